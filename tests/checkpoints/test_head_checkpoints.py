"""Checkpoints of heads: recognised, checked, converted, and refused in one sentence."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider import LLM, SamplingParams
from outrider.checkpoints.convert import convert
from outrider.checkpoints.heads import read_head
from outrider.checkpoints.unpickle import Refused, read, tensors_in
from outrider.drafters.medusa import MedusaSpec
from outrider.drafters.registry import GroupSpec, find_drafter
from outrider.errors import ConfigError, ModelError, OutriderError
from outrider.native import choice as native
from tests.support.commands import outrider
from tests.support.forked import run_program
from tests.support.heads import Eagle, make_head, make_medusa, save_head

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
    make_medusa(base / "borrowing", config.hidden_size, config.vocab_size, borrows=True)
    return base / "target"


@pytest.fixture(autouse=True)
def reader_is_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """The process that reads pickles need not import torch each time."""
    monkeypatch.setattr("outrider.checkpoints.convert.subprocess.run", run_program)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("eagle", "eagle3"),
        ("safeailab", "eagle3"),
        ("peagle", "eagle3"),
        ("medusa", "medusa"),
        ("borrowing", "medusa"),
    ],
)
def test_a_folder_is_known_by_its_contents(target: Path, name: str, kind: str) -> None:
    assert find_drafter(str(target.parent / name), target).name == kind
    done = outrider("drafters", "check", target, "--drafter", target.parent / name, "--json")
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
        assert "eagle3" in llm.engine.drafting.drafters
        assert llm.generate(["the quick"], params)[0].outputs[0].token_ids == wanted.token_ids
    done = outrider("drafters", "--model", tmp_path / "target", "--json")
    found = {each["name"]: each for each in json.loads(done.stdout)["drafters"]}
    assert found["eagle3"]["at_hand"]
    assert found["eagle3"]["page_bytes"] > 0
    assert found["eagle3"]["weight_bytes"] > 0
    assert found["eagle3"]["auto"]
    assert not found["medusa"]["at_hand"]


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


def named(head: Path, out: Path, target: str, tokens: Any = 5) -> Path:
    """A copy of a head whose metadata name another target and draft length."""
    method = {"proposal_type": "greedy", "speculative_tokens": tokens}
    about = {"verifier": {"name_or_path": target}, "proposal_methods": [method]}
    return spoiled(head, out, put("speculators_config", **about))


@needs_native
@pytest.mark.parametrize("file", ["", "config.json", "model.safetensors"])
def test_a_head_as_the_model_brings_its_target_and_length(
    target: Path, tmp_path: Path, file: str
) -> None:
    head = named(target.parent / "eagle", tmp_path / "eagle", str(target))
    llm = LLM(head / file, memory=2**24)
    assert llm.engine.model.shape.vocab_size == AutoConfig.from_pretrained(target).vocab_size
    assert llm.engine.config.num_speculative_tokens == 5
    assert "eagle3" in llm.engine.drafting.drafters
    assert {"eagle3", "suffix"} <= set(llm.engine.drafting.drafters)
    plain = LLM(head, "none", memory=2**24)
    params = SamplingParams(temperature=0, max_tokens=16)
    texts = [each.generate("the quick", params)[0].outputs[0].text for each in (llm, plain)]
    assert texts[0] == texts[1]
    with pytest.raises(ModelError, match="does not say of which target"):
        LLM(target.parent / "safeailab", memory=2**24)


@needs_native
def test_a_target_in_the_heads_own_folder_is_found(target: Path, tmp_path: Path) -> None:
    head = named(target.parent / "eagle", tmp_path / "a+b", "inner/target")
    shutil.copytree(target, head / "inner" / "target")
    shutil.copytree(head, head / "inner" / "drafter", ignore=lambda *_: ["inner"])
    llm = LLM(head, memory=2**24)
    assert llm.inputs.folder == head / "inner" / "target"
    assert isinstance(llm.drafter, GroupSpec)
    members = {each.name: each for each in llm.drafter.members}
    assert members["eagle3"].folder == head  # not the one beside the target
    assert len(members) == len(llm.drafter.members)


@pytest.mark.parametrize(
    "name",
    [
        "../target",
        "inner/../../target",
        "~/target",
        "some/target",
        "target",
        "a" * 5000,
        "x\0y",
        ".",
    ],
)
def test_a_target_that_is_not_at_hand_is_named(
    target: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    monkeypatch.setenv("HOME", str(target.parent))
    shutil.copytree(target, tmp_path / "target")
    head = named(target.parent / "eagle", tmp_path / "eagle", name)
    with pytest.raises(ModelError, match="as its target, which is") as caught:
        LLM(head, memory=2**24)
    said = str(caught.value)
    assert "\n" not in said
    assert repr(name)[:20] in said
    assert "give the target as the model, and drafter=" in said
    done = outrider("serve", head)
    assert done.exit_code == 1
    assert done.stderr == f"error: {said}\n"


def offline(*args: Any, **options: Any) -> None:
    raise OSError("no network")


@pytest.mark.parametrize("tokens", [0, -1, 2**31, "3", 2.5, [3], True])
def test_a_wrong_draft_length_of_a_speculator_is_refused(
    target: Path, tmp_path: Path, tokens: Any
) -> None:
    head = named(target.parent / "eagle", tmp_path / "eagle", str(target), tokens)
    with pytest.raises(
        ModelError, match=r"speculative_tokens is .*; a whole number from 1 to 1024"
    ):
        LLM(head, memory=2**24)


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
    **{
        f"choices {value!r:.40}": ("medusa", put(None, medusa_choices=value))
        for value in (
            [], {}, "[[0]]", 3, [0], [[0], 0], [[]], [[0], []], [[0, 0]], [[0], [1, 0]], [[0], [0]],
            [[10]], [[-1]], [[2**31]], [[10**400]], [[0.5]], [[1.0]], [[True]], [["0"]], [[None]],
            [[0], [0, 0], [0, 0, 0], [0, 0, 0, 0]], [[i % 10] for i in range(300)],
            [[0] * n for n in range(1, 40)],
        )
    },
    "no matrix of its own": ("borrowing", put(None, original_lm_head=False)),
    "a flag that is a text": ("borrowing", put(None, original_lm_head="yes")),
    "no width": ("borrowing", put(None, hidden_size=None)),
    "a vocabulary that is not the target's": ("borrowing", put(None, vocab_size=2**31 - 1)),
    "2**31 ids of Medusa": ("borrowing", put(None, vocab_size=2**31)),
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
    done = outrider("drafters", "check", target, "--drafter", folder)
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
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_what_a_head_adds_is_told_at_start(
    target: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "outrider")
    llm = LLM(target, str(target.parent / kind), **SMALL)
    name = "eagle3" if kind == "eagle" else kind
    line = str(llm.engine.budget)  # which the server tells too
    assert line in caplog.text
    _, _, added = line.partition(f"; drafter {name} adds ")
    assert "KiB of weights" in added
    assert ("a page" in added) == (kind == "eagle")


@needs_native
def test_heads_are_measured_however_small_steps_are(target: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(target)
    make_medusa(tmp_path / "medusa", config.hidden_size, config.vocab_size, heads=5)
    sizes = {"max_num_batched_tokens": 1, "max_num_seqs": 1}
    llm = LLM(target, str(tmp_path / "medusa"), memory=2**24, **sizes)
    output = llm.generate("the quick", SamplingParams(temperature=0, max_tokens=8))[0]
    assert output.outputs[0].token_ids


@needs_native
def test_a_head_wants_the_native_step_and_the_coupled_rule(target: Path) -> None:
    head = str(target.parent / "eagle")
    with pytest.raises(ConfigError, match="acceptance_rule='coupled' only"):
        LLM(target, head, acceptance_rule="rejection", **SMALL)
    with pytest.raises(ConfigError, match="torch runs this one"):
        LLM(target, head, dtype="float16", **SMALL)


@needs_native
@pytest.mark.parametrize("choices", [[[1, 0]], [[10]], [], "no", [[0] * 4], 5, [(0,)], [[None]]])
def test_choices_that_are_no_tree_are_refused(target: Path, choices: Any) -> None:
    spec = MedusaSpec(target.parent / "medusa", choices)
    with pytest.raises(ModelError, match="medusa_choices") as caught:
        LLM(target, spec, **SMALL)
    assert "\n" not in str(caught.value)


@needs_native
def test_choices_are_the_tree_that_the_engine_chooses_from(target: Path) -> None:
    params = SamplingParams(temperature=0.8, max_tokens=24, ignore_eos=True, seed=3)
    wanted = LLM(target, "none", memory=2**24).generate(["the quick"], params)[0].outputs[0]
    spec = MedusaSpec(target.parent / "medusa", [[0], [1], [0, 0], [0, 9], [1, 0]])
    for options in ({}, {"max_draft_nodes": 3}, {"num_speculative_tokens": 1}):
        llm = LLM(target, spec, memory=2**24, **options)
        drafter = llm.engine.drafting.drafters["medusa"]
        one = "num_speculative_tokens" in options
        assert drafter.max_length == (1 if one else 2)
        assert drafter.max_nodes == (2 if one else options.get("max_draft_nodes", 5))
        assert llm.generate(["the quick"], params)[0].outputs[0].token_ids == wanted.token_ids


@needs_native
def test_trees_have_no_more_nodes_than_were_said(target: Path) -> None:
    """Of 3 heads, by whose number the usual 16 nodes cannot be divided."""
    llm = LLM(target, str(target.parent / "medusa"), memory=2**24)
    drafter, controller = llm.engine.drafting.drafters["medusa"], llm.engine.controller
    sizes = [each.nodes(each.max_depth) for each in controller.methods.values()]
    assert max(sizes) == drafter.max_nodes == 16
    llm.generate(["the quick"] * 3, SamplingParams(max_tokens=40, ignore_eos=True, seed=1))


def test_pickled_weights_are_converted_once(target: Path, tmp_path: Path) -> None:
    medusa, legacy = target.parent / "medusa", tmp_path / "legacy"
    legacy.mkdir()
    tensors = load_file(medusa / "medusa_lm_head.safetensors")
    torch.save({f"medusa_head.{n}": t for n, t in tensors.items()}, legacy / "medusa_lm_head.pt")
    torch.save({"lr": 1.0}, legacy / "training_args.bin")
    shutil.copy(medusa / "config.json", legacy)
    assert convert(legacy / "medusa_lm_head.pt", tmp_path / "by its file") == len(tensors)
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
    done = outrider("convert", eagle, tmp_path / "eagle")
    assert done.exit_code == 0, done.output
    assert "drafter eagle3" in done.output
    assert outrider("drafters", "check", target, "--drafter", tmp_path / "eagle").exit_code == 0
    done = outrider("convert", eagle, tmp_path / "eagle")
    assert done.exit_code != 0
    assert "is not empty" in done.output
    # What is safetensors already is copied as it is.
    assert convert(medusa, tmp_path / "copied") == len(tensors)


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


@pytest.mark.parametrize(
    "content", [{"0.1.weight": Hostile()}, b"no pickle"], ids=["code", "bytes"]
)
def test_what_is_more_than_tensors_is_refused(
    tmp_path: Path, content: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    if isinstance(content, bytes):
        (source / "pytorch_model.bin").write_bytes(content)
    else:
        torch.save(content, source / "pytorch_model.bin")
    (there := tmp_path / "there").mkdir()
    outs = (tmp_path / "out", tmp_path / "new" / "out", there)
    # Each is read in a new process; what is left behind does not depend on the contents.
    for out in outs if isinstance(content, bytes) else outs[:1]:
        with pytest.raises(ModelError, match="cannot be converted") as caught:
            convert(source, out)
        assert "\n" not in str(caught.value)
        assert not re.search("weights_only|PyTorch|arbitrary code", str(caught.value))
    assert not (tmp_path / "harmed").exists()
    assert sorted(tmp_path.iterdir()) == [source, there]
    assert not [*there.iterdir()]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([1, 2], "holds no table of tensors"),
        ({}, "holds no table of tensors"),
        ({"a": 3}, "holds more than tensors by name ('a')"),
        ({1: torch.ones(1)}, "holds more than tensors by name (1)"),
    ],
    ids=["list", "empty", "number", "numbered"],
)
def test_what_is_no_table_of_tensors_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    """As the process that reads it does, whose message ``convert`` hands on."""
    file = str(tmp_path / "pytorch_model.bin")
    torch.save(content, file)
    with pytest.raises(Refused, match=f"{re.escape(said)}$"):
        tensors_in(read(file), file)


@pytest.mark.parametrize("size", [0, 1, 64, 700])
def test_cut_pickles_are_damaged_in_our_words(tmp_path: Path, size: int) -> None:
    file, said = tmp_path / "pytorch_model.bin", "is damaged, or holds more than tensors; fetch it"
    torch.save({"a": torch.ones(4)}, file)
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(Refused, match=f"{said} again"):
        read(str(file))
    if size == 64:  # in a process, as everywhere
        with pytest.raises(ModelError, match=f"{said} again"):
            convert(tmp_path, tmp_path / "out")
        assert outrider("convert", tmp_path, tmp_path / "out").exit_code == 1
        assert not (tmp_path / "out").exists()


def test_names_in_an_index_are_printable(tmp_path: Path) -> None:
    index = {"weight_map": {"a": "\x1b[2J" + "a" * 2000}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"cannot be read") as error:
        convert(tmp_path, tmp_path / "out")
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 1000


def test_a_pipe_is_no_checkpoint(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin is not a regular file"):
        convert(tmp_path, tmp_path / "out")


@pytest.mark.parametrize(
    "files",
    [
        ("pytorch_model.bin", "training_args.bin", "optimizer.pt"),
        ("pytorch_model-00001-of-00002.bin", "pytorch_model.bin.index.json"),
        ("model.pth",),
    ],
)
def test_a_folder_of_pickles_is_told_of_convert(
    target: Path, tmp_path: Path, files: tuple[str, ...]
) -> None:
    folder = tmp_path / "pickled"
    shutil.copytree(target, folder)
    for file in folder.glob("*.safetensors"):
        file.unlink()
    for name in files:
        (folder / name).write_bytes(b"x")
    said = rf"{re.escape(files[0])} is a pickle.*outrider convert {folder} NEW_FOLDER"
    with pytest.raises(ModelError, match=said):
        LLM(folder, None, **SMALL)
    for command in (
        ("quantize", folder, tmp_path / "o", "--quantization", "int4"),
        ("generate", "x", "--model", folder),
    ):
        done = outrider(*command)
        assert done.exit_code == 1
        assert re.search(said, done.stderr)
    assert not (tmp_path / "o").exists()


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="has no weights"):
        convert(tmp_path, tmp_path / "out")
    with pytest.raises(ModelError, match="not a folder"):
        convert(tmp_path / "none", tmp_path / "out")
    with pytest.raises(ConfigError, match="needs no conversion"):
        convert(tmp_path / "model.gguf", tmp_path / "out")
