"""Known acceptance: measured, given or assumed.

Published acceptance is accepted / drafted at a draft length K: the mean of survival at positions 1
to K. If each token has the chance p, this is (p + p^2 + ... + p^K) / K; ``per_token`` inverts it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import exp, log
from operator import mul
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ...base.fields import is_number
from ...base.outside.documents import read_json
from ...base.outside.text import printable
from ...base.types import Counts
from ...errors import ConfigError, shown
from .catalogue import data
from .figure import ASSUMED, MEASURED

P90 = 1.2816
"""Standard deviations from the median to P90 of a normal distribution."""
LEAST, MOST = 1e-3, 0.999
"""Chances are clamped to this range, so that their odds are finite."""
GIVEN_SPREAD = 0.25
"""Standard deviation of log-odds of a figure without counts: assumed."""
DRIFT = 0.1
"""The same, between the measured text and future text: assumed."""
LONGEST_DRAFT = 1024


def rate_at(chance: float, k: int) -> float:
    """Return accepted / drafted at draft length ``k`` if each token has the same chance."""
    return fmean(chance**i for i in range(1, k + 1))


def per_token(rate: float, k: int) -> float:
    """Return the chance per token at which accepted / drafted at draft length ``k`` is ``rate``."""
    low, high = 0.0, 1.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if rate_at(middle, k) < rate else (low, middle)
    return (low + high) / 2


def _odds(chance: float) -> float:
    held = min(max(chance, LEAST), MOST)
    return log(held / (1 - held))


class Drafts(NamedTuple):
    """The acceptance of drafts of one length, by position; the last value holds beyond the end.

    ``chances`` are of acceptance, given a token and all before it accepted; ``filled`` are the
    chances that there is a token; ``reached`` are the shares of steps with so long a draft. The
    last two are empty if drafts always have full length; a lookup may find fewer tokens.
    """

    chances: tuple[float, ...]
    filled: tuple[float, ...] = ()
    reached: tuple[float, ...] = ()

    def survival(self, k: int, shift: float = 0.0) -> list[float]:
        """Return P(accepted with all before) at positions 1 to ``k``; ``shift`` moves log-odds."""
        chances = _long(self.chances, k)
        if shift:
            chances = [1 / (1 + exp(-_odds(each) - shift)) for each in chances]
        filled = _long(self.filled or (1.0,), k)
        return [*accumulate(map(mul, chances, filled), mul)]

    def drafted(self, k: int) -> float:
        """Return the mean tokens of a step's draft of ``k`` tokens at most."""
        if not self.reached:
            return float(k)
        share, total = self.reached[-1], sum(self.reached[:k])
        for _ in range(len(self.reached), k):
            share *= self.filled[-1]
            total += share
        return total

    def with_chances(self, change: Callable[[float], float]) -> Drafts:
        """Return the drafts with changed chances."""
        return self._replace(chances=tuple(map(change, self.chances)))


def _long(values: Sequence[float], k: int) -> list[float]:
    return [*values[:k], *[values[-1]] * (k - len(values))]


@dataclass(frozen=True)
class Acceptance:
    """The acceptance of drafted tokens, and its uncertainty.

    ``drafts[i]`` are drafts of i + 1 tokens; the last entry holds for all longer ones. They differ
    if acceptance comes in runs: a long draft covers a whole run in one step, short ones need many.
    ``spread`` is the standard deviation of the log-odds of their chances.
    """

    drafts: tuple[Drafts, ...]
    spread: float
    evidence: str
    source: str

    def of_length(self, k: int) -> Drafts:
        """Return the entry for drafts of ``k`` tokens."""
        return self.drafts[min(k, len(self.drafts)) - 1]

    def survival(self, k: int, deviations: float = 0.0) -> list[float]:
        """Return P(accepted with all before) at positions 1 to ``k``, at so many ``deviations``."""
        return self.of_length(k).survival(k, deviations * self.spread)

    def drafted(self, k: int) -> float:
        """Return the mean tokens of a step's draft of ``k`` tokens at most."""
        return self.of_length(k).drafted(k) if k else 0.0

    def rate(self, k: int, deviations: float = 0.0) -> float:
        """Return accepted / drafted at draft length ``k``."""
        accepted, drafted = sum(self.survival(k, deviations)), self.drafted(k)
        return min(accepted / drafted, 1.0) if drafted else 0.0

    def tokens(self, k: int, deviations: float = 0.0) -> float:
        """Return the expected tokens of a step with a draft of ``k`` tokens at most."""
        return 1 + sum(self.survival(k, deviations))

    def with_chances(self, change: Callable[[float], float]) -> Acceptance:
        """Return the acceptance with changed chances."""
        return replace(self, drafts=tuple(each.with_chances(change) for each in self.drafts))

    def improved(self, gain: float) -> Acceptance:
        """Return the acceptance with accepted / drafted at K = 5 times ``gain``, at most 0.97."""
        rate = min(self.rate(5) * gain, 0.97)
        source = f"{self.source}, times {gain:g} by fine-tuning, as claimed"
        return replace(of_rate(rate, 5, source), spread=self.spread)


