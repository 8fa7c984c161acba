"""Two short tables of GGUF files from a peers report: one request and the start, and clients."""

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from ..common import table
from .known import FILE
from .report import machine_line, temperature

Entry = dict[str, Any]


def best(runs: list[Entry]) -> Entry | None:
    """Return the fastest run."""
    return max(runs, key=lambda run: run["tokens_per_second"], default=None)


def speed(run: Entry | None, plain: bool = False) -> str:
    """Return a run's tokens/s, and its mode unless that is said above."""
    if run is None:
        return ""
    number = f"{run['tokens_per_second']:,.1f}"
    length = f", K = {run['num_speculative_tokens']}" if run["num_speculative_tokens"] else ""
    return number if plain else f"{number} ({run['mode']}{length})"


def one_request(report: Entry, pairs: list[Entry]) -> tuple[list[str], list[list[str]]]:
    """Return names and rows of the table of one request and the start of a server."""
    heats = [temperature(report, pair) for pair in pairs]
    by_heat = {heat: pair["runs"] for heat, pair in zip(heats, pairs, strict=True)}
    first = by_heat[heats[0]]
    prefill = next((r["load"] for r in first if r["load"].startswith("prefill")), None)
    started = {s["peer"]: s for s in reversed(pairs[0].get("servers", []))}  # the first stands
    names = ["engine", "plain", *(f"best, T = {heat:g}" for heat in heats)]
    names += [f"{prefill} tokens"] if prefill else []
    names += ["first answer, s", "MB, ready", "MB, after chats", "greedy ids"]
    rows = []
    for peer in dict.fromkeys(run["peer"] for run in first):
        here = [run for run in first if run["peer"] == peer]
        decoded = [run for run in here if run["load"] == "decode"]
        row = [peer, speed(best([r for r in decoded if r["mode"] == "plain"]), plain=True)]
        for heat in heats:
            runs = [r for r in by_heat[heat] if (r["peer"], r["load"]) == (peer, "decode")]
            row.append(speed(best(runs)))
        if prefill:
            row.append(speed(best([r for r in here if r["load"] == prefill]), plain=True))
        if server := started.get(peer):
            row.append(f"{server['seconds']:.2f}")
            row += [f"{server[name] / 1e6:,.0f}" for name in ("ready_bytes", "later_bytes")]
        else:
            row += ["", "", ""]
        at = [run["first_difference"] for run in decoded if run["first_difference"] is not None]
        row.append(f"part at token {min(at)}" if at else "ours")
        rows.append(row)
    return names, rows


def clients(servers: list[Entry]) -> tuple[list[str], list[list[str]]]:
    """Return names and rows of the table of clients: tokens/s of a peer's faster server."""
    counts = sorted({load["clients"] for server in servers for load in server["loads"]})
    names = ["server", *(f"{n} client{'s' if n > 1 else ''}" for n in counts)]
    rows = []
    for peer in dict.fromkeys(server["peer"] for server in servers):
        its = [server for server in servers if server["peer"] == peer]
        row = [f"{peer}, {' or '.join(dict.fromkeys(server['mode'] for server in its))}"]
        for n in counts:
            loads = [load for s in its for load in s["loads"] if load["clients"] == n]
            fastest = max((load["tokens_per_second"] for load in loads), default=None)
            row.append("" if fastest is None else f"{fastest:,.0f}")
        rows.append(row)
    return names, rows


def tables(report: Entry) -> Iterator[str]:
    """Yield the lines of both tables of each pair of GGUF files; nothing for other pairs."""
    of_files = [p for p in report["pairs"] if any(run["dtype"] == FILE for run in p["runs"])]
    for name, group in groupby(of_files, key=lambda pair: pair["name"]):
        pairs = list(group)
        yield f"{name} · {report['max_tokens']} tokens · {machine_line(report)}"
        yield ""
        yield from table(*one_request(report, pairs))
        yield ""
        if servers := pairs[0].get("servers"):
            yield from table(*clients(servers))
            yield ""
