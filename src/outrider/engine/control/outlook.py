"""Choices of who drafts and how far, and the speed that is expected of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, zip_longest
from math import inf
from operator import attrgetter
from typing import NamedTuple

from ...base.limits import LARGEST_INT
from ...base.methods import TOGETHER
from .costs import CostModel
from .survival import Survival

DEPTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64)
"""Depths that are compared, and the longest of each method."""

HORIZON = 128
"""Most tokens over which the time of a drafter to read what it missed is spread."""
FALLS = 2
"""Depths in a row, each slower than the one before, behind which a method's are not considered."""
HOPELESS = 0.8
"""Share of the best speed so far below which longer drafts of a method are not considered."""


class Method(NamedTuple):
    """A way to draft: one drafter or several together, in chains or in trees.

    ``width`` is the number of nodes that a drafter may propose at each depth, ``longest`` the
    depth of a draft, and ``most`` its nodes, where there are fewer than that for each depth.
    """

    drafters: tuple[str, ...]
    longest: int
    width: int = 1
    most: int = LARGEST_INT

    @property
    def drafter(self) -> str:
        """The name of its drafter, or of several together."""
        return TOGETHER.join(self.drafters)

    def nodes(self, depth: int) -> int:
        """Return the nodes that a draft of that depth may have."""
        return min(self.most, depth * self.width * len(self.drafters))


class Choice(NamedTuple):
    """The name of a method, and how many tokens deep it drafts."""

    method: str
    depth: int


PLAIN = Choice("none", 0)


class Stream(NamedTuple):
    """A decoding sequence as the controller sees it.

    ``methods`` are those that may draft for it, up to ``bound`` tokens; ``fixed`` is the choice
    that its request made; ``left`` are the tokens that it may still emit.
    """

    id: str
    workload: str
    context: int
    methods: tuple[str, ...] = ()
    bound: int = DEPTHS[-1]
    fixed: Choice | None = None
    left: int = HORIZON


class Group(NamedTuple):
    """Sequences that are expected to fare alike: of one workload and freedom.

    ``levels`` say of each method how these sequences differ from the workload: the power of two of
    their odds; none where they do not differ.
    """

    workload: str
    levels: tuple[int, ...]
    methods: tuple[str, ...]
    bound: int
    fixed: Choice | None


class Option(NamedTuple):
    """A choice, and what a sequence expects of it.

    A step of it emits ``tokens`` by ``rows``. A pass at each depth happens as often as
    ``passes`` say. ``reading`` are the seconds, for each token to come, in which drafters read what
    they have missed.
    """

    choice: Choice
    tokens: float = 1.0
    rows: float = 1.0
    passes: Sequence[float] = ()
    reading: float = 0.0
    longer: float = 1.0


METHOD = attrgetter("choice.method")
"""Returns the method of an option."""


class Trial(NamedTuple):
    """A choice that a step tries, for the sequences with these ids, or for all if there are none.

    The step takes ``seconds``, of which ``price`` are expected to be lost.
    """

    choice: Choice
    ids: tuple[str, ...]
    seconds: float
    price: float


def counts_by_depth(drafts: Iterable[tuple[str, int, int]]) -> dict[str, list[int]]:
    """Return by name how much is drafted at each depth.

    Args:
        drafts: name, depth, and what counts at each of its depths: sequences, or rows.
    """
    drafting: dict[str, list[int]] = {}
    for name, depth, count in drafts:
        if depth:
            by_depth = drafting.setdefault(name, [])
            by_depth += [0] * (depth - len(by_depth))
            for i in range(depth):
                by_depth[i] += count
    return drafting


def draft_cost(costs: CostModel, method: Method, by_depth: Sequence[float]) -> float:
    """Return the seconds of a method where ``by_depth[i]`` sequences draft at depth i + 1."""
    rows = by_depth if method.width == 1 else [count * method.width for count in by_depth]
    return sum([costs.draft(name, rows) for name in parts_of(method)])


def draft_costs(costs: CostModel, method: Method, by_depth: Sequence[float]) -> list[float]:
    """Return ``draft_cost`` for drafts that end behind 0, 1, ... depths of ``by_depth``."""
    rows = by_depth if method.width == 1 else [count * method.width for count in by_depth]
    return [*map(sum, zip(*(costs.drafts(name, rows) for name in parts_of(method)), strict=True))]


def parts_of(method: Method) -> tuple[str, ...]:
    """Return what a method's time is spent on: its drafters, and merging if they are several."""
    drafters = method.drafters
    return drafters if len(drafters) == 1 else (*drafters, method.drafter)


def least_chance(children: Sequence[tuple[float, float]], passed: float, row: float) -> float:
    """Return the chance of a node from which a pass that drafts its child pays.

    The child is verified where its margin makes it worth a row. Chances only fall from node to
    node, so that looking one pass ahead is enough (optimal stopping in the monotone case: Chow,
    Robbins and Siegmund, "Great expectations", 1971, chapter 3).

    Args:
        children: how often a child has a margin, and how likely it is accepted then.
        passed, row: the price of a pass and of a row, in tokens.
    """
    often = accepted = 0.0
    least = inf
    for share, rate in sorted(children, key=lambda child: -child[1]):
        often += share
        accepted += share * rate
        least = min(least, (passed + row * often) / accepted)  # those so far are verified
    return least


