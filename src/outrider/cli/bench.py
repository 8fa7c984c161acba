"""``outrider bench``: plain decoding against drafters, measured side by side."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.table import Table
from rich.text import Text

from ..bench.intervals import shown
from ..errors import OutriderError
from . import beliefs
from .common import (
    LEAST_ROUNDS,
    SIGNS,
    WIDE,
    AsJson,
    Model,
    Out,
    Rounds,
    bars,
    counted,
    model_folder,
    new_table,
    numbers,
    png,
    report_console,
    shares,
    status,
    write_report,
)
from .flags import engine_options, setting, with_flags

if TYPE_CHECKING:
    from ..bench.workload import Workload

DEFINITIONS = (
    "tokens/s: decode speed, (N-1)/(T(N)-T(1)) · speedup: to plain in the same round · both are "
    "medians of {rounds} rounds, in brackets their {confidence:.1%} confidence intervals (order "
    "statistics) · end to end: tokens/s from the call on, prompts included · rate: accepted / "
    "drafted · length: 1 + accepted / drafts · survival: share of drafts accepted up to each "
    "position"
)


def named_workload(name: str) -> Workload:
    """Return the workload of that name or file; code is the pocket pair's held-out prompts."""
    from .. import pocket
    from ..bench.workload import CODE, Workload, load_workload

    return Workload.of_prompts(CODE, pocket.prompts()) if name == CODE else load_workload(name)


def identical(run: dict[str, Any]) -> Text | str:
    """Return the table's answer to whether outputs were the plain ones."""
    if not run["outputs_identical"]:
        return Text("NO", "bold red")
    ties = run["numerical_ties"]
    return f"yes, {ties} {'tie' if ties == 1 else 'ties'}" if ties else "yes"


def table(report: dict[str, Any], width: int) -> Table:
    """Return the runs as a table; the best of each temperature and batch size is bold."""
    from ..bench.offline import PLAIN
    from ..bench.report import best, heading

    runs = report["runs"]
    grid = new_table(
        "T", "batch", "drafter", "K", title="\n".join(heading(report)),
        right=("tokens/s", "", "speedup", "", "end\nto end", "rate", "length"),
        caption=DEFINITIONS.format(rounds=report["rounds"], **report["intervals"]),
    )  # fmt: skip
    grid.add_column("survival")
    grid.add_column("identical")
    for i, run in enumerate(runs):
        drafted = run["acceptance_length"] is not None
        survival = run["acceptance_by_position"] or []
        grid.add_row(
            f"{run['temperature']:g}",
            str(run["batch_size"]),
            run["drafter"],
            str(run["num_speculative_tokens"]),
            f"{run['tokens_per_second']:.1f}",
            shown(run["tokens_per_second_interval"], ".0f"),
            f"{run['speedup']:.2f}x",
            shown(run["speedup_interval"], ".2f") if run["drafter"] != PLAIN else "",
            f"{run['end_to_end_tokens_per_second']:.1f}",
            f"{run['acceptance_rate']:.2f}" if drafted else "",
            f"{run['acceptance_length']:.2f}" if drafted else "",
            f"{bars(survival)} {shares(survival) if width >= WIDE else ''}".strip(),
            identical(run),
            style="bold green" if run is best(runs, run) else None,
            end_section=i + 1 == len(runs) or runs[i + 1]["drafter"] == PLAIN,
        )
    return grid


def category_table(report: dict[str, Any]) -> Table | None:
    """Return the runs by category of prompts as a table; None where prompts have none."""
    runs = [run for run in report["runs"] if run["categories"]]
    if not runs:
        return None
    grid = new_table(
        "category", "T", "batch", "drafter", "K", title="by category",
        right=("prompts", "tokens/s", "speedup", "rate", "length"),
    )  # fmt: skip
    grid.add_column("identical")
    for category in runs[0]["categories"]:
        for run in runs:
            found = run["categories"][category]
            drafted = found["acceptance_length"] is not None
            grid.add_row(
                Text(" ".join(category.split()).translate(SIGNS)),  # it may look like markup
                f"{run['temperature']:g}", str(run["batch_size"]),
                run["drafter"], str(run["num_speculative_tokens"]), str(found["num_samples"]),
                f"{found['tokens_per_second']:.1f}", f"{found['speedup']:.2f}x",
                f"{found['acceptance_rate']:.2f}" if drafted else "",
                f"{found['acceptance_length']:.2f}" if drafted else "", identical(found),
                end_section=run is runs[-1],
            )  # fmt: skip
    return grid


def greedy_line(runs: Sequence[dict[str, Any]]) -> str | None:
    """Return a line on greedy acceptance with and without loops; None without greedy runs."""
    greedy = [r for r in runs if r["temperature"] == 0 and r["acceptance_length"] is not None]
    greedy = [r for r in greedy if r["batch_size"] == greedy[0]["batch_size"]]
    if not greedy:
        return None
    parts = []
    for run in greedy:
        fresh = run["acceptance_length_without_repeats"]
        parts.append(
            f"{run['drafter']} K={run['num_speculative_tokens']} {run['acceptance_length']:.2f} -> "
            f"{'none left' if fresh is None else format(fresh, '.2f')}"
        )
    return (
        "acceptance length at T = 0, without steps that continue an earlier 4-gram as before: "
        f"{'; '.join(parts)} ({greedy[0]['repeated_share']:.0%} of the tokens do so)"
    )


