"""Published speedups beside what the model predicts, and the tables of docs/planning.md.

``python -m tests.support.planning_section`` prints them.
"""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping
from typing import Any, NamedTuple

from outrider.ops.markdown import table
from outrider.ops.planning.acceptance import Acceptance, of_positions, of_rate
from outrider.ops.planning.catalogue import data, find_device, find_shape
from outrider.ops.planning.forecast import Forecast, draws, forecast, tenths
from outrider.ops.planning.placement import (
    AHEAD,
    APART,
    SOCKET,
    TOGETHER,
    Cpus,
    Pair,
    Placed,
    placements,
)
from outrider.ops.planning.roofline import ACTIVATION
from outrider.ops.planning.situation import Situation
from tests.support import DATA

TOKENS = 256
"""Of a prompt and of a response, where the sources say neither: assumed."""
CPUS = {"xeon-8480": 56, "epyc-9654": 96}
"""Cores of a socket."""


class Entry(NamedTuple):
    """A published pair, and its predicted decode speedup at the published K.

    ``published`` is [least, most], None where no figure was published; ``ms`` are the predicted
    milliseconds for a token, plain and with speculation.
    """

    name: str
    machine: str
    batch: int
    k: int
    acceptance: float
    published: tuple[float, float] | None
    predicted: tuple[float, float, float]
    ms: tuple[float, float]
    published_ms: tuple[float, float] | None
    source: str
    assumed: str

    @property
    def miss(self) -> float | None:
        """The predicted median over the published figure's nearer end; 1 where it lies within."""
        if self.published is None:
            return None
        low, high = self.published
        return self.predicted[1] / min(max(self.predicted[1], low), high)

    @property
    def covered(self) -> bool:
        """Return whether the predicted P10 to P90 and the published range meet."""
        if self.published is None:
            return False
        return self.predicted[0] <= self.published[1] and self.published[0] <= self.predicted[2]


def spread_at(forecast: Forecast, batch: int, k: int) -> tuple[float, float, float]:
    """Return P10, P50 and P90 of the speedup of decoding alone, at one batch size and K."""
    plain, running = forecast.batch(batch, 0) / forecast.tpot(batch, 0), forecast.batch(batch, k)
    worlds = draws(forecast.steps.evidence)
    return tenths([running / forecast.tpot(batch, k, draw) / plain for draw in worlds])


def _acceptance(entry: Mapping[str, Any]) -> Acceptance | None:
    known = entry.get("acceptance")
    if known is None:
        return None
    return of_positions(known) if isinstance(known, list) else of_rate(known, entry["k"])


def predict(entry: Mapping[str, Any]) -> Entry:
    """Return an entry of the catalogue with its prediction: decoding alone, without prompts."""
    batch, k, devices = entry.get("batch", 1), entry["k"], entry.get("devices", 1)
    situation = Situation(
        entry["target"], entry["drafter"], entry["hardware"], devices,
        entry.get("dtype", "bf16"), concurrency={batch: 1.0}, acceptance=_acceptance(entry),
        input_tokens=TOKENS, output_tokens=TOKENS,
    )  # fmt: skip
    target = find_shape(entry["target"])
    found = forecast(situation, target, situation.find_drafter(target))
    assert found is not None
    published, ms = entry.get("published"), entry.get("published_ms")
    return Entry(
        entry["name"], f"{devices} x {entry['hardware']}", batch, k, found.acceptance.rate(k),
        published and (published[0], published[1]), spread_at(found, batch, k),
        (1000 * found.tpot(batch, 0), 1000 * found.tpot(batch, k)), ms and (ms[0], ms[1]),
        entry["source"], entry["assumed"],
    )  # fmt: skip


def entries() -> list[Entry]:
    """Return every published pair with its prediction."""
    return [
        predict(entry)
        for entry in tomllib.loads((DATA / "published.toml").read_text("utf-8"))["entry"]
    ]


def _miss(entry: Entry) -> str:
    miss = entry.miss
    if miss is None:
        return ""
    share = "none" if miss == 1 else f"{miss - 1:+.0%}"
    return share if entry.covered else f"**{share}**"


