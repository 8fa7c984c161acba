"""The costs of steps: measured as they run, and predicted by rows, sequences and context.

Measured are the length of prompt chunks and the speedup of drafts; predictions are corrected by
what steps took.

None of it changes the output: a row's bits do not depend on its chunk.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import accumulate
from math import floor, inf, log2, prod
from typing import NamedTuple

SMOOTHING = 0.1
"""Weight of the newest measurement."""
FEWEST_ROWS = 16
"""Fewest rows of a chunk, so that prompts make progress."""
COUNTED_ROWS = 32
"""Fewest committed rows of a step that counts for the cost of a prompt's row."""
STALL_SECONDS, STALL_STEPS = 0.02, 2.0
"""Longest wait of running streams for a chunk: the longer of the two."""
FIRST_PROBE, PROBE_STEPS = 64, 256
"""Steps with drafts before the first step that measures plain decoding, and before the next."""
RATIO_SMOOTHING = 0.05
"""Weight of the newest ratio of measured to predicted seconds, once there are many."""
MACHINE_SMOOTHING = 0.1
"""The same where ratios tell how fast the machine is of late."""
PULL = 4.0
"""Measurements that a size needs before its own count as much as those of all sizes."""
SPIKE = 1.5
"""A measurement counts as this many times what was expected at most, and at least its inverse."""
HOST, HOST_PER_SEQUENCE = 1e-4, 2e-5
"""Seconds of a step beside its forwards, before they are measured."""
CALL, PER_SEQUENCE = 2e-5, 5e-6
"""Seconds of a drafter without a model: once a step, and for each sequence."""
LEAST_RATIO = 0.01
READ = 256
"""Tokens that a drafter reads at once where it has missed many."""
FRESHNESS = 0.98
"""What a ratio keeps of its weight with each forward that is measured."""
TRUSTED = 4
"""Measurements before spikes are cut."""


def smoothed(before: float | None, value: float) -> float:
    """Return a running mean with a new value; ``before`` is None where there was none."""
    return value if before is None else before + SMOOTHING * (value - before)


