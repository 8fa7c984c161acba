"""The outcome of an endpoint's audit."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any


class Status(StrEnum):
    """The outcome of a check."""

    PASSED = "passed"
    FAILED = "failed"
    DIFFERS = "differs"
    NOT_OFFERED = "not offered"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True)
class Result:
    """One check: its name, its status, and what was observed, or why nothing was.

    ``samples`` counts the tokens, answers or pairs that were compared; ``detects`` is the smallest
    error that they would have shown with 90 % probability, ``visible`` the same from 0 to 1.
    ``drafted`` counts the tokens that the server says it drafted meanwhile. ``DIFFERS`` is no
    error: it is another draw from the same law.
    """

    name: str
    status: Status
    seen: str
    samples: int = 0
    detects: str = ""
    visible: float | None = None
    drafted: int | None = None

    @property
    def failed(self) -> bool:
        return self.status is Status.FAILED


MISSED_PROBABILITY = 0.1  # probability that an error of visible size is missed


def share(trials: int) -> float:
    """Return the rate of errors at which ``trials`` would show one with 90 % probability."""
    return 1.0 if trials == 0 else 1 - MISSED_PROBABILITY ** (1 / trials)


def counted(name: str, wrong: Sequence[str], trials: int, unit: str, right: str) -> Result:
    """Return the result of trials; ``wrong`` describes each wrong one."""
    if not trials:
        return Result(name, Status.INCONCLUSIVE, f"no {unit} could be judged")
    rate = share(trials)
    detects = f"{rate:.2g} of {unit} wrong"
    if not wrong:
        return Result(name, Status.PASSED, right, trials, detects, rate)
    seen = f"{len(wrong)} of {trials} {unit} wrong, the first: {wrong[0]}"
    return Result(name, Status.FAILED, seen, trials, detects, rate)


class Verdict(StrEnum):
    """The outcome of an audit for one property."""

    HOLDS = "holds"
    FAILS = "fails"
    UNKNOWN = "cannot be told"


@dataclass(frozen=True)
class Column:
    """One property: its verdict, the evidence or the witness, and the tokens drafted.

    ``drafted`` is that of the check with the most; None if the server does not report it.
    """

    name: str
    verdict: Verdict
    seen: str
    drafted: int | None = None


@dataclass(frozen=True)
class EndpointReport:
    """The outcome of an audit; ``speculation`` has acceptance by the keys of ``bench serve``."""

    endpoint: str
    model: str
    reference: str
    seed: int
    requests: int
    results: list[Result]
    columns: list[Column]
    speculation: dict[str, Any]

    def having(self, status: Status) -> list[Result]:
        return [result for result in self.results if result.status is status]

    @property
    def passed(self) -> bool:
        """True if nothing failed, and something passed."""
        return not self.having(Status.FAILED) and bool(self.having(Status.PASSED))

    @property
    def verdict(self) -> str:
        counts = [f"{len(some)} {status}" for status in Status if (some := self.having(status))]
        if self.having(Status.FAILED):
            start = "violation: the server does not say what it should"
        elif self.passed:
            start = "pass: no error was found"
        else:
            start = "nothing could be tested"
        return f"{start} ({', '.join(counts)})"

    def as_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "verdict": self.verdict,
            "passed": self.passed,
            "results": [vars(result) for result in self.results],
            "columns": [vars(column) for column in self.columns],
        }
