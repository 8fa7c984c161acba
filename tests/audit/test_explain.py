"""``outrider explain``: its figures are the step's own, and its sentences say what they say."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig
from typer.testing import CliRunner, Result

from outrider import LLM, SamplingParams
from outrider.audit import watch
from outrider.audit.explain import Explanation, Position, explain, label
from outrider.base.types import Draft, DraftNodes
from outrider.cli import app
from outrider.cli import explain as command
from outrider.errors import NumericalError, RequestError
from outrider.native import choice as native
from outrider.sampling.noise import gumbel
from tests.support.heads import Eagle, make_head, make_medusa, save_head
from tests.support.pages import check_engine
from tests.support.tiny import VOCABULARY

PROMPT = "def greet(name):\n    return"
LOOP = "the lazy dog jumps over the lazy dog jumps over the lazy"
K = 4
needs_native = pytest.mark.skipif(native.library() is None, reason="the native step is off")


@pytest.fixture(scope="module")
def llm(tiny_llama: Path, tiny_drafter: Path) -> LLM:
    """Target and drafter share little, so most drafts are rejected."""
    return LLM(tiny_llama, drafter=tiny_drafter, num_speculative_tokens=4, max_num_seqs=1)


@pytest.fixture(scope="module")
def twins(tiny_llama: Path) -> LLM:
    """The target drafts for itself, so every draft is accepted."""
    return LLM(
        tiny_llama,
        drafter=tiny_llama,
        drafter_quantization="none",
        num_speculative_tokens=4,
        max_num_seqs=1,
    )


@pytest.fixture(scope="module")
def ngram(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, drafter="ngram", num_speculative_tokens=4, max_num_seqs=1)


@pytest.fixture(scope="module")
def heads(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    """Random heads, one of which drafts few of the target's ids."""
    folder, config = tmp_path_factory.mktemp("heads"), AutoConfig.from_pretrained(tiny_llama)
    save_head(make_head(Eagle(), config), folder / "eagle3")
    save_head(make_head(Eagle(parallel=True), config), folder / "peagle")
    make_medusa(folder / "medusa", config.hidden_size, config.vocab_size)
    return {
        name: LLM(tiny_llama, str(folder / name), num_speculative_tokens=4, max_num_seqs=1)
        for name in HEADS
    }


HEADS = ("eagle3", "peagle", "medusa")


@pytest.fixture(
    params=["llm", "twins", "ngram", *(pytest.param(name, marks=needs_native) for name in HEADS)]
)
def any_llm(request: pytest.FixtureRequest) -> Any:
    if request.param in HEADS:
        return request.getfixturevalue("heads")[request.param]
    return request.getfixturevalue(request.param)


def outrider(*args: object) -> Result:
    env = {"COLUMNS": "80", "FORCE_COLOR": None}
    return CliRunner(env=env).invoke(app, ["explain", *(str(a) for a in args)])


def generated(llm: LLM, prompt: str, temperature: float, seed: int) -> tuple[list[int], list[str]]:
    params = SamplingParams(temperature=temperature, seed=seed, max_tokens=120)
    (output,) = llm.generate(prompt, params)[0].outputs
    return output.token_ids, [str(o) for o in output.origins]


def check_arithmetic(found: Explanation) -> None:
    """Recompute what can be recomputed from the figures alone."""

    def drawn(scores: dict[int, float | None]) -> int:
        known = {id: score for id, score in scores.items() if score is not None}
        return min(known, key=lambda id: (-known[id], id))

    for position in found.positions:
        candidates = position.candidates
        assert len({c.id for c in candidates}) == len(candidates)
        assert [c.p for c in candidates] == sorted((c.p for c in candidates), reverse=True)
        noise = gumbel([found.seed], [0], [position.position], VOCABULARY)[0]
        for c in candidates:
            assert c.noise == (noise[c.id] if found.temperature else None)
            g = c.noise or 0
            assert c.target_score == pytest.approx(math.log(c.p) + g, abs=1e-5)
            if c.q == 0:  # an id that a head does not draft
                assert c.drafter_score is None
            elif c.q is not None:
                assert c.drafter_score == pytest.approx(math.log(c.q) + g, abs=1e-5)
        assert drawn({c.id: c.target_score for c in candidates}) == position.target.id
        if position.draft is not None:
            alike = position.draft.id == position.target.id
            assert alike == (position.outcome == "accepted") or position.outcome == "dropped"
            if candidates[0].q is not None:
                assert drawn({c.id: c.drafter_score for c in candidates}) == position.draft.id