def _published(entry: Entry) -> str:
    if entry.published is None:
        return "-"
    low, high = entry.published
    text = f"{low:g}x" if low == high else f"{low:g}-{high:g}x"
    if entry.published_ms is not None:
        text += f" ({entry.published_ms[0]:g} to {entry.published_ms[1]:g} ms)"
    return text


def _pairs() -> list[str]:
    found = entries()
    rows = [
        (
            e.name, e.machine, e.batch, e.k, f"{e.acceptance:.2f}", _published(e),
            "{1:.2f}x ({0:.2f}-{2:.2f})".format(*e.predicted)
            + (f", {e.ms[0]:.0f} to {e.ms[1]:.0f} ms" if e.published_ms else ""),
            _miss(e),
        )
        for e in found
    ]  # fmt: skip
    told = [entry for entry in found if entry.published is not None]
    within = sum(entry.covered for entry in told)
    names = ("pair", "machine", "batch", "K", "acceptance", "published", "predicted", "miss")
    sources = table(("pair", "source", "assumed"), ((e.name, e.source, e.assumed) for e in found))
    text = f"{within} of {len(told)} published figures meet P10 to P90, which should hold 80 %."
    return [text, "", *table(names, rows), *sources]


def _models() -> list[str]:
    shapes = [find_shape(name) for name in data("models")["model"]]
    known, heads = data("models")["model"], data("models")["head"]
    rows = (
        (f"`{s.name}`", f"{s.parameters / 1e9:.2f}", f"{s.active / 1e9:.2f}",
         f"{s.kv_values * ACTIVATION / 1024:.0f}", known[s.name]["tokenizer"],
         known[s.name].get("checkpoint", "none"),
         ", ".join(f"{h['checkpoint']} ({h['method']})" for h in heads if h["target"] == s.name))
        for s in shapes
    )  # fmt: skip
    names = ("model", "10^9 parameters", "multiplied for a row", "KB of cache a token", "tokenizer",
             "checkpoint", "head")  # fmt: skip
    return table(names, rows)


def _devices() -> list[str]:
    entries = data("hardware")["device"]
    rows = (
        (f"`{name}`", f"{each['memory'] / 1e9:.0f}", f"{each['bandwidth'] / 1e9:.0f}",
         f"{each['flops']['bf16'] / 1e12:g}", each["source"])
        for name, each in entries.items()
    )  # fmt: skip
    return table(("device", "GB", "GB/s", "10^12 FLOP/s in bf16", "source"), rows)


def placed() -> str:
    """Return the table of placements of docs/planning.md."""
    pairs = ("qwen2.5-7b", "qwen2.5-0.5b"), ("llama-3.1-70b", "llama-3.2-1b")
    names = TOGETHER, APART, AHEAD, SOCKET
    rows = []
    for (device, cores), (target, drafter) in itertools.product(CPUS.items(), pairs):
        for chance, used, sockets in itertools.product((0.7, 0.9), (16, 32, cores), (1, 2)):
            cpus = Cpus(find_device(device), cores, used, sockets)
            pair = Pair(find_shape(target), find_shape(drafter), chance, "int4")
            found = {each.name: each for each in placements(pair, cpus)}
            where, both = f"{sockets} x {used} of `{device}`", f"{target} + {drafter}"
            rows.append((where, both, f"{chance:g}", *(_cell(found.get(n)) for n in names)))
    return "\n".join(table(("cores", "pair", "chance", *names), rows)).strip()


def _cell(found: Placed | None) -> str:
    if found is None:
        return ""
    where = "" if found.share in (None, 1.0) else f", {found.share:.0%}"
    return f"{found.speedup:.2f} (K {found.k}{where})"


def reference() -> str:
    """Return the tables of docs/planning.md."""
    return "\n".join([*_pairs(), *_models(), *_devices()]).strip()


if __name__ == "__main__":
    print(reference(), placed(), sep="\n\n")
