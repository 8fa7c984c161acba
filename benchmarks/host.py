"""Host time: what a step costs outside C++.

It is the wall time from the end of one step to the end of the next, less what the library's own
clock counted in its calls: scheduling, drafting, marshalling, acceptance, text, and what the caller
does between steps ("around"). "Sampled" is the part of the native time that rows of logits took:
processing, draws and log probabilities. Figures are medians over the steps of all rounds in which
the whole batch was decoding; "controller", the controller's part of the host's time, is a mean,
since it looks at few steps. "Tokens" is what a sequence got of a step. The engines take turns
within a round: plain, ngram, suffix, a prediction that comes true, auto, and if the checkpoint has
a drafter of its own, that alone and merged with suffix. ``tests/engine/test_host.py`` guards
against growth, in bytecodes.
"""

from collections.abc import Callable, Sequence
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import Annotated, Any, NamedTuple

import typer

from outrider.base.types import SamplingParams, Speculation
from outrider.cli.common import Out, numbers, write_json
from outrider.drafters.registry import sibling
from outrider.errors import ConfigError, ModelError
from outrider.llm import LLM
from outrider.native.choice import library
from outrider.native.library import Library

from .common import POCKET, PROMPTS, Length, Model, Prompts, Rounds, Tokens, in_turns, read_prompts

MODES = {"plain": "none", "ngram": "ngram", "suffix": "suffix", "prediction": "none"}
"""Drafters by mode; a prediction comes with its request."""
COLUMNS = ("mode", "sampling", "batch", "steps", "host us", "around us", "native us", "sampled us",
           "us/sequence", "tokens", "controller us")  # fmt: skip
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "t0.7": {"temperature": 0.7},
    "t1": {"temperature": 1.0},
    "top_k": {"temperature": 0.7, "top_k": 50},
    "top_p": {"temperature": 0.7, "top_p": 0.9},
    "min_p": {"temperature": 0.7, "min_p": 0.05},
    "penalties": {"temperature": 0.7, "presence_penalty": 0.5, "repetition_penalty": 1.1},
    "grammar": {"temperature": 0.7, "structured_outputs": {"regex": "([a-z]+ )+"}},
    "logprobs": {"temperature": 0.7, "logprobs": 5},
}
"""Sampling options by the names that ``--sampling`` takes."""

CONTROLLING = ("choose", "budget", "cut", "learn")
"""What the engine calls of its chooser in every step, see ``AdaptiveChooser``."""


class ControllerClock:
    """Counts the nanoseconds that an engine's controller takes; 0 where there is none."""

    def __init__(self, llm: LLM) -> None:
        self.nanoseconds = 0
        chooser = llm.engine.chooser
        for name in CONTROLLING if llm.engine.controller else ():
            setattr(chooser, name, self._counted(getattr(chooser, name)))

    def _counted(self, call: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any) -> Any:
            begin = perf_counter_ns()
            result = call(*arguments)
            self.nanoseconds += perf_counter_ns() - begin
            return result

        return counted


class Step(NamedTuple):
    """Nanoseconds of a step in which a whole batch was decoding, and the tokens it gave."""

    own: int
    """In ``Engine.step``, less the native calls."""
    around: int
    """Between the step before and this one: the caller's."""
    native: int
    sampled: int
    emitted: int
    controller: int


def lasting(sampling: str, tokens: int) -> SamplingParams:
    """Return sampling options by their name, for outputs of so many tokens."""
    options = SAMPLINGS[sampling]
    goes_on = "structured_outputs" not in options  # EOS says that a form is complete
    return SamplingParams(
        **options, max_tokens=tokens, min_tokens=tokens, seed=1, ignore_eos=goes_on
    )


def modes_of(model: str) -> dict[str, str]:
    """Return the drafters that a checkpoint has at hand, by mode."""
    near = () if sibling(Path(model)) is None else ("model", "model+suffix")
    return MODES | {mode: mode for mode in (*near, "auto")}


def decode(
    clock: Library,
    controller: ControllerClock,
    llm: LLM,
    prompts: Sequence[str],
    params: SamplingParams,
    speculation: Sequence[Speculation],
) -> list[Step]:
    """Decode prompts together and return the steps in which all of them were decoding."""
    engine, steps = llm.engine, []
    started = llm.start(prompts, params, speculation=speculation)
    states = {state.request.id: state for state in started}
    left = perf_counter_ns()
    while engine.has_work:
        entered = perf_counter_ns()
        running = engine.scheduler.running
        decoding = [s for s in running if s.num_computed == len(s.tokens) - 1]
        native, sampled = clock.nanoseconds, clock.sampled_nanoseconds
        controlled, start = controller.nanoseconds, perf_counter_ns()
        events = engine.step()
        taken, native = perf_counter_ns() - start, clock.nanoseconds - native
        sampled = clock.sampled_nanoseconds - sampled
        if len(prompts) == len(decoding) == len(engine.scheduler.running):
            controlled = controller.nanoseconds - controlled
            counts = native, sampled, len(events), controlled
            steps.append(Step(taken - native, entered - left, *counts))
        left = perf_counter_ns()
        for event in events:
            states[event.request_id].take(event)
    return steps


