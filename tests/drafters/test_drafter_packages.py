"""A drafter in a package of its own: installed, recognised, budgeted, chosen, released."""

from __future__ import annotations

import re
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.base.types import Speculation
from outrider.drafters.base import Needs
from outrider.drafters.registry import find_drafter, known_specs
from outrider.errors import ConfigError
from tests.support import REPOSITORY

DOCS = REPOSITORY / "docs" / "drafters.md"
PACKAGES = REPOSITORY / "tests" / "packages"
MakeCheckpoint = Callable[..., Path]
PROMPTS = ["ab ab ab ab", "the lazy dog"]
PARAMS = SamplingParams(temperature=0.8, max_tokens=24, seed=3, ignore_eos=True)


def install(folder: Path, module: str, source: str, points: str) -> None:
    """Install a package of one module, from a wheel."""
    wheel = folder / f"{module}-1.0-py3-none-any.whl"
    info = f"{module}-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr(f"{module}.py", source)
        files.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        files.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nGenerator: tests\nTag: py3-none-any\n")
        files.writestr(f"{info}/entry_points.txt", points)
        files.writestr(f"{info}/RECORD", "")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index"]
    subprocess.run([*command, "--target", str(folder / "site"), str(wheel)], check=True)


@pytest.fixture
def repeat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The package of docs/drafters.md."""
    code, points = re.findall(r"```(?:python|toml)\n(.*?)```", DOCS.read_text(), re.S)
    table = points.replace('[project.entry-points."outrider.drafters"]', "[outrider.drafters]")
    install(tmp_path, "outrider_repeat", code, table.replace('"', ""))
    assert len([line for line in code.splitlines() if line.strip()]) <= 30
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    known_specs.cache_clear()
    yield
    known_specs.cache_clear()


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package in tests/packages is installed: trees, and hidden states of two layers."""
    folder = tmp_path_factory.mktemp("branches")
    code = (PACKAGES / "outrider_branches.py").read_text()
    points = "[outrider.drafters]\nbranches = outrider_branches:BranchesSpec\n"
    install(folder, "outrider_branches", code, points)
    return folder / "site"


@pytest.fixture
def branches(site: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """That package can be imported."""
    monkeypatch.syspath_prepend(str(site))
    known_specs.cache_clear()
    yield
    known_specs.cache_clear()


@pytest.mark.engine
@pytest.mark.usefixtures("branches")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_drafter_of_trees_sees_hidden_states(dtype: str, tiny_llama: Path) -> None:
    """Its trees change no output, and what it sees is what transformers computes."""
    plain = LLM(tiny_llama, None, dtype=dtype)
    expected = [o.outputs[0].token_ids for o in plain.generate(PROMPTS, PARAMS)]
    llm = LLM(tiny_llama, drafter="branches", dtype=dtype, num_speculative_tokens=3)
    drafter: Any = llm.engine.drafter
    outputs = llm.generate(PROMPTS, PARAMS)
    assert [o.outputs[0].token_ids for o in outputs] == expected
    assert llm.engine.counts.nodes == 2 * llm.engine.counts.drafted > 0
    assert {seq_id for seq_id, ended in drafter.released if ended} == set(drafter.seen)
    exact, rounded = (
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=getattr(torch, name)).model
        for name in ("float32", dtype)
    )
    for output, states in zip(outputs, drafter.seen.values(), strict=True):
        ids = [*output.prompt_token_ids, *output.outputs[0].token_ids][:-1]
        mine = [
            torch.from_numpy(np.stack([states[p, layer] for p in range(len(ids))]))
            for layer in (0, 1)
        ]
        mine[1] = exact.norm(mine[1].float())  # where transformers' last ones are
        with torch.inference_mode():
            right, theirs = (
                [h[0].float() for h in model(torch.tensor([ids]), output_hidden_states=True)[-1]]
                for model in (exact, rounded)
            )
        for layer in (0, 1):
            wrong = (mine[layer].float() - right[layer + 1]).norm()
            usual = (theirs[layer + 1] - right[layer + 1]).norm()
            assert wrong < 1e-5 * right[layer + 1].norm() + 1.5 * usual


