"""Plain decoding against drafters, interleaved in one process: the runs, not yet the figures."""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ..drafters.registry import find_drafter
from ..errors import ConfigError
from ..llm import LLM
from ..models.families import find_folder
from ..types import Counts, SamplingParams
from .record import Sample, run

PLAIN = "none"


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to measure.

    Args:
        model: the target, and ``target`` its name in the report.
        drafters: as ``LLM`` takes them; plain decoding always runs beside them. None takes the
            target's own drafter, where it has one, and ngram.
        lengths: draft lengths K, 1 or more.
        temperatures: 0 or above.
        max_tokens: output tokens of each prompt, 2 or more; EOS is ignored.
        dtype: see ``LLM``.
        batch_size: prompts that run together.
        rounds: how often everything is run.

    Raises:
        ConfigError: a value is out of its range.
    """

    model: str | Path
    target: str
    drafters: tuple[str, ...] | None = None
    lengths: tuple[int, ...] = (4,)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 128
    dtype: str = "auto"
    batch_size: int = 1
    rounds: int = 7

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 2), ("batch_size", 1), ("rounds", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"{name} is {getattr(self, name)}; give {least} or more.")
        for name in ("lengths", "temperatures", "drafters"):
            if getattr(self, name) == ():
                raise ConfigError(f"{name} is empty; give one or more.")
        if min(self.lengths) < 1:
            raise ConfigError(f"num_speculative_tokens is {min(self.lengths)}; give 1 or more.")


@dataclass(frozen=True)
class Cell:
    """One row of the report: a drafter ("none" with K = 0 is plain) at a temperature."""

    drafter: str
    length: int
    temperature: float


@dataclass(frozen=True)
class Timing:
    """One cell in one round: counts, seconds, and the most bytes that were resident meanwhile."""

    tokens: int
    seconds: float
    decode_tokens: int
    decode_seconds: float
    sequence_seconds: float
    cpu_seconds: float
    wall_seconds: float
    peak_memory: int

    @property
    def speed(self) -> float:
        """Decode speed, (N-1)/(T(N)-T(1)): tokens a second."""
        return self.decode_tokens / self.decode_seconds

    @property
    def end_to_end(self) -> float:
        """Output tokens a second from the call on, the prompts' time included."""
        return self.tokens / self.seconds


@dataclass
class Runs:
    """What one cell did: a timing a round, and of each prompt the first round's sample.

    ``outputs`` are each prompt's different outputs over the rounds: one, if all is well.
    """

    timings: list[Timing] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    outputs: list[set[tuple[int, ...]]] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)


def drafter_names(options: Options) -> dict[str, str]:
    """The drafters to run: their names in the report, and what ``LLM`` is given for them."""
    given = options.drafters or ("auto", "ngram")
    names: dict[str, str] = {}
    for drafter in given:
        found = find_drafter(drafter, find_folder(options.model))
        if found.name != PLAIN:
            names[found.name if drafter == "auto" else drafter] = drafter
    return names


def set_draft_length(llm: LLM, length: int) -> None:
    """Let ``llm`` draft at most ``length`` tokens, at most as many as it was made for."""
    llm.engine.config = replace(llm.engine.config, num_speculative_tokens=length)


class Bench:
    """The engines of a benchmark, one a drafter, and its prompts.

    Args:
        options: what to measure.
        prompts: texts.

    Raises:
        OutriderError: a model cannot be loaded, or a prompt leaves no room for the output.
    """

    def __init__(self, options: Options, prompts: Sequence[str]) -> None:
        self.options = options
        names = {PLAIN: PLAIN, **drafter_names(options)}
        self.engines = {
            name: LLM(
                options.model,
                drafter=drafter,
                num_speculative_tokens=max(options.lengths),
                dtype=options.dtype,
                max_num_seqs=options.batch_size,
            )
            for name, drafter in names.items()
        }
        self.plain = self.engines[PLAIN]
        variants = [(PLAIN, 0), *((n, k) for n in names if n != PLAIN for k in options.lengths)]
        self.cells = [Cell(n, k, t) for t in options.temperatures for n, k in variants]
        one = SamplingParams(temperature=0, max_tokens=1)
        self.prompts = [self.plain.generate(p, one)[0].prompt_token_ids for p in prompts]
        longest = max(map(len, self.prompts)) + options.max_tokens
        if longest > self.plain.engine.max_model_len:
            raise ConfigError(
                f"prompt and output have {longest} tokens, but the context of the model is "
                f"{self.plain.engine.max_model_len}; lower max_tokens."
            )

    def params(self, temperature: float) -> list[SamplingParams]:
        """Each prompt's parameters; its seed is its index."""
        return [
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=self.options.max_tokens, ignore_eos=True
            )
            for i in range(len(self.prompts))
        ]

    def order(self, number: int) -> Iterator[Cell]:
        """The cells in the order of round ``number``: turned on by one place a round.

        Cells of one temperature stay together, so that what is compared ran close by.
        """
        temperatures = self.options.temperatures
        for i in range(len(temperatures)):
            wanted = temperatures[(i + number) % len(temperatures)]
            cells = [c for c in self.cells if c.temperature == wanted]
            yield from (cells[(j + number) % len(cells)] for j in range(len(cells)))

    def run(self, progress: Callable[[int, int], None]) -> dict[Cell, Runs]:
        """Warm up, then run every round; ``progress`` is told (cells done, cells in all)."""
        found = {cell: Runs() for cell in self.cells}
        total = len(self.cells) * (self.options.rounds + 1)
        for i, cell in enumerate(self.cells):
            self._measure(cell, Runs())
            progress(i + 1, total)
        done = len(self.cells)
        for number in range(self.options.rounds):
            for cell in self.order(number):
                self._measure(cell, found[cell])
                done += 1
                progress(done, total)
        return found

    def _measure(self, cell: Cell, runs: Runs) -> None:
        """Run all prompts once and add what came of it to ``runs``."""
        llm, size = self.engines[cell.drafter], self.options.batch_size
        set_draft_length(llm, cell.length or max(self.options.lengths))
        params = self.params(cell.temperature)
        gc.collect()
        reset_peak_memory()
        cpu, wall = time.process_time(), time.perf_counter()
        batches = [
            run(llm, self.prompts[i : i + size], params[i : i + size])
            for i in range(0, len(self.prompts), size)
        ]
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        samples = [s for b in batches for s in b.samples]
        runs.timings.append(
            Timing(
                tokens=sum(b.tokens for b in batches),
                seconds=sum(b.seconds for b in batches),
                decode_tokens=sum(b.decode_tokens for b in batches),
                decode_seconds=sum(b.decode_seconds for b in batches),
                sequence_seconds=sum(s.last - s.first for s in samples),
                cpu_seconds=cpu,
                wall_seconds=wall,
                peak_memory=peak_memory(),
            )
        )
        if not runs.samples:
            runs.samples = samples
            runs.outputs = [set() for _ in samples]
        for sample, outputs in zip(samples, runs.outputs, strict=True):
            outputs.add(tuple(sample.token_ids))
            runs.counts.add(sample.counts)


def reset_peak_memory() -> None:
    """Start measuring the peak anew, where the system can: Linux, through its /proc."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> int:
    """Bytes of this process that were resident at once, since the last reset where that works."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    peak = [line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:")]
    usage = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak[0]) * 1024 if peak else usage * 1024


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))
