"""Reports as PNGs: speedups and acceptance of a benchmark, speeds and latencies of a tuning."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.plots import PANELS_IN_A_ROW, Axes, add_legend, colour, paneled, save
from .report import heading

Run = dict[str, Any]
STYLES = ("o-", "s--", "^:", "D-.")  # marker and line, by temperature; the colour is the drafter's
LONGEST_NAME = 32


def whiskers(runs: Sequence[Run], name: str) -> tuple[list[float], list[list[float]]]:
    """Return a figure of each run, and how far its interval reaches below and above."""
    values = [run[name] for run in runs]
    bounds = [run[f"{name}_interval"] or (run[name], run[name]) for run in runs]
    pairs = list(zip(values, bounds, strict=True))
    return values, [[v - low for v, (low, _) in pairs], [high - v for v, (_, high) in pairs]]


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the figure of a report with at least one drafter to ``file``, a PNG.

    A panel for each batch size shows the speedup by K; the last one shows acceptance by position at
    the largest K. Colours are drafters, and line styles temperatures. Raises ConfigError: the file
    cannot be written.
    """
    runs = [run for run in report["runs"] if run["num_speculative_tokens"]]
    sizes = list(dict.fromkeys(run["batch_size"] for run in runs))
    lines = list(dict.fromkeys((run["drafter"], run["temperature"]) for run in runs))
    confidence = report["intervals"]["confidence"]
    bars = f", bars: their {confidence:.1%} confidence intervals" if confidence else ""
    title = [*heading(report), f"speedup: medians of {report['rounds']} rounds{bars}"]
    figure, panels = paneled(len(sizes) + 1, "\n".join(title), margin=1.2)
    for panel, size in zip(panels, sizes, strict=False):
        panel.sharey(panels[0])
        panel.axhline(1, color="0.6", linewidth=1, zorder=0)
        for drafter, temperature in lines:
            points = _line(runs, drafter, temperature, size)
            panel.errorbar(
                [run["num_speculative_tokens"] for run in points], *whiskers(points, "speedup"),
                capsize=3, **_style(lines, drafter, temperature),
            )  # fmt: skip
        _describe(panel, f"speedup, batch size {size}", "draft length K, tokens", "times plain")
    # Acceptance does not depend on the batch, so the first size is enough.
    for drafter, temperature in lines:
        survival = _line(runs, drafter, temperature, sizes[0])[-1]["acceptance_by_position"] or []
        places = range(1, len(survival) + 1)
        panels[-1].plot(places, survival, **_style(lines, drafter, temperature))
    _describe(
        panels[-1], "acceptance by position, largest K", "position in the draft, tokens",
        "share of drafts accepted up to it",
    )  # fmt: skip
    figure.legend(
        handles=panels[-1].lines,
        loc="outside lower center",
        ncols=min(len(panels), PANELS_IN_A_ROW),
    )
    save(figure, file)


def _line(runs: Sequence[Run], drafter: str, temperature: float, size: int) -> list[Run]:
    """Return the runs of a line, by K."""
    key = drafter, temperature, size
    points = [r for r in runs if (r["drafter"], r["temperature"], r["batch_size"]) == key]
    return sorted(points, key=lambda run: run["num_speculative_tokens"])


def _style(lines: list[tuple[str, float]], drafter: str, temperature: float) -> dict[str, Any]:
    """Return the style of a line, and its label."""
    drafters, temperatures = (list(dict.fromkeys(part)) for part in zip(*lines, strict=True))
    name = drafter if len(drafter) <= LONGEST_NAME else f"…{drafter[1 - LONGEST_NAME :]}"
    form = STYLES[temperatures.index(temperature) % len(STYLES)]
    return {
        "color": colour(drafters.index(drafter)), "marker": form[0],
        "linestyle": form[1:], "markersize": 4, "linewidth": 1.2,
        "label": f"{name}, T = {temperature:g}",
    }  # fmt: skip


def _describe(panel: Axes, title: str, across: str, up: str) -> None:
    """Name a panel and its axes; y begins at 0, and x has whole numbers."""
    panel.set(title=title, xlabel=across, ylabel=up)
    panel.set_ylim(bottom=0)
    panel.locator_params(axis="x", integer=True)
    panel.grid(axis="y", color="0.92")


def draw_tuning(report: dict[str, Any], file: Path) -> None:
    """Write the figure of ``TuningResult.report`` to ``file``, a PNG, or raise ConfigError.

    A panel for each batch size shows tokens per second by K: points were raced, lines are
    predictions. The last panel shows throughput against the time per token of a sequence.
    """
    cells = report["batch_sizes"]
    machine = report["machine"]
    title = (
        f"{report['model']}, {report['workload']}, T = {report['temperature']:g}, {machine['cpu']}"
    )
    figure, panels = paneled(len(cells) + 1, title, margin=0.8)
    for panel, cell in zip(panels, cells, strict=False):
        _by_length(panel, cell)
    _frontier(panels[-1], report)
    save(figure, file)


def _by_length(panel: Axes, cell: dict[str, Any]) -> None:
    """Draw the speed of each drafter's chains by K."""
    chains = [row for row in cell["settings"] if not row["max_draft_nodes"]]
    plain = next(row for row in chains if not row["num_speculative_tokens"])
    panel.axhline(plain["tokens_per_second"], color="0.6", linewidth=1, label="plain")
    for place, drafter in enumerate(sorted({row["drafter"] for row in chains} - {"none"})):
        own = [row for row in chains if row["drafter"] == drafter]
        own.sort(key=lambda row: row["num_speculative_tokens"])
        raced = [row for row in own if row["rounds"]]
        lengths = [row["num_speculative_tokens"] for row in own]
        panel.plot(lengths, [row["promised"] for row in own], color=colour(place), label=drafter)
        panel.plot(
            [row["num_speculative_tokens"] for row in raced],
            [row["tokens_per_second"] for row in raced],
            "o", color=colour(place),
        )  # fmt: skip
    panel.set(
        title=f"batch size {cell['batch_size']}", xlabel="draft length K, tokens",
        ylabel="tokens per second",
    )  # fmt: skip
    panel.set_ylim(bottom=0)
    add_legend(panel, 7)


def _frontier(panel: Axes, report: dict[str, Any]) -> None:
    """Draw throughput against latency: all raced settings, and the Pareto-optimal points."""
    for place, cell in enumerate(report["batch_sizes"]):
        raced = [row for row in cell["settings"] if row["rounds"]]
        for name, marker in (("plain", "s"), ("drafted", "o")):
            rows = [row for row in raced if bool(row["num_speculative_tokens"]) != (marker == "s")]
            panel.plot(
                [row["latency_per_token_ms"] for row in rows],
                [row["tokens_per_second"] for row in rows],
                marker, color=colour(place), alpha=0.6,
                label=f"batch size {cell['batch_size']}, {name}",
            )  # fmt: skip
    front = report["pareto"]
    places = [(each["latency_per_token_ms"], each["tokens_per_second"]) for each in front]
    panel.plot(*zip(*places, strict=True), "k-", linewidth=1, label="none better in both")
    for each, at in zip(front, places, strict=True):
        panel.annotate(each["setting"], at, textcoords="offset points", xytext=(4, -8), fontsize=6)
    panel.set(title="throughput, latency", xlabel="ms a token", ylabel="tokens per second")
    panel.set_ylim(bottom=0)
    panel.set_xlim(left=0)
    add_legend(panel, 6)
