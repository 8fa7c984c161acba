"""The audit of a server: honest ones pass, lossy ones are caught, bad input is a sentence."""

from __future__ import annotations

import json
import math
import socket
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from typer.testing import CliRunner

from outrider.audit.endpoint import EndpointReport, Status, martingale, source, verify_endpoint
from outrider.audit.endpoint import audit as module
from outrider.audit.endpoint.answers import (
    EndpointCompletion,
    Law,
    Token,
    completions,
    law_of,
    message,
)
from outrider.audit.endpoint.distributions import AnswerContext, Laws, Prompt, draw_of, observe
from outrider.audit.endpoint.martingale import compare, visible_alike, visible_apart
from outrider.audit.endpoint.outcome import share
from outrider.audit.endpoint.sampling import CELLS, SAMPLINGS, Sampling, expected
from outrider.audit.endpoint.source import AuditedServer, TimeLimit, WithoutSpeculation
from outrider.cli import app
from outrider.errors import ConfigError, EndpointError
from tests.support.lossy import Faults, toy

if TYPE_CHECKING:
    from benchmarks.served import Served

SEED = 3
NONE = Sampling("temperature 1")
TYPICAL = SAMPLINGS[1]


def audit(faults: Faults, samples: int = 128, **options: Any) -> EndpointReport:
    with toy(faults) as url:
        return verify_endpoint(url, samples=samples, seed=SEED, **options)


def failed(report: EndpointReport) -> set[str]:
    assert json.dumps(report.as_json(), allow_nan=False)
    assert report.passed == (not report.having(Status.FAILED))
    return {result.name for result in report.having(Status.FAILED)}


def test_an_honest_server_passes() -> None:
    report = audit(Faults())
    assert failed(report) == set()
    assert report.verdict.startswith("pass")
    done = {result.name: result for result in report.results}
    assert not report.having(Status.NOT_OFFERED)
    assert done["greedy"].samples == 256
    for sampling in SAMPLINGS:
        assert done[f"law, {sampling.name}: later tokens"].status is Status.PASSED
    assert all(0 < r.visible < 1 for r in report.results if r.visible is not None)


def test_an_honest_server_with_parts_of_characters_passes() -> None:
    report = audit(Faults(parts=3), laws=["temperature 1", "min_p 0.2", "temperature 0.5"])
    assert failed(report) == set()
    done = {result.name: result for result in report.results}
    for name in ("temperature 1", "temperature 0.5"):
        assert done[f"law, {name}: first token"].status is Status.PASSED


