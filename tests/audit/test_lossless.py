"""Four verdicts about drafts: an honest server holds, a fault of each kind fails its column."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from outrider.audit.endpoint import EndpointReport, Result, Status, Verdict, verify_endpoint
from outrider.audit.endpoint.columns import NEEDS_PLAIN, NOTHING_DRAFTED, columns
from outrider.audit.endpoint.pairs import Pair, evidence, visible
from outrider.cli import app
from tests.support.lossy import Faults, toy

COLUMNS = ["T = 0", "T > 0", "per seed", "structured"]
HOLDS = dict.fromkeys(COLUMNS, Verdict.HOLDS)
TEXT_ALONE = {"usage"}


def audit(
    faults: Faults, plain: Faults | None = None, samples: int = 128, **options: Any
) -> EndpointReport:
    """Return the audit of a server against one that is right unless told."""
    laws = ["temperature 1"]
    with toy(plain) as reference, toy(faults) as url:
        return verify_endpoint(
            url, reference=reference, samples=samples, seed=3, laws=laws, **options
        )


def verdicts(report: EndpointReport) -> dict[str, Verdict]:
    assert json.dumps(report.as_json(), allow_nan=False)
    return {column.name: column.verdict for column in report.columns}


def seen(report: EndpointReport, name: str) -> str:
    return next(column.seen for column in report.columns if column.name == name)


def test_an_honest_server_holds_in_every_column() -> None:
    report = audit(Faults())
    assert verdicts(report) == HOLDS
    assert report.passed
    assert "plain repeats itself among others in 8 of 8" in seen(report, "T = 0")
    assert "response_format: 8 greedy answers are plain's" in seen(report, "structured")


@pytest.mark.parametrize(
    ("faults", "column", "witness"),
    [
        (Faults(greedy=True), "T = 0", "where the reference says"),
        (Faults(typical=True), "T > 0", "law, temperature 1: later tokens"),
        (Faults(ignored={"seed"}), "per seed", "where plain says"),
        (Faults(breaks_json=True), "structured", "ultraviolet"),
    ],
    ids=COLUMNS,
)
def test_a_fault_fails_its_column(faults: Faults, column: str, witness: str) -> None:
    report = audit(faults, samples=512 if column == "T > 0" else 64)
    assert verdicts(report)[column] is Verdict.FAILS
    assert witness in seen(report, column)


def test_a_rule_that_draws_anew_differs_and_is_no_violation() -> None:
    with toy() as reference, toy(Faults(reseeds=True)) as url:
        report = verify_endpoint(url, reference=reference, samples=64, seed=3, laws=["top_k 2"])
    assert verdicts(report) == {**HOLDS, "per seed": Verdict.FAILS}
    assert report.passed
    assert [result.name for result in report.having(Status.DIFFERS)] == ["seed, as plain"]


def test_texts_are_compared_where_no_token_is_told() -> None:
    told = {"tells": TEXT_ALONE}
    right = audit(Faults(**told), Faults(**told), samples=512)
    assert verdicts(right) == HOLDS
    assert "law, as plain" in seen(right, "T > 0")
    wrong = audit(Faults(**told, typical=True), Faults(**told), samples=512)
    assert verdicts(wrong)["T > 0"] is Verdict.FAILS
    assert "of plain's" in seen(wrong, "T > 0")
    assert verdicts(audit(Faults(**told, greedy=True), Faults(**told)))["T = 0"] is Verdict.FAILS


def test_what_plain_does_not_repeat_is_not_held_against_drafts() -> None:
    report = audit(Faults(), Faults(ignored={"seed"}))
    assert verdicts(report)["per seed"] is Verdict.UNKNOWN
    assert "plain does not repeat its seeds" in seen(report, "per seed")


def test_without_a_plain_server_two_columns_cannot_be_told() -> None:
    with toy() as url:
        report = verify_endpoint(url, samples=64, seed=3, laws=["temperature 1"])
    assert verdicts(report) == {
        **HOLDS, "per seed": Verdict.UNKNOWN, "structured": Verdict.UNKNOWN,
    }  # fmt: skip
    assert seen(report, "structured") == NEEDS_PLAIN


def test_forms_that_plain_does_not_offer_cannot_be_told() -> None:
    refused = {"response_format", "guided_regex"}
    report = audit(Faults(refused=refused), Faults(refused=refused))
    assert verdicts(report) == {**HOLDS, "structured": Verdict.UNKNOWN}
    assert "plain takes it by no known way" in seen(report, "structured")
    broken = audit(Faults(refused=refused))
    assert verdicts(broken)["structured"] is Verdict.UNKNOWN


def test_a_server_that_drafted_nothing_proves_nothing() -> None:
    done = [
        Result("greedy", Status.PASSED, "right", drafted=0),
        Result("law, temperature 1: later tokens", Status.PASSED, "right", drafted=7),
        Result("seed, as plain", Status.DIFFERS, "another text", drafted=0),
    ]
    first, second, third, _ = columns(done)
    assert (first.verdict, first.seen) == (Verdict.UNKNOWN, NOTHING_DRAFTED)
    assert (second.verdict, second.drafted) == (Verdict.HOLDS, 7)
    assert third.verdict is Verdict.FAILS


def test_first_tokens_alone_show_no_law_of_drafts() -> None:
    done = [Result("law, temperature 1: first token", Status.PASSED, "right")]
    assert columns(done)[1].verdict is Verdict.UNKNOWN


def test_two_runs_give_the_same_verdicts() -> None:
    one, two = (audit(Faults(typical=True), samples=256) for _ in range(2))
    assert verdicts(one) == verdicts(two)
    assert [result.status for result in one.results] == [result.status for result in two.results]


def test_the_command_tells_the_verdicts() -> None:
    with toy() as reference, toy(Faults(breaks_json=True)) as url:
        words = ["verify", "--endpoint", url, "--reference", reference, "--laws", "top_k 2"]
        done = CliRunner().invoke(app, [*words, "--samples", "64", "--seed", "3"])
    assert done.exit_code == 1
    lines = done.stdout.partition("with drafts")[2].splitlines()
    rows = {name: line for line in lines for name in COLUMNS if line.startswith(f"{name}  ")}
    assert list(rows) == COLUMNS
    assert "holds" in rows["T = 0"]
    assert "fails" in rows["structured"]


# The statistics


def drawn(rng: np.random.Generator, p: Any, q: Any, count: int) -> list[Pair]:
    ones, others = rng.choice(len(p), count, p=p), rng.choice(len(q), count, p=q)
    return [(0, str(x), str(y)) for x, y in zip(ones, others, strict=True)]


def test_the_bound_on_false_alarms_holds() -> None:
    """At alpha = 0.05 one trial in 20 may alarm on average; 5 sigma more would be too many."""
    rng = np.random.default_rng(1)
    trials, alarms = 400, 0
    for _ in range(trials):
        p = rng.dirichlet(np.full(8, 0.7))
        alarms += evidence(drawn(rng, p, p, 100)) > -math.log(0.05)
    assert alarms < 0.05 * trials + 5 * math.sqrt(0.05 * 0.95 * trials)


def test_an_error_that_is_called_visible_is_seen() -> None:
    """At 90 % of 60 trials 54 show on average; 43 would be 5 sigma off."""
    rng = np.random.default_rng(2)
    p = rng.dirichlet(np.full(8, 0.7))
    size = visible(drawn(rng, p, p, 400), 1e-6)
    assert 0 < size < 0.5
    rarest = np.eye(8)[p.argmin()]
    q = p + (rarest - p) * size / (1 - p.min())
    assert sum(evidence(drawn(rng, q, p, 400)) > -math.log(1e-6) for _ in range(60)) >= 43
