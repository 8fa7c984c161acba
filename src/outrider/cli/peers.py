"""``outrider bench peers``: our engine against other engines on this machine's CPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ..bench.intervals import shown
from ..errors import OutriderError
from .bench import LEAST_ROUNDS, NARROWEST, check_target
from .common import write

DEFINITIONS = (
    "tokens/s: median of {rounds} interleaved rounds of the best settings, in brackets its "
    "{confidence:.1%} confidence interval (order statistics). It is, under decode, "
    "(N-1)/(T(N)-T(1)), prompts one by one; under batch N, output of N requests that start "
    "together / time until all are done; under prefill N, N / T(1) · of memory: weights that a "
    "token reads x tokens/s / measured bandwidth · end to end: output / T(N) · "
    "TTFT: T(1), a call for one token (batch: one each) · peak: resident memory of the peer's "
    "processes, loading included · bits: size of the weights / their number · = plain: ids equal "
    "to the peer's own plain run, = ours: to our plain run · others: most cores that other "
    "processes used in a timed run"
)


def chosen(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The members of a comma list, each known."""
    found = tuple(dict.fromkeys(part for part in text.split(",") if part))
    wrong = [part for part in found if part not in known]
    if wrong or not found:
        raise typer.BadParameter(
            f"{option} has {(wrong or [text])[0]!r}; give one or more of {', '.join(known)}."
        )
    return found


def said(value: bool | None, at: int | None = None) -> str:
    """Whether ids are equal, and where they first are not."""
    if value is None:
        return ""
    return "yes" if value else f"no @{at}" if at is not None else "no"


