"""Prints the beliefs of an engine's controller (``engine/control/summary.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .common import WIDE, bars, shares

Beliefs = Mapping[str, Any]
CELLS = (
    "what the engine believes after each cell whose choices are its own: expected speeds are those "
    "of the whole batch in decode steps; survival, the expected share of drafts accepted up to "
    "each depth; filled, the drafted share of the nodes that a draft may have; ms per draft, those "
    "of one sequence up to 4 tokens deep"
)


def choice(chosen: Mapping[str, Any]) -> str:
    """Return one choice in words."""
    count = chosen["sequences"]
    if not chosen["depth"]:
        how = "plain decoding"
    else:
        deep = chosen["depth"]
        how = f"{chosen['method']}, {deep} {'token' if deep == 1 else 'tokens'} deep"
    return f"{how}, for {count} {'sequence' if count == 1 else 'sequences'}"


def expectation(beliefs: Beliefs) -> str:
    """Return what is expected of the choices, beside plain decoding."""
    chosen, plain = beliefs["tokens_per_second"], beliefs["plain_tokens_per_second"]
    text = f"{chosen:.0f} tokens/s expected, plain decoding {plain:.0f}"
    return f"{text} ({chosen / plain:.2f}x)" if plain else text


def pauses(beliefs: Beliefs) -> str:
    """Return the batch sizes at which drafting pauses, and why."""
    sizes = [
        f"{steps} steps from {size} {'sequence' if size == '1' else 'sequences'} on"
        for size, steps in beliefs["pauses"].items()
    ]
    return f"drafting lost time and pauses for {', '.join(sizes)}" if sizes else "none"


def methods(beliefs: Beliefs, width: int) -> Table:
    """Return what is known of each method, as a table."""
    grid = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    grid.add_column("  method", no_wrap=True)
    for name in ("ms per draft", "judged", "filled"):
        grid.add_column(name, justify="right")
    grid.add_column("survival")
    for name, cost in beliefs["draft_ms"].items():
        known = beliefs["survival"].get(name)
        row = [f"  {name}", f"{cost:.2f}"]
        if known is not None:
            figures = shares(known["survival"]) if width >= WIDE else ""
            picture = f"{bars(known['survival'])} {figures}".strip()
            row += [f"{known['judged']:.0f}", f"{known['filled']:.2f}", picture]
        grid.add_row(*row)
    return grid


def show(console: Console, title: str, beliefs: Beliefs) -> None:
    """Print the beliefs at the end of one cell."""
    verify = ", ".join(f"{n}: {ms:.2f}" for n, ms in beliefs["verify_ms"].items())
    console.print(Text.assemble("\n", (title, "bold"), f": {expectation(beliefs)}"))
    for chosen in beliefs["choices"]:
        console.print(f"  chosen: {choice(chosen)}")
    console.print(f"  pauses: {pauses(beliefs)}")
    console.print(f"  tried: {beliefs['explored']:.1%} of the time went into unused methods")
    console.print(f"  ms per verify, by rows: {verify}")
    if "experts" in beliefs:
        read = ", ".join(f"{rows}: {mean:g}" for rows, mean in beliefs["experts"].items())
        said = f"rows share {1 - beliefs['strange']:.0%} of what they could"
        console.print(f"  experts of a layer that are read, by rows: {read}; {said}")
    console.print(methods(beliefs, console.width))


def explain(console: Console, runs: Sequence[Mapping[str, Any]]) -> None:
    """Print the beliefs at the end of each run of a benchmark that has some."""
    cells = [run for run in runs if run["controller"] is not None]
    if not cells:
        console.print("no drafter left the choices to the engine; --drafter auto does.")
        return
    console.print(f"\n{CELLS}", style="dim")
    for run in cells:
        title = (
            f"{run['drafter']}, T = {run['temperature']:g}, batch {run['batch_size']}, "
            f"K up to {run['num_speculative_tokens']}"
        )
        show(console, title, run["controller"])
