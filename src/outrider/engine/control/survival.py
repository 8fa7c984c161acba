"""Estimates how likely drafted tokens are to be accepted, from those that were and were not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul
from typing import Any, TypeVar

import numpy as np

from ...native.rates import BINS, DEPTHS, GUESSED, RANKS, Rates
from .tuning import USUAL, Tuning

K = TypeVar("K")
V = TypeVar("V")

LEAST_CHANCE = 1e-3
"""Probabilities are kept this far from 0 and 1, so that their odds are finite."""
FIRST_RATES = {(r, b): float(GUESSED.table[0, r, b]) for r in range(RANKS) for b in range(BINS)}
"""The guessed rates by rank and bin, which are alike at all depths."""
MARGIN_SHARES = (0.2, 0.25, 0.2, 0.35)
"""Shares of first children whose margin is in each bin, before any is seen."""


@dataclass(slots=True)
class _Tally:
    """Accepted and judged tokens, older ones weighing less."""

    accepted: float = 0.0
    judged: float = 0.0

    def observe(
        self, decay: float, accepted: float, judged: float, newer: float | None = None
    ) -> None:
        """Add counts; older ones decay by ``newer`` observations, ``judged`` unless given."""
        kept = decay ** (judged if newer is None else newer)
        self.accepted = self.accepted * kept + accepted
        self.judged = self.judged * kept + judged

    def shrunk(self, general: float, weight: float) -> float:
        return (self.accepted + weight * general) / (self.judged + weight)


@dataclass(slots=True)
class _Beliefs:
    """The tallies of one method in one workload.

    ``depths`` counts tokens that were asked for but not drafted as refused; ``nodes``, by (depth,
    rank, bin), counts only drafted ones, and at depth 0 those of all depths. ``margins`` are first
    children by bin, older ones weighing less; ``filled`` counts drafted nodes out of those asked
    for, by depth. New observations wait to be counted: in ``outcomes`` by (accepted, judged) tokens
    of a draft, in ``seen`` by (depth, rank, bin, accepted) of a node, and in ``drafted`` and
    ``asked``, nodes by depth.
    """

    overall: _Tally = field(default_factory=_Tally)
    depths: list[_Tally] = field(default_factory=lambda: [_Tally() for _ in range(DEPTHS)])
    nodes: dict[tuple[int, int, int], _Tally] = field(default_factory=dict)
    margins: list[float] = field(default_factory=lambda: [0.0] * BINS)
    filled: list[_Tally] = field(default_factory=lambda: [_Tally() for _ in range(DEPTHS)])
    outcomes: dict[tuple[int, int], int] = field(default_factory=dict)
    seen: dict[tuple[int, int, int, bool], int] = field(default_factory=dict)
    drafted: list[int] = field(default_factory=lambda: [0] * DEPTHS)
    asked: list[int] = field(default_factory=lambda: [0] * DEPTHS)

    def count(self, decay: float) -> tuple[int, int]:
        """Count what is new; return how many tokens were accepted and judged."""
        hits, judged = [0] * DEPTHS, [0] * DEPTHS
        for (accepted, known), times in self.outcomes.items():
            for i in range(known):
                judged[min(i, DEPTHS - 1)] += times
                hits[min(i, DEPTHS - 1)] += times * (i < accepted)
        for tally, right, all in zip(self.depths, hits, judged, strict=True):
            tally.observe(decay, right, all, judged[0])
        self.overall.observe(decay, sum(hits), sum(judged))
        nodes: dict[tuple[int, int, int], list[int]] = {}
        first = sum([times for (_, rank, _, _), times in self.seen.items() if not rank])
        self.margins = [decay**first * weight for weight in self.margins]
        for (depth, rank, bin, accepted), times in self.seen.items():
            self.margins[bin] += times * (not rank)
            for place in ((depth, rank, bin), (0, rank, bin)):
                new = nodes.setdefault(place, [0, 0])
                new[0] += times * accepted
                new[1] += times
        for place, new in nodes.items():
            self.nodes.setdefault(place, _Tally()).observe(decay, *new)
        for tally, drafted, asked in zip(self.filled, self.drafted, self.asked, strict=True):
            tally.observe(decay, drafted, asked)
        self.outcomes.clear()
        self.seen.clear()
        self.drafted, self.asked = [0] * DEPTHS, [0] * DEPTHS
        return sum(hits), sum(judged)


@dataclass(slots=True)
class _Own:
    """Drafts of one sequence: tokens accepted, expected to be accepted, and judged.

    ``expected`` is what was expected when they were judged, not by the workload's present rates.
    """

    drafts: float = 0.0
    accepted: float = 0.0
    expected: float = 0.0
    judged: float = 0.0


class Survival:
    """Counts accepted and refused tokens by method (see ``choices.Method``), workload and depth.

    Estimates with few observations shrink towards more general ones: a depth's towards its method
    in this workload, that towards the method in all, that towards the ``priors``. Observations
    decay, so estimates follow drift. ``wider`` has, by method that drafts all of a narrower one's
    and more, the narrower one and the share of its refused tokens for which the rest is right.
    """

    def __init__(
        self,
        priors: Mapping[str, float],
        wider: Mapping[str, tuple[str, float]] | None = None,
        tuning: Tuning = USUAL,
    ) -> None:
        self._priors, self._tuning = priors, tuning
        self._wider = wider or {}
        self._methods: dict[str, _Tally] = {}
        self._workloads: OrderedDict[tuple[str, str], _Beliefs] = OrderedDict()
        self._own: OrderedDict[tuple[str, str], _Own] = OrderedDict()
        self._known: dict[tuple[str, str], list[float]] = {}
        """Rates as of the last time that observations were counted."""
        self._by_margin: dict[tuple[str, str], dict[tuple[int, int], float]] = {}
        """The same of nodes at all depths, by rank and bin."""
        self._filled: dict[tuple[str, str], list[float]] = {}
        """Shares of depths that are drafted, as of that time."""

    def _general(self, method: str) -> float:
        if method in self._wider:
            narrow, more = self._wider[method]
            prior = self._general(narrow)
            prior += more * (1 - prior)
        else:
            prior = self._priors.get(method, self._tuning.default_prior)
        tally = self._methods.get(method)
        return prior if tally is None else tally.shrunk(prior, self._tuning.prior_weight)

    def count(self) -> None:
        """Count the observations since the last call; estimates use only counted ones."""
        self._known.clear()
        self._by_margin.clear()
        self._filled.clear()
        decay = self._tuning.decay
        for (method, _), beliefs in self._workloads.items():
            if beliefs.outcomes or beliefs.seen or any(beliefs.asked):
                counted = beliefs.count(decay)
                self._methods.setdefault(method, _Tally()).observe(decay, *counted)

    def judged(self, method: str, workload: str) -> float:
        """Return how many recent tokens of a method were judged in a workload."""
        beliefs = self._workloads.get((method, workload))
        return 0.0 if beliefs is None else beliefs.overall.judged

    def curve(self, method: str, workload: str, depth: int, odds: float = 1.0) -> list[float]:
        """Return P(drafted and accepted with all before) at depths 1 to ``depth``, see ``odds``."""
        rates = self._rates(method, workload)[:depth]
        rates += rates[-1:] * (depth - len(rates))
        if odds != 1.0:
            rates = [rate * odds / (rate * odds + 1 - rate) for rate in rates]
        return [*accumulate(rates, mul)]

    def fill(self, method: str, workload: str, depth: int) -> list[float]:
        """Return the expected share of the nodes at depths 1 to ``depth`` that are drafted."""
        key = method, workload
        shares = self._filled.get(key)
        if shares is None:
            shares, share = [], 1.0
            for tally in self._workloads[key].filled if key in self._workloads else ():
                share = tally.shrunk(share, self._tuning.prior_weight)  # of the depth before
                shares.append(share)
            self._filled[key] = shares = shares or [1.0]
        return shares[:depth] + shares[-1:] * (depth - len(shares))

    def rates(self, method: str, workload: str) -> Rates:
        """Return P(accepted | parent accepted) of drafted nodes by depth, rank, bin of the margin.

        A depth's rates shrink towards those of all depths, and these towards the guess for trees.
        """
        beliefs = self._workloads.get((method, workload))
        if beliefs is None:
            return GUESSED
        together = self._all_depths(method, workload, beliefs)
        whole = [*together.values()] * DEPTHS
        for (depth, rank, bin), tally in beliefs.nodes.items():
            if depth:
                place = ((depth - 1) * RANKS + rank) * BINS + bin
                whole[place] = tally.shrunk(whole[place], self._tuning.shrinkage)
        return Rates(np.array(whole, np.float32).reshape(DEPTHS, RANKS, BINS))

    def children(self, method: str, workload: str) -> list[tuple[float, float]]:
        """Return by bin of margins how often a node's first child has it, and P(accepted) then."""
        beliefs = self._workloads.get((method, workload))
        if beliefs is None:
            return [(share, FIRST_RATES[0, bin]) for bin, share in enumerate(MARGIN_SHARES)]
        rates = self._all_depths(method, workload, beliefs)
        weight = self._tuning.prior_weight
        weights = [weight * s + w for s, w in zip(MARGIN_SHARES, beliefs.margins, strict=True)]
        total = sum(weights)
        return [(each / total, rates[0, bin]) for bin, each in enumerate(weights)]

    def _all_depths(
        self, method: str, workload: str, beliefs: _Beliefs
    ) -> dict[tuple[int, int], float]:
        """Return P(accepted | parent accepted) of drafted nodes by rank and bin of the margin."""
        rates = self._by_margin.get((method, workload))
        if rates is None:
            rates = self._by_margin[method, workload] = dict(FIRST_RATES)
            for (depth, rank, bin), tally in beliefs.nodes.items():
                if not depth:
                    rates[rank, bin] = tally.shrunk(rates[rank, bin], self._tuning.prior_weight)
        return rates

    def odds(self, method: str, workload: str, sequence: str) -> float:
        """Return the factor on odds by which a sequence differs from its workload."""
        own = self._own.get((method, sequence))
        if own is None or not own.judged:
            return 1.0
        usual = _held(own.expected / own.judged)
        weight = self._tuning.own_shrinkage
        chance = _held((own.accepted + weight * usual) / (own.judged + weight))
        return chance / (1 - chance) * (1 - usual) / usual

    def fares_well(self, method: str, sequence: str) -> bool:
        """Return whether most of what a method drafted for a sequence was accepted."""
        own, tuning = self._own.get((method, sequence)), self._tuning
        if own is None or own.judged < tuning.renewing_tokens:
            return False
        return own.accepted >= tuning.renewing_rate * own.judged

    def _rates(self, method: str, workload: str) -> list[float]:
        """Return P(drafted and accepted | the one before was) at each depth."""
        key = method, workload
        rates = self._known.get(key)
        if rates is None:
            general, weight = self._general(method), self._tuning.shrinkage
            rates = [general] * DEPTHS
            if beliefs := self._workloads.get(key):
                general = beliefs.overall.shrunk(general, weight)
                rates = [tally.shrunk(general, weight) for tally in beliefs.depths]
            self._known[key] = rates
        return rates

    def observe(
        self,
        method: str,
        workload: str,
        sequence: str,
        asked: int,
        accepted: int,
        judged: int | None = None,
    ) -> None:
        """Take in a draft of at most ``asked`` tokens, of which the first were ``accepted``.

        ``judged`` is the number of depths whose fate is known; by default up to the first refused.
        """
        if judged is None:
            judged = min(accepted + 1, asked)
        if not judged:
            return
        beliefs = _entry(self._workloads, (method, workload), _Beliefs, self._tuning.max_workloads)
        outcome = min(accepted, judged), judged
        beliefs.outcomes[outcome] = beliefs.outcomes.get(outcome, 0) + 1
        own = _entry(self._own, (method, sequence), _Own, self._tuning.max_sequences)
        if own.drafts > self._tuning.memory_drafts:
            own.drafts /= 2
            own.accepted /= 2
            own.expected /= 2
            own.judged /= 2
        rates = self._rates(method, workload)
        own.drafts += 1
        own.accepted += outcome[0]
        own.expected += sum(rates[:judged]) + max(judged - DEPTHS, 0) * rates[-1]
        own.judged += judged

    def observe_size(
        self, method: str, workload: str, sizes: Sequence[int], asked: int, width: int
    ) -> None:
        """Take in a draft's ``sizes`` by depth, where ``width`` nodes were asked for at each."""
        beliefs = _entry(self._workloads, (method, workload), _Beliefs, self._tuning.max_workloads)
        for depth in range(min(asked, DEPTHS)):
            beliefs.asked[depth] += width
        for depth, size in enumerate(sizes[:DEPTHS]):
            beliefs.drafted[depth] += size

    def observe_node(
        self, method: str, workload: str, depth: int, rank: int, bin: int, accepted: bool
    ) -> None:
        """Take in a node whose parent was accepted."""
        beliefs = _entry(self._workloads, (method, workload), _Beliefs, self._tuning.max_workloads)
        node = min(depth, DEPTHS), min(rank, RANKS - 1), bin, accepted
        beliefs.seen[node] = beliefs.seen.get(node, 0) + 1

    def release(self, sequence: str, methods: Collection[str]) -> None:
        """Forget a sequence that ended."""
        for method in methods:
            self._own.pop((method, sequence), None)

    def summary(self) -> dict[str, dict[str, Any]]:
        """Return by method the expected rates by depth in the workload with most judged tokens."""
        most: dict[str, tuple[float, str]] = {}
        for (method, workload), beliefs in self._workloads.items():
            most[method] = max(most.get(method, (0.0, "")), (beliefs.overall.judged, workload))
        return {
            method: {
                "survival": [round(p, 3) for p in self.curve(method, workload, DEPTHS)],
                "filled": round(sum(self.fill(method, workload, DEPTHS)) / DEPTHS, 3),
                "judged": round(judged, 1),
            }
            for method, (judged, workload) in most.items()
        }


def _entry(table: OrderedDict[K, V], key: K, make: type[V], most: int) -> V:
    """Return the entry of ``key``, a new one if needed; beyond ``most`` the oldest is dropped."""
    entry = table.get(key)
    if entry is None:
        entry = table[key] = make()
        if len(table) > most:
            table.popitem(last=False)
    return entry


def _held(chance: float) -> float:
    return min(max(chance, LEAST_CHANCE), 1 - LEAST_CHANCE)