def check_outcomes(found: Explanation) -> None:
    """Outcomes come in the order that a step has them, and are what goes out and is counted."""
    outcomes = [p.outcome for p in found.positions]
    accepted = outcomes.count("accepted")
    rejected = outcomes.count("rejected")
    dropped = outcomes.count("dropped")
    if rejected:
        assert outcomes == ["accepted"] * accepted + ["rejected"] + ["dropped"] * dropped
    else:
        assert outcomes == ["accepted"] * accepted + ["bonus" if accepted else "plain"]
    out = [p.target for p in found.positions if p.outcome != "dropped"]
    assert [(e.id, e.text) for e in found.output] == [(t.id, t.text) for t in out]
    assert (found.drafted, found.accepted) == (accepted + rejected + dropped, accepted)
    assert all(p.why.endswith(".") for p in found.positions)


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.5])
def test_every_step_is_what_generate_does(any_llm: LLM, temperature: float) -> None:
    llm = any_llm
    llm.engine.chooser.tries_plain = False  # a step without drafts has other origins
    ids, origins = generated(llm, LOOP, temperature, seed=2)
    prompt = llm.generate(LOOP, SamplingParams(max_tokens=1))[0].prompt_token_ids
    done = 1  # the prompt's own pass gave one
    for step in range(1, 9):
        found = explain(llm, LOOP, temperature, seed=2, step=step)
        assert found.step == step
        assert found.text_before == llm.decode([*prompt, *ids[:done]])
        assert found.positions[0].position == len(prompt) + done
        check_arithmetic(found)
        check_outcomes(found)
        end = done + len(found.output)
        assert [e.id for e in found.output] == ids[done:end]
        assert [e.origin for e in found.output] == origins[done:end]
        done = end


@needs_native
@pytest.mark.parametrize(("name", "passes"), [("eagle3", 4), ("peagle", 1), ("medusa", 1)])
def test_a_head_drafts_and_has_a_law(heads: dict[str, LLM], name: str, passes: int) -> None:
    found = explain(heads[name], PROMPT, 0.8, seed=0, step=1)
    assert found.drafted == (3 if name == "medusa" else K)
    assert sum(position.draft is not None for position in found.positions) == found.drafted
    assert all(c.q is not None for p in found.positions if p.draft for c in p.candidates)
    assert found.summary.endswith(
        f"at the price of {passes} pass{'es' * (passes > 1)} of the drafter."
    )
    said = command.introduction(found)
    assert "both draw with the same random noise" in said
    assert f"{name.replace('peagle', 'eagle3')}, proposes" not in said


def test_the_laws_are_those_that_plain_decoding_reports(tiny_llama: Path, llm: LLM) -> None:
    plain = LLM(tiny_llama, None, max_num_seqs=1, logprobs_mode="processed_logprobs")
    params = SamplingParams(temperature=0.8, seed=2, max_tokens=40, logprobs=5)
    output = plain.generate(PROMPT, params)[0]
    start, listed = len(output.prompt_token_ids), output.outputs[0].logprobs
    assert listed is not None
    for step in (1, 2, 3, 4):
        for position in explain(llm, PROMPT, 0.8, seed=2, step=step).positions:
            if position.outcome != "dropped":
                distribution = {c.id: c.p for c in position.candidates}
                for id, reported in listed[position.position - start].items():
                    assert distribution[id] == pytest.approx(math.exp(reported.logprob), rel=1e-5)


def test_a_whole_accepted_draft_ends_with_a_bonus(twins: LLM) -> None:
    found = explain(twins, PROMPT, 0.8, seed=1, step=1)
    assert [p.outcome for p in found.positions] == ["accepted"] * K + ["bonus"]
    assert all(c.p == c.q for p in found.positions[:K] for c in p.candidates)
    assert found.positions[K].draft is None
    assert found.summary == (
        "4 drafted, 4 accepted, 5 tokens from one pass of the target, instead of 5 passes, "
        "at the price of 4 passes of the drafter."
    )


def first_with_both(llm: LLM, prompt: str, temperature: float) -> tuple[int, Explanation]:
    """A seed whose first steps have one of each, found by looking."""
    for seed in range(40):
        found = explain(llm, prompt, temperature, seed)
        if "It is the first in which" in found.chosen:
            return seed, found
    raise AssertionError("no seed shows both")


def test_the_default_step_shows_both(llm: LLM) -> None:
    seed, found = first_with_both(llm, PROMPT, 0.8)
    outcomes = {p.outcome for p in found.positions}
    assert {"accepted", "rejected"} <= outcomes
    for step in range(1, found.step):
        before = explain(llm, PROMPT, 0.8, seed, step)
        assert not {"accepted", "rejected"} <= {p.outcome for p in before.positions}
        assert before.chosen == "It is the step that was asked for."