@pytest.mark.usefixtures("branches")
def test_a_drafter_of_trees_is_budgeted_and_chosen(tiny_llama: Path) -> None:
    memory = 2 << 20
    alone = LLM(tiny_llama, "ngram", num_speculative_tokens=4, memory=memory).engine.budget
    llm = LLM(tiny_llama, "branches", num_speculative_tokens=4, memory=memory)
    budget = llm.engine.budget
    own = budget.drafter_bytes / budget.pages - alone.drafter_bytes / alone.pages
    assert own == 64 * budget.page_size
    assert budget.pages < alone.pages
    drafted = {
        name: {
            event.drafted.drafter
            for event in llm.stream(PROMPTS, PARAMS, speculation=Speculation(drafter=name))
            if event.drafted is not None
        }
        for name in ("none", "branches")
    }
    assert drafted == {"none": set(), "branches": {"branches"}}


@pytest.mark.usefixtures("branches")
def test_a_drafter_takes_no_more_than_it_needs(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec: Any = find_drafter("branches", tiny_llama)
    for needs, sentence in (
        (Needs(target_layers=(0, 1)), r"drafts 16 nodes, but its needs say max_nodes = 0"),
        (
            Needs(max_nodes=16, target_layers=(0,)),
            r"hidden states of layers \(0, 1\), but its needs",
        ),
    ):
        monkeypatch.setattr(type(spec), "needs", lambda *_, needs=needs: needs)
        with pytest.raises(ConfigError, match=sentence):
            LLM(tiny_llama, "branches")


@pytest.mark.usefixtures("branches")
def test_hidden_states_that_a_model_lacks_are_refused(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="hidden states of layer 1, which this 'llama' model"):
        LLM(make_checkpoint(tmp_path / "one", "llama", num_hidden_layers=1), drafter="branches")
    with pytest.raises(ConfigError, match="hidden states of layer 0, which this 'starcoder2'"):
        LLM(make_checkpoint(tmp_path / "other", "starcoder2"), drafter="branches")


@pytest.mark.usefixtures("repeat")
def test_the_documented_drafter_drafts(tiny_llama: Path) -> None:
    expected = [o.outputs[0].token_ids for o in LLM(tiny_llama, None).generate(PROMPTS, PARAMS)]
    llm = LLM(tiny_llama, drafter="repeat", num_speculative_tokens=4)
    assert llm.drafter.name == "repeat"
    assert [o.outputs[0].token_ids for o in llm.generate(PROMPTS, PARAMS)] == expected
    assert llm.engine.counts.drafted > 0
    drafted = {
        name: {
            event.drafted.drafter
            for event in llm.stream(PROMPTS, PARAMS, speculation=Speculation(drafter=name))
            if event.drafted is not None
        }
        for name in ("none", "repeat")
    }
    assert drafted == {"none": set(), "repeat": {"repeat"}}
    with pytest.raises(ConfigError, match=r"neither a drafter \(auto, .*repeat, .*\) nor a folder"):
        LLM(tiny_llama, drafter="repeated")


@pytest.mark.parametrize("option", ["", "suffix+", "auto+"])
def test_an_empty_name_of_a_drafter_is_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="drafter is ''; give 'auto'"):
        find_drafter(option, tmp_path)


def test_a_package_that_cannot_be_loaded_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "broken_drafter", "x = 1\n", "[outrider.drafters]\nbad = broken_drafter:no\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    known_specs.cache_clear()
    with pytest.raises(ConfigError, match=r"drafter 'bad' of broken_drafter:no cannot be loaded"):
        find_drafter("bad", tmp_path)
    known_specs.cache_clear()
