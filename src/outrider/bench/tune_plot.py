"""A tuning as a PNG: speed by draft length, and throughput against latency."""

from pathlib import Path
from typing import Any

from ..base.plots import Axes, colour, paneled, save


def draw(report: dict[str, Any], file: Path) -> None:
    """Write the figure of ``Tuning.report`` to ``file``, a PNG, or raise ConfigError.

    A panel a batch size shows tokens per second by K: points were raced, lines are promises. The
    last panel has throughput against what a sequence waits for a token.
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
    panel.legend(fontsize=7)


def _frontier(panel: Axes, report: dict[str, Any]) -> None:
    """Draw throughput against latency: all that was raced, and the points that none beats."""
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
    panel.legend(fontsize=6)
