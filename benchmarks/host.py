"""Host time: what a step costs outside C++.

It is the wall time from the end of one step to the end of the next, less what the library's own
clock counted in its calls: scheduling, drafting, marshalling, acceptance, text, and what the caller
does between steps ("around"). Figures are medians over the steps of all rounds in which the whole
batch was decoding; "tokens" is what a sequence got of such a step. The engines (plain, ngram, and
the checkpoint's own drafter if it has one) take turns within a round.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any

import typer

from outrider.cli.common import JsonFile, numbers, write_json
from outrider.engine.engine import Engine
from outrider.errors import ConfigError, ModelError
from outrider.input_processor import InputProcessor
from outrider.native.choice import library
from outrider.native.library import Library
from outrider.types import SamplingParams

from .common import (
    POCKET,
    PROMPTS,
    Length,
    Model,
    Prompts,
    Rounds,
    Tokens,
    interleaved,
    open_engine,
    read_prompts,
)

COLUMNS = ("mode", "batch", "steps", "host us", "around us", "native us", "us/sequence", "tokens")


@dataclass
class Cell:
    """One mode at one batch size, and the nanoseconds of each step that counts."""

    mode: str
    batch: int
    step: list[int] = field(default_factory=list)
    """In ``Engine.step``, less the native calls."""
    around: list[int] = field(default_factory=list)
    """Between two of these: the caller's."""
    native: list[int] = field(default_factory=list)
    emitted: int = 0

    def decode(
        self,
        inputs: InputProcessor,
        engine: Engine,
        clock: Library,
        prompts: Sequence[str],
        params: SamplingParams,
    ) -> None:
        """Decode a batch of prompts and note the steps in which all of it was decoding."""
        states = {}
        for prompt in islice(cycle(prompts), self.batch):
            state = inputs.request(prompt, params)
            engine.add(state.request)
            states[state.request.id] = state
        left = perf_counter_ns()
        while engine.has_work:
            entered = perf_counter_ns()
            running = engine.scheduler.running
            counts = len(running) == self.batch and all(
                s.num_computed == len(s.tokens) - 1 for s in running
            )
            native, start = clock.nanoseconds, perf_counter_ns()
            events = engine.step()
            taken, native = perf_counter_ns() - start, clock.nanoseconds - native
            if counts and len(engine.scheduler.running) == self.batch:
                self.step.append(taken - native)
                self.around.append(entered - left)
                self.native.append(native)
                self.emitted += len(events)
            left = perf_counter_ns()
            for event in events:
                states[event.request_id].take(event)

    def report(self) -> dict[str, Any]:
        """Return medians in microseconds.

        Raises:
            ConfigError: no step counts.
        """
        if not self.step:
            raise ConfigError(
                f"no step decoded {self.batch} sequences at once; generate more tokens."
            )
        host = median(a + b for a, b in zip(self.step, self.around, strict=True)) / 1000
        return {
            "mode": self.mode,
            "batch_size": self.batch,
            "steps": len(self.step),
            "host_us": round(host, 1),
            "around_us": round(median(self.around) / 1000, 1),
            "native_us": round(median(self.native) / 1000, 1),
            "host_us_per_sequence": round(host / self.batch, 1),
            "tokens_per_step": round(self.emitted / len(self.step) / self.batch, 2),
        }


def measure(
    model: str,
    prompts: Sequence[str],
    batches: Sequence[int],
    length: int,
    tokens: int,
    rounds: int,
    temperature: float,
) -> list[dict[str, Any]]:
    """Measure every mode at every batch size, ``rounds`` times.

    Raises:
        OutriderError: the checkpoint cannot be used, or the native step is not there.
    """
    clock = library()
    if clock is None:
        raise ModelError("the native step is off or was not built, so it has no time of its own.")
    modes = {"plain": "none", "ngram": "ngram"}
    if (Path(model) / "drafter").is_dir():
        modes["model"] = str(Path(model) / "drafter")
    options = {
        "num_speculative_tokens": length, "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
    }  # fmt: skip
    processors = {
        mode: InputProcessor(model, drafter, dict(options)) for mode, drafter in modes.items()
    }
    engines = {mode: open_engine(inputs) for mode, inputs in processors.items()}
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=1, ignore_eos=True)
    cells = [Cell(mode, batch) for batch in batches for mode in modes]
    for number, turn in interleaved(cells, rounds):
        for cell in turn:
            noted = cell if number >= 0 else Cell(cell.mode, cell.batch)
            noted.decode(processors[cell.mode], engines[cell.mode], clock, prompts, params)
    return [cell.report() for cell in cells]


def main(
    model: Model = POCKET,
    prompts: Prompts = PROMPTS,
    batch_size: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,8,32",
    num_speculative_tokens: Length = 4,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    tokens: Tokens = 256,  # 32 requests enter over as many steps, and all must decode at once
    rounds: Rounds = 7,
    json_: JsonFile = None,
) -> None:
    """Measure what a step costs outside C++."""
    runs = measure(
        model, read_prompts(prompts), numbers(batch_size, int, "--batch-size"),
        num_speculative_tokens, tokens, rounds, temperature,
    )  # fmt: skip
    write_json(runs, json_)
    if json_ != "-":
        for row in (COLUMNS, *(run.values() for run in runs)):
            print(" ".join(f"{value:>12}" for value in row))
