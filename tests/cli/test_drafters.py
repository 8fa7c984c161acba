"""``outrider drafters``: what each drafter needs, costs and suits."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from outrider import LLM, pocket
from outrider.drafters import registry
from outrider.drafters.base import DrafterSpec, Needs, NoDrafter
from outrider.drafters.registry import known_specs
from outrider.errors import ConfigError
from tests.support.commands import outrider
from tests.support.heads import Eagle, make_head, save_head

BUILT_IN = {"none", "ngram", "suffix", "prediction", "layerskip", "model", "retokenize"}


class Entry:
    """An entry point of a specification."""

    def __init__(self, spec: type[DrafterSpec]) -> None:
        self.name, self.value, self.load = spec.name, "other:Spec", lambda: spec


@dataclass(frozen=True)
class Told(DrafterSpec):
    name = "told"
    wants, costs, suits = "a [bold] wish", "a coin", "all that loops"

    def needs(self, context: Any) -> Needs:
        return Needs(page_bytes=3 << 10, fixed_bytes=5 << 20)

    def make(self, context: Any) -> NoDrafter:
        raise NotImplementedError


@dataclass(frozen=True)
class Untold(Told):
    name = "untold"
    wants = costs = suits = ""

    def needs(self, context: Any) -> Needs:
        raise ConfigError("untold wants another target.")


@dataclass(frozen=True)
class ByFile(Told):
    name = "by-file"

    @classmethod
    def recognise(cls, option: str | Path) -> None:
        return None


@pytest.fixture
def _others(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    points = [Entry(spec) for spec in (Told, Untold, ByFile)]
    monkeypatch.setattr(registry, "entry_points", lambda group: points)
    known_specs.cache_clear()
    yield
    known_specs.cache_clear()


drafters = partial(outrider, "drafters")


def listed(*args: object) -> dict[str, dict[str, Any]]:
    done = drafters("--json", *args)
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    return {each["name"]: each for each in report["drafters"]}


def test_every_drafter_says_what_it_needs_costs_and_suits() -> None:
    found = listed()
    assert found.keys() >= BUILT_IN
    for name in BUILT_IN:
        assert all(found[name][fact] for fact in ("wants", "costs", "suits"))
        assert found[name]["at_hand"] is None is found[name]["page_bytes"]
    shown = drafters().stdout
    assert all(found[name]["costs"].split(",")[0] in shown for name in BUILT_IN)
    assert "memory" not in shown.splitlines()[0]


@pytest.mark.usefixtures("_others")
def test_drafters_of_other_packages_are_listed(tiny_llama: Path) -> None:
    shown = drafters().stdout
    assert "a [bold] wish" in shown
    assert "not said" in shown
    found = listed("--model", tiny_llama)
    assert found["told"]["at_hand"]
    assert (found["told"]["page_bytes"], found["told"]["fixed_bytes"]) == (3 << 10, 5 << 20)
    assert not found["told"]["auto"]
    assert found["untold"]["why"] == "untold wants another target."
    assert "its name alone does not choose it" in found["by-file"]["why"]
    text = drafters("--model", tiny_llama).stdout
    assert "3 KiB a page, 5 MiB once" in " ".join(text.split())


def test_a_model_has_a_checkpoint_at_hand_or_not(tiny_llama: Path, tmp_path: Path) -> None:
    found = listed("--model", tiny_llama)
    assert not found["model"]["at_hand"]
    assert "no checkpoint in the model's sub-folder" in found["model"]["why"]
    assert "give retokenize:PATH" in found["retokenize"]["why"]
    assert {name for name, each in found.items() if each["auto"]} == {"suffix", "prediction"}
    target = tmp_path / "target"
    for folder in (target, tmp_path / "drafter"):
        shutil.copytree(tiny_llama, folder)
    found = listed("--model", target)
    model = found["model"]
    assert model["at_hand"]
    assert model["auto"]
    assert Path(model["checkpoint"]).name == "drafter"
    budget = LLM(target, "model", num_speculative_tokens=2).engine.budget
    taken = sum(each["page_bytes"] or 0 for each in found.values())
    assert taken * budget.pages == budget.drafter_bytes
    assert "a page" in drafters("--model", target).stdout


def test_what_nothing_can_draft_for_says_so(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    found = listed("--model", make_checkpoint(tmp_path / "mamba", "mamba"))
    assert {name for name, each in found.items() if each["at_hand"]} == {"none"}
    assert "cannot go back" in found["suffix"]["why"]
    done = drafters("--model", tmp_path / "absent")
    assert done.exit_code == 1
    assert done.stderr.startswith("error: model ")


def test_layerskip_says_from_which_acceptance_on_it_pays() -> None:
    done = drafters("--model", pocket.PATH, "--json")
    found = {each["name"]: each for each in json.loads(done.stdout)["drafters"]}
    assert found["layerskip"]["note"] == (
        "without up to 7 of 20 sublayers a drafted token takes 0.52 of a plain one at best, and "
        "pays where more than 0.57 of them are accepted"
    )
    assert found["none"]["note"] is None


def test_drafters_on_disk_are_suggested(
    make_checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those beside the target and in the hub's cache that are small and have its tokenizer."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    models, hub = tmp_path / "models", tmp_path / "cache" / "hub"
    target = make_checkpoint(models / "target", "llama", tokenizer=True, num_hidden_layers=8)
    small = make_checkpoint(models / "small", "llama", tokenizer=True, num_hidden_layers=1)
    make_checkpoint(models / "no-tokenizer", "llama", num_hidden_layers=1)
    make_checkpoint(models / "as-large", "llama", tokenizer=True, num_hidden_layers=8)
    cached = hub / "models--some--body" / "snapshots" / "0123"
    make_checkpoint(cached, "llama", tokenizer=True, num_hidden_layers=1)
    (models / "damaged").mkdir()
    (models / "damaged" / "config.json").write_text("{")
    (models / "loop").symlink_to("loop")
    extra = {"outrider": {"recommended_tokens": {"code": 7}}}
    reference = make_head(Eagle(extra=extra), AutoConfig.from_pretrained(target))
    head = save_head(reference, models / "head")
    save_head(make_head(Eagle(layers=(9, 1, 1)), AutoConfig.from_pretrained(target)), models / "h")
    done = drafters("suggest", target, "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    on_disk = {each["drafter"] for each in found["drafters"] if each["found"] == "on disk"}
    assert on_disk == {str(small), str(cached), str(head)}
    extras = {each["drafter"]: each["extras"] for each in found["drafters"]}
    assert extras[str(head)]["recommended_tokens"] == {"code": 7}
    assert extras[str(small)] is None
    assert found["entry"] is None
    assert found["drafters"][0]["speedup"]["evidence"] == "modelled"
    shown = drafters("suggest", target).stdout
    assert "not in the catalogue" in shown
    assert f"{head} recommends 7 tokens for code." in " ".join(shown.split())
    assert "forecasts, not measurements" in " ".join(shown.split())
    assert f"outrider bench {target} --drafter {small}" in shown.splitlines()


def test_a_damaged_target_is_named_with_its_damage(tmp_path: Path) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")
    done = drafters("suggest", file)
    assert done.exit_code == 1
    assert "too short for a GGUF file" in " ".join(done.output.split())


def test_drafters_of_the_catalogue_are_suggested_by_name() -> None:
    done = drafters("suggest", "Qwen/Qwen3-8B", "--json")
    found = json.loads(done.stdout)
    assert found["entry"] == "qwen3-8b"
    commands = [each["command"] for each in found["drafters"]]
    assert "outrider bench Qwen/Qwen3-8B --drafter Qwen/Qwen3-0.6B" in commands
    done = drafters("suggest", "no/such-model")
    assert done.exit_code == 2
    assert "neither on disk nor in the catalogue" in " ".join(done.output.split())
    assert drafters("suggest", "").exit_code == 2
