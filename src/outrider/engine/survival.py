"""Estimates how likely drafted tokens are to be accepted, from those that were and were not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

DECAY = 1 - 1 / 256
"""What an observation keeps of its weight with each newer one of its kind."""
PRIOR_WEIGHT = 8.0
"""Observations that a method's prior counts for."""
SHRINKAGE = 12.0
"""Observations of its own that outweigh what an estimate takes from the more general one."""
DEEPEST = 8
"""Depths from here on share their observations."""
MOST_WORKLOADS = 64
MOST_SEQUENCES = 4096

K = TypeVar("K")
V = TypeVar("V")

PRIORS = {"eagle3": 0.8, "medusa": 0.65, "model": 0.65, "suffix": 0.6, "ngram": 0.5}
"""P(accept) by method before anything is seen; of others 0.5."""
DEFAULT_PRIOR = 0.5


@dataclass(slots=True)
class _Tally:
    """Accepted and judged tokens, older ones weighing less."""

    accepted: float = 0.0
    judged: float = 0.0

    def observe(self, accepted: bool) -> None:
        self.accepted = self.accepted * DECAY + accepted
        self.judged = self.judged * DECAY + 1.0

    def shrunk(self, general: float, weight: float) -> float:
        return (self.accepted + weight * general) / (self.judged + weight)


@dataclass(slots=True)
class _Beliefs:
    """The tallies of one drafter in one workload."""

    overall: _Tally = field(default_factory=_Tally)
    depths: dict[int, _Tally] = field(default_factory=dict)
    bins: dict[tuple[int, int, int], _Tally] = field(default_factory=dict)


@dataclass(slots=True)
class _Own:
    """Accepted and refused tokens of one sequence, beside the expected numbers."""

    accepted: float = 0.0
    expected: float = 0.0
    judged: float = 0.0


class Survival:
    """A table (drafter, workload, depth, rank, bin of the margin) -> P(accepted | parent accepted).

    Estimates with few observations lean on more general ones: a bin on its depth, a depth on its
    drafter in this workload, that on the drafter in all, that on the method's prior. Observations
    lose weight, so estimates follow drift.
    """

    def __init__(self, priors: Mapping[str, float] = PRIORS) -> None:
        self._priors = priors
        self._drafters: dict[str, _Tally] = {}
        self._workloads: OrderedDict[tuple[str, str], _Beliefs] = OrderedDict()
        self._own: OrderedDict[tuple[str, str], _Own] = OrderedDict()

    def _general(self, drafter: str) -> float:
        prior = self._priors.get(drafter, DEFAULT_PRIOR)
        tally = self._drafters.get(drafter)
        return prior if tally is None else tally.shrunk(prior, PRIOR_WEIGHT)

    def rate(self, drafter: str, workload: str, depth: int, rank: int = 0, bin: int = -1) -> float:
        """Return P(accepted | parent accepted) of a node; a bin of -1 is not known."""
        general = self._general(drafter)
        beliefs = self._workloads.get((drafter, workload))
        if beliefs is None:
            return general
        depth = min(depth, DEEPEST)
        rate = beliefs.overall.shrunk(general, SHRINKAGE)
        at_depth = beliefs.depths.get(depth)
        if at_depth is not None:
            rate = at_depth.shrunk(rate, SHRINKAGE)
        if bin >= 0 or rank:
            in_bin = beliefs.bins.get((depth, rank, bin))
            if in_bin is not None:
                rate = in_bin.shrunk(rate, SHRINKAGE)
        return rate

    def curve(self, drafter: str, workload: str, depth: int, odds: float = 1.0) -> list[float]:
        """Return P(accepted with all before) at depths 1 to ``depth`` of a chain.

        ``odds`` are those of ``odds``: the factor by which a sequence differs from its workload.
        """
        survival, curve = 1.0, []
        for i in range(1, depth + 1):
            rate = self.rate(drafter, workload, i)
            if odds != 1.0:
                rate = rate * odds / (rate * odds + 1 - rate)
            survival *= rate
            curve.append(survival)
        return curve

    def odds(self, drafter: str, sequence: str) -> float:
        """Return the factor on odds by which a sequence differs from its workload."""
        own = self._own.get((drafter, sequence))
        if own is None:
            return 1.0
        more = (own.accepted + SHRINKAGE) / (own.expected + SHRINKAGE)
        fewer = own.judged - own.accepted + SHRINKAGE
        return more / (fewer / (own.judged - own.expected + SHRINKAGE))

    def observe(
        self,
        drafter: str,
        workload: str,
        sequence: str,
        depth: int,
        accepted: bool,
        rank: int = 0,
        bin: int = -1,
    ) -> None:
        """Take in a node whose parent was accepted."""
        rate = self.rate(drafter, workload, depth, rank, bin)
        own = _entry(self._own, (drafter, sequence), _Own, MOST_SEQUENCES)
        own.accepted = own.accepted * DECAY + accepted
        own.expected = own.expected * DECAY + rate
        own.judged = own.judged * DECAY + 1.0
        beliefs = _entry(self._workloads, (drafter, workload), _Beliefs, MOST_WORKLOADS)
        depth = min(depth, DEEPEST)
        if not rank:
            self._drafters.setdefault(drafter, _Tally()).observe(accepted)
            beliefs.overall.observe(accepted)
            beliefs.depths.setdefault(depth, _Tally()).observe(accepted)
        if bin >= 0 or rank:
            beliefs.bins.setdefault((depth, rank, bin), _Tally()).observe(accepted)

    def release(self, sequence: str, drafters: Mapping[str, object]) -> None:
        """Forget a sequence that ended."""
        for drafter in drafters:
            self._own.pop((drafter, sequence), None)


def _entry(table: OrderedDict[K, V], key: K, make: type[V], most: int) -> V:
    """Return the entry of ``key``, a new one if there is none; the oldest goes where full."""
    found = table.get(key)
    if found is None:
        found = table[key] = make()
        if len(table) > most:
            table.popitem(last=False)
    return found
