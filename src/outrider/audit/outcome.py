"""The outcome of an audit: its checks and their verdict."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .trial import CountsFinding


@dataclass
class Check:
    """One tested claim: ``tested`` counts tokens or comparisons; ``runs`` has one entry per mix."""

    name: str
    claim: str
    tested: int = 0
    contexts: int = 0
    violations: list[str] = field(default_factory=list)
    ties: list[str] = field(default_factory=list)
    findings: list[CountsFinding] = field(default_factory=list)
    runs: list[tuple[str, int, int]] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """True if something was tested and nothing was violated."""
        return not self.violations and self.tested > 0

    def as_json(self) -> dict[str, Any]:
        names = ("mix", "drafted", "accepted")
        runs = [dict(zip(names, run, strict=True)) for run in self.runs]
        own = vars(self) | {"passed": self.passed, "runs": runs, "closest": None}
        if own.pop("findings"):  # the one with the largest ratio to its threshold
            most = max(self.findings, key=lambda each: each.statistic / each.threshold)
            statistic = most.statistic if math.isfinite(most.statistic) else None
            own["closest"] = vars(most) | {"statistic": statistic}
        return own


@dataclass(frozen=True)
class Visible:
    """The smallest total variation that the audit would have detected.

    ``everywhere``: of the first token, if the error has the same ranks in all contexts;
    ``somewhere``: of the first token in one context; ``tokens``: of three tokens in all contexts.
    """

    everywhere: float
    somewhere: float
    tokens: float


def visible_error(findings: Sequence[CountsFinding]) -> Visible | None:
    """Return the largest visible error of each kind of comparison, or None without any."""

    def worst(place: str, level: str) -> float:
        return max(
            (f.visible for f in findings if place in f.what and level in f.what), default=1.0
        )

    if not findings:
        return None
    return Visible(
        worst("all contexts", "first 1"), worst(", context", "first 1"), worst("all", "first 3")
    )


@dataclass(frozen=True)
class AuditReport:
    """The outcome of an audit; ``seed`` reproduces it."""

    model: str
    drafter: str
    size: str
    seed: int
    fault: str
    draws: int
    checks: list[Check]
    visible: Visible | None

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks)

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        if not self.passed:
            return "violation: speculative decoding does not say what the target says"
        ties = sum(len(check.ties) for check in self.checks)
        if ties:
            return f"pass, with {ties} numerical {'tie' if ties == 1 else 'ties'}"
        return "pass: nothing is lost by speculating"

    def as_json(self) -> dict[str, Any]:
        """Return the report for ``--json``; numbers that are not finite are None."""
        own = vars(self) | {"checks": [check.as_json() for check in self.checks]}
        visible = own.pop("visible")
        error = {"smallest_visible_error": None if visible is None else vars(visible)}
        return {"verdict": self.verdict, "passed": self.passed, **own, **error}