def test_ngram_has_no_law_but_the_target_has(ngram: LLM) -> None:
    found = explain(ngram, LOOP, 0.8, seed=0)
    assert found.drafted
    assert all(
        c.q is None and c.drafter_score is None for p in found.positions for c in p.candidates
    )
    assert "passes of the drafter" not in found.summary


def test_without_a_draft_it_says_why(ngram: LLM, tiny_llama: Path) -> None:
    found = explain(ngram, "q#Zw", 1.5, seed=0, step=1)
    (position,) = found.positions
    assert (position.outcome, position.draft, found.drafted) == ("plain", None, 0)
    assert "ngram has nothing to copy" in position.why
    assert found.summary == "0 drafted, 1 token from one pass of the target: plain decoding."
    plain = LLM(tiny_llama, drafter=None, max_num_seqs=1)
    found = explain(plain, PROMPT, 0.8, seed=0)
    assert found.chosen.startswith("It is the first; of ")
    assert found.positions[0].why.startswith("There is no drafter. The target draws ")


def test_a_draft_beyond_the_end_was_not_drafted(
    twins: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, _ = generated(twins, PROMPT, 0.8, seed=4)
    assert ids[2] not in ids[:2]  # it is the second token of the first step
    monkeypatch.setattr(twins.inputs, "eos_token_ids", frozenset({ids[2]}))
    found = explain(twins, PROMPT, 0.8, seed=4, step=1)
    assert [p.outcome for p in found.positions] == ["accepted", "accepted", "ended", "ended"]
    assert [e.id for e in found.output] == ids[1:3]
    assert (found.drafted, found.accepted) == (2, 2)
    with pytest.raises(RequestError, match="step is 2, but the output ended in step 1; give 1 to"):
        explain(twins, PROMPT, 0.8, seed=4, step=2)


def test_an_output_of_one_token_has_no_step(twins: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, _ = generated(twins, PROMPT, 0.8, seed=4)
    monkeypatch.setattr(twins.inputs, "eos_token_ids", frozenset({ids[0]}))
    with pytest.raises(RequestError, match="the output ended with its first token"):
        explain(twins, PROMPT, 0.8, seed=4)


def test_the_engine_is_left_as_it_was(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.engine.chooser, "tries_plain", False)  # every 64 steps, of any request
    drafter = llm.engine.drafter
    before = generated(llm, PROMPT, 0.8, seed=5)
    explain(llm, PROMPT, 0.8, seed=5)
    assert llm.engine.drafter is drafter
    assert not llm.engine.has_work
    check_engine(llm.engine)
    assert generated(llm, PROMPT, 0.8, seed=5) == before


def test_errors_leave_the_engine_as_it_was(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = llm.engine.drafter
    with pytest.raises(RequestError, match="step is 0; give 1 or more"):
        explain(llm, PROMPT, 0.8, seed=0, step=0)
    with pytest.raises(RequestError, match="longer than the model's context length of 256"):
        explain(llm, PROMPT * 100, 0.8, seed=0)
    tree = Draft([DraftNodes([5, 6], [-1, -1])])
    nothing = Draft.chains([[]])
    monkeypatch.setattr(
        drafter, "propose", lambda _, budgets, __: tree if budgets[0].depth else nothing
    )
    with pytest.raises(RequestError, match=r"drafted a tree of 2 nodes in step 1; .* chains only"):
        explain(llm, PROMPT, 0.8, seed=0)
    assert llm.engine.drafter is drafter
    assert not llm.engine.has_work


def test_logits_that_are_not_finite_are_an_error(
    ngram: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    decide = ngram.engine.model.decide

    def broken(*args: Any) -> Any:
        samples = decide(*args)
        return samples._replace(scores=[float("nan")] * len(samples.scores))

    monkeypatch.setattr(ngram.engine.model, "decide", broken)
    with pytest.raises(NumericalError, match="NaN"):
        explain(ngram, PROMPT, 0.8, seed=0)


def test_the_search_has_an_end(twins: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "SEARCHED_STEPS", 3)
    found = explain(twins, PROMPT, 0.8, seed=1)
    assert found.step == 1
    assert found.chosen.startswith("It is the first with a draft; of 3 steps none has both")


@pytest.fixture
def options(tiny_llama: Path, tiny_drafter: Path) -> tuple[object, ...]:
    length = ("--num-speculative-tokens", 4)
    return ("--model", tiny_llama, "--drafter", tiny_drafter, "--prompt", PROMPT, *length)


def test_json_is_the_explanation(options: tuple[object, ...], llm: LLM) -> None:
    done = outrider(*options, "--json", "--seed", 3, "--step", 2)
    assert (done.exit_code, done.stderr) == (0, "")
    data = json.loads(done.stdout, parse_constant=pytest.fail)
    assert data == asdict(explain(llm, PROMPT, 0.8, seed=3, step=2))
    assert list(data) == [
        "drafter", "temperature", "seed", "num_speculative_tokens", "step", "chosen", "text_before",
        "positions", "output", "drafted", "accepted", "summary",
    ]  # fmt: skip
    position = data["positions"][0]
    assert list(position) == [
        "index", "position", "draft", "target", "outcome", "why", "candidates",
    ]  # fmt: skip
    assert list(position["draft"]) == list(position["target"]) == ["id", "text"]
    assert list(position["candidates"][0]) == [
        "id", "text", "p", "q", "noise", "target_score", "drafter_score",
    ]  # fmt: skip
    assert list(data["output"][0]) == ["id", "text", "origin"]


def line_of(text: str, token: str) -> list[str]:
    return next(line for line in text.splitlines() if line.startswith(f"  {token} ")).split()


def test_what_people_read(options: tuple[object, ...], llm: LLM) -> None:
    seed, found = first_with_both(llm, PROMPT, 0.8)
    done = outrider(*options, "--seed", seed)
    assert (done.exit_code, done.stderr) == (0, "")
    text = done.stdout
    assert "\x1b" not in text
    assert all(len(line) <= 80 and line == line.rstrip() for line in text.splitlines())
    one = " ".join(text.split())
    assert f"Step {found.step} (temperature 0.8, seed {seed}). {found.chosen}" in one
    for word in ("distribution:", "noise g:", "accepted:", "bonus:"):
        assert word in one
    for position in found.positions:
        start = f"{position.index} draft {label(position.draft or position.target)}: "
        assert " ".join(f"{start}{position.outcome.upper()}. {position.why}".split()) in one
    assert found.summary in one
    taken = next(p for p in found.positions if p.outcome == "accepted")
    best = next(c for c in taken.candidates if c.id == taken.target.id)
    block = text[text.index(f"{taken.index}  draft") :]
    assert line_of(block, command.shortened(label(taken.target)))[-6:] == [
        f"{best.p:.3f}", f"{best.q:.3f}", f"{best.noise:.2f}", f"{best.target_score:.2f}",
        f"{best.drafter_score:.2f}", "both",
    ]  # fmt: skip


def test_a_table_has_the_likeliest_and_the_chosen(llm: LLM) -> None:
    positions: list[Position] = []
    for seed in range(5):
        positions += explain(llm, PROMPT, 1.5, seed).positions
    for position in positions:
        rows = [c.id for c in command.shown(position)]
        assert position.target.id in rows
        assert position.draft is None or position.draft.id in rows
        assert rows[:5] == [c.id for c in position.candidates[:5]]
        assert len(rows) <= 7


def test_without_noise_there_is_none_to_show(options: tuple[object, ...], ngram: LLM) -> None:
    greedy = outrider(*options, "--temperature", 0).stdout
    assert "At temperature 0 no noise is drawn" in " ".join(greedy.split())
    assert "log p + g" not in greedy
    plain = outrider(*options, "--drafter", "none").stdout
    assert "PLAIN. There is no drafter." in plain
    assert plain.startswith("Without a drafter, a step is one pass of the target for one token.")


@pytest.mark.parametrize(
    ("text", "shown"),
    [(" a\n\x1b", r"' a\n\x1b'"), ("\ufffd", "<token 7>"), ("", "<token 7>"), (" ", "' '")],
)
def test_a_token_is_shown_safely(text: str, shown: str) -> None:
    from outrider.audit.explain import ExplainedToken

    assert label(ExplainedToken(7, text)) == shown


def test_bad_usage_is_one_sentence(options: tuple[object, ...], tmp_path: Path) -> None:
    for args, said in (
        (("--model", tmp_path / "nothing"), "nothing"),
        ((*options, "--step", 0), "error: step is 0; give 1 or more.\n"),
        ((*options, "--step", 500), "but the output ended in step"),
        ((*options, "--prompt", ""), "error: the prompt has no tokens; give at least one.\n"),
        ((*options, "--prompt", PROMPT * 100), "longer than the model's context length of 256"),
        ((*options, "--temperature", -1), "temperature is -1.0"),
        ((*options, "--drafter", "magic"), "drafter 'magic' is neither a drafter"),
    ):
        done = outrider(*args)
        assert done.exit_code in (1, 2)
        assert done.stdout == ""
        assert said in done.stderr
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_the_bundled_pair_shows_both() -> None:
    done = outrider("--json")
    data = json.loads(done.stdout)
    assert {"accepted", "rejected"} <= {p["outcome"] for p in data["positions"]}