def show(report: dict[str, Any], on_stderr: bool, explain: bool) -> None:
    """Print the table and what engines believe, on stderr where the JSON has stdout."""
    console = report_console(on_stderr)
    console.print(table(report, console.width))
    if (grid := category_table(report)) is not None:
        console.print(grid)
    if line := greedy_line(report["runs"]):
        console.print(line)
    if explain:
        beliefs.explain(console, report["runs"])


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """The options of ``outrider bench``."""

    drafter: list[str] | None = setting(
        None,
        "auto, ngram, suffix or a checkpoint's folder; several comma-separated or by repeating the "
        "option. Unless given, the model's own drafter if it has one, ngram and auto. With "
        "--replay: ngram, suffix or planted:AGREEMENT[:SIZE], which agrees with the target in "
        "that share of tokens (0 to 1) and costs as much as a model of SIZE, or nothing; several "
        "joined by +, or auto+ and those that it may choose. Unless given, planted:0.8 and ngram.",
    )
    num_speculative_tokens: str = setting("4", "Draft lengths K, comma-separated.", metavar="INTS")
    temperature: str = setting("0,0.7,1", "Temperatures, comma-separated.", metavar="FLOATS")
    batch_size: str = setting(
        "1", "Numbers of prompts that run together, comma-separated.", metavar="INTS"
    )
    prompts: str | None = setting(
        None,
        "code (held out from the pocket pair's training; the default), edit, prose, json, chat, "
        "or a .jsonl or .json file of prompts. Files of MT-Bench, Spec-Bench and SPEED-Bench "
        "(.parquet) are read as they are. --replay needs recorded answers, which code lacks; its "
        "default is edit.",
        metavar="NAME|FILE",
    )
    num_prompts: int | None = setting(None, "Use only this many prompts; 8 unless given.")
    max_tokens: int = setting(128, "Output tokens of each prompt.")
    rounds: Rounds = LEAST_ROUNDS
    explain: bool = setting(
        False,
        "Also show what the engine expects of each choice, where it chooses, as with drafter auto.",
    )
    json_: AsJson = False
    out: Out = None
    plot: str | None = setting(
        None,
        "Draw speedup by K and acceptance by position, as PNG; needs outrider[plot].",
        metavar="FILE.png",
        callback=png,
    )
    fresh: bool = setting(
        False, "Start an engine for each measurement, so that the time it learns counts."
    )
    replay: str | None = setting(
        None,
        "Measure a replay target instead: random weights of that size (1m, 3m, 20m, 100m, 300m, or "
        "480m-a85m, a mixture of experts) that cost what a real model costs and say the prompts' "
        "recorded answers. MODEL then lends its tokenizer, vocabulary and context only.",
        metavar="SIZE",
    )


@with_flags(
    BenchFlags,
    engine_options(
        *("dtype", "quantization", "drafter_quantization", "drafter_window"),
        *("drafter_cpus", "draft_ahead", "preset", "threads"),
    ),
)
def bench(flags: BenchFlags, model: Model = None, **engine: Any) -> None:
    """Measure plain decoding against drafters, and check that their outputs are the same."""
    drafters = [d for listed in flags.drafter or [] for d in listed.split(",") if d]
    with status("loading the models"):
        from ..bench.offline import Bench, BenchOptions
        from ..bench.report import report as make_report

        if flags.plot:
            from ..bench.plot import draw
        workload = named_workload(flags.prompts or ("edit" if flags.replay else "code"))
        items = workload.first(flags.num_prompts)
        options = BenchOptions(
            model=model_folder(model), replay=flags.replay,
            target=f"replay-{flags.replay}" if flags.replay else model or "pocket",
            drafters=tuple(dict.fromkeys(drafters)) if flags.drafter else None,
            lengths=numbers(flags.num_speculative_tokens, int, "--num-speculative-tokens"),
            temperatures=numbers(flags.temperature, float, "--temperature"),
            batch_sizes=numbers(flags.batch_size, int, "--batch-size"),
            max_tokens=flags.max_tokens, rounds=flags.rounds, fresh=flags.fresh, engine=engine,
        )  # fmt: skip
        engines = Bench(options, items)
        if flags.plot and len(engines.engines) == 1:
            raise typer.BadParameter("--plot has nothing to show without a drafter; give one.")
    with counted("measuring") as told:
        runs = engines.run(told)
    with status("comparing outputs"):
        report = make_report(engines, runs)
    write_report(report, flags.json_, flags.out)
    show(report, on_stderr=flags.json_, explain=flags.explain)
    if flags.plot:
        draw(report, Path(flags.plot))
    if not all(run["outputs_identical"] for run in report["runs"]):
        sys.stdout.flush()
        raise OutriderError("outputs differ from plain decoding by more than numerical ties.")
