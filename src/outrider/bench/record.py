"""The record of a run: its requests, their events, and the time and memory that it took."""

import gc
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from ..base.types import Counts, Event, SamplingParams
from ..errors import NumericalError
from ..frontend.inputs import Prompt
from ..frontend.outputs import RequestState, SampleState
from ..llm import LLM
from ..params import StructuredOutputsParams
from .machine import available_cores, peak_memory, reset_peak_memory
from .workload import Item


def params_of(item: Item, temperature: float, seed: int, most: int) -> SamplingParams:
    """Return an item's parameters with ``most`` output tokens; a schema, not EOS, ends it."""
    form = None if item.schema is None else StructuredOutputsParams(json=item.schema)
    return SamplingParams(
        temperature=temperature, seed=seed, max_tokens=most, ignore_eos=form is None,
        structured_outputs=form,
    )  # fmt: skip


@contextmanager
def frozen() -> Iterator[None]:
    """Keep loaded objects out of garbage collection during a run.

    What the caller has frozen stays frozen.
    """
    outermost = not gc.get_freeze_count()
    gc.collect()
    if outermost:
        gc.freeze()
    try:
        yield
    finally:
        if outermost:
            gc.unfreeze()


@dataclass(frozen=True)
class Batch:
    """Requests that ran together, one sample each; times are of ``time.perf_counter``."""

    start: float
    states: list[RequestState]
    events: list[Event]

    @property
    def end(self) -> float:
        """The time of the last token."""
        return max(state.ended for state in self.states)

    @property
    def decode_tokens(self) -> int:
        """The sum of N - 1 over samples: the tokens after each sample's first."""
        return sum(len(state.samples[0].token_ids) - 1 for state in self.states)

    @property
    def decode_seconds(self) -> float:
        """T(N) - T(1): from the batch's first token to its last."""
        return self.end - min(state.started + (state.ttft or 0.0) for state in self.states)


def run(llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> Batch:
    """Continue ``prompts`` (one sample each) together, and time it."""
    start = time.perf_counter()
    states = llm.start(list(prompts), list(params))
    events = list(llm.run(states))
    for state in states:
        if state.error is not None:
            raise NumericalError(f"a prompt failed: {state.error}")
    return Batch(start, states, events)


@dataclass(frozen=True)
class Pass:
    """All prompts once, in batches; ``utilisation`` is CPU time over wall time and cores."""

    batches: list[Batch]
    utilisation: float
    peak_memory: int

    @property
    def states(self) -> list[RequestState]:
        return [state for batch in self.batches for state in batch.states]

    @property
    def samples(self) -> list[SampleState]:
        return [state.samples[0] for state in self.states]

    @property
    def outputs(self) -> list[list[int]]:
        return [sample.token_ids for sample in self.samples]

    @property
    def seconds(self) -> float:
        """The sum over batches of the time from the call to the last token."""
        return sum(batch.end - batch.start for batch in self.batches)

    @property
    def decode_tokens(self) -> int:
        return sum(batch.decode_tokens for batch in self.batches)

    @property
    def speed(self) -> float:
        """Decode speed, (N-1)/(T(N)-T(1)), in tokens a second."""
        return self.decode_tokens / sum(batch.decode_seconds for batch in self.batches)

    @property
    def end_to_end(self) -> float:
        """Tokens per second from the call on, including the prompts' time."""
        return sum(map(len, self.outputs)) / self.seconds

    @property
    def latency(self) -> float:
        """Mean seconds per token of a sequence, after its first token."""
        waits = [state.ended - state.started - (state.ttft or 0.0) for state in self.states]
        return sum(waits) / self.decode_tokens

    def speed_of(self, chosen: Sequence[int]) -> float:
        """Return the tokens per second, after the first, of the sequences with these indices."""
        states = [self.states[i] for i in chosen]
        waits = sum(state.ended - state.started - (state.ttft or 0.0) for state in states)
        return sum(len(state.samples[0].token_ids) - 1 for state in states) / waits

    @property
    def counts(self) -> Counts:
        return total(state.counts for state in self.states)


def total(parts: Iterable[Counts]) -> Counts:
    """Return the sum of counts."""
    counts = Counts()
    for part in parts:
        counts.add(part)
    return counts


def run_all(
    llm: LLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams], size: int = 1
) -> Pass:
    """Continue all ``prompts``, ``size`` at a time."""
    starts = range(0, len(prompts), size)
    reset_peak_memory()
    cpu, wall = time.process_time(), time.perf_counter()
    batches = [run(llm, prompts[i : i + size], params[i : i + size]) for i in starts]
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    return Pass(batches, cpu / (wall * available_cores()), peak_memory())
