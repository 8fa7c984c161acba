"""Speculation at a batch size: speeds, times, memory, and their uncertainty."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from math import exp, inf
from statistics import quantiles
from typing import NamedTuple

from ...engine.control.tuning import USUAL
from ...errors import ConfigError
from .acceptance import Acceptance
from .catalogue import Shape
from .figure import MEASURED, MODELLED
from .roofline import ACTIVATION, BYTES, MEDUSA_HEADS, Steps
from .situation import PlannedDrafter, Situation

BATCHES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Batch sizes that are compared, in addition to those of the traffic."""
DRAWS = 400
SPREADS = {MODELLED: (0.15, 0.15, 0.2), MEASURED: (0.05, 0.05, 0.05)}
"""Standard deviations of the log seconds of drafting, of additional rows and of whole steps with
drafts, by the costs' evidence. That of whole modelled steps is about the distance of published
figures from their predictions (docs/planning.md); the others are assumed."""


class MemoryUse(NamedTuple):
    """Bytes needed besides the target, and the sequences that fit with and without them."""

    drafter: float
    per_sequence: float
    """Bytes of the drafter's KV cache."""
    buffers: float
    """Logits of the rows of one sequence's draft."""
    plain: float
    """Sequences that fit without speculation."""
    speculative: float


class Draw(NamedTuple):
    """One random outcome: acceptance in standard deviations, costs as factors."""

    acceptance: float = 0.0
    drafting: float = 1.0
    verifying: float = 1.0
    whole: float = 1.0


EXPECTED = Draw()


def draws(evidence: str) -> list[Draw]:
    """Return random draws of acceptance and costs, the same in each call."""
    source = random.Random(0)
    return [
        Draw(source.gauss(), *(exp(each * source.gauss()) for each in SPREADS[evidence]))
        for _ in range(DRAWS)
    ]


def tenths(values: Sequence[float]) -> tuple[float, float, float]:
    """Return P10, P50 and P90."""
    low, *_, high = tenth = quantiles(values, n=10)
    return low, tenth[4], high


@dataclass(frozen=True)
class Forecast:
    """The speeds of a situation; prefills are seconds per prompt, the drafter's in addition."""

    steps: Steps
    acceptance: Acceptance
    output_tokens: int
    prefill: float
    draft_prefill: float
    memory: MemoryUse | None
    longest: int

    def batch(self, batch: int, k: int) -> int:
        """Return how many of ``batch`` sequences run at once: as many as fit, perhaps none."""
        if self.memory is None:
            return batch
        return int(min(batch, self.memory.speculative if k else self.memory.plain))

    def tpot(self, batch: int, k: int, draw: Draw = EXPECTED) -> float:
        """Return the seconds per output token of a sequence."""
        running = self.batch(batch, k)
        if not k:
            return self.steps.seconds(running, 0)
        plain = self.steps.verify(running, 0)
        verify = self.steps.verify(running, self.acceptance.drafted(k))
        more = (verify - plain) * draw.verifying
        drafting = self.steps.draft(running, k) * draw.drafting
        seconds = plain + more + drafting + self.steps.costs.host_at(running)
        return seconds * draw.whole / self.acceptance.tokens(k, draw.acceptance)

    def ttft(self, k: int) -> float:
        """Return the seconds to the first token of a request that does not wait in a queue."""
        return self.prefill + (self.draft_prefill if k else 0.0)

    def speed(self, batch: int, k: int, draw: Draw = EXPECTED) -> float:
        """Return the tokens per second of a batch, including the time for its prompts."""
        running = self.batch(batch, k)
        if not running:
            return 0.0
        decoding = (self.output_tokens - 1) * self.tpot(batch, k, draw)
        return running * self.output_tokens / (decoding + running * self.ttft(k))

    def speedup(self, batch: int, k: int, draw: Draw = EXPECTED) -> float:
        """Return tokens per second with drafts of ``k`` tokens over those without."""
        return self.speed(batch, k, draw) / self.speed(batch, 0)

    def best(self, batch: int) -> tuple[int, float]:
        """Return the best draft length of at least 1, and its speedup."""
        lengths = [k for k in USUAL.depths if k < self.longest] + [self.longest]
        speedups = [(self.speedup(batch, k), -k) for k in lengths]
        speedup, length = max(speedups)
        return -length, speedup

    def chosen(self, batch: int) -> int:
        """Return the draft length to use: 0 if the best one misses the controller's threshold."""
        k, speedup = self.best(batch)
        return k if speedup >= USUAL.enter_speedup else 0

    def range_of(self, shares: Mapping[int, float]) -> tuple[float, float, float]:
        """Return P10, P50 and P90 of the speedup over a mix of batch sizes, each at its K."""
        lengths = {batch: self.chosen(batch) for batch in shares}
        if not any(lengths.values()):
            lengths = {batch: self.best(batch)[0] for batch in shares}
        plain = sum(share * self.speed(batch, 0) for batch, share in shares.items())
        worlds = draws(self.steps.evidence)
        speeds = [sum(s * self.speed(b, lengths[b], w) for b, s in shares.items()) for w in worlds]
        return tenths([speed / plain for speed in speeds])

    def extra(self, batch: int) -> float:
        """Return the bytes that speculation adds at a batch size."""
        if self.memory is None:
            return 0.0
        return self.memory.drafter + batch * (self.memory.per_sequence + self.memory.buffers)

    @property
    def limit(self) -> int:
        """The largest batch that is worth comparing."""
        return int(min(self.memory.plain if self.memory else inf, BATCHES[-1]))

    def ranges(self, also: Sequence[int] = ()) -> list[tuple[int, int, int, float]]:
        """Return ranges of batch sizes with equal draft length: first, last, K, least speedup."""
        most = max(self.limit, *also) if also else self.limit
        sizes = sorted({size for size in (*BATCHES, *also) if size <= most} | {1})
        spans: list[tuple[int, int, int, float]] = []
        for size, after in zip(sizes, [*sizes[1:], most + 1], strict=True):
            k, speedup = self.best(size)
            k, speedup = (k, speedup) if speedup >= USUAL.enter_speedup else (0, 1.0)
            if spans and spans[-1][2] == k:
                first, _, _, least = spans.pop()
                spans.append((first, after - 1, k, min(least, speedup)))
            else:
                spans.append((size, after - 1, k, speedup))
        return spans

    def break_even(self, batch: int, k: int) -> float | None:
        """Return the accepted / drafted at ``k`` at which speculation breaks even; None if none."""
        if self.with_chance(1.0).speedup(batch, k) < 1:
            return None
        low, high = 0.0, 1.0
        for _ in range(40):
            middle = (low + high) / 2
            loses = self.with_chance(middle).speedup(batch, k) < 1
            low, high = (middle, high) if loses else (low, middle)
        return self.with_chance(high).acceptance.rate(k)

    def with_chance(self, chance: float) -> Forecast:
        """Return the forecast with the same chance of acceptance for each drafted token."""
        return replace(self, acceptance=self.acceptance.with_chances(lambda _: chance))

    def halved(self, batch: int, k: int) -> dict[str, float]:
        """Return, by limiting factor, the speedup if half of that factor were gone."""
        better = self.acceptance.with_chances(lambda chance: 1 - (1 - chance) / 2)
        accepting = replace(self, acceptance=better)
        prompting = replace(self, draft_prefill=self.draft_prefill / 2)
        speedups = {
            "acceptance": accepting.speedup(batch, k),
            "drafting": self.speedup(batch, k, Draw(drafting=0.5)),
            "verification": self.speedup(batch, k, Draw(verifying=0.5)),
            "the drafter's prompt": prompting.speedup(batch, k),
        }
        if self.memory and self.memory.speculative < batch:
            between = (self.memory.plain + self.memory.speculative) / 2
            roomier = replace(self, memory=self.memory._replace(speculative=between))
            speedups["memory"] = roomier.speedup(batch, k)
        return speedups


