"""Chooses who drafts for each sequence and how far, by expected tokens per second.

Before drafting, ``decide`` compares drafters and depths by what the cost model and the survival
table expect of the whole batch; drafting nothing is among the choices. After it, ``cut`` keeps
those drafted tokens whose survival is worth the rows that they take. What the choice rests on is
never the value of a token that is still to be verified by a ratio rule: those skip ``cut``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import nlargest
from math import log2
from typing import NamedTuple

from .cost_model import CostModel
from .survival import Survival

REVIEW_STEPS = 16
"""Steps before choices are compared again, if the batch stays alike."""
FIRST_REVIEWS = 64
"""Steps that are reviewed one by one, while everything is new."""
WORTHWHILE = 1.02
"""Expected speed over plain decoding from which on it drafts."""
BETTER = 1.01
"""Expected speed over that of the present choice from which on another takes its place."""
MOST_LEVELS = 2
"""Sequences are told apart by up to this power of two of their odds."""
EXPLORED = 0.01
"""Share of the time that may go into trying what is not expected to be best."""
PROBE_DEPTH = 3
LOST = 4.0
"""Plain steps that drafting may lose before it is switched off."""
FIRST_PAUSE, LONGEST_PAUSE = 192, 4096
"""Steps without drafts after drafting lost, doubled each time it loses again."""


class Stream(NamedTuple):
    """A sequence as the controller sees it."""

    id: str
    workload: str
    context: int


class Choice(NamedTuple):
    """Who drafts, and how many tokens deep."""

    drafter: str
    depth: int


PLAIN = Choice("none", 0)


@dataclass
class _Group:
    """Sequences that are expected to fare alike: their survival by drafter and depth."""

    count: int
    curves: Mapping[str, list[float]]


@dataclass
class _Guard:
    """Counts what drafting lost against plain decoding, and pauses it."""

    deficit: float = 0.0
    pause: int = FIRST_PAUSE
    until: int = 0
    trial: bool = False

    def observe(self, step: int, lost: float) -> bool:
        """Take in plain steps lost (negative: won) by one drafted step; True if it pauses now."""
        self.deficit = max(-LOST, self.deficit + lost)
        if self.deficit > LOST:
            self.until = step + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.deficit = LOST / 2  # half open: the next trial loses sooner
            return True
        if self.deficit <= -LOST:
            self.pause = FIRST_PAUSE
        return False


@dataclass
class Controller:
    """The choices of one engine.

    Args:
        costs, survival: what it expects; ``observe`` keeps them true.
        drafters: names, with the longest draft of each.
    """

    costs: CostModel
    survival: Survival
    drafters: Mapping[str, int]
    step: int = 0
    seconds: float = 0.0
    explored: float = 0.0
    choices: dict[tuple[str, int], Choice] = field(default_factory=dict)
    _reviewed: int = -REVIEW_STEPS
    _size: int = 0
    _guards: dict[int, _Guard] = field(default_factory=dict)
    _tried: dict[str, int] = field(default_factory=dict)

    def decide(self, streams: Sequence[Stream]) -> list[Choice]:
        """Return the choice for each decoding sequence of the next step."""
        self.step += 1
        guard = self._guards.setdefault(len(streams).bit_length(), _Guard())
        if self.step < guard.until:
            return [PLAIN] * len(streams)
        keys = [self._key(stream) for stream in streams]
        if self._stale(keys):
            self._review(streams, keys)
        chosen = [self.choices[key] for key in keys]
        return self._explore(streams, chosen)

    def _key(self, stream: Stream) -> tuple[str, int]:
        """Return the group of a sequence: its workload, and how it differs from that."""
        odds = [self.survival.odds(name, stream.id) for name in self.drafters]
        best = max(odds, default=1.0)
        level = round(log2(best)) if best != 1.0 else 0
        return stream.workload, max(-MOST_LEVELS, min(MOST_LEVELS, level))

    def _stale(self, keys: Sequence[tuple[str, int]]) -> bool:
        every = 1 if self.step < FIRST_REVIEWS else REVIEW_STEPS
        if self.step - self._reviewed >= every or not self.choices.keys() >= set(keys):
            return True
        return abs(len(keys) - self._size) > self._size // 4

    def _review(self, streams: Sequence[Stream], keys: Sequence[tuple[str, int]]) -> None:
        """Choose anew for every group: each in turn, the others as they are, until none gains."""
        self._reviewed, self._size = self.step, len(streams)
        counts: dict[tuple[str, int], int] = {}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        groups = {
            key: _Group(count, {name: self._curve(name, key) for name in self.drafters})
            for key, count in counts.items()
        }
        context = sum([stream.context for stream in streams])
        chosen = {key: self.choices.get(key, PLAIN) for key in groups}
        speed = self._speed(groups, chosen, context)
        for _ in range(2):
            before = dict(chosen)
            for key, group in groups.items():
                kept, best = chosen[key], speed * BETTER
                for name, curve in [("none", []), *group.curves.items()]:
                    for depth in range(len(curve) + 1):
                        trial = Choice(name, depth) if depth else PLAIN
                        expected = self._speed(groups, {**chosen, key: trial}, context)
                        if expected > best:
                            kept, best, speed = trial, expected, expected
                chosen[key] = kept
            if chosen == before:
                break
        plain = self._speed(groups, dict.fromkeys(groups, PLAIN), context)
        if speed < plain * WORTHWHILE:
            chosen = dict.fromkeys(groups, PLAIN)
        self.choices = chosen

    def _curve(self, name: str, key: tuple[str, int]) -> list[float]:
        workload, level = key
        return self.survival.curve(name, workload, self.drafters[name], 2.0**level)

    def _speed(
        self,
        groups: Mapping[tuple[str, int], _Group],
        chosen: Mapping[tuple[str, int], Choice],
        context: int,
    ) -> float:
        """Return the expected tokens per second of a batch of ``groups``."""
        tokens, rows = 0.0, 0
        drafting: dict[str, list[int]] = {}
        for key, group in groups.items():
            name, depth = chosen[key]
            rows += group.count * (1 + depth)
            tokens += group.count
            if depth:
                tokens += group.count * sum(group.curves[name][:depth])
                counts = drafting.setdefault(name, [])
                counts.extend([0] * (depth - len(counts)))
                for i in range(depth):
                    counts[i] += group.count
        seconds = self.costs.verify(rows, context)
        for name, counts in drafting.items():
            seconds += self.costs.draft(name, counts)
        return tokens / seconds

    def _explore(self, streams: Sequence[Stream], chosen: list[Choice]) -> list[Choice]:
        """Let one sequence try a drafter that nobody uses, as far as the time for that goes."""
        if self.explored > EXPLORED * self.seconds:
            return chosen
        used = {choice.drafter for choice in chosen}
        unused = [name for name in self.drafters if name not in used]
        if not unused:
            return chosen
        name = min(unused, key=lambda n: self._tried.get(n, 0))
        place = self.step % len(streams)
        depth = min(PROBE_DEPTH, self.drafters[name])
        context = sum([stream.context for stream in streams])
        more = self.costs.verify(len(streams) + depth, context) - self.costs.verify(
            len(streams), context
        )
        price = self.costs.draft(name, [1] * depth) + more
        if self.explored + price > EXPLORED * self.seconds:
            return chosen
        self._tried[name] = self.step
        self.explored += price
        return [*chosen[:place], Choice(name, depth), *chosen[place + 1 :]]

    def cut(
        self, streams: Sequence[Stream], survivals: Sequence[Sequence[float]], spent: float
    ) -> list[int]:
        """Return how many of each draft's nodes to verify.

        Args:
            streams: those of the step.
            survivals: P(accepted) of each node of each draft, no child's above its parent's.
            spent: seconds that drafting took.
        """
        count = len(streams)
        context = sum([stream.context for stream in streams])
        nodes = [(s, i) for i, draft in enumerate(survivals) for s in draft]
        nodes = nlargest(len(nodes), nodes)
        best, most, tokens = count / (self.costs.verify(count, context) + spent), 0, float(count)
        for kept, (survival, _) in enumerate(nodes, start=1):
            tokens += survival
            speed = tokens / (self.costs.verify(count + kept, context) + spent)
            if speed > best:
                best, most = speed, kept
        lengths = [0] * count
        for _, i in nodes[:most]:
            lengths[i] += 1
        return lengths

    def observe(self, streams: int, context: int, emitted: int, drafted: bool, took: float) -> None:
        """Take in a step: its decoding sequences, emitted tokens and seconds."""
        self.seconds += took
        if drafted:
            plain = self.costs.verify(streams, context)
            guard = self._guards.setdefault(streams.bit_length(), _Guard())
            guard.observe(self.step, took / plain - emitted / streams)
