"""Line charts as SVG text, which need no library and load nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from math import ceil, floor, log10
from typing import NamedTuple

WIDTH, HEIGHT = 640, 360
LEFT, RIGHT, TOP, BOTTOM = 64, 150, 36, 48
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
TICKS = 5


class Series(NamedTuple):
    """A line: its name in the legend, and its points."""

    name: str
    across: Sequence[float]
    up: Sequence[float]


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers from ``low`` to ``high``, about ``TICKS`` of them."""
    raw = (high - low) / TICKS
    scale = 10 ** floor(log10(raw))
    step = next(scale * each for each in (1, 2, 2.5, 5, 10) if scale * each >= raw * 0.999)
    first = ceil(low / step - 1e-9)
    return [step * i for i in range(first, floor(high / step + 1e-9) + 1)]


def line_chart(
    title: str, across: str, up: str, series: Sequence[Series], level: float | None = None
) -> str:
    """Return a chart as an SVG element; ``level`` is a height that is marked."""
    xs = [x for each in series for x in each.across]
    ys = [y for each in series for y in each.up] + ([] if level is None else [level])
    left, right = min(xs), max(xs)
    low, high = min(0.0, *ys), max(ys)
    right, high = (right if right > left else left + 1), (high if high > low else low + 1)

    def place(x: float, y: float) -> tuple[float, float]:
        wide, tall = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return (
            round(LEFT + wide * (x - left) / (right - left), 1),
            round(HEIGHT - BOTTOM - tall * (y - low) / (high - low), 1),
        )

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'role="img" font-family="sans-serif" font-size="12">',
        f"<title>{escape(title)}</title>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">{escape(title)}</text>',
    ]
    for tick in ticks(left, right):
        x, y = place(tick, low)
        parts.append(f'<text x="{x}" y="{y + 16}" text-anchor="middle">{tick:g}</text>')
    for tick in ticks(low, high):
        x, y = place(left, tick)
        end, _ = place(right, tick)
        parts.append(f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#e5e5e5"/>')
        parts.append(f'<text x="{x - 6}" y="{y + 4}" text-anchor="end">{tick:,g}</text>')
    if level is not None:
        (x, y), (end, _) = place(left, level), place(right, level)
        parts.append(
            f'<line x1="{x}" y1="{y}" x2="{end}" y2="{y}" stroke="#555" stroke-dasharray="4 3"/>'
        )
    for i, each in enumerate(series):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(
            f"{x},{y}" for x, y in (place(*p) for p in zip(each.across, each.up, strict=True))
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        y = TOP + 18 * i + 8
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 10}" y1="{y}" x2="{WIDTH - RIGHT + 28}" y2="{y}" '
            f'stroke="{colour}" stroke-width="2"/>'
            f'<text x="{WIDTH - RIGHT + 33}" y="{y + 4}">{escape(each.name)}</text>'
        )
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{HEIGHT - 10}" text-anchor="middle">{escape(across)}</text>'
    )
    parts.append(
        f'<text x="14" y="{(TOP + HEIGHT - BOTTOM) / 2}" text-anchor="middle" '
        f'transform="rotate(-90 14 {(TOP + HEIGHT - BOTTOM) / 2})">{escape(up)}</text></svg>'
    )
    return "\n".join(parts) + "\n"
