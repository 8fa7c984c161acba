"""Decides the drafter and draft length of each sequence, or that a step is plain; reads no clock.

The controller compares the ways to draft that sequences leave open, plain decoding among them, by
the expected tokens per second of the whole batch (``Outlook.speed``), as Liu et al., "Optimizing
speculative decoding for serving large language models using goodput", 2024, choose a depth.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log2

from .choices import PLAIN, Choice, Knowledge, Method, Stream, StreamGroup
from .costs import CostModel
from .outlook import Outlook
from .survival import Survival
from .trials import Review, Trials
from .tuning import USUAL, Tuning


@dataclass
class _Guard:
    """The loss of drafting at one batch size, in plain steps, and the methods barred for it.

    ``bars`` has for each barred method the step until which it may not draft; the next bar lasts
    ``pause`` steps. Sequences whose ids are ``known`` cannot end bars early.
    """

    pause: int
    deficit: float = 0.0
    bars: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)


class Controller:
    """Compares choices, tries unused ones, and bars methods that lose.

    Its expectations come from ``costs`` and ``survival``, which learn from the outcomes. Methods
    that are ``shadowed`` need no trials: their drafts are scored without being verified. ``unread``
    returns how many tokens a drafter has not read, from a sequence's id and the drafter's name.
    """

    def __init__(
        self,
        costs: CostModel,
        survival: Survival,
        methods: Mapping[str, Method],
        shadowed: frozenset[str] = frozenset(),
        unread: Callable[[str, str], int] = lambda sequence, drafter: 0,
        tuning: Tuning = USUAL,
    ) -> None:
        self.costs, self.survival, self.methods, self.tuning = costs, survival, methods, tuning
        self.known = Knowledge(costs, survival, methods, tuning)
        self.shadowed, self.unread = shadowed, unread
        self.review_steps = tuning.review_steps  # steps after which choices are compared again
        self.least_review_steps = tuning.review_steps  # the same where drafts bring nothing
        self._vain = 0  # steps in a row without an accepted token
        self.trials = Trials(self.known, shadowed)
        self._guards: dict[int, _Guard] = {}  # by the bits of a batch size
        self.choices: dict[StreamGroup, Choice] = {}
        self.counts: dict[StreamGroup, int] = {}  # sequences, as of the last review
        self.review = Review()
        self.step = 0
        self.reviewed = 0  # the step of the last review
        self.paused = False  # True if all methods that may draft were barred at the last step
        self._barred: frozenset[str] = frozenset()  # methods, at the last step
        self._used: set[str] = set()  # methods that drafted by choice at the last step
        self._size = 0
        self._drafts = False  # True if the last review chose drafts for any group
        self._other_since = 0
        """The step since which the batch is twice or half as large as at the last review."""
        self._steady = False
        self._assigned: dict[str, Choice] = {}
        self._seen: set[tuple[str, ...]] = set()
        """The methods that sequences left open at the last review."""

    def decide(self, streams: Sequence[Stream]) -> list[Choice]:
        """Return the choice for each decoding sequence of the next step."""
        self.step += 1
        self._steady, self.trials.now = True, None
        before, self._barred = self._barred, self._bars(streams)
        all_barred = all(self._barred.issuperset(stream.methods) for stream in streams)
        self.paused = bool(self._barred) and all_barred
        if self.paused:
            self._used = set()
            return [stream.fixed or PLAIN for stream in streams]
        due = (
            self._due(len(streams), self.step)
            or not self._barred <= before
            or not all(map(self._is_known, streams))
        )
        if due:
            self._compare(streams)
        assigned = self._assigned
        choices = [s.fixed or assigned.get(s.id) or self._joined(s) for s in streams]
        trials = self.trials
        if due:
            trials.plan(self.step, streams, choices, self.review_steps)
        if trials.due(len(streams), first=due):
            self._steady = False
            choices = trials.start(self.step, streams, choices)
        drafting = (c for s, c in zip(streams, choices, strict=True) if c.depth and not s.fixed)
        self._used = {choice.method for choice in drafting}
        return choices

    @property
    def tries(self) -> bool:
        """True if the last decision tries something that is not used."""
        return self.trials.now is not None

    @property
    def cold(self) -> bool:
        """True if the last decision tries something whose drafters have not drafted for long."""
        return self.tries and self.trials.cold

    def steady(self, streams: int) -> bool:
        """Return True, and count a step, where ``decide`` would choose the same again."""
        step = self.step + 1
        if not self._steady or self._due(streams, step) or self.trials.due(streams):
            return False
        self.step = step
        return True

    def due(self, streams: Sequence[Stream]) -> bool:
        """Return True where ``decide`` would compare choices for the next step."""
        return self._due(len(streams), self.step + 1) or not all(map(self._is_known, streams))

    def _due(self, streams: int, step: int) -> bool:
        """Return True if a step compares choices; note since when the batch's size differs."""
        size, drafts, tuning = self._size, self._drafts, self.tuning
        if self.trials.ready:
            return True
        if streams >= 2 * size or 2 * streams <= size:
            self._other_since = self._other_since or step
            grown = streams > size and (drafts or not size)
            if grown or step - self._other_since >= tuning.lasting_steps:
                return True
        else:
            self._other_since = 0
        every = self.review_steps
        if drafts and self._vain >= tuning.vain_steps:
            every = self.least_review_steps
        if drafts and abs(streams - size) > size // 4:
            every //= tuning.changed_reviews
        if step < tuning.first_reviewed_steps and drafts:
            every = 1
        return step - self.reviewed >= min(every, max(tuning.first_review_steps, self.reviewed))

    def _is_known(self, stream: Stream) -> bool:
        """Return False if the methods that a new sequence leaves open were never compared."""
        return stream.methods in self._seen or stream.id in self._assigned or not stream.methods

    def _joined(self, stream: Stream) -> Choice:
        """Return the choice for a sequence that came after the last review."""
        group = StreamGroup(stream.workload, (), stream.methods, stream.max_depth, None)
        choice = self.choices.get(group)
        if choice is None:
            choice = next((c for g, c in self.choices.items() if g.methods == group.methods), PLAIN)
        choice = choice._replace(depth=min(choice.depth, stream.max_depth))
        self._assigned[stream.id] = choice
        return choice

    def _levels(self, stream: Stream) -> tuple[int, ...]:
        """Return how a sequence differs from its workload, see ``StreamGroup``."""
        odds = [self.survival.odds(name, stream.workload, stream.id) for name in stream.methods]
        most = self.tuning.max_level
        levels = tuple([max(-most, min(most, round(log2(each)))) for each in odds])
        return levels if any(levels) else ()

    def _compare(self, streams: Sequence[Stream]) -> None:
        """Choose anew for every group."""
        tuning = self.tuning
        self.reviewed, self._size, self._other_since = self.step, len(streams), 0
        context = sum([stream.context for stream in streams])
        self.survival.count()
        self.costs.count()
        # A lone sequence makes up its workload's recent counts: its luck must not count twice.
        alike = len(streams) == 1
        groups = [
            StreamGroup(
                s.workload,
                () if s.fixed or alike else self._levels(s),
                s.methods,
                s.max_depth,
                s.fixed,
            )
            for s in streams
        ]
        if len(set(groups)) > tuning.max_groups:
            groups = [group._replace(levels=()) for group in groups]
        counts: dict[StreamGroup, int] = {}
        for group in groups:
            counts[group] = counts.get(group, 0) + 1
        self.counts = counts
        missed = {stream.id: self._unread(stream) for stream in streams}
        unread: dict[tuple[StreamGroup, str], float] = {}
        for stream, group in zip(streams, groups, strict=True):
            horizon = max(1, min(tuning.horizon, stream.left))
            for name, tokens in missed[stream.id].items():
                unread[group, name] = unread.get((group, name), 0.0) + tokens / horizon
        outlook = Outlook(self.known, counts, context, unread, self._barred)
        speed, choices = outlook.best()
        used = {g: self._assigned.get(s.id, PLAIN) for s, g in zip(streams, groups, strict=True)}
        present = outlook.known(used)
        now, plain = outlook.speed(present), outlook.plain()
        plain_speed = outlook.speed(plain)
        if speed < tuning.better_speedup * now:
            speed, choices = now, present
        drafts = any(option.choice.depth for option in present.values())
        doubt = tuning.doubted(outlook.judged(choices))
        least = tuning.stay_speedup if drafts else tuning.enter_speedup + doubt
        if speed < least * plain_speed:
            speed, choices = plain_speed, plain
        plain_seconds = self.costs.verify(len(streams), context) + self.costs.host(len(streams))
        seconds = outlook.tokens(choices) / speed
        self.review = Review(
            *(context, speed, plain_speed, plain_seconds, seconds, missed),
            outlook.fastest,
            self._barred,
        )
        self.trials.review = self.review
        self.choices = {group: option.choice for group, option in choices.items()}
        self._drafts = any(choice.depth for choice in self.choices.values())
        self._assigned = {s.id: self.choices[g] for s, g in zip(streams, groups, strict=True)}
        self._seen = {group.methods for group in groups}

    def _unread(self, stream: Stream) -> dict[str, int]:
        """Return the tokens of a sequence that drafters must read before they can draft."""
        names = {name for method in stream.methods for name in self.methods[method].drafters}
        return {name: self.unread(stream.id, name) for name in names if self.costs.reads(name)}

    def accepted(self, any_token: bool) -> None:
        """Take in whether any drafted token of a step was accepted."""
        self._vain = 0 if any_token else self._vain + 1

    def affords(self, steps: int) -> None:
        """Set after how many steps comparing again takes only a small share of the time."""
        self.review_steps = max(self.tuning.review_steps, steps)
        self.least_review_steps = max(self.tuning.vain_steps, steps)

    def observe(
        self, streams: int, emitted: int, drafting: float, took: float, slow: float = 1.0
    ) -> None:
        """Take in some steps of the same ``streams`` sequences.

        Those with drafts ``emitted`` tokens in ``drafting`` seconds; ``took`` are the seconds of
        all. The target took ``slow`` times as long as expected for the same rows.
        """
        self.trials.seconds += took
        if drafting and self._used:
            lost = drafting / (self.review.plain_seconds * max(1.0, slow)) - emitted / streams
            self._note_loss(streams, lost)

    def _note_loss(self, streams: int, lost: float) -> None:
        """Take in what drafting lost, in plain steps; a gain is negative.

        If it is too much, the methods in use are barred, in a batch of several all methods. Part of
        the loss stays, so that the next bar comes sooner.
        """
        size, tuning = streams.bit_length(), self.tuning
        most = tuning.lost_steps + tuning.luck_steps / 2 ** ((size - 1) / 2)
        guard = self._guards.get(size)
        if guard is None:
            guard = self._guards[size] = _Guard(tuning.first_pause)
        guard.deficit = max(-most, guard.deficit + lost)
        if guard.deficit > most:
            losers = self._used if streams == 1 else self.methods  # several lose more, and sooner
            guard.bars |= dict.fromkeys(losers, self.step + guard.pause)
            guard.pause = min(2 * guard.pause, tuning.longest_pause)
            guard.known = {*self._assigned}
            guard.deficit = tuning.half_open * most
            self._steady = False
        elif guard.deficit == -most:
            guard.pause = tuning.first_pause

    def barred(self, streams: int) -> frozenset[str]:
        """Return the methods that may not draft for so many streams, since they lost too much."""
        guard = self._guards.get(streams.bit_length())
        bars = guard.bars.items() if guard is not None else ()
        return frozenset([name for name, until in bars if self.step < until])

    def _bars(self, streams: Sequence[Stream]) -> frozenset[str]:
        """Return the methods that may not draft for a batch.

        Bars end early once shadows of enough new sequences are accepted.
        """
        tuning, barred = self.tuning, self.barred(len(streams))
        if not barred or self.step % tuning.renewing_steps:
            return barred
        guard = self._guards[len(streams).bit_length()]
        better = {
            stream.id
            for stream in streams
            if stream.id not in guard.known
            and any(
                self.survival.fares_well(name, stream.id)
                for name in self.shadowed.intersection(stream.methods)
            )
        }
        if len(better) <= tuning.renewing_share * len(streams):
            return barred
        guard.bars.clear()
        guard.known |= better
        return frozenset()

    @property
    def pauses(self) -> dict[int, int]:
        """The steps for which methods are still barred, by the smallest batch size concerned."""
        left = {
            2**size >> 1: max(guard.bars.values(), default=0) - self.step
            for size, guard in self._guards.items()
        }
        return {size: steps for size, steps in left.items() if steps > 0}

    def release(self, id: str) -> None:
        """Forget a sequence that ended."""
        self._assigned.pop(id, None)
        self.survival.release(id, self.methods)
        for guard in self._guards.values():
            if guard.deficit < 0:  # others must not use up what it gained
                guard.deficit *= 1 - 1 / max(1, self._size)