@pytest.mark.parametrize(
    ("faults", "tried", "samples", "wrong"),
    [
        (Faults(typical=True), "temperature 1", 512, {"law, temperature 1: later tokens"}),
        (Faults(ignored={"min_p"}), "min_p 0.2", 192, {"law, min_p 0.2: later tokens"}),
        (Faults(ignored={"top_k"}), "top_k 2", 128, {"law, top_k 2: later tokens"}),
        (Faults(ignored={"top_p"}), "top_p 0.7", 192, {"law, top_p 0.7: later tokens"}),
        (Faults(blind=True), "penalties", 768, {"law, penalties: later tokens"}),
        (
            Faults(ignored={"logit_bias"}),
            "logit_bias -2",
            256,
            {"law, logit_bias -2: first token"},
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_law_is_caught(faults: Faults, tried: str, samples: int, wrong: set[str]) -> None:
    report = audit(faults, samples, laws=[tried])
    assert wrong <= failed(report)
    assert all(name.startswith("law") for name in failed(report))
    if faults.typical:
        assert "law, temperature 1: first token" not in failed(report)
    if faults.ignored and tried != "logit_bias -2":
        seen = {result.name: result.seen for result in report.results}
        assert "as if the option were ignored" in seen[min(wrong)]


@pytest.mark.parametrize(
    ("faults", "wrong"),
    [
        (Faults(greedy=True), {"greedy"}),
        (Faults(certain=True), {"logprobs"}),
        (Faults(ignored={"seed"}), {"seed, alone", "seed, among others"}),
        (Faults(crowded=True), {"seed, among others"}),
        (Faults(overshoots=True), {"max_tokens"}),
        (Faults(stops_late=True), {"stop"}),
        (Faults(copies=True), {"n"}),
        (Faults(breaks_json=True), {"json_schema"}),
        (Faults(ignored={"response_format"}), {"json_schema"}),
    ],
    ids=lambda value: "+".join(sorted(value)) if isinstance(value, set) else "",
)
def test_each_other_error_is_caught(faults: Faults, wrong: set[str]) -> None:
    found = {
        name for name in failed(audit(faults, 64, laws=["top_k 2"])) if not name.startswith("law")
    }
    assert found == wrong


def test_what_is_refused_is_not_offered() -> None:
    refused = {"min_p", "n", "seed", "return_token_ids", "guided_regex", "response_format"}
    laws = ["min_p 0.2", "logit_bias -2", "temperature 1"]
    report = audit(Faults(refused=refused, tells={"logprobs"}), laws=laws)
    assert failed(report) == set()
    missing = {result.name for result in report.having(Status.NOT_OFFERED)}
    assert missing == {"n", "seed", "json_schema", "regex", "law, min_p 0.2", "law, logit_bias -2"}
    assert "no such field: min_p" in next(
        result.seen for result in report.results if result.name == "law, min_p 0.2"
    )


def test_without_log_probabilities_texts_are_compared() -> None:
    report = audit(Faults(tells={"usage"}))
    done = {result.name: result for result in report.results}
    assert failed(report) == set()
    assert (done["greedy"].status, done["greedy"].samples) == (Status.PASSED, 8)
    assert done["law"].status is Status.NOT_OFFERED
    assert "no log probabilities" in done["law"].seen
    wrong = audit(Faults(tells={"usage"}, greedy=True))
    done = {result.name: result for result in wrong.results}
    assert done["greedy"].status is Status.INCONCLUSIVE
    assert "cannot be told from a tie" in done["greedy"].seen


def test_another_server_is_the_reference() -> None:
    with toy() as plain:
        against: dict[str, Any] = {"reference": plain, "laws": ["top_k 2"]}
        assert failed(audit(Faults(), 64, **against)) == set()
        assert "greedy" in failed(audit(Faults(greedy=True), 64, **against))


def test_time_ends_an_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    # A clock that ticks when it is read: as much is done on every machine.
    monkeypatch.setattr(source, "time", SimpleNamespace(monotonic=count(0.0, 0.005).__next__))
    report = audit(Faults(), 1_000_000, seconds=10.0)
    assert failed(report) == set()
    assert report.having(Status.PASSED)
    with pytest.raises(EndpointError, match="too slow"):
        audit(Faults(), seconds=1e-6)


def test_our_own_server_passes(server: Served) -> None:
    laws = ["temperature 1", "min_p 0.2", "logit_bias -2"]
    report = verify_endpoint(server.url, laws=laws, samples=128, seed=SEED)
    assert failed(report) == set()
    assert report.reference == "the server, with speculation off"
    assert not report.having(Status.NOT_OFFERED)
    assert report.speculation["spec_decode_draft_tokens"] > 0


@pytest.mark.parametrize(
    ("switch", "found"),
    [
        ((200, b'{"enabled": true}'), "the server, with speculation off"),
        ((200, b"<html>a page for every path"), "one token a request"),
        ((200, b"[]"), "one token a request"),
        ((403, b"no"), "one token a request"),
        ((501, b"no"), "one token a request"),
    ],
    ids=lambda value: str(value)[:12],
)
def test_the_switch_is_looked_for(switch: tuple[int, bytes], found: str) -> None:
    assert found in audit(Faults(switch=switch), 64, laws=["top_k 2"]).reference


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_switch_that_nobody_can_tell_is_an_error(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(source, "PAUSE_SECONDS", 0.0)
    with toy(Faults(switch=(status, b"it broke"))) as url:
        code, out, err = verify("--endpoint", url, "--samples", "64")
    assert (code, out) == (1, "")
    assert err == f"error: {url}/v1/speculation says HTTP {status}: 'it broke'\n"


def test_a_model_on_this_machine_is_the_reference(
    server: Served, tiny_llama: Path, tiny_qwen3: Path
) -> None:
    options: dict[str, Any] = {"laws": ["temperature 1"], "samples": 64, "seed": SEED}
    report = verify_endpoint(server.url, reference=str(tiny_llama), **options)
    assert failed(report) == set()
    report = verify_endpoint(server.url, reference=str(tiny_qwen3), **options)
    assert {"greedy", "logprobs", "law, temperature 1: first token"} <= failed(report)


BROKEN: list[tuple[Faults, str]] = [
    (Faults(models={"data": []}), "is not OpenAI's"),
    (Faults(models=[1]), "is not OpenAI's"),
    (Faults(raw=b"<html>hello"), "is not JSON"),
    (Faults(raw=b"{}"), "it has no choices"),
    (Faults(raw=b'{"choices": [{"text": 3}]}'), "a choice's text is 3"),
    (Faults(raw=b'{"choices": [{"text": "\xff"}]}'), "is not JSON"),
    (Faults(raw=b'{"choices": [{"text": "a"}, {"text": "b"}]}'), "a choice's index is None"),
    (Faults(raw=b'{"choices": [{"text": "a", "logprobs": 5}]}'), "logprobs is 5"),
    (Faults(raw=b'{"error": {"message": "full\nmoon"}}', status=500), "HTTP 500: 'full\\nmoon'"),
    (Faults(raw=b"no", status=401), "HTTP 401: 'no'"),
    (Faults(raw=b"gone", status=404), "HTTP 404: 'gone'"),
    (Faults(raw=b"[" * 100_000, after=40), "is not JSON"),
]


@pytest.mark.parametrize(("faults", "said"), BROKEN, ids=lambda value: str(value)[:30])
def test_what_is_not_openais_is_a_sentence(faults: Faults, said: str) -> None:
    with toy(faults) as url:
        done = CliRunner().invoke(app, ["verify", "--endpoint", url, "--samples", "64"])
    assert done.exit_code == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: ")
    assert said in done.stderr


@pytest.mark.parametrize(
    ("logprobs", "said"),
    [
        ({"tokens": ["a"], "top_logprobs": [{"a": 1.0}]}, "a log probability is 1.0"),
        ({"tokens": ["a"], "top_logprobs": [{"a": "x"}]}, "a log probability is 'x'"),
        ({"tokens": ["a"], "top_logprobs": [{"a": float("nan")}]}, "a log probability is nan"),
        ({"tokens": ["a"], "top_logprobs": [{"a": -0.1, "b": -0.1}]}, "sum to 1.81"),
        ({"tokens": ["a"], "top_logprobs": [{"a": -1e9}]}, "name no token"),
        ({"tokens": [3], "top_logprobs": [{}]}, "a token is 3"),
        ({"content": [3]}, "a log probability is 3"),
        ({"tokens": None}, "logprobs.tokens is None"),
    ],
)
def test_log_probabilities_that_are_none_are_a_sentence(logprobs: Any, said: str) -> None:
    body = json.dumps({"choices": [{"text": "a", "logprobs": logprobs}]}).encode()
    with pytest.raises(EndpointError, match=said):
        completions(body, "http://x/v1/completions")


def test_a_chat_without_a_message_is_a_sentence() -> None:
    for body in (b"{}", b'{"choices": [{"message": null}]}', b"[]", b"{", b'{"choices": 3}'):
        with pytest.raises(EndpointError, match="not OpenAI's"):
            message(body, "http://x")
    good = b'{"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}'
    assert message(good, "http://x") == ("hi", "stop")


def verify(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["verify", *args])
    return done.exit_code, done.stdout, done.stderr


def test_the_command() -> None:
    quick = ("--samples", "64", "--laws", "top_k 2, temperature 1")
    with toy() as url:
        code, out, err = verify("--endpoint", url, *quick, "--seed", "5")
        assert (code, err) == (0, "")
        assert out.startswith("pass: no error was found")
        assert "--seed 5 repeats them" in out
        assert "the server has no /metrics" in out
        code, out, err = verify("--endpoint", url, *quick, "--json", "--model", "other")
        assert (code, err) == (0, "")
        report = json.loads(out)
        assert (report["passed"], report["model"]) == (True, "other")
        tried = {result["name"] for result in report["results"] if result["name"][:3] == "law"}
        assert len(tried) == 4
    with toy(Faults(ignored={"seed"})) as url:
        code, out, err = verify("--endpoint", url, *quick)
        assert code == 1
        assert out.startswith("violation: ")
        assert err == "error: the audit found a violation.\n"


def test_bad_usage_is_a_sentence() -> None:
    for args, said in (
        (("--reference", "x"), "--reference needs --endpoint"),
        (("--samples", "64"), "--samples needs --endpoint"),
        (("--laws", "top_k 2"), "--laws needs --endpoint"),
        (("--endpoint", "http://x", "--laws", "top_k"), "There is no law 'top_k'; known are"),
        (("--seconds", "9"), "--seconds needs --endpoint"),
        (("--endpoint", "http://x", "--fault", "threshold"), "--fault is for the audit of a pair"),
        (("--endpoint", "http://x", "--drafter", "d"), "--drafter is for the audit of a pair"),
        (("--endpoint", "ftp://x"), "is not an address"),
        (("--endpoint", "http://x", "--samples", "3"), "greater than or equal to 64"),
        (("--endpoint", "http://x", "--api-key", "ü"), "characters that no header can carry"),
    ):
        code, out, err = verify(*args)
        assert (code, out) == (2, "")
        assert said in " ".join(err.split())
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        code, _, err = verify("--endpoint", f"127.0.0.1:{closed.getsockname()[1]}")
    assert code == 1
    assert "cannot be reached" in err
    with toy() as url:
        code, _, err = verify("--endpoint", url, "--reference", "/nowhere/at/all")
        assert code in (1, 2)
        assert err.count("\n") == 1
    for options in ({"samples": 3}, {"seconds": 0.0}, {"seconds": float("nan")}):
        with pytest.raises(ConfigError):
            verify_endpoint("http://x", **options)


def test_a_reference_that_reads_prompts_otherwise_is_refused(monkeypatch: Any) -> None:
    monkeypatch.setattr(module, "TEXTS", ("one two",))
    other = Faults(tells={"logprobs", "token_ids"})
    other.raw = json.dumps(
        {"choices": [{"text": "a", "index": 0}], "usage": {"prompt_tokens": 77}}
    ).encode()
    with toy(other) as url, pytest.raises(EndpointError, match="other tokens"):
        audit(Faults(), 64, reference=url)


# The statistics


def contexts(rng: np.random.Generator, count: int) -> Any:
    return rng.dirichlet(np.full(CELLS, 0.7), count)


def drawn(rng: np.random.Generator, laws: Any, draws: int) -> Any:
    return np.array([rng.multinomial(draws, law) for law in laws])


@pytest.fixture
def verdicts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """``compare`` without the simulation of what would be seen, on which no verdict depends."""
    monkeypatch.setattr(martingale, "visible_apart", lambda *_: 0.0)


def test_the_bound_on_false_alarms_holds(verdicts_alone: None) -> None:
    """At alpha = 0.05 one trial in 20 may alarm on average; 5 sigma more would be too many."""
    rng = np.random.default_rng(1)
    trials, alarms = 1000, 0
    for _ in range(trials):
        laws = contexts(rng, 6)
        counts = drawn(rng, laws, 60)
        alarms += compare(laws, contexts(rng, 6), counts, 0.05).wrong
    assert alarms < 0.05 * trials + 5 * math.sqrt(0.05 * 0.95 * trials)


def test_an_error_that_is_called_visible_is_seen(verdicts_alone: None) -> None:
    """At 90 % of 60 trials 54 show on average; 43 would be 5 sigma off."""
    rng = np.random.default_rng(2)
    laws = contexts(rng, 8)
    draws = np.full(8, 250)
    for visible, alike in (
        (visible_alike(2000, 1e-6), True),
        (visible_apart(laws, draws, 1e-6), False),
    ):
        seen = 0
        for _ in range(60):
            p = contexts(rng, 8) if alike else laws
            cells = [0] * 8 if alike else [rng.choice(CELLS, p=law) for law in p]
            moved = np.eye(CELLS)[cells]
            size = float((np.abs(moved - p).sum(1) / 2).mean())
            q = p + (moved - p) * min(1.0, visible / size)
            seen += compare(p, p, drawn(rng, q, 250), 1e-6).wrong
        assert seen >= 43


def test_a_token_that_is_excluded_is_an_error_at_once() -> None:
    law = np.array([[0.6, 0.4, 0, 0, 0, 0]])
    right = np.array([[60, 40, 0, 0, 0, 0]])
    assert not compare(law, law, right, 1e-6).wrong
    got = compare(law, law, right + np.eye(CELLS, dtype=np.int64)[3], 1e-6)
    assert got.wrong
    assert got.excluded == 1


def test_options_make_the_laws_that_they_should() -> None:
    tokens = tuple(Token(text, number) for number, text in enumerate("abcde"))
    law = Law(tokens, (0.5, 0.25, 0.15, 0.05, 0.02))

    def cells(*before: Token, biased: Token | None = None, **options: Any) -> Any:
        found = expected(law, Sampling("", **options), before, biased)
        return None if found is None else found.round(4).tolist()

    assert cells() == [0.5, 0.25, 0.15, 0.05, 0.02, 0.03]
    assert cells(top_k=2) == [0.6667, 0.3333, 0, 0, 0, 0]
    assert cells(top_p=0.6) == [0.6667, 0.3333, 0, 0, 0, 0]
    assert cells(min_p=0.2) == [0.5556, 0.2778, 0.1667, 0, 0, 0]
    assert cells(min_p=0.1) is None  # d is on the edge
    assert cells(top_p=0.76) is None  # so is b
    assert cells(top_k=5) is None  # what would be the sixth is not known
    half = np.array([0.5, 0.25, 0.15, 0.05, 0.02]) ** 2
    assert cells(temperature=0.5) == [*(half / half.sum()).round(4).tolist(), 0]
    lower = np.array([0.5 * np.exp(-2.0), 0.25 * np.exp(-1.5), 0.15, 0.05, 0.02])
    seen = (tokens[0], tokens[0], tokens[1])
    assert cells(*seen, presence_penalty=1.0, frequency_penalty=0.5) == [
        *(lower / lower.sum()).round(4).tolist(), 0,
    ]  # fmt: skip
    raised = np.array([0.5, 0.25, 0.15 * np.exp(-2), 0.05, 0.02])
    assert cells(bias=-2.0, biased=tokens[2]) == [*(raised / raised.sum()).round(4).tolist(), 0]


def test_tokens_that_cannot_be_told_apart_count_as_others() -> None:
    law = law_of([(Token("<|end|>"), -1.0), (Token("a"), -1.2), (Token("\ufffd"), -2.0)])
    assert law.rank(Token("a")) == 1
    assert law.rank(Token("<|end|>")) is None
    assert law.rank(Token("")) is None
    found = expected(law, NONE, ())
    assert found is not None
    assert found[1] == pytest.approx(np.exp(-1.2))
    assert found[-1] == pytest.approx(1 - np.exp(-1.2))
    named = law_of(
        [
            (Token("bytes:\\x80"), -1.0),
            (Token("a"), -1.2),
            (Token("\ufffd"), -3.0),
        ]
    )
    assert named.rank(Token("\ufffd", 7)) is None
    for sampling in SAMPLINGS[1:]:
        found = expected(named, sampling, ())
        assert found is None or (found[0], found[-1]) == (0, 0)
    assert AnswerContext(Prompt("p"), (Token("\ufffd", 7),)).given is None
    assert AnswerContext(Prompt("p"), (Token("bytes:\\xe2\\x80"),)).given is None
    assert AnswerContext(Prompt("p", (1, 2)), (Token("\ufffd", 7),)).given == (1, 2, 7)
    assert Token("x", 3).same(Token("y", 3))
    assert not Token("x", 3).same(Token("x", 4))


def test_behind_tokens_that_look_special_nothing_is_judged() -> None:
    """Ends of answers are not counted there, so the other tokens alone follow no law."""
    law = law_of([(Token("a"), -0.7), (Token("b"), -1.0), (Token(""), -2.0)])
    laws = Laws(WithoutSpeculation(AuditedServer("http://x", None, None)), TimeLimit(None))
    draws, ends = [], [Token("<br>", 7), Token(" c", 8)]
    for first in ends:
        laws._known[AnswerContext(Prompt("p", (1,)), (first,))] = law
        for text, reason in (("a", "length"), ("", "stop")):
            tokens = (first, Token(text, 9)) if text else (first,)
            draws.append(draw_of(Prompt("p", (1,)), EndpointCompletion("", reason, tokens)))
    seen = observe(draws, NONE, laws, {}, later=True)
    assert [context.tokens for context in seen.contexts] == [(ends[1],)]
    assert seen.counts.tolist() == [[1, 0, 0, 0, 0, 1]]


def test_the_rate_that_trials_show() -> None:
    assert share(0) == 1
    assert (1 - share(50)) ** 50 == pytest.approx(0.1)