@dataclass
class StepCosts:
    """Running means over the steps of one engine.

    ``speedups`` holds by drafter how much faster than plain its steps emit: emitted tokens times
    the seconds of a plain step over the seconds taken. A plain step's time depends on how many
    sequences decode together, so it is kept for each number.
    """

    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    speedups: dict[str, float] = field(default_factory=dict)
    seconds_per_row: float | None = None
    decode_seconds: float | None = None
    _plain: dict[int, float] = field(default_factory=dict)
    _since_probe: dict[int, int] = field(default_factory=dict)

    def max_chunk(self, most: int) -> int:
        """Return the rows of prompts that may run beside streams, ``most`` if not measured yet."""
        if self.seconds_per_row is None:
            return most
        allowed = max(STALL_SECONDS, STALL_STEPS * (self.decode_seconds or 0.0))
        return min(most, max(FEWEST_ROWS, int(allowed / self.seconds_per_row)))

    def probe_due(self, decoding: int) -> bool:
        """Return True if the next step of so many sequences should go without drafts."""
        due = PROBE_STEPS if decoding in self._plain else FIRST_PROBE
        return self._since_probe.get(decoding, 0) >= due

    def observe(
        self,
        rows: int,
        decoding: int,
        emitted: int,
        drafters: Set[str],
        seconds: float,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Take in one step.

        Args:
            rows: committed rows.
            decoding: sequences that decode.
            emitted: emitted tokens.
            drafters: who drafted.
            seconds: the whole step's.
            draft_seconds, verify_seconds: the shares of drafting and verifying.
        """
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        if rows != decoding:
            if rows - decoding >= COUNTED_ROWS:
                self.seconds_per_row = smoothed(self.seconds_per_row, seconds / rows)
            return
        self.decode_seconds = smoothed(self.decode_seconds, seconds)
        if not drafters:
            self._plain[decoding] = smoothed(self._plain.get(decoding), seconds)
            self._since_probe[decoding] = 0
        elif len(drafters) == 1:
            (drafter,) = drafters
            self._since_probe[decoding] = self._since_probe.get(decoding, 0) + 1
            plain = self._plain.get(decoding)
            if plain is not None:
                speedup = emitted / decoding * plain / seconds
                self.speedups[drafter] = smoothed(self.speedups.get(drafter), speedup)


class Curve(NamedTuple):
    """Seconds by a number of rows: straight between points, on with the last slope behind them.

    ``rows`` rise from 1 on; ``seconds`` do not fall.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]

    def at(self, rows: float) -> float:
        """Return the seconds of ``rows`` rows, 0 for none; a mean of rows may lie between two."""
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

    A drafter without passes proposes a whole draft at once.
    """

    passes: Curve | None = None
    call: float = 0.0
    per_sequence: float = 0.0

    def at(self, counts: Sequence[float]) -> float:
        """Return the seconds where ``counts[i]`` sequences draft a token at depth i + 1.

        Of less than one, expected, a pass happens as seldom.
        """
        if not counts or not counts[0]:
            return 0.0
        seconds, passes = self.call + self.per_sequence * counts[0], self.passes
        if passes is None:
            return seconds
        if counts[-1] == counts[0]:
            return seconds + passes.at(counts[0]) * min(counts[0], 1) * len(counts)
        return seconds + sum([passes.at(n) * min(n, 1) for n in counts])

    def up_to(self, counts: Sequence[float]) -> list[float]:
        """Return the seconds of drafts that end behind 0, 1, ... depths, see ``at``."""
        if not counts or not counts[0]:
            return [0.0] * (len(counts) + 1)
        seconds, passes = self.call + self.per_sequence * counts[0], self.passes
        if passes is None:
            return [0.0] + [seconds] * len(counts)
        each = [passes.at(n) * min(n, 1) for n in counts]
        return [0.0, *[seconds + before for before in accumulate(each)]]


@dataclass(frozen=True)
class Costs:
    """The seconds of a target and its drafters, as measured or guessed.

    ``per_context`` is the time that a step takes for each token of the context of a sequence;
    ``host`` and ``host_per_sequence`` what it takes beside its forwards and its drafting.
    """

    target: Curve
    drafters: Mapping[str, DraftCosts]
    per_context: float = 0.0
    host: float = HOST
    host_per_sequence: float = HOST_PER_SEQUENCE

    def host_at(self, sequences: int) -> float:
        """Return the seconds of a step beside its forwards and its drafting."""
        return self.host + self.host_per_sequence * sequences


@dataclass
class _Ratio:
    """A running geometric mean of measured over predicted seconds.

    ``smoothing`` weighs the newest.
    """

    smoothing: float = RATIO_SMOOTHING
    value: float = 1.0
    seen: int = 0
    _recent: float = 0.0
    _turn: int = 0
    _before: float = inf

    def observe(self, ratio: float, turn: int) -> None:
        """Take in a ratio; the longer ago the others were seen, by ``turn``, the more it weighs.

        The lesser of two in a row counts, so that no step which others slowed counts alone.
        """
        ratio, self._before = min(ratio, self._before), ratio
        if self.seen >= TRUSTED:
            ratio = min(max(ratio, self.value / SPIKE), self.value * SPIKE)
        self.seen += 1
        self._recent = self.weight(turn) + 1
        self._turn = turn
        self.value *= (ratio / self.value) ** max(self.smoothing, 1 / self._recent)

    def weight(self, turn: int) -> float:
        """Return how many were seen, older ones counting less."""
        return self._recent * FRESHNESS ** (turn - self._turn)

    @property
    def cautious(self) -> float:
        """The mean, nearer to 1 the fewer were seen."""
        return (self.seen * self.value + PULL) / (self.seen + PULL)


def _nearest_power(size: int) -> int:
    return round(log2(max(size, 1)))


@dataclass
class _Correction:
    """Ratios of measured to predicted seconds, of all sizes of late and around powers of two.

    Those of a size are relative to that of all, so that one which was last seen while the machine
    was busy, or while it was not, stays right beside the others.
    """

    overall: _Ratio = field(default_factory=lambda: _Ratio(MACHINE_SMOOTHING))
    sizes: dict[int, _Ratio] = field(default_factory=dict)
    _known: dict[float, float] = field(default_factory=dict)
    _level: float = 1.0
    _turn: int = 0

    def at(self, size: float) -> float:
        """Return the ratio at a size: straight between powers of two, so that it makes no steps."""
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
        self._settle()
        self._known.clear()
        self._level = self.overall.value

    def _settle(self) -> None:
        """Let what sizes that were seen of late have in common count for the machine."""
        weights = {power: own.weight(self._turn) for power, own in self.sizes.items()}
        if total := sum(weights.values()):
            each = (own.value ** (weights[power] / total) for power, own in self.sizes.items())
            common = prod(each)
            self.overall.value *= common
            for own in self.sizes.values():
                own.value /= common

    def seen(self, size: int) -> int:
        """Return how often a ratio was observed around a size."""
        own = self.sizes.get(_nearest_power(size))
        return 0 if own is None else own.seen

    def observe(self, size: int, ratio: float, turn: int) -> None:
        self._turn = turn
        own, ratio = self.sizes.setdefault(_nearest_power(size), _Ratio()), max(ratio, LEAST_RATIO)
        if own.seen >= TRUSTED:  # a new size says nothing of the machine
            self.overall.observe(ratio / own.value, turn)
        own.observe(ratio / self.overall.value, turn)


class CostModel:
    """The costs of one engine: a prior, corrected by what its steps take.

    What the target takes more or less than expected is taken for the machine's speed of late, so
    that a drafter that was last used while the machine was busy does not stay dear.
    """

    def __init__(self, prior: Costs) -> None:
        self.prior = prior
        self._target = _Correction()
        self._drafters = {name: _Correction() for name in prior.drafters}
        self._host = _Correction()
        self._steps: dict[str, _Ratio] = {}
        self._turn = 0
        self._rows: dict[int, tuple[float, float]] = {}
        self._drafts: dict[tuple[str, float, int], float] = {}

    def count(self) -> None:
        """Let what was observed since the last time count."""
        for each in (self._target, self._host, *self._drafters.values()):
            each.count()
        self._rows.clear()
        self._drafts.clear()

    def learned(self) -> Costs:
        """Return the costs as corrected so far, by the rows of the prior."""
        self.count()
        target, machine = self.prior.target, self._target.overall.value
        drafters: dict[str, DraftCosts] = {}
        for name, prior in self.prior.drafters.items():
            own, passes = self._drafters[name], prior.passes
            if passes is not None:
                seconds = [passes.at(n) * own.at(n) * machine for n in passes.rows]
                passes = Curve(passes.rows, tuple(accumulate(seconds, max)))
            each = own.overall.value * machine
            drafters[name] = DraftCosts(passes, prior.call * each, prior.per_sequence * each)
        curve = Curve(target.rows, tuple(self.verify(rows, 0) for rows in target.rows))
        return Costs(curve, drafters, self.prior.per_context * machine)

    def verify(self, rows: int, context: int) -> float:
        """Return the seconds of a forward of ``rows`` rows over ``context`` tokens in all."""
        known = self._rows.get(rows)
        if known is None:
            prior, ratio = self.prior.target, self._target
            # No rows cost more than more rows do, whatever was measured beside other work.
            larger = [2**power for power in ratio.sizes if 2**power > rows]
            most = min([prior.at(size) * ratio.at(size) for size in larger], default=inf)
            seconds = prior.at(rows)
            known = self._rows[rows] = seconds, min(ratio.at(rows), most / seconds)
        return (known[0] + self.prior.per_context * context) * known[1]

    def measured(self, rows: int) -> bool:
        """Return True where forwards of about as many rows were measured while the engine ran."""
        return self._target.seen(rows) >= TRUSTED

    def host(self, sequences: int) -> float:
        """Return the seconds of a step beside its forward and its drafting."""
        return self.prior.host_at(sequences) * self._host.at(sequences)

    def observe_host(self, sequences: int, seconds: float) -> None:
        """Take in what a step took beside its forward and its drafting."""
        prior = self.prior.host_at(sequences)
        self._host.observe(sequences, max(seconds, 0.0) / prior, self._turn)

    def draft(self, name: str, counts: Sequence[float]) -> float:
        """Return the seconds of a drafter, see ``DraftCosts.at``."""
        if not counts or not counts[0]:
            return 0.0
        if counts[-1] != counts[0]:
            return self._draft(name, counts)
        key = name, counts[0], len(counts)
        seconds = self._drafts.get(key)
        if seconds is None:
            seconds = self._drafts[key] = self._draft(name, counts)
        return seconds

    def drafts(self, name: str, counts: Sequence[float]) -> list[float]:
        """Return the seconds of drafts that end behind 0, 1, ... depths, see ``draft``."""
        own = self._drafters[name].at(counts[0]) * self._target.overall.value
        return [seconds * own for seconds in self.prior.drafters[name].up_to(counts)]

    def _draft(self, name: str, counts: Sequence[float]) -> float:
        own = self._drafters[name].at(counts[0])
        return self.prior.drafters[name].at(counts) * own * self._target.overall.value

    def reads(self, name: str) -> bool:
        """Return True if a drafter must read a sequence before it can draft for it."""
        known = self.prior.drafters.get(name)
        return known is not None and known.passes is not None

    def read(self, name: str, tokens: float) -> float:
        """Return the seconds that a drafter takes to read tokens that it has missed."""
        return self.draft(name, [READ]) * tokens / READ

    def step(self, method: str) -> float:
        """Return how many times longer steps of a method take than the sum of their parts.

        Trees cost more than chains of as many rows, and merging more than its parts.
        """
        ratio = self._steps.get(method)
        return 1.0 if ratio is None else ratio.cautious

    def observe_step(self, method: str, ratio: float) -> None:
        """Take in what a step took, over the sum of what was expected of its parts."""
        self._steps.setdefault(method, _Ratio()).observe(ratio, self._turn)

    def observe_verify(self, rows: int, context: int, seconds: float) -> None:
        """Take in what a forward took."""
        prior = self.prior.target.at(rows) + self.prior.per_context * context
        self._turn += 1
        self._target.observe(rows, seconds / prior, self._turn)

    def observe_draft(self, name: str, counts: Sequence[int], seconds: float) -> None:
        """Take in what a drafter took."""
        prior = self.prior.drafters[name].at(counts) * self._target.overall.value
        if prior > 0:
            self._drafters[name].observe(counts[0], seconds / prior, self._turn)
