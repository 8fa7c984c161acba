"""A peers report as Markdown tables: every run, and ours / theirs for each peer."""

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.intervals import shown

from ..common import table
from .files import tables as files_tables
from .known import OWN
from .report import heading, label

RATIOS = ("dtype", "load", "peer", "plain", "best mode", "which")
RUNS = (
    "dtype", "load", "engine", "mode", "K", "threads", "tokens/s", "of memory", "of peak",
    "of both", "end to end", "TTFT ms", "peak MB", "bits per weight", "= plain", "= ours", "others",
)  # fmt: skip
BRIEF = (
    "pair", "dtype", "load", "plain", "best mode", "our plain tokens/s", "of the machine",
    "our best tokens/s",
)  # fmt: skip
DEFINITIONS = (
    "tokens/s: median of {rounds} interleaved rounds of the best settings, in brackets its "
    "{confidence:.1%} confidence interval (order statistics). It is, under decode, "
    "(N-1)/(T(N)-T(1)), prompts one by one; under batch N, output of N requests that start "
    "together / time until all are done; under prefill N, N / T(1) · of memory: weights that a "
    "token reads x tokens/s / measured bandwidth · of peak: products with weights a second / those "
    "that the instruction set can do, measured too · of both: the least time that both allow for "
    "the prompts and steps of several requests / the time taken · end to end: output / T(N) · "
    "TTFT: T(1), a call for one token (batch: one each) · peak: resident memory of the peer's "
    "processes, loading included · bits: size of the weights / their number · = plain: ids equal "
    "to the peer's own plain run, = ours: to our plain run · others: most cores that other "
    "processes used in a timed run · ratios: ours / theirs, * against the fastest peer"
)


def same(identical: bool | None, at: int | None = None) -> str:
    """Return whether ids are equal, and where they first are not."""
    if identical is None:
        return ""
    return "yes" if identical else f"no @{at}" if at is not None else "no"


def cells(run: dict[str, Any]) -> list[object]:
    """Return a run's row."""
    shares = [run["memory_share"], run.get("peak_share"), run.get("roofline_share")]
    bits = run["bits_per_weight"]
    others = [cores for cores in run["others_cores"] if cores is not None]
    mode = f"{run['mode']} {run.get('arguments', '')}".rstrip()
    return [
        run["dtype"], run["load"], f"{run['peer']} {run['version']}", mode,
        run["num_speculative_tokens"] or "",
        run["threads"],
        f"{run['tokens_per_second']:,.0f} "
        f"{shown(run['tokens_per_second_interval'], ',.0f')}".rstrip(),
        *("" if share is None else f"{share:.0%}" for share in shares),
        f"{run['end_to_end_tokens_per_second']:,.0f}",
        f"{run['ttft_ms']:,.0f}", f"{run['peak_memory_bytes'] / 1e6:,.0f}",
        "" if bits is None else f"{bits:.2f}", same(run["identical_to_plain"]),
        same(run["identical_to_outrider"], run["first_difference"]),
        f"{max(others):.2f}" if others else "",
    ]  # fmt: skip


def ratios(pair: dict[str, Any]) -> Iterator[list[object]]:
    """Yield ours / theirs, a row a dtype, load and peer."""
    hardest = {(bar["dtype"], bar["load"]): bar for bar in pair["bars"]}
    for entry in pair["ratios"]:
        bar, best, row = hardest[entry["dtype"], entry["load"]], entry["best"], []
        for name in ("plain", "best"):
            star = "*" if bar[name] and bar[name]["peer"] == entry["peer"] else ""
            ratio = entry[name]
            row.append(
                ratio and f"{ratio['ratio']:.2f}{star} {shown(ratio['interval'], '.2f')}".rstrip()
            )
        row.append(best and f"{best['ours']} / {best['theirs']}")
        yield [entry["dtype"], entry["load"], entry["peer"], *(cell or "" for cell in row)]


def brief(report: dict[str, Any]) -> Iterator[list[object]]:
    """Yield ours / the fastest peer's, a row a pair, dtype and load.

    ``of the machine`` is our plain run's share of bandwidth, peak or both, whichever is known.
    """
    for pair in report["pairs"]:
        own = [run for run in pair["runs"] if run["peer"] == OWN]
        for bar in pair["bars"]:
            cell = bar["dtype"], bar["load"]
            runs = [run for run in own if (run["dtype"], run["load"]) == cell]
            ours = next((run for run in runs if run["mode"] == "plain"), None)
            if ours is None:
                continue
            shares = (ours.get(f"{name}_share") for name in ("memory", "peak", "roofline"))
            yield [
                pair["name"], bar["dtype"], bar["load"],
                *(
                    f"{ratio['ratio']:.2f} {shown(ratio['interval'], '.2f')} {ratio['peer']}"
                    if (ratio := bar[name]) else ""
                    for name in ("plain", "best")
                ),
                f"{ours['tokens_per_second']:,.0f}",
                next((f"{share:.0%}" for share in shares if share is not None), ""),
                f"{max(run['tokens_per_second'] for run in runs):,.0f}",
            ]  # fmt: skip


def markdown(report: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a report, those of GGUF files first."""
    yield from files_tables(report)
    for pair in report["pairs"]:
        yield f"{label(pair)} · {heading(report)} · medians of {report['rounds']} rounds"
        for names, rows in ((RATIOS, ratios(pair)), (RUNS, map(cells, pair["runs"]))):
            yield ""
            yield from table(names, rows)
        yield ""
        for skipped in pair["skipped"]:
            which = [skipped[name] for name in ("peer", "dtype", "mode", "load")]
            yield f"skipped: {' '.join(filter(None, which))}: {skipped['reason']}"
    yield DEFINITIONS.format(rounds=report["rounds"], **report["intervals"])


def main(
    files: Annotated[list[Path], typer.Argument(help="What peers wrote with --out.", exists=True)],
    short: Annotated[
        bool, typer.Option("--brief", help="One table of ours / the fastest peer's.")
    ] = False,
    real: Annotated[
        bool, typer.Option("--files", help="The short tables of GGUF files alone.")
    ] = False,
) -> None:
    """Print the tables of peers reports, in Markdown."""
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in files]
    if short:
        print("\n".join(table(BRIEF, chain.from_iterable(map(brief, reports)))))
        return
    for report in reports:
        print("\n".join(files_tables(report) if real else markdown(report)))
