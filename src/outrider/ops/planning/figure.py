"""Numbers with their unit and their evidence."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

MEASURED, MODELLED, ASSUMED = "measured", "modelled", "assumed"


class Figure(NamedTuple):
    """A number with its unit, and whether it was measured, modelled or assumed."""

    value: float
    unit: str
    evidence: str

    def said(self) -> str:
        """Return the number in readable form, without its evidence."""
        value, unit = self.value, self.unit
        if unit == "times":
            return f"{value:.2f}x"
        if unit == "s":
            return f"{1000 * value:.2f} ms" if value < 1 else f"{value:.2f} s"
        if unit == "bytes":
            return f"{value / 1e9:.2f} GB" if value >= 1e8 else f"{value / 1e6:.2f} MB"
        if unit.startswith("share"):
            return f"{100 * value:.1f} %{unit.removeprefix('share')}"
        if unit.startswith("$"):
            sign, size = "-" if value < 0 else "", abs(value)
            return f"{sign}${size:,.{0 if size >= 100 else 2}f}{unit[1:]}"
        if unit.startswith("accepted"):
            return f"{value:.2f} {unit}"
        return f"{value:,.0f} {unit}"

    def __str__(self) -> str:
        return f"{self.said()} ({self.evidence})"


def modelled(value: float, unit: str) -> Figure:
    """Return a figure that the model computed."""
    return Figure(value, unit, MODELLED)


def ranged(
    values: tuple[float, float, float], unit: str, evidence: str = MODELLED
) -> dict[str, Figure]:
    """Return P10, P50 and P90 as figures."""
    figures = (Figure(each, unit, evidence) for each in values)
    return dict(zip(("p10", "p50", "p90"), figures, strict=True))


class Report:
    """An answer with figures."""

    def to_json(self) -> dict[str, Any]:
        """Return the answer as plain objects; each figure has its unit and evidence."""
        return dict(to_json(self))


def to_json(value: Any) -> Any:
    """Return dataclasses and named tuples as plain objects."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: to_json(each) for name, each in value._asdict().items()}
    if is_dataclass(value):
        return {each.name: to_json(getattr(value, each.name)) for each in fields(value)}
    if isinstance(value, dict):
        return {key: to_json(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    return value
