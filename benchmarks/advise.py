"""What ``outrider.planning`` predicts of this machine, beside what it then measures.

Costs are measured at batch sizes 1, 4 and 16, acceptance at K = 8 with one sequence, on one half of
the prompts. On the other half, speedups of K = 1 to 8 at batch sizes 2, 8 and 32 are predicted, and
then measured in interleaved rounds: tokens per second of steps in which the whole batch decodes.
"""

from collections.abc import Iterator
from statistics import median
from typing import Annotated, Any

import typer

from outrider.bench.machine import machine
from outrider.bench.offline import turned
from outrider.bench.steps import profile, survival_of, timed, tokens_per_second
from outrider.cli.common import JsonFile, numbers, write_json
from outrider.llm import LLM
from outrider.planning import of_positions
from outrider.planning.figure import MEASURED
from outrider.planning.roofline import Steps

from .common import POCKET, PROMPTS, Prompts, Rounds, Tokens, read_prompts, table

CLEAR = 0.1
"""Distance of a speedup from 1 from which on its sign counts."""
LONGEST = 8


def cells(
    llm: LLM, prompts: list[str], sizes: tuple[int, ...], rounds: int, tokens: int
) -> dict[tuple[int, int], list[float]]:
    """Return the tokens per second of each batch size and draft length, a value a round."""
    listed = [(size, k) for size in sizes for k in range(LONGEST + 1)]
    found: dict[tuple[int, int], list[float]] = {cell: [] for cell in listed}
    for number in range(-1, rounds):
        for size, k in turned(listed, number):
            steps, _ = timed(llm, prompts, size, k, tokens)
            if number >= 0:
                found[size, k].append(tokens_per_second(steps))
    return found


def compare(
    llm: LLM, prompts: list[str], sizes: tuple[int, ...], rounds: int, tokens: int
) -> list[dict[str, Any]]:
    """Return the cells of one drafter: what was predicted, and what was measured."""
    seen, unseen = prompts[::2], prompts[1::2]
    costs = profile(llm, seen, LONGEST, tokens=tokens)
    _, counts = timed(llm, seen, 1, LONGEST, tokens)
    lengths = [len(llm.inputs.encode(text)) for text in unseen]
    context = sum(lengths) / len(lengths) + tokens / 2
    name = llm.engine.drafter.name
    steps = Steps(costs, name, context, evidence=MEASURED)
    survival = survival_of(llm.engine.drafter, counts)
    acceptance = of_positions(survival, "measured", MEASURED, counts.drafts)
    speeds = cells(llm, unseen, sizes, rounds, tokens)
    found = []
    for size in sizes:
        for k in range(1, LONGEST + 1):
            rates = [a / b for a, b in zip(speeds[size, k], speeds[size, 0], strict=True)]
            speedup = median(rates)
            predicted = steps.speedup(acceptance.tokens(k), size, k)
            found.append(
                {
                    "drafter": name, "batch_size": size, "num_speculative_tokens": k,
                    "predicted": predicted, "speedup": speedup, "speedup_by_round": rates,
                    "error": predicted / speedup - 1,
                }
            )  # fmt: skip
    return found


def summary(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return how far the predictions are off, and how often they are on the wrong side of 1."""
    clear = [each for each in found if abs(each["speedup"] - 1) > CLEAR]
    right = sum((each["speedup"] > 1) == (each["predicted"] > 1) for each in clear)
    return {
        "cells": len(found),
        "losing": sum(each["speedup"] < 1 for each in found),
        "median_error": median(abs(each["error"]) for each in found),
        "clear_cells": len(clear),
        "right_side": right / len(clear) if clear else None,
    }


def markdown(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the report."""
    names = ("drafter", "batch", "K", "predicted", "measured", "error")
    yield from table(
        names,
        (
            (
                each["drafter"], each["batch_size"], each["num_speculative_tokens"],
                f"{each['predicted']:.2f}", f"{each['speedup']:.2f}", f"{each['error']:+.0%}",
            )
            for each in report["cells"]
        ),
    )  # fmt: skip
    yield ""
    total = report["summary"]
    yield (
        f"{total['cells']} cells, {total['losing']} of them slower than plain decoding: median "
        f"error {total['median_error']:.1%}; on the right side of 1 in "
        f"{total['right_side'] or 0:.0%} of the {total['clear_cells']} cells beyond 10 %"
    )


def main(
    model: Annotated[str, typer.Argument(help="A checkpoint's folder.")] = POCKET,
    prompts: Prompts = PROMPTS,
    drafters: Annotated[str, typer.Option(help="With commas.")] = "model,suffix",
    batch_size: Annotated[str, typer.Option(help="Not 1, 4 or 16; with commas.")] = "2,8,32",
    rounds: Rounds = 3,
    tokens: Tokens = 64,
    json_: JsonFile = None,
) -> None:
    """Compare predicted speedups with measured ones, in cells that the profile has not seen."""
    texts = read_prompts(prompts)
    sizes = numbers(batch_size, int, "--batch-size")
    found: list[dict[str, Any]] = []
    for drafter in drafters.split(","):
        llm = LLM(
            model, drafter=drafter, num_speculative_tokens=LONGEST, max_num_seqs=max(sizes)
        )  # fmt: skip
        found += compare(llm, texts, sizes, rounds, tokens)
    report = {"machine": machine(), "summary": summary(found), "cells": found}
    write_json(report, json_)
    print("\n".join(markdown(report)))
