"""The costs of steps: expected by rows, sequences and context, and corrected by what steps take."""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import floor, inf, log2, prod
from typing import NamedTuple

from ...base.types import StepRecord
from .tuning import USUAL, Tuning


class Curve(NamedTuple):
    """Seconds by number of rows: linear between points, and with the last slope beyond them.

    ``rows`` rise from 1; ``seconds`` do not fall.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: float) -> float:
        """Return the seconds of ``rows`` rows, 0 for none; a mean need not be whole."""
        if rows <= 0:
            return 0.0
        known, seconds = self
        last = len(known) - 1
        if not last:
            return seconds[0]
        right = bisect_right(known, rows, 1, last)
        begin, least = known[right - 1], seconds[right - 1]
        share = (rows - begin) / (known[right] - begin)
        return least + share * (seconds[right] - least) if share > 0 else least


@dataclass(frozen=True)
class DraftCosts:
    """The seconds of one drafter: ``passes`` by sequences in a pass, and ``call`` once a step.

    A drafter without passes proposes a whole draft at once. If it ``repeats``, each pass runs the
    rows of all earlier passes again.
    """

    passes: Curve | None = None
    call: float = 0.0
    per_sequence: float = 0.0
    repeats: bool = False

    def _each(self, passes: Curve, counts: Sequence[float]) -> list[float]:
        """Return the seconds of each pass, see ``at``."""
        if not self.repeats:
            return [passes.at(n) * min(n, 1) for n in counts]
        return [passes.at(n * depth) * min(n, 1) for depth, n in enumerate(counts, 1)]

    def at(self, counts: Sequence[float]) -> float:
        """Return the seconds if ``counts[i]`` sequences are expected to draft at depth i + 1."""
        if not counts or not counts[0]:
            return 0.0
        seconds, passes = self.call + self.per_sequence * counts[0], self.passes
        if passes is None:
            return seconds
        if counts[-1] == counts[0] and not self.repeats:
            return seconds + passes.at(counts[0]) * min(counts[0], 1) * len(counts)
        return seconds + sum(self._each(passes, counts))

    def up_to(self, counts: Sequence[float]) -> list[float]:
        """Return the seconds of drafts that end after 0, 1, ... depths, see ``at``."""
        if not counts or not counts[0]:
            return [0.0] * (len(counts) + 1)
        seconds, passes = self.call + self.per_sequence * counts[0], self.passes
        if passes is None:
            return [0.0] + [seconds] * len(counts)
        each = self._each(passes, counts)
        return [0.0, *[seconds + before for before in accumulate(each)]]


@dataclass(frozen=True)
class ExpertCosts:
    """A mixture of ``experts``; each row goes to its ``top`` best.

    Reading one expert, in all layers, takes about ``share`` of a forward of one row.
    """

    experts: int
    top: int
    share: float

    def strangers(self, rows: float) -> float:
        """Return the expected number of experts of a layer that unrelated rows use."""
        asleep: float = (1 - self.top / self.experts) ** rows
        return self.experts * (1 - asleep)


@dataclass(frozen=True)
class Costs:
    """The seconds of a target and its drafters, as measured or guessed.

    ``per_context`` is a step's time for each token of a sequence's context. ``host`` and
    ``host_per_sequence`` are its time outside its forwards and its drafting.
    """

    target: Curve
    drafters: Mapping[str, DraftCosts]
    per_context: float = 0.0
    host: float = USUAL.host
    host_per_sequence: float = USUAL.host_per_sequence

    def host_at(self, sequences: int) -> float:
        """Return the seconds of a step outside its forwards and its drafting."""
        return self.host + self.host_per_sequence * sequences


UNKNOWN = Costs(Curve((1,), (1.0,)), {})  # a placeholder where costs are not used


@dataclass
class Mean:
    """A running mean; once it is known, new values are capped at ``spike`` times the mean."""

    spike: float = inf
    tuning: Tuning = USUAL
    value: float = 0.0
    seen: int = 0

    def take(self, value: float) -> None:
        if self.seen >= self.tuning.trusted:
            value = min(value, self.spike * self.value)
        self.seen += 1
        self.value += (value - self.value) * max(self.tuning.smoothing, 1 / self.seen)


class _Ratio:
    """A running geometric mean of measured over expected seconds; old ones lose weight each turn.

    ``before`` stands for the ratio before the first: with 1 a first spike does not count.
    """

    __slots__ = ("_before", "_recent", "_smoothing", "_tuning", "_turn", "seen", "value")

    def __init__(self, tuning: Tuning, smoothing: float, before: float = inf) -> None:
        self._tuning, self._smoothing = tuning, smoothing
        self.value, self.seen = 1.0, 0
        self._recent, self._turn, self._before = 0.0, 0, before

    def observe(self, ratio: float, turn: int) -> None:
        """Take in a ratio; the smaller of two in a row counts, as other work slows single steps."""
        ratio, self._before = min(ratio, self._before), ratio
        if self.seen >= self._tuning.trusted:
            spike = self._tuning.spike
            ratio = min(max(ratio, self.value / spike), self.value * spike)
        self.seen += 1
        self._recent = self.weight(turn) + 1
        self._turn = turn
        self.value *= (ratio / self.value) ** max(self._smoothing, 1 / self._recent)

    def weight(self, turn: int) -> float:
        """Return how many ratios were seen, older ones counting less."""
        return self._recent * self._tuning.freshness ** (turn - self._turn)

    @property
    def cautious(self) -> float:
        """The mean, pulled towards 1 while few ratios were seen."""
        pull = self._tuning.pull
        return (self.seen * self.value + pull) / (self.seen + pull)


class _Correction:
    """Ratios of measured to expected seconds: a recent one of all sizes, and one by power of two.

    Those of a size are relative to that of all. So a size that was last seen while the machine was
    busy, or while it was not, stays comparable with the others.
    """

    def __init__(self, tuning: Tuning, before: float = inf) -> None:
        self._tuning, self._before = tuning, before
        self.overall = _Ratio(tuning, tuning.machine_smoothing, before)
        self.sizes: dict[int, _Ratio] = {}
        self._known: dict[float, float] = {}
        self._level, self._turn = 1.0, 0

    def at(self, size: float) -> float:
        """Return the ratio at a size, interpolated between powers of two so that it never jumps."""
        value = self._known.get(size)
        if value is None:
            power = log2(max(size, 1))
            below = floor(power)
            left, right = self._near(below), self._near(below + 1)
            value = self._known[size] = left + (power - below) * (right - left)
        return value * self._level

    def _near(self, power: int) -> float:
        own = self.sizes.get(power)
        return 1.0 if own is None else own.cautious

    def count(self) -> None:
        """Apply the ratios; what recently seen sizes have in common moves to the overall ratio."""
        weights = {power: own.weight(self._turn) for power, own in self.sizes.items()}
        if total := sum(weights.values()):
            each = (own.value ** (weights[power] / total) for power, own in self.sizes.items())
            common = prod(each)
            self.overall.value *= common
            for own in self.sizes.values():
                own.value /= common
        self._known.clear()
        self._level = self.overall.value

    def seen(self, size: int) -> int:
        """Return how often a ratio was observed around a size."""
        own = self.sizes.get(_nearest_power(size))
        return 0 if own is None else own.seen

    def observe(self, size: int, ratio: float, turn: int) -> None:
        self._turn = turn
        power, tuning = _nearest_power(size), self._tuning
        own = self.sizes.get(power)
        if own is None:
            own = self.sizes[power] = _Ratio(tuning, tuning.ratio_smoothing, self._before)
        ratio = max(ratio, tuning.least_ratio)
        if own.seen >= tuning.trusted:  # a new size says nothing about the machine's speed
            self.overall.observe(ratio / own.value, turn)
        own.observe(ratio / self.overall.value, turn)


def _nearest_power(size: int) -> int:
    return round(log2(max(size, 1)))


class CorrectedCosts:
    """The target's expected seconds by rows and context, times the measured ratios.

    The prior was measured with unrelated rows. Rows that share experts of a ``mixture``, as
    measured, read fewer of them and take less.
    """

    def __init__(self, prior: Costs, tuning: Tuning, mixture: ExpertCosts | None = None) -> None:
        self._curve, self._per_context, self._tuning = prior.target, prior.per_context, tuning
        self._ratio = _Correction(tuning, 1.0)
        self._rows: dict[int, tuple[float, float]] = {}
        self._mixture = mixture
        self._strange = Mean(tuning=tuning, value=1.0)

    @property
    def strange(self) -> float | None:
        """The strangeness of rows: 0 if they share all experts, 1 if unrelated; None without."""
        return None if self._mixture is None else self._strange.value

    def _expected(self, rows: int, read: float | None = None) -> float:
        """Return the prior's seconds of rows that ``read`` that many experts of a layer."""
        seconds, mixture = self._curve.at(rows), self._mixture
        if mixture is None:
            return seconds
        most = mixture.strangers(rows)
        if read is None:
            read = mixture.top + (most - mixture.top) * self._strange.value
        one = self._curve.at(1)
        return max(seconds - max(0.0, most - read) * mixture.share * one, min(one, seconds))

    @property
    def machine(self) -> float:
        """The ratio of recently measured to expected seconds of forwards of all sizes."""
        return self._ratio.overall.value

    def count(self) -> None:
        self._ratio.count()
        self._rows.clear()

    def at(self, rows: int, context: int) -> float:
        known = self._rows.get(rows)
        if known is None:
            ratio = self._ratio
            # Fewer rows never cost more than more rows, whatever was measured under load.
            larger = [2**power for power in ratio.sizes if 2**power > rows]
            most = min([self._expected(size) * ratio.at(size) for size in larger], default=inf)
            seconds = self._expected(rows)
            known = self._rows[rows] = seconds, min(ratio.at(rows), most / seconds)
        return (known[0] + self._per_context * context) * known[1]

    def measured(self, rows: int) -> bool:
        return self._ratio.seen(rows) >= self._tuning.trusted

    def observe(
        self, rows: int, context: int, seconds: float, turn: int, read: float | None = None
    ) -> None:
        prior = self._expected(rows, read) + self._per_context * context
        self._ratio.observe(rows, seconds / prior, turn)
        mixture = self._mixture
        if mixture is not None and read is not None and rows > 1:
            most = mixture.strangers(rows) - mixture.top
            self._strange.take(min(1.0, max(0.0, (read - mixture.top) / most)) if most > 0 else 0.0)


