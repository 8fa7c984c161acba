"""``outrider bench``: plain decoding against drafters, measured side by side."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from ..errors import OutriderError
from .common import Dtype, Model, bars, model_folder, status, write

if TYPE_CHECKING:
    from ..bench.offline import Bench as Engines
    from ..bench.offline import Cell, Runs

LEAST_ROUNDS = 7
NARROWEST = 120
DEFINITIONS = (
    "tokens/s: decode speed, (N-1)/(T(N)-T(1)) · speedup: to plain in the same round · both are "
    "medians over rounds · end to end: tokens/s from the call on, prompts included · rate: "
    "accepted / drafted · length: 1 + accepted / drafts · survival: share of drafts accepted up "
    "to each position"
)


def numbers(text: str, kind: type[int] | type[float], option: str) -> tuple[Any, ...]:
    """A comma list as numbers, without repetition."""
    try:
        return tuple(dict.fromkeys(kind(part) for part in text.split(",")))
    except ValueError:
        raise typer.BadParameter(
            f"{option} is {text!r}; give numbers with commas between."
        ) from None


def check_target(file: str | None) -> None:
    """Refuse a file that could not be written after all the work."""
    if file in (None, "-"):
        return
    path = Path(str(file))
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise typer.BadParameter(f"--json {file} cannot be written: no such folder, or a folder.")


def measure(bench: Engines) -> dict[Cell, Runs]:
    """Run everything, with a bar on stderr when that is a terminal."""
    console = Console(stderr=True)
    columns = (TextColumn("measuring"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = not console.is_terminal
    # Drawn between cells only: a thread that draws would run into what is being timed.
    bar = Progress(*columns, console=console, transient=True, disable=hidden, auto_refresh=False)
    with bar:
        task = bar.add_task("")
        return bench.run(lambda n, total: bar.update(task, completed=n, total=total, refresh=True))


def shares(survival: list[float]) -> str:
    """Survival in figures."""
    return " ".join(f"{share:.2f}" for share in survival)


def identical(run: dict[str, Any]) -> str:
    """Whether outputs were the plain ones, as the table says it."""
    if not run["outputs_identical"]:
        return "[bold red]NO[/bold red]"
    ties = run["numerical_ties"]
    return f"yes, {ties} {'tie' if ties == 1 else 'ties'}" if ties else "yes"


def table(report: dict[str, Any], width: int) -> Table:
    """The runs for people; the best of each temperature stands out."""
    from ..bench.report import best

    machine, runs = report["machine"], report["runs"]
    where = f"{machine['dtype']} · {machine['cpu']}, {machine['cores']} cores"
    title = f"{escape(runs[0]['target'])} · {where}"
    made = Table(
        title=title, caption=DEFINITIONS, caption_justify="left", box=box.SIMPLE, show_edge=False,
        pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in ("T", "drafter", "K"):
        made.add_column(name, overflow="fold")
    for name in ("tokens/s", "speedup", "end\nto end", "rate", "length"):
        made.add_column(name, justify="right")
    made.add_column("survival")
    made.add_column("identical")
    for i, run in enumerate(runs):
        ends = i + 1 == len(runs) or runs[i + 1]["temperature"] != run["temperature"]
        drafted = run["acceptance_length"] is not None
        survival = run["acceptance_by_position"] or []
        made.add_row(
            f"{run['temperature']:g}",
            escape(run["drafter"]),
            str(run["num_speculative_tokens"]),
            f"{run['tokens_per_second']:.1f}",
            f"{run['speedup']:.2f}x",
            f"{run['end_to_end_tokens_per_second']:.1f}",
            f"{run['acceptance_rate']:.2f}" if drafted else "",
            f"{run['acceptance_length']:.2f}" if drafted else "",
            f"{bars(survival)} {shares(survival) if width >= NARROWEST else ''}".strip(),
            identical(run),
            style="bold green" if run is best(runs, run["temperature"]) else None,
            end_section=ends,
        )
    return made


def greedy_line(runs: Sequence[dict[str, Any]]) -> str | None:
    """How far greedy acceptance is owed to loops, in a line; None without greedy runs."""
    greedy = [r for r in runs if r["temperature"] == 0 and r["acceptance_length"] is not None]
    if not greedy:
        return None
    parts = []
    for run in greedy:
        fresh = run["acceptance_length_without_repeats"]
        shown = "none left" if fresh is None else f"{fresh:.2f}"
        parts.append(
            f"{run['drafter']} K={run['num_speculative_tokens']} "
            f"{run['acceptance_length']:.2f} -> {shown}"
        )
    share = greedy[0]["repeated_share"]
    return (
        "acceptance length at T = 0, without steps that continue an earlier 4-gram as before: "
        f"{'; '.join(parts)} ({share:.0%} of the tokens do so)"
    )


def show(report: dict[str, Any], on_stderr: bool) -> None:
    """Print the table, on stderr where the JSON has stdout."""
    console = Console(stderr=on_stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=on_stderr, highlight=False, width=NARROWEST)
    console.print(table(report, console.width))
    line = greedy_line(report["runs"])
    if line:
        console.print(line)


def bench(
    model: Model = None,
    drafter: Annotated[
        list[str] | None,
        typer.Option(
            help="ngram or a checkpoint's folder; may be given again, or with commas. "
            "The model's own drafter, if it has one, and ngram unless given.",
        ),
    ] = None,
    num_speculative_tokens: Annotated[
        str, typer.Option(metavar="INTS", help="Draft lengths K, with commas.")
    ] = "4",
    temperature: Annotated[
        str, typer.Option(metavar="FLOATS", help="Temperatures, with commas.")
    ] = "0,0.7,1",
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each prompt.")] = 128,
    num_prompts: Annotated[int, typer.Option(min=1, help="Held-out code prompts.")] = 8,
    dtype: Dtype = "auto",
    batch_size: Annotated[int, typer.Option(help="Prompts that run together.")] = 1,
    rounds: Annotated[
        int, typer.Option(min=LEAST_ROUNDS, help="Interleaved rounds.")
    ] = LEAST_ROUNDS,
    json_: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help='Write the report here; "-" is stdout.'),
    ] = None,
) -> None:
    """Measure plain decoding against drafters, and check that their outputs are the same."""
    check_target(json_)
    lengths = numbers(num_speculative_tokens, int, "--num-speculative-tokens")
    temperatures = numbers(temperature, float, "--temperature")
    drafters = [d for given in drafter or [] for d in given.split(",") if d]
    with status("loading the models"):
        from .. import pocket
        from ..bench.offline import Bench, Options
        from ..bench.report import report as make_report

        prompts = pocket.prompts()
        if num_prompts > len(prompts):
            raise typer.BadParameter(
                f"--num-prompts is {num_prompts}; give {len(prompts)} at most."
            )
        options = Options(
            model=model_folder(model), target=model or "pocket",
            drafters=tuple(dict.fromkeys(drafters)) if drafter else None,
            lengths=lengths, temperatures=temperatures, max_tokens=max_tokens, dtype=dtype,
            batch_size=batch_size, rounds=rounds,
        )  # fmt: skip
        engines = Bench(options, prompts[:num_prompts])
    found = measure(engines)
    with status("comparing outputs"):
        report = make_report(engines, found)
    if json_ == "-":
        write(json.dumps(report, indent=1) + "\n")
    elif json_:
        Path(json_).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    show(report, on_stderr=json_ == "-")
    if not all(run["outputs_identical"] for run in report["runs"]):
        sys.stdout.flush()
        raise OutriderError("outputs differ from plain decoding by more than numerical ties.")
