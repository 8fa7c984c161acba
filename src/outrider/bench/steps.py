"""What an engine's steps cost on this machine, measured while it decodes: a profile for planning.

Steps are timed in which all sequences of a batch decode and nothing else runs. Batch sizes and
draft lengths take turns, so that none has a quiet machine for itself, and the quicker steps count,
since others may use the machine for a while.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, field
from itertools import cycle, islice
from statistics import median
from typing import NamedTuple

from ..drafters.base import Drafter
from ..engine.calibrate import plausible
from ..engine.costs import Costs, Curve, DraftCosts, StepCosts
from ..errors import ConfigError
from ..llm import LLM
from ..types import Counts, SamplingParams, Speculation
from .offline import turned
from .record import total

SIZES = (1, 4, 16)
"""Batch sizes of a profile."""
MIDDLE = 3
"""Draft length that is measured beside 0, 1 and the longest."""
ROUNDS, TOKENS = 3, 64
QUICK = 0.1
"""Share of steps that are quicker than the seconds that count."""


class Timed(NamedTuple):
    """One step of a whole batch: tokens that it emitted, and seconds."""

    emitted: int
    seconds: float
    draft: float
    verify: float

    @property
    def host(self) -> float:
        """Seconds beside drafting and verification."""
        return self.seconds - self.draft - self.verify


@dataclass
class Recorder(StepCosts):
    """Keeps what each step of ``size`` sequences took."""

    size: int = 1
    steps: list[Timed] = field(default_factory=list)

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
        """See ``StepCosts.observe``."""
        if rows == decoding == self.size:
            self.steps.append(Timed(emitted, seconds, draft_seconds, verify_seconds))


def timed(
    llm: LLM, prompts: Sequence[str], size: int, k: int, tokens: int, temperature: float = 0.0
) -> tuple[list[Timed], Counts]:
    """Return the steps of all prompts, ``size`` at a time, each drafting ``k`` tokens.

    Prompts begin again where there are fewer than ``size``.
    """
    kept, recorder = llm.engine.costs, Recorder(size=size)
    how = Speculation(enabled=k > 0, num_speculative_tokens=k or None)
    counts = Counts()
    llm.engine.costs = recorder
    try:
        whole = -(-len(prompts) // size) * size
        listed = [*islice(cycle(prompts), whole)]
        for i in range(0, whole, size):
            params = [
                SamplingParams(temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=j)
                for j in range(i, i + size)
            ]
            states = llm.start(listed[i : i + size], params, speculation=[how] * size)
            for _ in llm.run(states):
                pass
            counts.add(total(state.counts for state in states))
    finally:
        llm.engine.costs = kept
    return recorder.steps, counts


def profile(
    llm: LLM,
    prompts: Sequence[str],
    longest: int,
    sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS,
    tokens: int = TOKENS,
) -> Costs:
    """Return what steps cost by rows, sequences and draft length, with the engine's drafter.

    Args:
        llm: drafts up to ``longest`` tokens, and holds ``sizes`` sequences.
        prompts: texts of the kind that planning is about.
        longest: draft length, 2 or more.
        sizes: at least two, from 1 on.
        rounds: each batch size and length is measured so often.
        tokens: of each output.

    Raises:
        ConfigError: the outputs are too short.
    """
    lengths = sorted({0, 1, min(MIDDLE, longest), longest})
    cells = [(size, k) for size in sizes for k in lengths]
    steps: dict[tuple[int, int], list[Timed]] = {cell: [] for cell in cells}
    for number in range(-1, rounds):
        for size, k in turned(cells, number):
            found, _ = timed(llm, prompts[: max(size, 4)], size, k, tokens)
            if number >= 0:  # the first round warms up
                steps[size, k] += found
    if not all(steps.values()):
        raise ConfigError("the sample's outputs are too short to time steps; give other prompts.")
    texts = [len(llm.inputs.encode(text)) for text in prompts]
    return fitted(llm.engine.drafter, steps, sum(texts) / len(texts) + tokens / 2)


def survival_of(drafter: Drafter, counts: Counts) -> list[float]:
    """Return acceptance by position; of a lookup over all steps, since it often drafts nothing."""
    if drafter.model is not None:
        return counts.acceptance_by_position
    return [accepted / counts.steps for accepted in counts.accepted_by_position]


def quick(seconds: Iterable[float]) -> float:
    """Return the seconds that a step takes where nobody else uses the machine, about."""
    listed = sorted(seconds)
    return listed[int(QUICK * (len(listed) - 1))]


def fitted(drafter: Drafter, steps: dict[tuple[int, int], list[Timed]], context: float) -> Costs:
    """Return the costs that steps by batch size and draft length make.

    ``context`` is the mean number of tokens of a sequence.
    """
    sizes = sorted({size for size, _ in steps})
    verify = {cell: quick(each.verify for each in found) for cell, found in steps.items()}
    per_sequence = sequence_cost(verify)
    by_rows: dict[int, list[float]] = {}
    for (size, k), seconds in verify.items():
        by_rows.setdefault(size * (1 + k), []).append(seconds - per_sequence * size)
    rows = sorted(by_rows)
    target = Curve(tuple(rows), plausible(rows, [median(by_rows[each]) for each in rows]))
    host = line(sizes, [quick(each.host for each in steps[size, 0]) for size in sizes])
    # What drafted steps take beside drafting and verification is the drafter's.
    draft = {
        (size, k): quick(each.draft + each.host for each in found) - host[0] - host[1] * size
        for (size, k), found in steps.items()
    }
    longest = max(k for _, k in steps)
    if drafter.model is None:
        call, each = line(sizes, [draft[size, longest] for size in sizes])
        drafting = DraftCosts(None, call, each)
    else:
        passes = [(draft[s, longest] - draft[s, 1]) / (longest - 1) for s in sizes]
        passes = [max(each, 1e-7) for each in passes]
        one = median(draft[s, 1] - each for s, each in zip(sizes, passes, strict=True))
        drafting = DraftCosts(Curve(tuple(sizes), plausible(sizes, passes)), max(one, 0.0))
    return Costs(target, {drafter.name: drafting}, per_sequence / context, *host)


def sequence_cost(verify: dict[tuple[int, int], float]) -> float:
    """Return what a sequence adds to a forward of the same rows: the median over batch sizes.

    ``verify`` has seconds by sequences and draft length. It is half of any forward at most.
    """
    found = [
        (a - b) / (size - other)
        for (size, k), a in verify.items()
        for (other, length), b in verify.items()
        if size > other and size * (1 + k) == other * (1 + length)
    ]
    most = min(seconds / size for (size, _), seconds in verify.items()) / 2
    return min(max(median(found), 0.0), most) if found else 0.0


def line(across: Sequence[float], up: Sequence[float]) -> tuple[float, float]:
    """Return height at 0 and slope of the straight line through points, neither below 0."""
    x, y = sum(across) / len(across), sum(up) / len(up)
    spread = sum((each - x) ** 2 for each in across)
    slope = sum((a - x) * (b - y) for a, b in zip(across, up, strict=True)) / spread
    slope = max(slope, 0.0)
    return max(y - slope * x, 0.0), slope


def tokens_per_second(steps: Iterable[Timed]) -> float:
    """Return the tokens of steps over their seconds."""
    listed = list(steps)
    return sum(step.emitted for step in listed) / sum(step.seconds for step in listed)