class MeasuredCosts:
    """Means of the target's measured seconds by rows, where no expected ones are known.

    Between measured sizes they are interpolated linearly; beyond these they follow ``shape``.
    """

    machine = 1.0

    def __init__(self, shape: Curve, spike: float, tuning: Tuning = USUAL) -> None:
        self._shape, self._spike, self._tuning = shape, spike, tuning
        self._sizes: dict[int, Mean] = {}

    def count(self) -> None:
        """Do nothing: means apply at once."""

    def at(self, rows: int, context: int) -> float:
        known, shape = sorted(self._sizes), self._shape
        seconds = list(accumulate((self._sizes[size].value for size in known), max))
        place = bisect_right(known, rows)
        if 0 < place < len(known):
            share = (rows - known[place - 1]) / (known[place] - known[place - 1])
            return seconds[place - 1] + share * (seconds[place] - seconds[place - 1])
        if not known:
            return shape.at(rows)
        end = place - 1 if place else 0
        return seconds[end] * shape.at(rows) / shape.at(known[end])

    def measured(self, rows: int) -> bool:
        power, trusted = rows.bit_length(), self._tuning.trusted
        return any(n.bit_length() == power and m.seen >= trusted for n, m in self._sizes.items())

    def observe(
        self, rows: int, context: int, seconds: float, turn: int, read: float | None = None
    ) -> None:
        self._sizes.setdefault(rows, Mean(self._spike, self._tuning)).take(seconds)


