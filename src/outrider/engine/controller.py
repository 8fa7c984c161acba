"""Chooses who drafts for each sequence and how far, by expected tokens per second.

Before drafting, ``decide`` compares drafters and depths by what the cost model and the survival
table expect of the whole batch; drafting nothing is among the choices. After it, ``cut`` keeps
those drafted tokens whose survival is worth the rows that they take (Liu et al., "Optimizing
speculative decoding for serving large language models using goodput", 2024, choose a depth so; here
every token is weighed). ``cut`` looks at the draft, which the coupled rule allows and the ratio
rules do not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2
from typing import NamedTuple

from .costs import CostModel
from .survival import Survival

REVIEW_STEPS = 16
"""Steps after which choices are compared again, if the batch stays alike."""
FIRST_REVIEWS = 64
"""Steps that are reviewed one by one, while everything is new."""
WORTHWHILE = 1.02
"""Expected speed over plain decoding from which on anything is drafted."""
BETTER = 1.01
"""Expected speed over that of the present choices from which on others take their place."""
MOST_LEVELS = 2
"""Sequences are told apart by up to this power of two of their odds."""
EXPLORED = 0.005
"""Share of the time that may go into trying drafters that nobody uses."""
PROBE_DEPTH = 3
LOST = 4.0
"""Plain steps that drafting may lose before it pauses."""
FIRST_PAUSE, LONGEST_PAUSE = 192, 4096
"""Steps without drafts after drafting lost, doubled each time that it loses again."""


class Stream(NamedTuple):
    """A decoding sequence as the controller sees it."""

    id: str
    workload: str
    context: int


class Choice(NamedTuple):
    """A drafter, and how many tokens deep it drafts."""

    drafter: str
    depth: int


PLAIN = Choice("none", 0)
Key = tuple[str, int]
"""A group of sequences that are expected to fare alike: a workload, a level of odds."""


@dataclass
class _Guard:
    """Counts what drafting lost against plain decoding at one batch size, and pauses it."""

    deficit: float = 0.0
    pause: int = FIRST_PAUSE
    until: int = 0

    def observe(self, step: int, lost: float) -> None:
        """Take in the plain steps that one drafted step lost; negative ones were won."""
        self.deficit = max(-LOST, self.deficit + lost)
        if self.deficit > LOST:
            self.until = step + self.pause
            self.pause = min(2 * self.pause, LONGEST_PAUSE)
            self.deficit = LOST / 2  # half open: the next trial loses sooner
        elif self.deficit == -LOST:
            self.pause = FIRST_PAUSE


def sequences_by_depth(choices: Iterable[tuple[Choice, int]]) -> dict[str, list[int]]:
    """Return for each drafter how many sequences draft a token at each depth.

    Args:
        choices: each with the number of sequences that it is made for.
    """
    drafting: dict[str, list[int]] = {}
    for (name, depth), count in choices:
        if depth:
            by_depth = drafting.setdefault(name, [])
            by_depth += [0] * (depth - len(by_depth))
            for i in range(depth):
                by_depth[i] += count
    return drafting


class _Outlook:
    """The expected speed of a batch of groups under any choices."""

    def __init__(
        self,
        counts: Mapping[Key, int],
        curves: Mapping[Key, Mapping[str, Sequence[float]]],
        costs: CostModel,
        context: int,
    ) -> None:
        self.counts, self.curves = counts, curves
        self._costs, self._context = costs, context
        self._verify: dict[int, float] = {}

    def speed(self, choices: Mapping[Key, Choice]) -> float:
        """Return the expected tokens per second."""
        tokens, rows = 0.0, 0
        for key, count in self.counts.items():
            name, depth = choices[key]
            rows += count * (1 + depth)
            tokens += count * (1 + sum(self.curves[key][name][:depth])) if depth else count
        drafting = sequences_by_depth((choices[key], n) for key, n in self.counts.items())
        seconds = self._verify.get(rows)
        if seconds is None:
            seconds = self._verify[rows] = self._costs.verify(rows, self._context)
        for name, by_depth in drafting.items():
            seconds += self._costs.draft(name, by_depth)
        return tokens / seconds

    def options(self, key: Key) -> list[Choice]:
        """Return every choice for a group."""
        curves = self.curves[key].items()
        return [PLAIN, *(Choice(n, i + 1) for n, curve in curves for i in range(len(curve)))]

    def improved(self, choices: dict[Key, Choice]) -> tuple[float, dict[Key, Choice]]:
        """Return the best choices to be had by changing one group after the other."""
        best = self.speed(choices)
        for key in self.counts:
            for option in self.options(key):
                trial = {**choices, key: option}
                speed = self.speed(trial)
                if speed > best:
                    best, choices = speed, trial
        return best, choices

    def best(self) -> tuple[float, dict[Key, Choice]]:
        """Return the best choices that were found: one for all, then group by group."""
        first = next(iter(self.counts))
        alike = [dict.fromkeys(self.counts, option) for option in self.options(first)]
        return self.improved(max(alike, key=self.speed))


@dataclass
class Controller:
    """The choices of one engine.

    Args:
        costs, survival: what is expected of steps and drafts; both are told what came of them.
        drafters: names, with the longest draft of each.
    """

    costs: CostModel
    survival: Survival
    drafters: Mapping[str, int]
    choices: dict[Key, Choice] = field(default_factory=dict)
    step: int = 0
    seconds: float = 0.0
    """Seconds of all steps."""
    explored: float = 0.0
    """Seconds that went into trying drafters."""
    _reviewed: int = 0
    _size: int = 0
    _guards: dict[int, _Guard] = field(default_factory=dict)
    _tried: dict[str, int] = field(default_factory=dict)

    def decide(self, streams: Sequence[Stream]) -> list[Choice]:
        """Return the choice for each decoding sequence of the next step."""
        self.step += 1
        guard = self._guards.setdefault(len(streams).bit_length(), _Guard())
        if self.step < guard.until:
            return [PLAIN] * len(streams)
        keys = [(s.workload, self.level(s.id)) for s in streams]
        if self._is_stale(keys):
            self._review(streams, keys)
        choices = self.choices
        return self._explored(streams, [choices[key] for key in keys])

    def level(self, id: str) -> int:
        """Return how a sequence differs from its workload: a power of two of the odds."""
        odds = max([self.survival.odds(name, id) for name in self.drafters], default=1.0)
        return 0 if odds == 1 else max(-MOST_LEVELS, min(MOST_LEVELS, round(log2(odds))))

    def _is_stale(self, keys: Sequence[Key]) -> bool:
        every = 1 if self.step < FIRST_REVIEWS else REVIEW_STEPS
        changed = abs(len(keys) - self._size) > self._size // 4
        return (
            changed
            or self.step - self._reviewed >= every
            or set(keys) - self.choices.keys() != set()
        )

    def _review(self, streams: Sequence[Stream], keys: Sequence[Key]) -> None:
        """Choose anew for every group."""
        self._reviewed, self._size = self.step, len(streams)
        counts: dict[Key, int] = {}
        for key in keys:
            counts[key] = counts.get(key, 0) + 1
        curves = {
            (workload, level): {
                name: self.survival.curve(name, workload, longest, 2.0**level)
                for name, longest in self.drafters.items()
            }
            for workload, level in counts
        }
        outlook = _Outlook(counts, curves, self.costs, sum([s.context for s in streams]))
        speed, choices = outlook.best()
        present = {key: self.choices.get(key, PLAIN) for key in counts}
        if speed < BETTER * outlook.speed(present):
            speed, choices = outlook.speed(present), present
        plain = dict.fromkeys(counts, PLAIN)
        self.choices = choices if speed >= WORTHWHILE * outlook.speed(plain) else plain

    def _explored(self, streams: Sequence[Stream], choices: list[Choice]) -> list[Choice]:
        """Let one sequence try a drafter that nobody uses, as far as the time for that goes."""
        if self.explored > EXPLORED * self.seconds:
            return choices
        unused = self.drafters.keys() - {choice.drafter for choice in choices}
        if not unused:
            return choices
        name = min(sorted(unused), key=lambda each: self._tried.get(each, 0))
        depth, rows = min(PROBE_DEPTH, self.drafters[name]), len(streams)
        context = sum([stream.context for stream in streams])
        more = self.costs.verify(rows + depth, context) - self.costs.verify(rows, context)
        price = self.costs.draft(name, [1] * depth) + more
        if self.explored + price > EXPLORED * self.seconds:
            return choices
        self._tried[name] = self.step
        self.explored += price
        place = self.step % rows
        return [*choices[:place], Choice(name, depth), *choices[place + 1 :]]

    def cut(
        self, streams: Sequence[Stream], survivals: Sequence[Sequence[float]], spent: float
    ) -> list[int]:
        """Return how many nodes of each draft to verify.

        Args:
            streams: those of the step.
            survivals: P(accepted with all before) of each node of each draft, likeliest first.
            spent: seconds that drafting took.
        """
        count, context = len(streams), sum([stream.context for stream in streams])
        nodes = sorted([(-s, i) for i, draft in enumerate(survivals) for s in draft])
        best, most, tokens = count / (self.costs.verify(count, context) + spent), 0, float(count)
        for kept, (lost, _) in enumerate(nodes, start=1):
            tokens -= lost
            speed = tokens / (self.costs.verify(count + kept, context) + spent)
            if speed > best:
                best, most = speed, kept
        lengths = [0] * count
        for _, i in nodes[:most]:
            lengths[i] += 1
        return lengths

    def observe(self, streams: int, context: int, emitted: int, drafted: bool, took: float) -> None:
        """Take in a step: its decoding sequences, their context, emitted tokens, seconds."""
        self.seconds += took
        if drafted:
            lost = took / self.costs.verify(streams, context) - emitted / streams
            guard = self._guards.setdefault(streams.bit_length(), _Guard())
            guard.observe(self.step, lost)
