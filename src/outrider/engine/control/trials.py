"""Trials: steps that try what is not used, within a small share of the time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from math import inf
from typing import NamedTuple

from .choices import PLAIN, Choice, Knowledge, Stream


class Review(NamedTuple):
    """The figures that the last comparison of choices expects of the batch.

    ``plain_seconds`` are those of a plain step, ``step_seconds`` those of a step with the choices.
    ``missed`` are the tokens that drafters have not read, by sequence and drafter. ``fastest`` are
    the tokens per second if all draft with one method at its best depth, unless it is ``barred``.
    """

    context: int = 0
    tokens_per_second: float = 0.0
    plain_per_second: float = 0.0
    plain_seconds: float = 1.0
    step_seconds: float = 1.0
    missed: Mapping[str, Mapping[str, int]] = {}
    fastest: Mapping[str, float] = {}
    barred: Collection[str] = ()


class Trial(NamedTuple):
    """A choice that a step tries, for the sequences with these ids, or for all if there are none.

    ``price`` are the seconds that it is expected to lose, without ``reading``, those in which
    drafters read missed tokens. A ``first`` trial does not wait until they are saved up. A method
    that is not ``hopeful`` would be slower than the present choice even if it were underrated.
    """

    choice: Choice
    ids: tuple[str, ...]
    price: float
    reading: float = 0.0
    first: bool = False
    hopeful: bool = True

    @property
    def cost(self) -> float:
        """The seconds that it is expected to lose, with reading."""
        return self.price + self.reading


class Trials:
    """Plans trials of plain steps where drafts are used, and of unused methods."""

    def __init__(self, known: Knowledge, shadowed: frozenset[str]) -> None:
        self._costs, self._survival, self._methods, self._tuning = known
        self._shadowed = shadowed
        self.seconds = self.explored = 0.0  # seconds of all steps, and those that trials have cost
        self.now: Trial | None = None  # the trial of the present step
        self.review = Review()
        self._planned: Trial | None = None
        self._left = 0  # steps of the present trial that follow
        self.cold = False  # True if the present step is the first of its trial
        self._tried: dict[Choice, int] = {}
        self._num_tried = 0
        self._rested = -inf  # seconds that must be saved up before the next trial
        self._turn = 0  # the sequence that is first to try something
        self._firsts = {
            name: known.tuning.first_trials
            for name, method in known.methods.items()
            if method.drafters == (name,) and method.width == 1 and name not in shadowed
        }
        """By drafter, the trials left until it is known. For a lone sequence they need not wait,
        and their reading is not charged."""
        self.ready = False  # True if a drafter has become known since the last plan

    def _saved(self, streams: int, steps: int = 0) -> float:
        """Return the seconds that trials may take now, or after so many more steps."""
        tuning = self._tuning
        share = tuning.alone_share if streams == 1 else tuning.together_share
        return share * (self.seconds + steps * self.review.step_seconds) - self.explored

    def due(self, streams: int, first: bool = False) -> bool:
        """Return True if a trial is planned, and its cost was saved up since the last one.

        With ``first`` only a first trial counts, one that makes a drafter known.
        """
        trial = self._planned
        if trial is None or (first and not trial.first):
            return False
        if trial.first or self._left:
            return True
        cost = trial.cost + self._following(trial, streams) * trial.price
        return self._saved(streams) >= max(cost, self._rested)

    def _following(self, trial: Trial, streams: int) -> int:
        """Return how many steps follow the first one of a trial.

        In the first one drafters read missed tokens, and their weights and code are not in the
        CPU's caches, so it tells no costs. With several streams more steps would cost too much.
        """
        return self._tuning.trial_steps - 1 if streams == 1 and trial.ids else 0

    def plan(
        self, step: int, streams: Sequence[Stream], choices: Sequence[Choice], review_steps: int
    ) -> None:
        """Plan a trial of the choice not tried for longest, if time can be saved up for it soon.

        If its method is not known yet, it is the trial that is cheapest per sequence among those
        for which time can be saved up in ``patience_steps``. First trials go before others.
        Methods without hope wait for ``hopeless_steps``; those that are ``barred`` are not tried.
        """
        self._planned, self.ready, self._left = None, False, 0
        rests = self._saved(len(streams), review_steps) < self._rested
        if rests and not self._firsts:
            return
        wait, tried = self._tuning.hopeless_steps, self._tried

        def since(trial: Trial) -> int:
            return tried.get(trial.choice, -wait) + (0 if trial.hopeful else wait)

        trials = [
            trial
            for trial in self._trials(step, streams, choices)
            if trial.first or (not rests and (trial.hopeful or since(trial) <= step))
        ]
        oldest = min(trials, key=lambda trial: (not trial.first, since(trial)), default=None)
        if oldest is None:
            return
        least, *others = (trial for trial in trials if trial.choice == oldest.choice)
        saved = self._saved(len(streams), self._tuning.patience_steps)
        for trial in others:
            if trial.cost / len(trial.ids) < least.cost / len(least.ids) and trial.cost <= saved:
                least = trial
        self._planned = least

    def start(self, step: int, streams: Sequence[Stream], choices: list[Choice]) -> list[Choice]:
        """Return the choices of a step that runs the planned trial."""
        trial = self._planned
        assert trial is not None
        ids, name = trial.ids, trial.choice.method
        self._planned = None
        places = [i for i, s in enumerate(streams) if s.fixed is None and (not ids or s.id in ids)]
        if not places:
            self._left = 0
            return choices  # its sequences have ended
        begins = not self._left
        self.cold = bool(ids) and begins
        self._left = self._following(trial, len(streams)) if begins else self._left - 1
        if ids and (self._left or not self._sure(trial.choice, streams[0])):
            self._planned = trial._replace(reading=0.0)  # tried again until the next review
        self.now = trial
        self._tried[trial.choice] = step
        self._num_tried += bool(ids)
        self.explored += trial.cost
        if begins and not trial.first:
            self._rested = self._saved(len(streams)) + trial.cost
        if name in self._firsts:
            self._firsts[name] -= 1
            if not self._firsts[name]:
                del self._firsts[name]
                self._planned, self.ready = None, True
        for place in places:
            choices[place] = trial.choice
        return choices

    def observe(self, seconds: float, tokens: int) -> None:
        """Take in the seconds and tokens of a step, if it was one of a trial.

        The time that it lost replaces the expected price in what trials have cost.
        """
        if self.now is not None:
            lost = seconds - self.now.reading - tokens / self.review.tokens_per_second
            lost = max(0.0, min(lost, self.now.price + self.review.step_seconds))
            self.explored += lost - self.now.price

    def _trials(
        self, step: int, streams: Sequence[Stream], choices: Sequence[Choice]
    ) -> list[Trial]:
        """Return the possible trials.

        A trial costs the seconds beyond the usual step, and those for tokens that it loses.
        """
        review, tuning = self.review, self._tuning
        trials: list[Trial] = []
        drafts = (c.depth and not s.fixed for s, c in zip(streams, choices, strict=True))
        near = review.plain_per_second > tuning.near_speed * review.tokens_per_second
        every = tuning.plain_steps if near else tuning.sure_steps
        late = step - self._tried.get(PLAIN, 0) >= every
        if (late or (near and not self._costs.measured(len(streams)))) and any(drafts):
            took = review.plain_seconds
            lost = took * (1 - review.plain_per_second / review.tokens_per_second)
            return [Trial(PLAIN, (), max(lost, took * tuning.least_price))]
        self._turn = (self._turn + 1) % len(streams)
        kinds: dict[tuple[tuple[str, ...], int], Stream] = {}
        for stream in (*streams[self._turn :], *streams[: self._turn]):
            if stream.fixed is None:
                kinds.setdefault((stream.methods, stream.max_depth), stream)
        unused = (choice for stream in kinds.values() for choice in self._unused(stream, choices))
        for choice in dict.fromkeys(unused):
            for places, missed in self._triers(choice, streams):
                (took, gain), (usual, lost) = (
                    self._drafting(streams[places[0]], each, len(places), len(streams))
                    for each in (choice, choices[places[0]])
                )
                price = max(took - usual + (lost - gain) / review.tokens_per_second, took / 4)
                ids = tuple(streams[place].id for place in places)
                steps = min(tuning.first_steps, max(streams[place].left for place in places) / 2)
                new = choice.method in self._firsts and not self._sure(choice, streams[places[0]])
                first = new and len(streams) == 1 and missed <= steps * review.plain_seconds
                reading = 0.0 if first else missed
                hopeful = self._hopeful(choice.method, streams[places[0]])
                trials.append(Trial(choice, ids, price, reading, first, hopeful))
        return trials

    def _triers(
        self, choice: Choice, streams: Sequence[Stream]
    ) -> Iterator[tuple[list[int], float]]:
        """Yield the places of sequences that may try a choice, and the seconds to catch up.

        First a few sequences, those whose drafters have missed least, in turn among equals. If the
        method is not known yet, then all sequences, since they share a drafter's passes.
        """
        drafters, unread = self._methods[choice.method].drafters, self.review.missed
        missed = {
            i: sum([self._costs.read(n, unread[streams[i].id].get(n, 0)) for n in drafters])
            for i in (*range(self._turn, len(streams)), *range(self._turn))
            if streams[i].fixed is None
            and choice.method in streams[i].methods
            and choice.depth <= streams[i].max_depth
        }
        places = sorted(missed, key=missed.__getitem__)
        few = 1 + len(streams) // self._tuning.sequences_per_trier
        yield places[:few], sum([missed[i] for i in places[:few]])
        if len(places) > few and not self._sure(choice, streams[places[0]]):
            yield places, sum(missed.values())

    def _hopeful(self, method: str, stream: Stream) -> bool:
        """Return whether a method, if it were underrated, would be faster than what is used."""
        review, tuning = self.review, self._tuning
        doubt = tuning.doubted(self._survival.judged(method, stream.workload))
        return review.fastest.get(method, inf) * (1 + doubt) >= review.tokens_per_second

    def _sure(self, choice: Choice, stream: Stream) -> bool:
        """Return whether enough tokens of a method were judged in a sequence's workload."""
        judged = self._survival.judged(choice.method, stream.workload)
        return judged >= self._tuning.sure_tokens

    def _unused(self, stream: Stream, choices: Sequence[Choice]) -> list[Choice]:
        """Return unused methods, or a longer draft of a used one until its rows are measured."""
        methods, tuning = self._methods, self._tuning
        most = {name: min(methods[name].max_depth, stream.max_depth) for name in stream.methods}
        used = {choice.method for choice in choices}
        unused = {
            name
            for name in {*stream.methods}.difference(used, self.review.barred)
            if name not in self._shadowed or self._promises(name, stream, most[name])
        }
        known = self._num_tried >= tuning.known_trials * len(unused)
        for choice in dict.fromkeys(choices) if known else ():
            name, depth = choice
            if name not in most:
                continue
            rows = len(choices) + methods[name].nodes(most[name])
            curve = self._survival.curve(name, stream.workload, most[name])
            promises = 1 + sum(curve) > tuning.longer_gain * (1 + sum(curve[:depth]))
            if promises and not self._costs.measured(rows):
                return [Choice(name, most[name])]
        return [Choice(name, min(tuning.trial_depth, most[name])) for name in sorted(unused)]

    def _promises(self, method: str, stream: Stream, most: int) -> bool:
        """Return whether a shadowed method is so often right that only its costs keep it unused."""
        curve = self._survival.curve(method, stream.workload, min(self._tuning.trial_depth, most))
        known = self._survival.judged(method, stream.workload) >= self._tuning.renewing_tokens
        return known and 1 + sum(curve) > self._tuning.promised_gain

    def _drafting(
        self, stream: Stream, choice: Choice, count: int, streams: int
    ) -> tuple[float, float]:
        """Return the seconds that drafts of ``count`` sequences add, and the tokens they bring."""
        if not choice.depth:
            return 0.0, 0.0
        method, context = self._methods[choice.method], self.review.context
        more = self._costs.verify(streams + count * method.nodes(choice.depth), context)
        more -= self._costs.verify(streams, context)
        tokens = sum(self._survival.curve(choice.method, stream.workload, choice.depth))
        return method.seconds(self._costs, [count] * choice.depth) + more, count * tokens