def _checked(rate: Any, what: str) -> float:
    if not is_number(rate) or not 0 <= rate <= 1:
        raise ConfigError(f"{what} is {shown(rate)}; give a share from 0 to 1.")
    return float(rate)


def of_rate(rate: float, k: int, source: str = "as given", evidence: str = ASSUMED) -> Acceptance:
    """Return the acceptance whose accepted / drafted at draft length ``k`` is ``rate``."""
    rate = _checked(rate, "acceptance")
    if isinstance(k, bool) or not isinstance(k, int) or not 1 <= k <= LONGEST_DRAFT:
        raise ConfigError(
            f"acceptance at K = {shown(k)}; give a draft length from 1 to {LONGEST_DRAFT}."
        )
    drafts = Drafts((per_token(rate, k),))
    return Acceptance((drafts,), GIVEN_SPREAD, evidence, f"{source}: {rate:.2f} at K = {k}")


def of_positions(
    survival: Sequence[float], source: str = "as given", evidence: str = ASSUMED, drafts: float = 0
) -> Acceptance:
    """Return the acceptance with this survival by position, counted over ``drafts`` drafts."""
    if not survival or len(survival) > LONGEST_DRAFT:
        raise ConfigError(
            f"acceptance by position has {len(survival)} places; give 1 to {LONGEST_DRAFT}."
        )
    shares = [_checked(each, f"acceptance at position {i}") for i, each in enumerate(survival, 1)]
    if evidence == MEASURED:  # drafts were ragged, so a later share may be a little higher
        shares = [*accumulate(shares, min)]
    pairs = [*pairwise([1.0, *shares])]
    if any(later > earlier + 1e-9 for earlier, later in pairs):
        raise ConfigError(
            "acceptance by position rises; give shares of drafts accepted up to each."
        )
    chances = tuple(share / above if above else 0.0 for above, share in pairs)
    spread = _spread(fmean(shares), drafts * len(shares)) if drafts else GIVEN_SPREAD
    return Acceptance((Drafts(chances),), spread, evidence, source)


def _spread(rate: float, drafted: float) -> float:
    """Return the standard deviation of log-odds after ``drafted`` tokens."""
    rate = min(max(rate, LEAST), MOST)
    return float((DRIFT**2 + 1 / (drafted * rate * (1 - rate))) ** 0.5)


def of_counts(counts: Counts, longest: int, source: str = "measured") -> Acceptance:
    """Return the acceptance counted with drafts of ``longest`` tokens at most.

    Shorter drafts are prefixes of these; the rest of an accepted run is drafted again.
    """
    if not counts.drafted:
        raise ConfigError("nothing was drafted; count more steps.")
    drafts = tuple(_shortened(counts, longest, k) for k in range(1, longest + 1))
    spread = _spread(counts.accepted / counts.drafted, counts.drafted)
    return Acceptance(drafts, spread, MEASURED, source)


def _shortened(counts: Counts, longest: int, k: int) -> Drafts:
    """Return the acceptance that drafts of ``k`` tokens at most would have had."""
    steps: dict[tuple[int, int], float] = {(0, 0): counts.steps - counts.drafts}
    for (depth, accepted), times in counts.outcomes.items():
        for outcome, each in _cut(depth, accepted, longest, k):
            steps[outcome] = steps.get(outcome, 0.0) + each * times

    def share(depth: int, accepted: int) -> float:
        return sum(n for (d, a), n in steps.items() if d >= depth and a >= accepted)

    chances, filled, reached = [], [], []
    for i in range(1, k + 1):
        before, there = share(0, i - 1), share(i, i - 1)
        filled.append(there / before if before else 0.0)
        chances.append(share(i, i) / there if there else 0.0)
        reached.append(share(i, 0) / share(0, 0))
    return Drafts(tuple(chances), tuple(filled), tuple(reached))


