"""Checkpoints of heads: recognised, checked, converted, and refused in one sentence."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import Eagle, make_head, make_medusa, save_head
from safetensors.torch import load_file, save_file
from transformers import AutoConfig
from typer.testing import CliRunner, Result

from outrider import LLM, SamplingParams
from outrider.cli import app
from outrider.drafters.registry import find_drafter
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.models.convert import convert
from outrider.models.heads import read_head
from outrider.native import choice as native

needs_native = pytest.mark.skipif(native.library() is None, reason="the native step is off")
SMALL: dict[str, Any] = {"memory": 2**24, "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def target(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target, its EAGLE-3 head in both layouts, and Medusa heads, side by side."""
    base = tmp_path_factory.mktemp("pair")
    shutil.copytree(tiny_llama, base / "target")
    config = AutoConfig.from_pretrained(tiny_llama)
    head = make_head(Eagle(), config)
    save_head(head, base / "eagle")
    save_head(head, base / "safeailab", "safeailab", embeds=False)
    save_head(make_head(Eagle(parallel=True), config), base / "peagle")
    make_medusa(base / "medusa", config.hidden_size, config.vocab_size)
    return base / "target"


def run(*args: object) -> Result:
    return CliRunner().invoke(app, [*map(str, args)])


@pytest.mark.parametrize(
    ("name", "kind"),
    [("eagle", "eagle3"), ("safeailab", "eagle3"), ("peagle", "eagle3"), ("medusa", "medusa")],
)
def test_a_folder_is_known_by_its_contents(target: Path, name: str, kind: str) -> None:
    assert find_drafter(str(target.parent / name), target).name == kind
    done = run("drafters", "check", target.parent / name, "--target", target, "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["fits"]


@needs_native
def test_a_head_beside_a_target_is_its_drafter(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target, tmp_path / "target")
    shutil.copytree(target.parent / "eagle", tmp_path / "target" / "drafter")
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    wanted = LLM(target, "none", memory=2**24).generate(["the quick"], params)[0].outputs[0]
    for drafter in ("auto", "eagle3"):
        llm = LLM(tmp_path / "target", drafter, **SMALL)
        assert "eagle3" in llm.engine.speculator.drafters
        assert llm.generate(["the quick"], params)[0].outputs[0].token_ids == wanted.token_ids
    done = run("drafters", "--model", tmp_path / "target", "--json")
    found = {each["name"]: each for each in json.loads(done.stdout)["drafters"]}
    assert found["eagle3"]["at_hand"]
    assert found["eagle3"]["page_bytes"] > 0
    assert found["eagle3"]["auto"]
    assert not found["medusa"]["at_hand"]


@needs_native
def test_a_head_as_the_model_brings_its_target_and_length(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target.parent / "eagle", tmp_path / "eagle")
    file = tmp_path / "eagle" / "config.json"
    config = json.loads(file.read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(target)
    file.write_text(json.dumps(config))
    llm = LLM(tmp_path / "eagle", memory=2**24)
    assert llm.engine.model.shape.vocab_size == AutoConfig.from_pretrained(target).vocab_size
    assert llm.engine.config.num_speculative_tokens == 5
    assert "eagle3" in llm.engine.speculator.drafters
    with pytest.raises(ModelError, match="does not say of which target"):
        LLM(target.parent / "safeailab", memory=2**24)


def spoiled(folder: Path, out: Path, change: Callable[[Any, Any], None]) -> Path:
    """A copy of a checkpoint whose config and tensors a function changes."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    (file,) = out.glob("*.safetensors")
    tensors = load_file(file)
    change(config, tensors)
    (out / "config.json").write_text(json.dumps(config))
    save_file(tensors, file)
    return out


def put(section: str | None, **values: Any) -> Callable[[Any, Any], None]:
    def change(config: Any, tensors: Any) -> None:
        (config[section] if section else config).update(values)

    return change


def drop(name: str) -> Callable[[Any, Any], None]:
    return lambda config, tensors: tensors.pop(name)


def cut(name: str) -> Callable[[Any, Any], None]:
    return lambda config, tensors: tensors.update({name: tensors[name][:-1].clone()})


LAYER = "transformer_layer_config"
WRONG: dict[str, tuple[str, Callable[[Any, Any], None]]] = {
    "another vocabulary": ("eagle", put(LAYER, vocab_size=999)),
    "no vocabulary": ("eagle", put(LAYER, vocab_size=None)),
    "another width": ("eagle", put(None, target_hidden_size=48)),
    "too many layers": ("eagle", put(LAYER, num_hidden_layers=2**31)),
    "more layers than tensors": ("eagle", put(LAYER, num_hidden_layers=2)),
    "no heads": ("eagle", put(LAYER, num_attention_heads=0)),
    "a text for a size": ("eagle", put(LAYER, hidden_size="32")),
    "another family": ("eagle", put(LAYER, model_type="gpt2")),
    "a list for a family": ("eagle", put(LAYER, model_type=["llama"])),
    "layers of another target": ("eagle", put(None, eagle_aux_hidden_state_layer_ids=[2, 16, 29])),
    "negative layers": ("eagle", put(None, eagle_aux_hidden_state_layer_ids=[-1, 0, 1])),
    "no layers": ("eagle", put(None, eagle_aux_hidden_state_layer_ids=[])),
    "large layers": ("eagle", put(None, eagle_aux_hidden_state_layer_ids=[2**31, 0, 1])),
    "a fourth layer": ("eagle", put(None, eagle_aux_hidden_state_layer_ids=[0, 1, 1, 2])),
    "another kind": ("eagle", put(None, speculators_model_type="dspark")),
    "a number for a kind": ("eagle", put(None, speculators_model_type=3)),
    "both norms": ("eagle", put(None, norm_before_fc=True, fc_norm=True)),
    "a text for a flag": ("eagle", put(None, norm_output="yes")),
    "an unknown norm": ("eagle", put(None, norm_before_fc=True)),
    "fewer ids": ("eagle", put(None, draft_vocab_size=7)),
    "2**31 ids": ("eagle", put(None, draft_vocab_size=2**31)),
    "no section": ("eagle", put(None, transformer_layer_config=None)),
    "a list for a section": ("eagle", put(None, transformer_layer_config=[1])),
    "no mask": ("peagle", put(None, mask_token_id=None)),
    "a mask beyond": ("peagle", put(None, mask_token_id=10**6)),
    "no mask's state": ("peagle", drop("mask_hidden")),
    "no fc": ("eagle", drop("fc.weight")),
    "no norm": ("eagle", drop("layers.0.hidden_norm.weight")),
    "a short norm": ("eagle", cut("norm.weight")),
    "a short head": ("eagle", cut("lm_head.weight")),
    "short ids": ("eagle", cut("d2t")),
    "no ids": ("eagle", drop("d2t")),
    "absolute ids": ("eagle", lambda c, t: t["d2t"].add_(torch.arange(len(t["d2t"])))),
    "other ids": ("eagle", lambda c, t: t["t2d"].logical_not_()),
    "ids below 0": ("eagle", lambda c, t: t["d2t"].sub_(10**12)),
    "ids as floats": ("eagle", lambda c, t: t.update(d2t=t["d2t"].float())),
    "more heads": ("medusa", put(None, medusa_num_heads=9)),
    "2**31 heads": ("medusa", put(None, medusa_num_heads=2**31)),
    "no heads of Medusa": ("medusa", put(None, medusa_num_heads=0)),
    "more blocks": ("medusa", put(None, medusa_num_layers=2)),
    "a short block": ("medusa", cut("1.0.linear.weight")),
    "a short bias": ("medusa", cut("1.0.linear.bias")),
    "a flat matrix": ("medusa", lambda c, t: t.update({"0.1.weight": t["0.1.weight"][0].clone()})),
}  # fmt: skip


@needs_native
@pytest.mark.parametrize("wrong", WRONG)
def test_a_damaged_head_is_refused_in_one_sentence(
    target: Path, tmp_path: Path, wrong: str
) -> None:
    name, change = WRONG[wrong]
    folder = spoiled(target.parent / name, tmp_path / "head", change)
    with pytest.raises(OutriderError) as caught:
        LLM(target, str(folder), **SMALL)
    said = str(caught.value)
    assert "\n" not in said
    assert len(said) < 500
    assert "native step refused" not in said
    done = run("drafters", "check", folder, "--target", target)
    assert done.exit_code == 1, done.output
    assert "Traceback" not in done.output


@needs_native
def test_a_truncated_file_is_refused(target: Path, tmp_path: Path) -> None:
    shutil.copytree(target.parent / "eagle", tmp_path / "head")
    file = tmp_path / "head" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(ModelError, match="damaged"):
        LLM(target, str(tmp_path / "head"), **SMALL)


@needs_native
def test_a_head_wants_the_native_step_and_the_coupled_rule(target: Path) -> None:
    head = str(target.parent / "eagle")
    with pytest.raises(ConfigError, match="acceptance_rule='coupled' only"):
        LLM(target, head, acceptance_rule="rejection", **SMALL)
    with pytest.raises(ConfigError, match="torch runs this one"):
        LLM(target, head, dtype="float16", **SMALL)


def test_pickled_weights_are_converted_once(target: Path, tmp_path: Path) -> None:
    medusa, legacy = target.parent / "medusa", tmp_path / "legacy"
    legacy.mkdir()
    tensors = load_file(medusa / "medusa_lm_head.safetensors")
    torch.save({f"medusa_head.{n}": t for n, t in tensors.items()}, legacy / "medusa_lm_head.pt")
    torch.save({"lr": 1.0}, legacy / "training_args.bin")
    shutil.copy(medusa / "config.json", legacy)
    assert convert(legacy, tmp_path / "new") == len(tensors)
    found = load_file(tmp_path / "new" / "model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    head = read_head(tmp_path / "new")
    assert head is not None
    assert head.kind == "medusa"

    eagle = tmp_path / "bin"
    shutil.copytree(target.parent / "safeailab", eagle)
    torch.save(load_file(eagle / "model.safetensors"), eagle / "pytorch_model.bin")
    (eagle / "model.safetensors").unlink()
    done = run("convert", eagle, tmp_path / "eagle")
    assert done.exit_code == 0, done.output
    assert "drafter eagle3" in done.output
    assert run("drafters", "check", tmp_path / "eagle", "--target", target).exit_code == 0
    done = run("convert", eagle, tmp_path / "eagle")
    assert done.exit_code != 0
    assert "is not empty" in done.output
    # What is safetensors already is copied as it is.
    assert convert(medusa, tmp_path / "copied") == len(tensors)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "content",
    [{"0.1.weight": Hostile()}, [1, 2], {}, {"a": 3}, {1: torch.ones(1)}, b"no pickle"],
    ids=["code", "list", "empty", "number", "numbered", "bytes"],
)
def test_what_is_more_than_tensors_is_refused(
    tmp_path: Path, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    if isinstance(content, bytes):
        (source / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, source / "pytorch_model.bin")
    with pytest.raises(ModelError, match="cannot be converted") as caught:
        convert(source, tmp_path / "out")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "harmed").exists()
    assert not (tmp_path / "out" / "model.safetensors").exists()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(ModelError, match="not a folder"):
        convert(tmp_path / "none", tmp_path / "out")
