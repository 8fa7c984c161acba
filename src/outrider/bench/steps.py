"""A profile for planning: what an engine's steps cost on this machine while it decodes.

Only steps in which all sequences of a batch decode and nothing else runs are timed. Batch sizes and
draft lengths take turns, and the faster steps count, since others may use the machine.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import cycle, islice
from operator import attrgetter
from statistics import fmean, median
from typing import NamedTuple, TypeVar

from ..base.types import Counts, SamplingParams, Speculation, StepRecord
from ..drafters.base import Drafter
from ..engine.control.costs import Costs, Curve, DraftCosts
from ..engine.measure import plausible
from ..errors import ConfigError
from ..frontend.outputs import RequestState
from ..llm import LLM
from .offline import turned

T = TypeVar("T")
SIZES = (1, 4, 16)  # batch sizes of a profile
MIDDLE_LENGTH = 3  # draft length that is measured besides 0, 1 and the longest
ROUNDS, TOKENS = 3, 64
PROFILE_PROMPTS = 4  # prompts of a profile
PASSES = 3  # number of requests over how many run at once
QUICK_SHARE = 0.1  # share of steps that are faster than the time that counts
LIKE_FACTOR = 1.1  # steps whose rows differ by less than this factor are grouped
ALIKE_FACTOR = 1.02  # the same when comparing numbers of sequences
FEWEST_STEPS = 10  # fewest steps in a group by rows whose seconds count


class Timed(NamedTuple):
    """One step of ``size`` decoding sequences: tokens emitted and drafted, and seconds."""

    size: int
    emitted: int
    drafted: int
    seconds: float
    draft: float
    verify: float

    @property
    def rows(self) -> int:
        """Rows that the target verified."""
        return self.size + self.drafted

    @property
    def host(self) -> float:
        """Seconds besides drafting and verification."""
        return self.seconds - self.draft - self.verify


def timed(
    llm: LLM, prompts: Sequence[str], size: int, k: int, tokens: int, temperature: float = 0.0
) -> tuple[list[Timed], Counts]:
    """Return the steps of ``size`` sequences that decode, each with a draft of ``k`` tokens.

    A sequence that ends makes room for the next one, as in a server, until ``PASSES`` times as many
    have run as run together. The counts are those of all steps.
    """
    engine = llm.engine
    how = Speculation(enabled=k > 0, num_speculative_tokens=k or None)
    count = len(prompts) if size == 1 else max(len(prompts), PASSES * size)
    waiting = enumerate(islice(cycle(prompts), count))
    running: dict[str, RequestState] = {}
    steps, counts = list[Timed](), Counts()
    tries_plain, engine.chooser.tries_plain = engine.chooser.tries_plain, False
    try:
        while True:
            for seed, prompt in islice(waiting, size - len(running)):
                params = SamplingParams(
                    temperature=temperature, max_tokens=tokens, ignore_eos=True, seed=seed
                )
                (state,) = llm.start(prompt, params, speculation=how)
                running[state.request.id] = state
            if not running:
                break
            events, record = engine.step(), engine.record
            engine.settle()
            steps += timed_steps(record, size)
            for event in events:
                state = running[event.request_id]
                state.take(event)
                if state.done:
                    counts.add(running.pop(event.request_id).counts)
    finally:
        engine.chooser.tries_plain = tries_plain
        for request_id in running:
            engine.abort(request_id)
    return steps, counts


def timed_steps(record: StepRecord | None, size: int) -> list[Timed]:
    """Return a step's times if all of ``size`` sequences decoded in it, else nothing."""
    if record is None or not record.plan.rows == record.plan.decoding == size:
        return []
    events, seconds = record.events, record.seconds
    drafted = sum(len(each.drafted.tokens) for each in events if each.drafted)
    return [Timed(size, len(events), drafted, seconds.step, seconds.draft, seconds.verify)]


def profile(
    llm: LLM, prompts: Sequence[str], longest: int, sizes: Sequence[int] = SIZES,
    rounds: int = ROUNDS, tokens: int = TOKENS,
) -> Costs:  # fmt: skip
    """Return what steps cost by rows, sequences and draft length, with the engine's drafter.

    ``llm`` drafts up to ``longest`` tokens, 2 or more, and holds ``sizes`` sequences, at least two
    sizes from 1 on. Each size and length is measured in all ``rounds``, with ``tokens`` tokens.

    Raises ConfigError: the outputs are too short.
    """
    lengths = sorted({0, 1, min(MIDDLE_LENGTH, longest), longest})
    cells = [(size, k) for size in sizes for k in lengths]
    steps: dict[tuple[int, int], list[Timed]] = {cell: [] for cell in cells}
    for number in range(-1, rounds):
        for size, k in turned(cells, number):
            own, _ = timed(llm, prompts[:PROFILE_PROMPTS], size, k, tokens)
            if number >= 0:  # the first round warms up
                steps[size, k] += own
    texts = [len(llm.inputs.encode(text)) for text in prompts]
    return fitted(llm.engine.drafter, steps, sum(texts) / len(texts) + tokens / 2)