def _cut(
    depth: int, accepted: int, longest: int, k: int
) -> Iterator[tuple[tuple[int, int], float]]:
    """Yield the outcomes, with counts, of drafts of ``k`` tokens in place of one counted step."""
    if accepted == longest:  # the run goes on
        yield (k, k), (longest + 1) / (k + 1)
        return
    whole, left = divmod(accepted + 1, k + 1)
    yield (k, k), whole
    if left:  # the last step emits the rest; a cut draft would have gone on
        end = k if depth == longest else depth - whole * (k + 1)
        yield (min(k, end), left - 1), 1.0


def prior(method: str, tasks: Mapping[str, float], temperature: float = 0.0) -> Acceptance:
    """Return the acceptance that ``data/acceptance.toml`` assumes of a method for some tasks."""
    priors = data("acceptance")
    table, k = priors["method"][method], priors["k"]
    known = [name for name in table if name != "evidence"]
    for name in tasks:
        if name not in known:
            raise ConfigError(f"there is no task {shown(name)}; known are {', '.join(known)}.")
    whole = sum(tasks.values())
    if whole <= 0:
        raise ConfigError("no task has a share above 0; give one.")
    low, high = (
        per_token(sum(share * table[name][end] for name, share in tasks.items()) / whole, k)
        for end in (0, 1)
    )
    middle = (_odds(low) + _odds(high)) / 2
    chance = (1 - priors["temperature_loss"] * min(temperature, 1.0)) / (1 + exp(-middle))
    mix = ", ".join(f"{name} {share / whole:.0%}" for name, share in tasks.items())
    source = f"prior of {method} drafters for {mix}: {table['evidence']}"
    spread = (_odds(high) - _odds(low)) / (2 * P90)
    return Acceptance((Drafts((chance,)),), spread, ASSUMED, source)


def read_acceptance(file: Path, drafter: str | None = None) -> Acceptance:
    """Return a drafter's acceptance in a report of ``outrider bench`` or ``vllm bench serve``."""
    report = read_json(file, f"The acceptance {printable(file)}")
    runs = report.get("runs", [report]) if isinstance(report, dict) else []
    runs = [run for run in runs if isinstance(run, dict)] if isinstance(runs, list) else []
    source = f"measured: {printable(file.name)}"
    names = {str(run.get("drafter")) for run in runs if _positions(run)}
    if len(names) > 1:
        runs = [run for run in runs if run.get("drafter") == drafter]
        if not runs:
            raise ConfigError(
                f"{file} has the acceptance of {printable(', '.join(sorted(names)))}; name one as "
                "drafter."
            )
    run: Mapping[str, Any] = max(runs, key=lambda each: len(_positions(each)), default={})
    if positions := _positions(run):
        drafts = run.get("drafts") or run.get("spec_decode_num_drafts") or 0
        drafts = drafts if isinstance(drafts, int | float) and drafts > 0 else 0
        return of_positions(positions, source, MEASURED, drafts)
    for run in runs:
        rate, k = run.get("acceptance_rate"), run.get("num_speculative_tokens")
        if rate is not None and k:
            return of_rate(rate, k, source, MEASURED)
    raise ConfigError(
        f"{file} has no acceptance: neither acceptance_by_position nor acceptance_rate with "
        "num_speculative_tokens."
    )


def _positions(run: Mapping[str, Any]) -> list[float]:
    positions = run.get("acceptance_by_position")
    if positions is None:
        positions = run.get("spec_decode_per_position_acceptance_rates")
    return positions if isinstance(positions, list) else []


def parse_acceptance(text: str, drafter: str | None = None) -> Acceptance:
    """Return the acceptance of a text: ``0.73@5``, ``0.92,0.81,0.71``, or a file's name."""
    if os.path.isfile(text):
        return read_acceptance(Path(text), drafter)
    rate, at, k = text.partition("@")
    try:
        if at:
            return of_rate(float(rate), int(k))
        positions = [float(part) for part in text.split(",")]
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(
            f"acceptance is {shown(text)}; give a file, a rate at its K such as 0.73@5, or shares "
            "by position such as 0.92,0.81,0.71."
        ) from None
    if len(positions) == 1:
        _checked(positions[0], "acceptance")
        given = printable(text, 50)
        raise ConfigError(f"acceptance {given} has no K; give the draft length too: {given}@5.")
    return of_positions(positions)
