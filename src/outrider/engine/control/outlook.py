"""The expected speed of a batch under any choices, and the best choices."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache, partial
from itertools import accumulate, groupby, pairwise, zip_longest
from math import exp, log
from operator import attrgetter
from typing import NamedTuple

from .choices import PLAIN, Choice, Knowledge, Method, StreamGroup


class DraftOption(NamedTuple):
    """A choice, with which a step is expected to emit ``tokens`` from ``rows`` per sequence.

    ``verified`` are the seconds of its rows if the sequence is alone. ``passes`` are the expected
    drafting passes at each depth; ``reading`` is the time that drafters take to read missed tokens,
    in seconds per token to come.
    """

    choice: Choice
    tokens: float = 1.0
    rows: float = 1.0
    verified: float = 0.0
    passes: Sequence[float] = ()
    reading: float = 0.0
    longer: float = 1.0


METHOD_OF = attrgetter("choice.method")


class Outlook:
    """The expected speed of a batch of groups under any choices.

    A group has ``counts`` sequences; all groups together have ``context`` tokens. ``unread`` are,
    by group and drafter, the missed tokens per token to come, summed over the group's sequences.
    Methods that are ``barred`` draft only where requests fix them.
    """

    def __init__(
        self,
        known: Knowledge,
        counts: Mapping[StreamGroup, int],
        context: int,
        unread: Mapping[tuple[StreamGroup, str], float],
        barred: Collection[str] = (),
    ) -> None:
        self.counts, self._unread = counts, unread
        self._barred = barred
        self._costs, self._survival, self._methods, self._tuning = known
        self._sequences = sum(counts.values())
        self._host = self._costs.host(self._sequences)
        self._seconds = cache(partial(self._costs.verify, context=context))
        """Seconds of verifying so many rows."""
        alone = self._seconds(1)
        self._nothing = DraftOption(PLAIN, verified=alone, longer=self._costs.step(PLAIN.method))
        self.fastest: dict[str, float] = {}
        """Tokens per second by method if all draft with it at its best depth; set by ``best``."""
        self.options = {group: self._options(group) for group in counts}
        self._by_choice = {
            group: {option.choice: option for option in options}
            for group, options in self.options.items()
        }

    def _options(self, group: StreamGroup) -> list[DraftOption]:
        """Return every choice for a group."""
        if group.fixed is not None and not group.fixed.depth:
            return [self._nothing]
        options = [self._nothing] if group.fixed is None else []
        levels = dict(zip(group.methods, group.levels, strict=False))
        for name in (group.fixed.method,) if group.fixed else group.methods:
            if name in self._barred and group.fixed is None:
                continue
            method, odds = self._methods[name], 2.0 ** levels.get(name, 0)
            most = group.fixed.depth if group.fixed else min(group.max_depth, method.max_depth)
            curve = self._survival.curve(name, group.workload, most, odds)
            fill = self._survival.fill(name, group.workload, most)
            width, longer = method.nodes(1), self._costs.step(name)
            reading = self._reading(group, method)
            verified = self._verified(method, fill)
            tokens = [*accumulate(curve, initial=1.0)]
            nodes = [min(width * each, method.max_nodes) for each in accumulate(fill, initial=0.0)]
            depths = () if group.fixed else (d for d in self._tuning.depths if d < most)
            options += [
                DraftOption(
                    Choice(name, d), tokens[d], 1 + nodes[d], verified[d], fill[:d], reading, longer
                )
                for d in (*depths, most)
            ]
        return options

    def _verified(self, method: Method, fill: Sequence[float]) -> list[float]:
        """Return the seconds of verifying a lone sequence's drafts of 0, 1, ... tokens.

        For chains it is the mean over their lengths: where the costs of rows bend, that is more
        than the cost of the mean length. Trees are taken to have their mean number of nodes.
        """
        if self._sequences > 1:
            return [0.0] * (len(fill) + 1)
        seconds, width = self._seconds, method.nodes(1)
        if width > 1:
            filled = accumulate(fill, initial=0.0)
            return [seconds(round(1 + min(width * each, method.max_nodes))) for each in filled]
        by_depth = [*map(seconds, range(1, len(fill) + 2))]
        more = (
            share * (after - before)
            for share, (before, after) in zip(fill, pairwise(by_depth), strict=True)
        )
        return [*accumulate(more, initial=by_depth[0])]

    def _reading(self, group: StreamGroup, method: Method) -> float:
        missed = [(name, self._unread.get((group, name), 0)) for name in method.drafters]
        seconds = sum([self._costs.read(name, tokens) for name, tokens in missed if tokens])
        return seconds / self.counts[group]

    def speed(self, choices: Mapping[StreamGroup, DraftOption]) -> float:
        """Return the expected tokens per second, counting tokens as ``tokens`` does."""
        rows = longer = reading = verified = 0.0
        drafting: dict[str, list[float]] = {}
        for group, count in self.counts.items():
            choice, each, width, alone, passes, missed, step = choices[group]
            verified += alone
            reading += count * each * missed
            rows += count * width
            longer += count * step
            if choice.depth:
                mine = [count * share for share in passes]
                others = drafting.get(choice.method)
                if others is not None:
                    mine = [a + b for a, b in zip_longest(mine, others, fillvalue=0.0)]
                drafting[choice.method] = mine
        if self._sequences > 1:
            verified = self._seconds(round(rows))
        seconds = self._host + verified
        for name, counts in drafting.items():
            seconds += self._methods[name].seconds(self._costs, counts)
        return self.tokens(choices) / (seconds * longer / self._sequences + reading)

    def tokens(self, choices: Mapping[StreamGroup, DraftOption]) -> float:
        """Return the tokens of a step, with the geometric mean for every sequence.

        Their sum would draft for few at the cost of many: all wait for a step that the drafts of
        some make longer. The mean of logarithms is proportionally fair (Kelly, "Charging and rate
        control for elastic traffic", 1997), and the same where sequences are alike.
        """
        logs = sum([count * log(choices[group].tokens) for group, count in self.counts.items()])
        return self._sequences * exp(logs / self._sequences)

    def plain(self) -> dict[StreamGroup, DraftOption]:
        """Return the choices of plain decoding, as far as requests leave them open."""
        return {group: options[0] for group, options in self.options.items()}

    def known(self, choices: Mapping[StreamGroup, Choice]) -> dict[StreamGroup, DraftOption]:
        """Return the options of given choices; plain where there is none."""
        by_choice = self._by_choice
        return {
            group: by_choice[group].get(choices.get(group, PLAIN), options[0])
            for group, options in self.options.items()
        }

    def judged(self, choices: Mapping[StreamGroup, DraftOption]) -> float:
        """Return the judged tokens of the least known method among the choices."""
        judged = [
            self._survival.judged(option.choice.method, group.workload)
            for group, option in choices.items()
            if option.choice.depth
        ]
        return min(judged, default=0.0)

    def best(self) -> tuple[float, dict[StreamGroup, DraftOption]]:
        """Return the best choices found: first one choice for all groups, then group by group."""
        groups = list(self.options)
        if len(groups) == 1:
            return self._best_of_one(groups[0])
        widest = max(groups, key=lambda group: len(self.options[group]))
        speed, choices = 0.0, self.plain()
        for group in (None, *groups):  # None stands for all groups
            for name, depths in groupby(self.options[group or widest], key=METHOD_OF):
                before = falls = 0.0
                for option in depths:
                    trial = (
                        self.known(dict.fromkeys(groups, option.choice))
                        if group is None
                        else {**choices, group: option}
                    )
                    other = self.speed(trial)
                    if group is None:
                        self._note(name, other)
                    if other > speed:
                        speed, choices = other, trial
                    falls = falls + 1 if other < before else 0
                    before = other
                    if falls == self._tuning.falls:
                        break
        return speed, choices

    def _note(self, method: str, speed: float) -> None:
        """Take in the speed if all draft with a method at some depth."""
        self.fastest[method] = max(speed, self.fastest.get(method, 0.0))

    def _best_of_one(self, group: StreamGroup) -> tuple[float, dict[StreamGroup, DraftOption]]:
        """Return the result of ``best`` for a single group, in a fraction of the time."""
        count = self.counts[group]
        speed, best = 0.0, self._nothing
        for name, depths in groupby(self.options[group], key=METHOD_OF):
            options = [*depths]  # the longest last
            drafting = [0.0]
            if options[-1].choice.depth:
                counts = [count * share for share in options[-1].passes]
                drafting = self._methods[name].seconds_up_to(self._costs, counts)
            for option in options:
                _, tokens, rows, verified, passes, reading, longer = option
                if count > 1:
                    verified = self._seconds(round(count * rows))
                seconds = self._host + verified + drafting[len(passes)]
                other = tokens / (seconds * longer / count + tokens * reading)
                self._note(name, other)
                if other > speed:
                    speed, best = other, option
                elif other < self._tuning.hopeless_speed * speed:
                    break
        return speed, {group: best}
