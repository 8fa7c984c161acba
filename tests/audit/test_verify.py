"""The audit: right rules pass, wrong ones are caught, and what it says is so."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks.rules import coupled_acceptance, first_bounds, measure
from outrider import pocket
from outrider.audit import ties
from outrider.audit.faults import FAULTS, Fault
from outrider.audit.sweep import MIXES, Mix
from outrider.audit.trial import continued, hold
from outrider.audit.verify import FALSE_ALARM, QUICK, AuditSize, verify
from outrider.audit.wrapped import WrappedPipeline
from outrider.cli import app
from outrider.cli import verify as cli_verify
from outrider.engine.setup import set_up
from outrider.sampling.ratio import RULES
from tests.support import enumeration
from tests.support.exactness import VOCABULARY, planted_pair

TINY = AuditSize("tiny", 2, 20, 8, 1, (Mix("model", 3, 4), Mix("tree", 3, 2)), 12, 2**10)
SMALL = AuditSize("tiny", 1, 20, 8, 1, (Mix("ngram", 3, 9),), 4, 2**9)
"""Where the distributions are not what is looked at."""
LAWS = AuditSize("tiny", 2, 20, 8, 1, (Mix("ngram", 3, 9),), 8, 2**10)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return planted_pair(tmp_path_factory.mktemp("verify"))


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return rng.integers(4, VOCABULARY, (2, 20)).tolist()  # type: ignore[no-any-return]


def test_the_right_rules_pass(pair: Path) -> None:
    """Seeds are fixed; a fresh one would raise a false alarm once in a million audits."""
    said: list[str] = []
    report = verify(pair, prompts(), size=TINY, seed=4, progress=said.append)
    assert report.passed, report.as_json()
    assert report.verdict.startswith("pass")
    assert [check.name for check in report.checks] == ["greedy", "equality", "distributions"]
    assert any("rule block" in line for line in said)
    greedy, equality, distributions = report.checks
    assert greedy.tested == 16
    assert all(0 < accepted < drafted for _, drafted, accepted in equality.runs)
    assert {f.what.split(",")[0] for f in distributions.findings} == set(RULES)
    assert report.visible is not None
    assert 0 < report.visible.everywhere < report.visible.somewhere < 1
    assert json.dumps(report.as_json(), allow_nan=False)


RULE_FAULTS = [name for name, fault in FAULTS.items() if fault.rule is not None]


@pytest.mark.parametrize("name", RULE_FAULTS)
def test_a_wrong_rule_is_caught(pair: Path, name: str) -> None:
    report = verify(pair, prompts(), size=LAWS, seed=5, fault=FAULTS[name])
    assert not report.passed
    assert "violation" in report.verdict
    greedy, equality, distributions = report.checks
    assert greedy.passed
    assert equality.passed
    assert distributions.violations, f"{name} was not seen"
    assert json.dumps(report.as_json(), allow_nan=False)


def test_stale_penalties_are_caught(pair: Path) -> None:
    size = replace(TINY, tokens=24, contexts=4, draws=2**9)
    report = verify(pair, prompts(), size=size, seed=5, fault=FAULTS["stale-penalties"])
    greedy, equality, distributions = report.checks
    assert greedy.passed
    assert distributions.passed
    assert equality.violations
    assert all("penalties" in text for text in equality.violations)


def test_a_spoilt_engine_is_caught(pair: Path) -> None:
    """The speculative engine answers from another temperature than the plain one."""

    class Sharper(WrappedPipeline):
        def apply(self, logits: Any, tokens: list[int], paths: list[list[int]]) -> Any:
            logits *= 1.3
            return super().apply(logits, tokens, paths)

    fault = Fault("sharper", pipeline=lambda sequence: Sharper(sequence.pipeline))
    report = verify(pair, prompts(), "none", SMALL, 6, fault)
    assert not report.checks[1].passed
    assert "gap" in report.checks[1].violations[0]


def test_a_large_tie_is_a_violation(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the measured noise: fp32 does not move a score by a hundredth."""
    found = ties.Difference(23, (1, 2), 0.01, 0.02, True)
    monkeypatch.setattr("outrider.audit.verify.compare", lambda *_, **__: found)
    report = verify(pair, prompts(), "none", SMALL, 6)
    assert report.checks[0].violations
    assert report.checks[1].violations
    small = ties.Difference(23, (1, 2), 1e-6, 2e-6, True)
    monkeypatch.setattr("outrider.audit.verify.compare", lambda *_, **__: small)
    report = verify(pair, prompts(), "none", SMALL, 6)
    assert report.checks[1].ties
    assert "numerical ties" in report.verdict


def test_the_bound_on_false_alarms_holds() -> None:
    """At alpha = 0.02 of 2,000 trials at most 40 may alarm on average; 80 would be 6 sigma off."""
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(2000):
        p = rng.dirichlet(np.full(5, 0.7))
        counts = rng.multinomial(300, p).astype(np.float64)
        alarms += hold("", counts, p, 0.02).wrong
    assert alarms < 80