class CostModel:
    """The costs of one engine: expected ones, corrected by what its steps take.

    How much slower than expected the target is counts as the machine's recent speed, so that a
    drafter that was last used while the machine was busy does not stay expensive. ``target`` has
    the seconds of forwards; None corrects the prior's. ``mixture`` are its experts, if it has any.
    """

    def __init__(
        self,
        prior: Costs = UNKNOWN,
        tuning: Tuning = USUAL,
        target: MeasuredCosts | None = None,
        mixture: ExpertCosts | None = None,
    ) -> None:
        self.prior, self.tuning = prior, tuning
        own = target or CorrectedCosts(prior, tuning, mixture)
        self.target: MeasuredCosts | CorrectedCosts = own
        self.verify = self.target.at
        """Returns the seconds of a forward, given its rows and its tokens of context in all."""
        self.measured = self.target.measured
        """Returns True if forwards of about that many rows were measured while the engine ran."""
        # One slow first draft, or its verification, must not bar a drafter.
        self._drafters = {name: _Correction(tuning, 1.0) for name in prior.drafters}
        self._host = _Correction(tuning)
        self._steps = defaultdict[str, _Ratio](lambda: _Ratio(tuning, tuning.ratio_smoothing, 1.0))
        self._turn = 0
        self._drafts: dict[tuple[str, float, int], float] = {}
        self._waited: dict[str, float] = {}
        self.draft_seconds = self.verify_seconds = 0.0  # seconds of all steps so far
        self.speedups: dict[str, float] = {}
        """The speedup over plain decoding of steps with a drafter, by drafter."""
        self.seconds_per_row: float | None = None
        """Seconds of a prompt's row in a step with streams; None until measured."""
        self._decode_seconds: float | None = None
        self._plain_seconds: dict[int, float] = {}

    @property
    def strange(self) -> float | None:
        """See ``CorrectedCosts``."""
        target = self.target
        return target.strange if isinstance(target, CorrectedCosts) else None

    def count(self) -> None:
        """Apply what was observed since the last call."""
        self.target.count()
        for each in (self._host, *self._drafters.values()):
            each.count()
        self._drafts.clear()

    def host(self, sequences: int) -> float:
        """Return the seconds of a step outside its forward and its drafting."""
        return self.prior.host_at(sequences) * self._host.at(sequences)

    def draft(self, name: str, counts: Sequence[float]) -> float:
        """Return the seconds of a drafter, see ``DraftCosts.at``."""
        if not counts or not counts[0]:
            return 0.0
        key, alike = (name, counts[0], len(counts)), counts[-1] == counts[0]
        seconds = self._drafts.get(key) if alike else None
        if seconds is None:
            own = self._drafters[name].at(counts[0])
            seconds = self.prior.drafters[name].at(counts) * own * self.target.machine
            if alike:
                self._drafts[key] = seconds
        return seconds

    def drafts(self, name: str, counts: Sequence[float]) -> list[float]:
        """Return the seconds of drafts that end after 0, 1, ... depths, see ``draft``."""
        own = self._drafters[name].at(counts[0]) * self.target.machine
        return [seconds * own for seconds in self.prior.drafters[name].up_to(counts)]

    def waited(self, name: str) -> float:
        """Return the share of a drafter's recent drafts that were not drafted ahead."""
        return self._waited.get(name, 1.0)

    def reads(self, name: str) -> bool:
        """Return True if a drafter must read a sequence before it can draft for it."""
        known = self.prior.drafters.get(name)
        return known is not None and known.passes is not None

    def read(self, name: str, tokens: float) -> float:
        """Return the seconds that a drafter takes to read ``tokens`` missed tokens."""
        at_once = self.tuning.read_tokens
        return self.draft(name, [at_once]) * tokens / at_once

    def step(self, method: str) -> float:
        """Return how many times longer steps of a method take than the sum of their parts."""
        return self._steps[method].cautious

    def chunk(self) -> int | None:
        """Return the prompt rows that may run in a step with streams; None if not measured yet."""
        if self.seconds_per_row is None:
            return None
        tuning = self.tuning
        stall = max(tuning.stall_seconds, tuning.stall_steps * (self._decode_seconds or 0.0))
        return max(tuning.fewest_chunk_rows, int(stall / self.seconds_per_row))

    def knows_plain(self, streams: int) -> bool:
        """Return True where a step without drafts of so many streams was measured."""
        return streams in self._plain_seconds

    def observe(self, record: StepRecord) -> None:
        """Take in a step as a whole: its drafters' speedup, or what plain decoding takes."""
        plan, seconds = record.plan, record.seconds
        streams = plan.decoding
        self.draft_seconds += seconds.draft
        self.verify_seconds += seconds.verify
        if plan.rows != streams:
            if plan.rows - streams >= self.tuning.counted_rows:
                per_row = seconds.step / plan.rows
                self.seconds_per_row = self._smoothed(self.seconds_per_row, per_row)
            return
        self._decode_seconds = self._smoothed(self._decode_seconds, seconds.step)
        plain, drafters = self._plain_seconds.get(streams), record.drafters
        if not drafters:
            self._plain_seconds[streams] = self._smoothed(plain, seconds.step)
        elif len(drafters) == 1 and plain is not None:
            (drafter,) = drafters
            # A plain step slower than one with drafts was slowed by other work.
            speedup = len(record.events) / streams * min(plain / seconds.step, 1.0)
            self.speedups[drafter] = self._smoothed(self.speedups.get(drafter), speedup)

    def _smoothed(self, before: float | None, value: float) -> float:
        return value if before is None else before + self.tuning.smoothing * (value - before)

    def observe_step(self, method: str, ratio: float) -> None:
        """Take in a step's seconds over the sum of those expected of its parts."""
        self._steps[method].observe(ratio, self._turn)

    def observe_verify(
        self, rows: int, context: int, seconds: float, read: float | None = None
    ) -> None:
        """Take in a forward's seconds, and the experts per layer that it read, if it has any."""
        self._turn += 1
        self.target.observe(rows, context, seconds, self._turn, read)

    def observe_host(self, sequences: int, seconds: float) -> None:
        """Take in a step's seconds outside its forward and its drafting."""
        prior = self.prior.host_at(sequences)
        self._host.observe(sequences, max(seconds, 0.0) / prior, self._turn)

    def observe_ahead(self, name: str, share: float) -> None:
        """Take in the share of a drafter's drafts that was drafted ahead."""
        if share or name in self._waited:
            self._waited[name] = self._smoothed(self._waited.get(name), 1 - share)

    def observe_draft(self, name: str, counts: Sequence[int], seconds: float) -> None:
        """Take in the seconds of a drafter's drafts."""
        prior = self.prior.drafters[name].at(counts) * self.target.machine
        if prior > 0:
            self._drafters[name].observe(counts[0], seconds / prior, self._turn)