class Outlook:
    """The expected speed of a batch of groups under any choices.

    Args:
        counts: the sequences of each group.
        methods, costs, survival: as of ``Controller``.
        context: tokens of all sequences.
        unread: tokens that drafters have missed of a group for each token to come, added up over
            its sequences, by group and drafter.
    """

    def __init__(
        self,
        counts: Mapping[Group, int],
        methods: Mapping[str, Method],
        costs: CostModel,
        survival: Survival,
        context: int,
        unread: Mapping[tuple[Group, str], float],
    ) -> None:
        self.counts = counts
        self._methods, self._costs, self._survival = methods, costs, survival
        self._context, self._unread = context, unread
        self._sequences = sum(counts.values())
        self._host = costs.host(self._sequences)
        self._nothing = Option(PLAIN, longer=costs.step(PLAIN.method))
        self.options = {group: self._options(group) for group in counts}
        self._by_choice = {
            group: {option.choice: option for option in options}
            for group, options in self.options.items()
        }

    def _options(self, group: Group) -> list[Option]:
        """Return every choice for a group."""
        if group.fixed is not None and not group.fixed.depth:
            return [self._nothing]
        options = [self._nothing] if group.fixed is None else []
        levels = dict(zip(group.methods, group.levels, strict=False))
        for name in (group.fixed.method,) if group.fixed else group.methods:
            method, odds = self._methods[name], 2.0 ** levels.get(name, 0)
            most = group.fixed.depth if group.fixed else min(group.bound, method.longest)
            curve = self._survival.curve(name, group.workload, most, odds)
            fill = self._survival.fill(name, group.workload, most)
            width, longer = method.nodes(1), self._costs.step(name)
            reading = self._reading(group, method)
            for d in (most,) if group.fixed else (*(d for d in DEPTHS if d < most), most):
                passes = fill[:d]
                rows = 1 + min(width * sum(passes), method.nodes(d))
                tokens = 1 + sum(curve[:d])
                options.append(Option(Choice(name, d), tokens, rows, passes, reading, longer))
        return options

    def _reading(self, group: Group, method: Method) -> float:
        missed = [(name, self._unread.get((group, name), 0)) for name in method.drafters]
        seconds = sum([self._costs.read(name, tokens) for name, tokens in missed if tokens])
        return seconds / self.counts[group]

    def speed(self, choices: Mapping[Group, Option]) -> float:
        """Return the expected tokens per second."""
        tokens = rows = longer = reading = 0.0
        drafting: dict[str, list[float]] = {}
        for group, count in self.counts.items():
            choice, each, width, passes, missed, step = choices[group]
            tokens += count * each
            reading += count * each * missed
            rows += count * width
            longer += count * step
            if choice.depth:
                mine = [count * share for share in passes]
                others = drafting.get(choice.method)
                if others is not None:
                    mine = [a + b for a, b in zip_longest(mine, others, fillvalue=0.0)]
                drafting[choice.method] = mine
        seconds = self._host + self._costs.verify(round(rows), self._context)
        for name, counts in drafting.items():
            seconds += draft_cost(self._costs, self._methods[name], counts)
        return tokens / (seconds * longer / self._sequences + reading)

    def plain(self) -> dict[Group, Option]:
        """Return the choices of plain decoding, as far as requests leave them open."""
        return {group: options[0] for group, options in self.options.items()}

    def known(self, choices: Mapping[Group, Choice]) -> dict[Group, Option]:
        """Return the options of given choices; plain where there is none."""
        by_choice = self._by_choice
        return {
            group: by_choice[group].get(choices.get(group, PLAIN), options[0])
            for group, options in self.options.items()
        }

    def judged(self, choices: Mapping[Group, Option]) -> float:
        """Return the judged tokens of the least known method among the choices."""
        judged = [
            self._survival.judged(option.choice.method, group.workload)
            for group, option in choices.items()
            if option.choice.depth
        ]
        return min(judged, default=0.0)

    def best(self) -> tuple[float, dict[Group, Option]]:
        """Return the best choices that were found: one for all, then group by group."""
        groups = list(self.options)
        if len(groups) == 1:
            return self._best_of_one(groups[0])
        widest = max(groups, key=lambda group: len(self.options[group]))
        speed, choices = 0.0, self.plain()
        for group in (None, *groups):  # the first stands for all
            for _, depths in groupby(self.options[group or widest], key=METHOD):
                before = falls = 0.0
                for option in depths:
                    trial = (
                        self.known(dict.fromkeys(groups, option.choice))
                        if group is None
                        else {**choices, group: option}
                    )
                    other = self.speed(trial)
                    if other > speed:
                        speed, choices = other, trial
                    falls = falls + 1 if other < before else 0
                    before = other
                    if falls == FALLS:
                        break
        return speed, choices

    def _best_of_one(self, group: Group) -> tuple[float, dict[Group, Option]]:
        """Return the result of ``best`` for a single group, in a fraction of the time."""
        count, verify = self.counts[group], self._costs.verify
        speed, best = 0.0, self._nothing
        for name, depths in groupby(self.options[group], key=METHOD):
            options = [*depths]  # the longest last
            drafting = [0.0]
            if options[-1].choice.depth:
                counts = [count * share for share in options[-1].passes]
                drafting = draft_costs(self._costs, self._methods[name], counts)
            for option in options:
                _, tokens, rows, passes, reading, longer = option
                seconds = self._host + verify(round(count * rows), self._context)
                seconds += drafting[len(passes)]
                other = tokens / (seconds * longer / count + tokens * reading)
                if other > speed:
                    speed, best = other, option
                elif other < HOPELESS * speed:
                    break
        return speed, {group: best}