def quick(seconds: Iterable[float]) -> float:
    """Return roughly the seconds that a step takes if nothing else uses the machine."""
    listed = sorted(seconds)
    return listed[int(QUICK_SHARE * (len(listed) - 1))]


class ForwardTimes(NamedTuple):
    """The time of forward passes with about ``rows`` rows, of ``size`` sequences."""

    size: int
    rows: float
    seconds: float


def points(steps: dict[tuple[int, int], list[Timed]]) -> list[ForwardTimes]:
    """Return the times of forward passes, by sequences and rows."""
    return [
        ForwardTimes(size, fmean(each.rows for each in alike), quick(each.verify for each in alike))
        for size in sorted({size for size, _ in steps})
        for alike in by_rows(each for cell in steps if cell[0] == size for each in steps[cell])
        if len(alike) >= FEWEST_STEPS
    ]


def by_rows(steps: Iterable[Timed]) -> Iterator[list[Timed]]:
    """Yield steps by rising rows, grouped by about equal rows."""
    return groups(steps, attrgetter("rows"), LIKE_FACTOR)


def usual(steps: Iterable[Timed], what: Callable[[Timed], float]) -> float:
    """Return the mean over steps of the ``quick`` value among steps with about as many rows."""
    parts = [(len(alike), quick(map(what, alike))) for alike in by_rows(steps)]
    return sum(count * each for count, each in parts) / sum(count for count, _ in parts)


def groups(items: Iterable[T], size: Callable[[T], float], within: float) -> Iterator[list[T]]:
    """Yield items by rising size, grouped so that sizes differ by less than a factor."""
    left = sorted(items, key=size)
    while left:
        least = size(left[0])
        count = bisect_left(left, least * within, key=size)
        yield left[:count]
        del left[:count]


def fitted(drafter: Drafter, steps: dict[tuple[int, int], list[Timed]], context: float) -> Costs:
    """Return the costs fitted to steps. Raises ConfigError: there are too few of them."""
    sizes = sorted({size for size, _ in steps})
    forwards = points(steps)
    if not forwards or min(map(len, steps.values())) < FEWEST_STEPS:
        raise ConfigError("the sample's outputs are too short to time steps; give more prompts.")
    per_sequence = sequence_cost(forwards)
    target = curve(forwards, per_sequence)
    host = line(sizes, [quick(each.host for each in steps[size, 0]) for size in sizes])

    def beside(step: Timed) -> float:
        # The time of drafted steps outside verification is the drafter's.
        return step.draft + step.host

    draft = {
        (size, k): usual(own, beside) - host[0] - host[1] * size for (size, k), own in steps.items()
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


def curve(forwards: Sequence[ForwardTimes], per_sequence: float) -> Curve:
    """Return the seconds of forward passes by rows, without what each sequence adds."""
    rows, seconds = list[int](), list[float]()
    for alike in groups(forwards, attrgetter("rows"), LIKE_FACTOR):
        rows.append(max(round(fmean(each.rows for each in alike)), rows[-1] + 1 if rows else 1))
        seconds.append(median(each.seconds - per_sequence * each.size for each in alike))
    return Curve(tuple(rows), plausible(rows, seconds))


def sequence_cost(forwards: Sequence[ForwardTimes]) -> float:
    """Return what a sequence adds to a forward pass (at most half): the median of similar pairs."""
    added = [
        (a.seconds - b.seconds) / (a.size - b.size)
        for a in forwards
        for b in forwards
        if a.size > b.size and 1 / ALIKE_FACTOR <= a.rows / b.rows <= ALIKE_FACTOR
    ]
    most = min(each.seconds / each.size for each in forwards) / 2
    return min(max(median(added), 0.0), most) if added else 0.0


def line(across: Sequence[float], up: Sequence[float]) -> tuple[float, float]:
    """Return intercept and slope of the line fitted to points, neither below 0."""
    x, y = sum(across) / len(across), sum(up) / len(up)
    spread = sum((each - x) ** 2 for each in across)
    slope = sum((a - x) * (b - y) for a, b in zip(across, up, strict=True)) / spread
    slope = max(slope, 0.0)
    return max(y - slope * x, 0.0), slope


def tokens_per_second(steps: Iterable[Timed]) -> float:
    """Return tokens over seconds; a step's seconds are the median of steps with as many rows."""
    tokens, seconds = 0, 0.0
    for alike in by_rows(steps):
        tokens += sum(step.emitted for step in alike)
        seconds += len(alike) * median(step.seconds for step in alike)
    return tokens / seconds