def table(report: dict[str, Any], pair: dict[str, Any]) -> Table:
    """A pair's runs for people."""
    from ..bench.peers.report import heading, label

    definitions = DEFINITIONS.format(
        rounds=report["rounds"], confidence=report["intervals"]["confidence"]
    )
    made = Table(
        title=escape(f"{label(pair)} · {pair['prompts']} prompts, {heading(report)}"),
        caption=definitions, caption_justify="left",
        box=box.SIMPLE, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in ("dtype", "load", "peer", "mode", "K", "threads"):
        made.add_column(name)
    for name in ("tokens/s", "", "of memory", "end to end", "TTFT ms", "peak MB", "bits"):
        made.add_column(name, justify="right")
    for name in ("= plain", "= ours", "others"):
        made.add_column(name)
    groups = [(run["dtype"], run["load"]) for run in pair["runs"]]
    for run, group, following in zip(pair["runs"], groups, [*groups[1:], None], strict=True):
        others = [o for o in run["others_cores"] if o is not None]
        made.add_row(
            *group,
            f"{run['peer']} {run['version']}",
            run["mode"],
            str(run["num_speculative_tokens"] or ""),
            str(run["threads"]),
            f"{run['tokens_per_second']:.1f}",
            escape(shown(run["tokens_per_second_interval"], ".0f")),
            "" if run["memory_share"] is None else f"{run['memory_share']:.0%}",
            f"{run['end_to_end_tokens_per_second']:.1f}",
            f"{run['ttft_ms']:.0f}",
            f"{run['peak_memory_bytes'] / 1e6:.0f}",
            "?" if run["bits_per_weight"] is None else f"{run['bits_per_weight']:.2f}",
            said(run["identical_to_plain"]),
            said(run["identical_to_outrider"], run["first_difference"]),
            f"{max(others):.2f}" if others else "",
            end_section=group != following,
        )
    return made


def ratios(pair: dict[str, Any]) -> Table:
    """Ours / theirs."""
    made = Table(
        title="ours / theirs (* the fastest peer)", box=box.SIMPLE, show_edge=False,
        pad_edge=False, padding=(0, 1, 0, 0),
    )  # fmt: skip
    for name in ("dtype", "load", "peer", "plain", "", "best mode", "", "which"):
        made.add_column(name)
    hardest = {(entry["dtype"], entry["load"]): entry for entry in pair["bars"]}
    for entry in pair["ratios"]:
        cells = []
        for name in ("plain", "best"):
            found, bar = entry[name], hardest[entry["dtype"], entry["load"]][name]
            star = "*" if bar and bar["peer"] == entry["peer"] else ""
            cells += [f"{found['ratio']:.2f}{star}" if found else ""]
            cells += [escape(shown(found["interval"], ".2f")) if found else ""]
        best = entry["best"]
        which = f"{best['ours']} / {best['theirs']}" if best else ""
        made.add_row(entry["dtype"], entry["load"], entry["peer"], *cells, which)
    return made


def show(report: dict[str, Any], on_stderr: bool) -> None:
    """Print every pair's tables and what was skipped, on stderr where the JSON has stdout."""
    console = Console(stderr=on_stderr, highlight=False)
    if not console.is_terminal:
        console = Console(stderr=on_stderr, highlight=False, width=NARROWEST)
    for pair in report["pairs"]:
        console.print(table(report, pair))
        console.print(ratios(pair))
        for skipped in pair["skipped"]:
            parts = [skipped[name] for name in ("peer", "dtype", "mode", "load")]
            which = " ".join(part for part in parts if part)
            console.print(escape(f"skipped: {which}: {skipped['reason']}"))


def numbers(text: str, option: str) -> tuple[int, ...]:
    """The numbers of a comma list."""
    try:
        return tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        raise typer.BadParameter(f"{option} is {text!r}; give whole numbers with commas.") from None


def peers(
    pair: Annotated[
        str,
        typer.Option(
            metavar="pocket|planted|1b|PATH",
            help="Pairs with commas: the bundled one; planted (12 layers x 768, random weights, a "
            "drafter that agrees on nine tokens of ten) or 1b (the shape of Llama-3.2-1B, the same "
            "way), both made on first use; or a checkpoint's folder, its drafter in or beside it.",
        ),
    ] = "planted",
    peers: Annotated[
        str, typer.Option(help="Peers with commas; all that are installed unless given.")
    ] = "transformers,llama.cpp,openvino,vllm",
    dtype: Annotated[
        str, typer.Option(help="With commas: float32, bfloat16, int8, int4.")
    ] = "float32,bfloat16",
    concurrency: Annotated[
        str, typer.Option(help="Requests at a time, with commas; 1 runs the prompts one by one.")
    ] = "1",
    prefill: Annotated[
        int, typer.Option(help="Measure the prefill of a prompt of so many tokens too.")
    ] = 0,
    num_prompts: Annotated[
        int | None,
        typer.Option(help="How many prompts are run one by one; 2 of a planted pair, else 4."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Output tokens of each prompt.")] = 128,
    temperature: Annotated[
        float, typer.Option(help="Above 0 every engine draws its own noise.")
    ] = 0.0,
    rounds: Annotated[
        int, typer.Option(min=LEAST_ROUNDS, help="Interleaved rounds.")
    ] = LEAST_ROUNDS,
    json_: Annotated[
        str | None,
        typer.Option("--json", metavar="FILE", help='Write the report here; "-" is stdout.'),
    ] = None,
    plot: Annotated[
        str | None, typer.Option(metavar="FILE.png", help="Draw the speeds, as PNG.")
    ] = None,
) -> None:
    """Measure against other engines on this CPU; `make peers` installs them."""
    check_target("--json", None if json_ == "-" else json_)
    check_target("--plot", plot)
    if plot is not None and Path(plot).suffix.lower() != ".png":
        raise typer.BadParameter(f"--plot is {plot!r}; give a file that ends in .png.")
    from ..bench.peers import known
    from ..bench.peers.measure import Bench, Options
    from ..bench.peers.pairs import find_pair
    from ..bench.peers.report import report as make_report

    all_peers = known.peers()
    others = tuple(name for name in all_peers if name != known.OWN)
    sides = [all_peers[name] for name in (known.OWN, *chosen(peers, others, "--peers"))]
    options = Options(
        dtypes=chosen(dtype, known.DTYPES, "--dtype"), rounds=rounds, max_tokens=max_tokens,
        temperature=temperature, concurrency=numbers(concurrency, "--concurrency"),
        prefill=prefill,
    )  # fmt: skip
    benches: list[Bench] = []
    for found in [find_pair(name, num_prompts) for name in dict.fromkeys(pair.split(","))]:
        bench = Bench(found, sides, options)
        bench.run()
        benches.append(bench)
        report = make_report(benches)
        if json_ and json_ != "-":  # after every pair: a long run may end before its time
            Path(json_).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    if json_ == "-":
        write(json.dumps(report, indent=1) + "\n")
    runs = [run for entry in report["pairs"] for run in entry["runs"]]
    if not runs:
        raise OutriderError("nothing could be measured; the lines above say why.")
    show(report, on_stderr=json_ == "-")
    if plot:
        from ..bench.peers.plot import draw

        draw(report, Path(plot))
    if any(run["peer"] == known.OWN and run["identical_to_plain"] is False for run in runs):
        raise OutriderError("Outrider's outputs with drafts differ from its plain ones.")
