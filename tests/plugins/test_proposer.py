"""Outrider's lookups behind the interface of vLLM's custom proposers."""

from __future__ import annotations

import subprocess
import sys
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import outrider.plugins.vllm
from outrider.base.types import DraftBudget
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.suffix import SuffixDrafter
from outrider.plugins.common.patching import patch_imports
from outrider.plugins.vllm import v1
from outrider.plugins.vllm.hooks import PATCHES

LOOP = [5, 6, 7, 8] * 4


class Runner:
    def __init__(self, names: list[str]) -> None:
        self.input_batch = SimpleNamespace(req_ids=names)
        self.requests = dict.fromkeys(names)


@pytest.fixture(autouse=True)
def plugin_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_VLLM", "1")
    monkeypatch.setattr(sys, "meta_path", sys.meta_path.copy())
    patch_imports(PATCHES)


def make(name: str, length: int = 6, limit: int = 100, longest: bool = True, **options: Any) -> Any:
    """A proposer; with ``longest`` the controller does not shorten its drafts."""
    speculative = SimpleNamespace(num_speculative_tokens=length, **options)
    model = SimpleNamespace(max_model_len=limit)
    config = SimpleNamespace(speculative_config=speculative, model_config=model)
    made = getattr(outrider.plugins.vllm, name)(config)
    if longest:
        made._lengths.choose = lambda sizes, most: [most] * len(sizes)
    return made


def propose(proposer: Any, texts: dict[str, list[int]], runner: Runner) -> list[list[int]]:
    tokens = np.zeros((len(texts), max(map(len, texts.values()))), np.int32)
    for row, text in enumerate(texts.values()):
        tokens[row, : len(text)] = text
    counts = np.array([len(text) for text in texts.values()], np.int32)
    v1.last_runner = weakref.ref(runner)
    sampled = [text[-1:] for text in texts.values()]
    drafts: list[list[int]] = proposer.propose(sampled, counts, tokens, slot_mappings=None)
    return drafts


@pytest.mark.parametrize("name", ["NgramProposer", "SuffixProposer", "Proposer"])
def test_drafts_are_those_of_outriders_drafters(name: str) -> None:
    texts = {"a": [1, 2, *LOOP, 9], "b": [3, *LOOP], "c": [1, 2, 3]}
    runner = Runner(list(texts))
    proposer = make(name)
    for _ in range(5):  # as each text grows
        own: Any
        expected = []
        for text in texts.values():
            sequence: Any = SimpleNamespace(
                id="s", tokens=text, request=SimpleNamespace(cache_salt="")
            )
            drafted = SuffixDrafter(6).draft(sequence, DraftBudget(6, 6)).tokens
            own = NgramDrafter(6).draft(sequence, 6)
            if name == "NgramProposer" or (name == "Proposer" and not drafted):
                drafted = own
            expected.append(list(drafted))
        assert propose(proposer, texts, runner) == expected
        assert any(expected)
        texts["a"] = [*texts["a"], 5]
        texts["b"] = [*texts["b"], *LOOP[:3]]


def test_a_request_that_ended_is_forgotten() -> None:
    proposer, runner = make("Proposer"), Runner(["a", "b"])
    propose(proposer, {"a": LOOP, "b": LOOP}, runner)
    del runner.requests["a"]
    runner.input_batch.req_ids.remove("a")
    propose(proposer, {"b": LOOP}, runner)
    assert list(proposer._texts) == ["b"]
    # A name that comes again with another text is another request.
    assert propose(proposer, {"b": [1, 2, 3]}, runner) == [[]]


@pytest.mark.parametrize("right", [True, False])
def test_the_controller_says_how_far(right: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(0.02 * i for i in range(1000))
    monkeypatch.setattr("outrider.plugins.vllm.proposer.time.perf_counter", lambda: next(clock))
    proposer, runner = make("Proposer", limit=10_000, longest=False), Runner(["a"])
    text, lengths = [*LOOP], []
    for step in range(120):
        ((draft),) = propose(proposer, {"a": text}, runner)
        lengths.append(len(draft))
        text += draft if right else [500 + step, 5]
        text.append(5 + len(text) % 4 if right else 6)
    assert lengths[:4] == [0] * 4  # plain steps are measured first
    assert (sum(lengths[-30:]) > 120) == right
    assert (sum(lengths[-30:]) < 20) != right


def test_drafts_end_at_the_model_s_length_and_wait_for_the_prompt() -> None:
    runner = Runner(["a"])
    for left in range(4):
        proposer = make("NgramProposer", limit=len(LOOP) + left)
        assert len(propose(proposer, {"a": LOOP}, runner)[0]) == max(0, left - 1)
    tokens = np.array([LOOP], np.int32)
    counts = np.array([len(LOOP)], np.int32)
    assert make("Proposer").propose([[]], counts, tokens) == [[]]


def test_a_proposer_without_the_rule_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("OUTRIDER_VLLM")
    with pytest.raises(SystemExit):
        make("Proposer")
    assert "set OUTRIDER_VLLM=1" in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_VLLM", "1")
    sys.meta_path.pop(0)  # as where VLLM_PLUGINS names others alone
    with pytest.raises(SystemExit):
        make("Proposer")
    assert "name outrider in VLLM_PLUGINS" in capsys.readouterr().err


ABOVE = ("outrider.server", "outrider.engine.engine", "outrider.models", "transformers", "gguf")


def test_neither_the_native_step_nor_the_server_is_imported() -> None:
    code = "import sys\n"
    for modules, names in (
        (
            "outrider.plugins.vllm.v1, outrider.plugins.vllm.v2, outrider.plugins.vllm.hooks",
            (*ABOVE, "outrider.native"),
        ),
        ("outrider.plugins.vllm.proposer", ABOVE),
    ):
        code += (
            f"import {modules}\nprint([name for name in sys.modules if name.startswith({names})])\n"
        )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert said.stdout == "[]\n" * 2


@pytest.mark.parametrize("name", ["SuffixProposer", "Proposer"])
def test_drafts_are_the_same_without_the_native_step(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = {"a": [1, 2, *LOOP, 9, 5], "b": [3, *LOOP]}
    runner = Runner(list(texts))
    expected = propose(make(name), texts, runner)
    monkeypatch.setenv("OUTRIDER_NATIVE_ISA", "off")
    assert propose(make(name), texts, runner) == expected
    assert all(expected)