def judged(situation: Situation, outlook: Forecast) -> dict[int, float]:
    """Return shares of time by batch size; for priority throughput, one that fills the machine."""
    shares = {size: share for size, share in situation.concurrency.items() if share > 0}
    if situation.priority == "throughput":
        return {max(outlook.limit, *shares): 1.0}
    return shares


def median_size(shares: Mapping[int, float]) -> int:
    """Return the median batch size, weighted by time."""
    sizes = sorted(shares)
    sums = accumulate(shares[size] for size in sizes)
    half = sum(shares.values()) / 2
    return next(size for size, below in zip(sizes, sums, strict=True) if below >= half)


def memory_of(situation: Situation, target: Shape, drafter: PlannedDrafter) -> MemoryUse | None:
    """Return the memory use of a situation; None if the hardware is unknown."""
    machines = situation.machines(drafter)
    if machines is None:
        return None
    machine, drafting = machines
    tokens = situation.input_tokens + situation.output_tokens
    own = target.kv_values * ACTIVATION * tokens
    free = machine.memory - machine.weights(target)
    row = 4.0 * target.vocabulary
    if free < own + row:
        where = f"{machine.count} x {machine.device.name}"
        raise ConfigError(
            f"{target.name} in {machine.dtype} takes {machine.weights(target) / 1e9:.0f} GB and "
            f"{own / 1e9:.1f} GB for a sequence; {where} give {machine.memory / 1e9:.0f} GB: raise "
            "the tensor parallel size, or give larger devices or a smaller dtype."
        )
    weights = cache = 0.0
    if situation.placement == "same":
        if drafter.shape is not None:
            weights = drafting.weights(drafter.shape)
            cache = drafter.shape.kv_values * ACTIVATION * tokens
        elif drafter.method == "medusa":
            values = MEDUSA_HEADS * target.hidden * (target.hidden + target.vocabulary)
            weights = values * BYTES[drafting.dtype]
    buffers = row * (1 + situation.longest)
    more = max(0.0, free - weights) / (own + cache + buffers)
    return MemoryUse(weights, cache, buffers, free / (own + row), more)


def prefills(
    situation: Situation, target: Shape, drafter: PlannedDrafter, steps: Steps
) -> tuple[float, float]:
    """Return the seconds in which the target reads a prompt, and those that the drafter adds."""
    tokens = situation.input_tokens
    machines = situation.machines(drafter)
    if steps.evidence == MEASURED or machines is None:
        passes = steps.costs.drafters[steps.name].passes
        whole = steps.costs.target.at(tokens) + steps.costs.host
        return whole, passes.at(tokens) if passes else 0.0
    machine, drafting = machines
    own = machine.prefill(target, tokens) + steps.costs.host
    more = drafting.prefill(drafter.shape, tokens) if drafter.shape else 0.0
    # A drafter on another device reads the prompt while the target does.
    return own, more if situation.placement == "same" else max(0.0, more - own)


def forecast(situation: Situation, target: Shape, drafter: PlannedDrafter) -> Forecast | None:
    """Return the forecast of a situation; None if the cost of steps is unknown."""
    memory = memory_of(situation, target, drafter)
    steps = situation.steps(target, drafter)
    if steps is None:
        return None
    prefill, more = prefills(situation, target, drafter, steps)
    return Forecast(
        steps, situation.expected(drafter), situation.output_tokens, prefill, more, memory,
        situation.longest,
    )  # fmt: skip
