"""What a step costs outside C++: ``python -m outrider.bench.host MODEL PROMPTS``.

Host time is the wall time from the end of one step to the end of the next, less what the library's
own clock says was spent in its calls: scheduling, drafting, marshalling, acceptance, text, and what
``LLM`` does around a step ("around"). Figures are medians over the steps of all rounds in which
the whole batch was decoding; "tokens" is what a sequence got of such a step. The engines (plain,
ngram, and the checkpoint's own drafter if it has one) take turns within a round.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Any

from tqdm import tqdm

from ..errors import ConfigError, ModelError, OutriderError
from ..llm import LLM
from ..native.choice import library
from ..native.library import Library
from ..types import Event, SamplingParams

COLUMNS = ("mode", "batch", "steps", "host us", "around us", "native us", "us/sequence", "tokens")


@dataclass
class Cell:
    """One mode at one batch size; ns of each step that counts."""

    mode: str
    batch: int
    step: list[int] = field(default_factory=list)
    """In ``Engine.step``, less the native calls."""
    around: list[int] = field(default_factory=list)
    """Between two of these: the caller's."""
    native: list[int] = field(default_factory=list)
    emitted: int = 0

    def watch(self, llm: LLM, step: Library) -> Callable[[], list[Event]]:
        """``Engine.step`` with a stopwatch."""
        inner, scheduler, left = llm.engine.step, llm.engine.scheduler, [0]

        def watched() -> list[Event]:
            entered = perf_counter_ns()
            running = scheduler.running
            counts = len(running) == self.batch and all(
                s.num_computed == len(s.tokens) - 1 for s in running
            )
            native, start = step.nanoseconds, perf_counter_ns()
            events = inner()
            taken, native = perf_counter_ns() - start, step.nanoseconds - native
            if counts and len(running) == self.batch:
                self.step.append(taken - native)
                self.around.append(entered - left[0])
                self.native.append(native)
                self.emitted += len(events)
            left[0] = perf_counter_ns()
            return events

        return watched

    def report(self) -> dict[str, Any]:
        """Medians in microseconds.

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


def run(cell: Cell, llm: LLM, prompts: Sequence[str], tokens: int, temperature: float) -> None:
    """Generate with the cell's batch size, watching every step."""
    step = library()
    if step is None:
        raise ModelError("the native step is off or was not built, so it has no time of its own.")
    asked = [prompts[i % len(prompts)] for i in range(cell.batch)]
    params = SamplingParams(temperature=temperature, max_tokens=tokens, seed=1, ignore_eos=True)
    inner = llm.engine.step
    llm.engine.step = cell.watch(llm, step)  # type: ignore[method-assign]
    try:
        llm.generate(asked, params)
    finally:
        llm.engine.step = inner  # type: ignore[method-assign]


def measure(
    model: str,
    prompts: Sequence[str],
    batches: Sequence[int],
    length: int,
    tokens: int,
    rounds: int,
    temperature: float,
) -> list[dict[str, Any]]:
    """Every mode at every batch size, ``rounds`` times after one that is not counted.

    Raises:
        OutriderError: the checkpoint cannot be used, or the native step is not there.
    """
    modes = {"plain": "none", "ngram": "ngram"}
    if (Path(model) / "drafter").is_dir():
        modes["model"] = str(Path(model) / "drafter")
    options = {
        "num_speculative_tokens": length, "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
    }  # fmt: skip
    engines = {mode: LLM(model, drafter, **options) for mode, drafter in modes.items()}
    cells = [Cell(mode, batch) for batch in batches for mode in modes]
    for number in tqdm(range(rounds + 1), leave=False, disable=None):
        for cell in cells:
            into = cell if number else Cell(cell.mode, cell.batch)
            run(into, engines[cell.mode], prompts, tokens, temperature)
    return [cell.report() for cell in cells]


def main() -> None:
    """Print a table; with ``--json`` write the figures."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.host")
    parser.add_argument("model", help="a checkpoint's folder; src/outrider/pocket/model")
    parser.add_argument("prompts", help="a JSON list of texts; src/outrider/pocket/prompts.json")
    parser.add_argument("--batch-size", default="1,8,32", help="batch sizes, with commas")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", help='a file for the figures; "-" is stdout')
    args = parser.parse_args()
    prompts = json.loads(Path(args.prompts).read_text(encoding="utf-8"))
    batches = [int(size) for size in args.batch_size.split(",")]
    try:
        found = measure(
            args.model, prompts, batches, args.num_speculative_tokens, args.tokens, args.rounds,
            args.temperature,
        )  # fmt: skip
    except OutriderError as error:
        sys.exit(str(error))
    if args.json == "-":
        print(json.dumps(found, indent=1))
        return
    print(" ".join(f"{name:>12}" for name in COLUMNS))
    for row in found:
        print(" ".join(f"{value:>12}" for value in row.values()))
    if args.json:
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