def figures(mode: str, sampling: str, batch: int, steps: Sequence[Step]) -> dict[str, Any]:
    """Return medians in microseconds, and the controller's mean."""
    if not steps:
        raise ConfigError(f"no step decoded {batch} sequences at once; generate more tokens.")
    host = median(step.own + step.around for step in steps) / 1000
    return {
        "mode": mode,
        "sampling": sampling,
        "batch_size": batch,
        "steps": len(steps),
        "host_us": round(host, 1),
        "around_us": round(median(step.around for step in steps) / 1000, 1),
        "native_us": round(median(step.native for step in steps) / 1000, 1),
        "sampled_us": round(median(step.sampled for step in steps) / 1000, 1),
        "host_us_per_sequence": round(host / batch, 1),
        "tokens_per_step": round(sum(step.emitted for step in steps) / len(steps) / batch, 2),
        "controller_us": round(sum(step.controller for step in steps) / len(steps) / 1000, 1),
    }


def measure(
    model: str,
    prompts: Sequence[str],
    batches: Sequence[int],
    length: int,
    tokens: int,
    rounds: int,
    samplings: Sequence[str],
    modes: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Measure every mode (``modes``, or all) at every batch size, ``rounds`` times."""
    known = modes_of(model)
    for asked, names in (modes, list(known)), (samplings, list(SAMPLINGS)):
        for name in asked:
            if name not in names:
                raise ConfigError(f"there is no {name!r}; give some of {', '.join(names)}.")
    clock = library()
    if clock is None:
        raise ModelError("the native step is off or was not built, so it has no time of its own.")
    options: dict[str, Any] = {
        "num_speculative_tokens": length, "max_num_seqs": max(batches),
        "enable_prefix_caching": False,
    }  # fmt: skip
    engines = {mode: LLM(model, known[mode], **options) for mode in modes or known}
    controllers = {mode: ControllerClock(llm) for mode, llm in engines.items()}
    texts = list(islice(cycle(prompts), max(batches)))

    def predictions(params: SamplingParams) -> list[Speculation]:
        outputs = engines["prediction"].generate(texts, params) if "prediction" in engines else ()
        return [Speculation(prediction=tuple(each.outputs[0].token_ids)) for each in outputs]

    params = {name: lasting(name, tokens) for name in samplings}
    expected = {name: predictions(each) for name, each in params.items()}

    def run(cell: tuple[str, str, int], _: int) -> list[Step]:
        mode, name, batch = cell
        wishes = expected[name] if mode == "prediction" else [Speculation()] * batch
        return decode(
            clock, controllers[mode], engines[mode], texts[:batch], params[name], wishes[:batch]
        )

    cells = [(mode, name, batch) for batch in batches for name in samplings for mode in engines]
    steps = in_turns(cells, run, rounds)
    return [figures(*cell, list(chain(*each))) for cell, each in steps.items()]


def main(
    model: Model = POCKET,
    prompts: Prompts = PROMPTS,
    batch_size: Annotated[str, typer.Option(help="Batch sizes, with commas.")] = "1,8,32",
    num_speculative_tokens: Length = 4,
    sampling: Annotated[str, typer.Option(help=f"Of {', '.join(SAMPLINGS)}.")] = "greedy",
    modes: Annotated[str, typer.Option(help="Modes, with commas; all unless given.")] = "",
    tokens: Tokens = 512,  # 32 requests enter over as many steps, and all must decode at once
    rounds: Rounds = 7,
    out: Out = None,
) -> None:
    """Measure what a step costs outside C++."""
    runs = measure(
        model, read_prompts(prompts), numbers(batch_size, int, "--batch-size"),
        num_speculative_tokens, tokens, rounds, sampling.split(","),
        [mode for mode in modes.split(",") if mode],
    )  # fmt: skip
    write_json(runs, out)
    if out != "-":
        for row in (COLUMNS, *(run.values() for run in runs)):
            print(" ".join(f"{value:>12}" for value in row))
