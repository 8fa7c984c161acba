"""Chooses who drafts for each sequence and how far, by expected tokens per second.

Before drafting, ``decide`` compares ways to draft by what the cost model and the survival table
expect of the whole batch; drafting nothing is among them (Liu et al., "Optimizing speculative
decoding for serving large language models using goodput", 2024, choose a depth so). A drafter goes
on behind a node only where that is worth another pass (``least``), and of what was drafted those
nodes are verified that are worth their rows (``worth``). Both look at what is known of the nodes
themselves, which the coupled rule allows and the ratio rules do not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import inf, log2

from .costs import CostModel
from .guards import Guards
from .outlook import (
    HORIZON,
    PLAIN,
    Choice,
    Group,
    Method,
    Outlook,
    Stream,
    Trial,
    draft_cost,
    least_chance,
)
from .survival import Survival

REVIEW_STEPS = 16
"""Steps after which choices are compared again, if the batch stays alike."""
CHANGED = 4
"""Choices are compared this many times sooner where drafts are used and the batch has changed by a
quarter."""
LASTING = 3
"""Steps for which a batch must be twice or half as large before choices are compared again. Drafts
do not wait where it has grown."""
FIRST_REVIEWS = 16
"""Steps that are reviewed one by one while drafts teach something new. If nothing is drafted, a new
engine doubles the steps between reviews."""
FIRST_STEPS = 4
"""Steps between the first two of these reviews."""
ENTER, STAY = 1.04, 1.01
"""Expected speed over plain decoding from which on drafting begins, and goes on."""
DOUBT, SURE = 0.25, 48.0
"""What a method that was never tried must promise beyond ``ENTER``, and the number of judged tokens
over which that falls to zero."""
BETTER = 1.01
"""Expected speed over that of the present choices from which on others take their place."""
MOST_LEVELS = 2
"""Sequences are told apart by up to this power of two of their odds."""
MOST_GROUPS = 12
"""Groups beyond which sequences of a workload are not told apart."""
EXPLORED_ALONE, EXPLORED = 0.015, 0.005
"""Share of the time of one stream, and of several, that may go into trying what is not used."""
TRIERS = 16
"""Sequences of which one more tries what nobody uses."""
PATIENCE = 128
"""Steps within which the time for a trial of all sequences must be saved up."""
PROBE_DEPTH = 3
KNOWN, MORE = 8, 1.2
"""Trials of each unused method before the first longer draft of one in use, and the factor on its
tokens that makes one worth trying."""
NEAR = 0.7
"""Speed of plain decoding over that of drafts from which on plain steps are tried often."""
PLAIN_STEPS, SURE_STEPS = 48, 192
"""Steps after which plain ones are tried again where drafts win little, and where they win much."""
LEAST_PRICE = 0.02
"""Share of a plain step that trying one costs at least."""
TINY = 1e-6
WORST = 0.9
"""Chance of acceptance from which a node is drafted whatever that costs."""
CUTS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128,
        160, 192, 224, 256, 320, 384, 448, 512)  # fmt: skip
"""Nodes of a step that are compared."""


@dataclass
class Controller:
    """The choices of one engine.

    Args:
        costs, survival: what is expected of steps and drafts; both are told what came of them.
        methods: by name.
        review_steps: steps after which choices are compared again, if the batch stays alike.
        shadowed: methods whose drafts are scored without being verified, so that none needs to be
            tried.
        unread: returns how many tokens of a sequence a drafter has missed, by their names.
    """

    costs: CostModel
    survival: Survival
    methods: Mapping[str, Method]
    shadowed: frozenset[str] = frozenset()
    unread: Callable[[str, str], int] = lambda sequence, drafter: 0
    review_steps: int = REVIEW_STEPS
    choices: dict[Group, Choice] = field(default_factory=dict)
    counts: dict[Group, int] = field(default_factory=dict)
    """The sequences of each group, as of the last review."""
    step: int = 0
    seconds: float = 0.0
    """Seconds of all steps."""
    explored: float = 0.0
    """Seconds that trying methods has cost."""
    tokens_per_second: float = 0.0
    """What the last review expects of the batch."""
    plain_per_second: float = 0.0
    """The same without drafts."""
    reviewed: int = 0
    paused: bool = False
    """Whether drafting paused at the last step."""
    _size: int = 0
    _drafts: bool = False
    """Whether the last review chose drafts for any group."""
    _other_since: int = 0
    """The step since when the batch is twice or half as large as at the last review."""
    _context: int = 0
    _plain_seconds: float = 1.0
    _step_seconds: float = 1.0
    _missed: dict[str, dict[str, int]] = field(default_factory=dict)
    """By sequence and drafter, as of the last review."""
    _planned: Trial | None = None
    _trial: Trial | None = None
    _steady: bool = False
    _assigned: dict[str, Choice] = field(default_factory=dict)
    _guards: Guards = field(default_factory=Guards)
    _tried: dict[Choice, int] = field(default_factory=dict)
    _num_tried: int = 0
    _rested: float = -inf
    """Seconds that must be saved up before the next trial."""
    _turn: int = 0
    """The sequence that is first to try something."""

    def decide(self, streams: Sequence[Stream]) -> list[Choice]:
        """Return the choice for each decoding sequence of the next step."""
        self.step += 1
        self._steady, self._trial = True, None
        self.paused = self._guards.pauses(len(streams), self.step)
        if self.paused:
            return [stream.fixed or PLAIN for stream in streams]
        due = self._due(len(streams), self.step)
        if due:
            self._review(streams)
        assigned = self._assigned
        choices = [s.fixed or assigned.get(s.id) or self._joined(s) for s in streams]
        if due:
            soon = self._saved(len(streams), self.review_steps) >= self._rested
            self._planned = self._next_trial(streams, choices) if soon else None
        elif self._planned is not None and self._affordable(self._planned, len(streams)):
            return self._try(self._planned, streams, choices)
        return choices

    @property
    def tries(self) -> bool:
        """Whether the last decision tries something that is not used."""
        return self._trial is not None

    def steady(self, streams: int) -> bool:
        """Return True, and count a step, where ``decide`` would choose the same again."""
        if not self._steady or self.due(streams):
            return False
        if self._planned is not None and self._affordable(self._planned, streams):
            return False
        self.step += 1
        return True

    def due(self, streams: int) -> bool:
        """Return True where ``decide`` would compare choices for the next step."""
        return self._due(streams, self.step + 1)

    def _due(self, streams: int, step: int) -> bool:
        """Return True where a step compares choices; note since when the batch is another."""
        size = self._size
        drafts = self._drafts
        if streams >= 2 * size or 2 * streams <= size:
            self._other_since = self._other_since or step
            grown = streams > size and (drafts or not size)
            if grown or step - self._other_since >= LASTING:
                return True
        else:
            self._other_since = 0
        every = self.review_steps
        if drafts and abs(streams - size) > size // 4:
            every //= CHANGED
        if step < FIRST_REVIEWS and drafts:
            every = 1
        return step - self.reviewed >= min(every, max(FIRST_STEPS, self.reviewed))

    def levels(self, stream: Stream) -> tuple[int, ...]:
        """Return how a sequence differs from its workload, see ``Group``."""
        odds = [self.survival.odds(name, stream.workload, stream.id) for name in stream.methods]
        levels = tuple([max(-MOST_LEVELS, min(MOST_LEVELS, round(log2(each)))) for each in odds])
        return levels if any(levels) else ()

    def _joined(self, stream: Stream) -> Choice:
        """Return the choice for a sequence that came after the last review."""
        group = Group(stream.workload, (), stream.methods, stream.bound, None)
        choice = self.choices.get(group)
        if choice is None:
            choice = next((c for g, c in self.choices.items() if g.methods == group.methods), PLAIN)
        choice = choice._replace(depth=min(choice.depth, stream.bound))
        self._assigned[stream.id] = choice
        return choice

    def _review(self, streams: Sequence[Stream]) -> None:
        """Choose anew for every group."""
        self.reviewed, self._size, self._other_since = self.step, len(streams), 0
        self._context = sum([stream.context for stream in streams])
        self.survival.count()
        self.costs.count()
        groups = [
            Group(s.workload, () if s.fixed else self.levels(s), s.methods, s.bound, s.fixed)
            for s in streams
        ]
        if len(set(groups)) > MOST_GROUPS:
            groups = [group._replace(levels=()) for group in groups]
        counts: dict[Group, int] = {}
        for group in groups:
            counts[group] = counts.get(group, 0) + 1
        self.counts = counts
        self._missed = {stream.id: self._unread(stream) for stream in streams}
        unread: dict[tuple[Group, str], float] = {}
        for stream, group in zip(streams, groups, strict=True):
            horizon = max(1, min(HORIZON, stream.left))
            for name, tokens in self._missed[stream.id].items():
                unread[group, name] = unread.get((group, name), 0.0) + tokens / horizon
        outlook = Outlook(counts, self.methods, self.costs, self.survival, self._context, unread)
        speed, choices = outlook.best()
        used = {g: self._assigned.get(s.id, PLAIN) for s, g in zip(streams, groups, strict=True)}
        present = outlook.known(used)
        now, plain = outlook.speed(present), outlook.plain()
        self.plain_per_second = outlook.speed(plain)
        self._plain_seconds = self.costs.verify(len(streams), self._context)
        self._plain_seconds += self.costs.host(len(streams))
        if speed < BETTER * now:
            speed, choices = now, present
        drafts = any(option.choice.depth for option in present.values())
        doubt = max(0.0, 1 - outlook.judged(choices) / SURE)
        least = STAY if drafts else ENTER + DOUBT * doubt
        if speed < least * self.plain_per_second:
            speed, choices = self.plain_per_second, plain
        self.tokens_per_second = speed
        self._step_seconds = sum(counts[g] * o.tokens for g, o in choices.items()) / speed
        self.choices = {group: option.choice for group, option in choices.items()}
        self._drafts = any(choice.depth for choice in self.choices.values())
        self._assigned = {s.id: self.choices[g] for s, g in zip(streams, groups, strict=True)}

    def _unread(self, stream: Stream) -> dict[str, int]:
        """Return the tokens of a sequence that drafters must read before they can draft."""
        names = {name for method in stream.methods for name in self.methods[method].drafters}
        return {name: self.unread(stream.id, name) for name in names if self.costs.reads(name)}

    def least(self, choice: Choice, workload: str, sequences: int) -> float:
        """Return the chance of acceptance from which a node is worth a drafter's pass behind it.

        The pass must bring what the batch emits while it runs, see ``least_chance``. A row has the
        mean price of those that whole drafts have, since which of them it will be is not known.
        """
        method, context = self.methods[choice.method], self._context
        passed = draft_cost(self.costs, method, [sequences] * 2)
        passed -= draft_cost(self.costs, method, [sequences])
        rows = sequences * method.nodes(choice.depth)
        row = self.costs.verify(sequences + rows, context) - self.costs.verify(sequences, context)
        children = self.survival.children(choice.method, workload)
        value = self.tokens_per_second
        price = value * passed / (sequences * method.width)
        return min(WORST, least_chance(children, price, value * row / rows))

    def worth(self, survivals: Sequence[float], rows: int, sequences: int, spent: float) -> float:
        """Return the chance of acceptance from which a node is worth its row in the target.

        A row must bring what the batch emits while it runs, at the best speed that cutting these
        nodes reaches.

        Args:
            survivals: P(accepted with all before) of the nodes of a step.
            rows: those of the step beside the nodes.
            sequences: those that decode.
            spent: seconds that drafting took.
        """
        order = sorted(survivals, reverse=True)
        context, fixed = self._context, spent + self.costs.host(sequences)
        tokens = [*accumulate(order, initial=float(sequences))]
        best, most = 0.0, 0
        for count in (*CUTS[: bisect_left(CUTS, len(order))], len(order)):
            speed = tokens[count] / (self.costs.verify(rows + count, context) + fixed)
            if speed >= best:
                best, most = speed, count
        row = self.costs.verify(rows + most + 1, context) - self.costs.verify(rows + most, context)
        # Other drafts are cut by the same price, but these right here.
        most_likely_cut = order[most] + TINY if most < len(order) else 0.0
        least_likely_kept = order[most - 1] if most else 1.1
        return min(least_likely_kept, max(most_likely_cut, best * row))

    def _saved(self, streams: int, steps: int = 0) -> float:
        """Return the seconds that trials may take now, or after so many more steps."""
        share = EXPLORED_ALONE if streams == 1 else EXPLORED
        return share * (self.seconds + steps * self._step_seconds) - self.explored

    def _affordable(self, trial: Trial, streams: int) -> bool:
        """Return True if enough time is saved up for a trial.

        Saved time may pay for an expensive trial, but not for many in a row: the price of each must
        be saved up again before the next.
        """
        return self._saved(streams) >= max(trial.price, self._rested)

    def _next_trial(self, streams: Sequence[Stream], choices: Sequence[Choice]) -> Trial | None:
        """Return the trial of the choice that was not tried for longest.

        If its method is not known yet, that is the trial that teaches most for its price, as long
        as the time for it can be saved up in ``PATIENCE`` steps.
        """
        trials = self._trials(streams, choices)
        oldest = min(trials, key=lambda each: self._tried.get(each.choice, 0), default=None)
        if oldest is None:
            return None
        least, *others = (trial for trial in trials if trial.choice == oldest.choice)
        saved = self._saved(len(streams), PATIENCE)
        for trial in others:
            if trial.price / len(trial.ids) < least.price / len(least.ids) and trial.price <= saved:
                least = trial
        return least

    def _try(self, trial: Trial, streams: Sequence[Stream], choices: list[Choice]) -> list[Choice]:
        """Return the choices of a step that tries something."""
        ids = trial.ids
        if not ids or self.survival.judged(trial.choice.method, streams[0].workload) >= SURE:
            self._planned = None  # or it would be tried again until the next review
        self._steady = False
        places = [i for i, s in enumerate(streams) if s.fixed is None and (not ids or s.id in ids)]
        if not places:
            return choices  # its sequences have ended
        self._trial = trial
        self._tried[trial.choice] = self.step
        self._num_tried += bool(ids)
        self.explored += trial.price
        self._rested = self._saved(len(streams)) + trial.price
        for place in places:
            choices[place] = trial.choice
        return choices

    def _trials(self, streams: Sequence[Stream], choices: Sequence[Choice]) -> list[Trial]:
        """Return what may be tried: plain steps where drafts are used, and what nobody uses.

        A trial costs the seconds that it takes beyond the usual step, and those that the batch
        needs for the tokens that it brings less.
        """
        found: list[Trial] = []
        drafts = (c.depth and not s.fixed for s, c in zip(streams, choices, strict=True))
        near = self.plain_per_second > NEAR * self.tokens_per_second
        late = self.step - self._tried.get(PLAIN, 0) >= (PLAIN_STEPS if near else SURE_STEPS)
        if (late or (near and not self.costs.measured(len(streams)))) and any(drafts):
            took = self._plain_seconds
            lost = took * (1 - self.plain_per_second / self.tokens_per_second)
            return [Trial(PLAIN, (), took, max(lost, took * LEAST_PRICE))]
        self._turn = (self._turn + 1) % len(streams)
        kinds: dict[tuple[tuple[str, ...], int], Stream] = {}
        for stream in (*streams[self._turn :], *streams[: self._turn]):
            if stream.fixed is None:
                kinds.setdefault((stream.methods, stream.bound), stream)
        unused = (choice for stream in kinds.values() for choice in self._unused(stream, choices))
        for choice in dict.fromkeys(unused):
            for places, missed in self._triers(choice, streams):
                (took, gain), (usual, lost) = (
                    self._drafting(streams[places[0]], each, len(places), len(streams))
                    for each in (choice, choices[places[0]])
                )
                took += missed
                price = max(took - usual + (lost - gain) / self.tokens_per_second, took / 4)
                seconds = self._step_seconds + took - usual
                ids = tuple(streams[place].id for place in places)
                found.append(Trial(choice, ids, seconds, price))
        return found

    def _triers(
        self, choice: Choice, streams: Sequence[Stream]
    ) -> Iterator[tuple[list[int], float]]:
        """Yield the places of sequences that may try a choice, and the seconds to catch up.

        The first are a few sequences, in turn or those whose drafters have missed least. If the
        method is not known yet, all sequences follow, since they share a drafter's passes.
        """
        drafters = self.methods[choice.method].drafters
        missed = {
            i: sum([self.costs.read(n, self._missed[streams[i].id].get(n, 0)) for n in drafters])
            for i in (*range(self._turn, len(streams)), *range(self._turn))
            if streams[i].fixed is None
            and choice.method in streams[i].methods
            and choice.depth <= streams[i].bound
        }
        places = sorted(missed, key=missed.__getitem__)
        few = 1 + len(streams) // TRIERS
        yield places[:few], sum([missed[i] for i in places[:few]])
        judged = self.survival.judged(choice.method, streams[places[0]].workload)
        if len(places) > few and judged < SURE:
            yield places, sum(missed.values())

    def _unused(self, stream: Stream, choices: Sequence[Choice]) -> list[Choice]:
        """Return methods that nobody uses, or a longer draft of the others.

        Longer drafts that promise more are tried until it was measured what so many rows take.
        """
        most = {name: min(self.methods[name].longest, stream.bound) for name in stream.methods}
        unused = {*stream.methods} - self.shadowed - {choice.method for choice in choices}
        for choice in dict.fromkeys(choices) if self._num_tried >= KNOWN * len(unused) else ():
            name, depth = choice
            if name not in most:
                continue
            rows = len(choices) + self.methods[name].nodes(most[name])
            curve = self.survival.curve(name, stream.workload, most[name])
            promises = 1 + sum(curve) > MORE * (1 + sum(curve[:depth]))
            if promises and not self.costs.measured(rows):
                return [Choice(name, most[name])]
        return [Choice(name, min(PROBE_DEPTH, most[name])) for name in sorted(unused)]

    def _drafting(
        self, stream: Stream, choice: Choice, count: int, streams: int
    ) -> tuple[float, float]:
        """Return the seconds that drafts of ``count`` sequences add, and the tokens they bring."""
        if not choice.depth:
            return 0.0, 0.0
        method, context = self.methods[choice.method], self._context
        more = self.costs.verify(streams + count * method.nodes(choice.depth), context)
        more -= self.costs.verify(streams, context)
        tokens = sum(self.survival.curve(choice.method, stream.workload, choice.depth))
        return draft_cost(self.costs, method, [count] * choice.depth) + more, count * tokens

    def release(self, id: str) -> None:
        """Forget a sequence that ended."""
        self._assigned.pop(id, None)
        self.survival.release(id, self.methods)

    def observe(
        self, streams: int, emitted: int, drafting: float, took: float, slow: float = 1.0
    ) -> None:
        """Take in some steps of the same sequences.

        Args:
            streams: sequences.
            emitted: tokens of the steps with drafts.
            drafting: seconds of the steps with drafts.
            took: seconds of all.
            slow: how many times longer than expected the target took for the same rows.
        """
        self.seconds += took
        if drafting:
            lost = drafting / (self._plain_seconds * max(1.0, slow)) - emitted / streams
            self._guards.observe(streams, self.step, lost)
            if self._guards.pauses(streams, self.step):
                self._steady = False

    def observe_trial(self, seconds: float) -> None:
        """Take in what a step took in which something was tried, beyond what was expected."""
        if self._trial is not None:
            self.explored += min(max(0.0, seconds - self._trial.seconds), self._step_seconds)

    @property
    def pauses(self) -> dict[int, int]:
        """The steps for which drafting still pauses, by the least batch size that they are for."""
        return self._guards.left(self.step)