def test_an_error_that_is_called_visible_is_seen() -> None:
    """Moved by the visible total variation, it is told apart with probability 1 - alpha."""
    rng = np.random.default_rng(8)
    p = rng.dirichlet(np.full(8, 3.0))
    n, alpha = 4000, 1e-6
    visible = hold("", rng.multinomial(n, p).astype(np.float64), p, alpha).visible
    shift = np.where(p > np.median(p), -1.0, 1.0)
    q = p + np.where(shift > 0, visible / 4, -visible / 4)
    assert q.min() > 0
    assert np.abs(p - q).sum() / 2 == pytest.approx(visible)
    for _ in range(50):
        assert hold("", rng.multinomial(n, q).astype(np.float64), p, alpha).wrong
    impossible = np.where(np.arange(8) == 0, 0.0, p)
    finding = hold("", np.ones(8), impossible / impossible.sum(), alpha)
    assert finding.statistic == math.inf
    exact = hold("", p * 1e6 // 1, p, alpha)
    assert not exact.wrong


def test_what_a_step_did_not_emit_comes_from_the_oracle() -> None:
    """The distribution of the completion; a false alarm: 1e-6 (``hold``)."""
    rng = np.random.default_rng(9)
    joint = np.zeros((8, 8, 8))
    joint[:3, :4, :2] = rng.dirichlet(np.ones(24)).reshape(3, 4, 2)
    first = rng.choice(8, 20_000, p=joint.sum((1, 2)))
    tokens = np.stack([first, np.full(20_000, -1), np.full(20_000, -1)], 1)
    counts = continued(tokens, joint, rng)
    assert counts.sum() == 20_000
    assert not hold("", counts, joint, 1e-6).wrong


def test_coupled_acceptance_of_many_laws_is_the_oracles() -> None:
    rng = np.random.default_rng(10)
    p, q = rng.dirichlet(np.full(9, 0.5), 20), rng.dirichlet(np.full(9, 0.5), 20)
    p[::3, 2] = 0
    q[::4, 5] = 0
    p, q = p / p.sum(1, keepdims=True), q / q.sum(1, keepdims=True)
    got = coupled_acceptance(p, q)
    expected = [enumeration.coupled_acceptance(a, b) for a, b in zip(p, q, strict=True)]
    np.testing.assert_allclose(got, expected, atol=1e-12)
    bounds = first_bounds(p, q)
    assert bounds.shape == (20, 3)
    ratio, coupled, least = bounds.sum(0)
    assert least < coupled < ratio


def test_the_rules_are_compared_beside_the_bounds(pair: Path) -> None:
    """Measured acceptance of the first position is the theory's; 5 sigma: a false alarm of 1e-6."""
    intake = set_up(pair, "model", {"num_speculative_tokens": 2, "memory": 2**24})
    for name in ("coupled", "rejection"):
        llm, bounds = measure(intake, RULES[name](), prompts() * 8, 1.0, 40, 3)
        mean = float(bounds[:, int(name == "coupled")].mean())
        sigma = math.sqrt(mean * (1 - mean) / len(bounds))
        assert abs(llm.engine.counts.acceptance_by_position[0] - mean) < 5 * sigma


def outrider(*args: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["verify", *args])
    return done.exit_code, done.stdout, done.stderr


def test_the_command(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.audit.verify.QUICK", SMALL)
    code, out, err = outrider("--model", str(pair), "--seed", "4")
    assert (code, err) == (0, "")
    assert out.startswith("pass: nothing is lost by speculating")
    assert "--seed 4 repeats it" in out
    assert "smallest visible error" in out
    code, out, _ = outrider("--model", str(pair), "--drafter", "ngram", "--json")
    report = json.loads(out)
    assert code == 0
    assert report["passed"]
    assert report["seed"] >= 0
    assert report["smallest_visible_error"]["everywhere"] > 0


def test_the_command_takes_prompts(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider.audit.verify.QUICK", SMALL)
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "the quick brown fox", "id": 1}\n"jumps over the lazy dog"\n')
    code, out, _ = outrider("--model", str(tiny_llama), "--prompts", str(file), "--json")
    assert code == 0
    assert json.loads(out)["passed"]
    code, _, err = outrider("--model", str(tiny_llama), "--prompts", str(tmp_path / "none.jsonl"))
    assert code == 2
    assert "cannot be read" in err


def test_the_command_can_fail(pair: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.audit.verify.QUICK", LAWS)
    monkeypatch.setattr(pocket, "prompts", prompts)
    code, out, err = outrider("--model", str(pair), "--fault", "accept-always")
    assert code == 1
    assert out.startswith("violation: ")
    assert "more of the kind" in out
    assert err == "error: the audit found a violation.\n"
    assert outrider("--model", "/nowhere")[0] in (1, 2)
    assert outrider("--seed", "-1")[0] == 2
    assert outrider("--fault", "none-such")[0] == 2
    assert cli_verify.SHOWN > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_the_pocket_pair_passes_with_fresh_seeds(number: int) -> None:
    """20 audits with seeds from the operating system; a false alarm: 2e-5 for all of them."""
    assert FALSE_ALARM == 1e-6
    report = verify(pocket.PATH, pocket.prompts(), size=QUICK)
    assert report.passed, report.as_json()


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_the_pocket_pair_catches_every_fault(name: str) -> None:
    mixes = tuple(m for m in MIXES if m.drafter == "model")[:1]
    size = AuditSize("distributions", 4, 64, 16, 1, mixes, QUICK.contexts, QUICK.draws)
    report = verify(pocket.PATH, pocket.prompts(), size=size, fault=FAULTS[name])
    greedy, equality, distributions = report.checks
    assert greedy.passed
    assert bool(distributions.violations) == (FAULTS[name].rule is not None)
    assert bool(equality.violations) == (FAULTS[name].pipeline is not None)
