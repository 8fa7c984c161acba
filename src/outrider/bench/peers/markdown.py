"""``outrider bench peers`` as Markdown: ``python -m outrider.bench.peers.markdown REPORT.json``.

Two tables a pair: ours / theirs against the fastest peer of each dtype and load, and every run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..intervals import shown
from .report import heading, label

RATIOS = ("dtype", "load", "plain", "best mode")
RUNS = (
    "dtype", "load", "engine", "mode", "K", "tokens/s", "of memory", "TTFT ms", "peak MB",
    "bits per weight", "= plain",
)  # fmt: skip


def table(names: Iterable[str], rows: Iterable[Iterable[str]]) -> Iterator[str]:
    """The lines of a table."""
    names = list(names)
    for cells in (names, ["---"] * len(names), *rows):
        yield f"| {' | '.join(cells)} |"


def bar(found: dict[str, Any] | None) -> str:
    """Ours / theirs, its interval, and who the fastest peer is."""
    if found is None:
        return ""
    parts = (f"{found['ratio']:.2f}", shown(found["interval"], ".2f"), found["peer"])
    return " ".join(filter(None, parts))


def speed(run: dict[str, Any]) -> str:
    """Tokens a second, with their interval."""
    bounds = shown(run["tokens_per_second_interval"], ",.0f")
    return f"{run['tokens_per_second']:,.0f} {bounds}".rstrip()


def cells(run: dict[str, Any]) -> Iterator[str]:
    """A run's row."""
    share, bits, same = (run[n] for n in ("memory_share", "bits_per_weight", "identical_to_plain"))
    yield from (run["dtype"], run["load"], run["peer"], run["mode"])
    yield str(run["num_speculative_tokens"] or "")
    yield speed(run)
    yield "" if share is None else f"{share:.0%}"
    yield f"{run['ttft_ms']:,.0f}"
    yield f"{run['peak_memory_bytes'] / 1e6:,.0f}"
    yield "" if bits is None else f"{bits:.2f}"
    yield {None: "", True: "yes", False: "no"}[same]


def markdown(report: dict[str, Any]) -> Iterator[str]:
    """The lines of a report."""
    for pair in report["pairs"]:
        yield f"{label(pair)} · {heading(report)} · medians of {report['rounds']} rounds"
        yield ""
        rows = ([e["dtype"], e["load"], bar(e["plain"]), bar(e["best"])] for e in pair["bars"])
        yield from table(RATIOS, rows)
        yield ""
        yield from table(RUNS, map(cells, pair["runs"]))
        yield ""


def main() -> None:
    """Print what the files say."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.peers.markdown")
    parser.add_argument("files", nargs="+", type=Path)
    for file in parser.parse_args().files:
        print("\n".join(markdown(json.loads(file.read_text(encoding="utf-8")))))


if __name__ == "__main__":
    main()
