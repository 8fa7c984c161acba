"""The cost of bringing speculation into production, and the time until it pays for itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date, timedelta
from html import escape
from math import ceil, floor
from typing import Annotated

from pydantic import Field

from ...base.outside.models import check_fields
from ...base.tables import told
from ...errors import ConfigError
from ..markdown import html, listed, section, table
from .advice import Advice
from .catalogue import data
from .checks import Amount, Share, one_of
from .figure import ASSUMED, Figure, Report, modelled

HOURS_A_MONTH = 730.0
DAYS_A_MONTH = HOURS_A_MONTH / 24
CASES = ("low", "base", "high")
MOST_SPEEDUP = 100.0


@dataclass(frozen=True)
class Plan:
    """A question to ``roi``; it is checked on creation, which may raise ConfigError.

    ``speedup`` is low, base and high for the same devices and traffic, such as P10, P50 and P90 of
    ``advise``. ``option`` is a way to introduce speculation, which gives the working ``days`` and
    the ``training_hours`` unless they are given. ``price`` is for a device hour, ``day`` for an
    engineer's day, in dollars. ``requests`` are per month; ``users`` and latencies (``p50``,
    ``p95``, seconds) are today's. The work begins today unless ``start`` is given.
    """

    devices: Annotated[int, Field(ge=1, le=1_000_000)]
    price: Amount
    speedup: tuple[float, float, float]
    option: Annotated[str, one_of(data("efforts")["option"])] = "draft-model"
    days: Amount | None = None
    day: Amount = 800.0
    training_hours: Amount | None = None
    requests: Amount | None = None
    users: Annotated[int, Field(ge=1, le=1_000_000_000)] | None = None
    p50: Amount | None = None
    p95: Amount | None = None
    utilisation: Share | None = None
    value_of_second: Amount = 0.0
    start: date | None = None

    def __post_init__(self) -> None:
        if len(self.speedup) != 3:
            raise ConfigError(f"speedup has {len(self.speedup)} values; give low, base and high.")
        check_fields(self)
        low, base, high = self.speedup
        if not 0 < low <= base <= high:
            raise ConfigError(
                f"speedup is {low:g}, {base:g}, {high:g}; give low, base and high, rising."
            )
        if high > MOST_SPEEDUP:
            raise ConfigError(f"speedup is {high:g}; give a number from 0 to {MOST_SPEEDUP:g}.")
        if self.value_of_second and (self.p50 is None or self.requests is None):
            raise ConfigError("the value of a second needs p50 and the requests of a month.")


@dataclass(frozen=True)
class Case:
    """One of low, base and high. Money is in dollars; a month has 730 hours.

    Break-even days count from the end of the work; ``roi`` is a year's savings / cost - 1.
    """

    speedup: Figure
    cost: Figure
    device_hours_saved: Figure
    saved_a_month: Figure
    latency_value_a_month: Figure
    break_even_days: Figure | None
    break_even_date: str | None
    roi: Figure
    net_first_year: Figure


@dataclass(frozen=True)
class Roi(Report):
    """The result of ``roi``, by case; figures whose input was not given are left out."""

    option: str
    days: tuple[float, float]
    memory: tuple[float, float] | None
    spent_a_month: Figure
    cases: dict[str, Case]
    capacity: dict[str, Figure]
    """In the base case: users that the same devices serve, devices that these would need in
    addition without speculation, and dollars for 1,000 requests."""
    latency: dict[str, Figure]
    """Seconds of a request, today and in the base case."""
    balance: dict[str, list[Figure]]
    """By case: the gain by the end of months 0 to 12, less the cost."""
    notes: list[str]


def _money(value: float) -> Figure:
    return modelled(value, "$")


def _after(start: date, days: float) -> str | None:
    """Return the date ``days`` later; None if it is beyond the calendar."""
    try:
        return (start + timedelta(days=ceil(days))).isoformat()
    except OverflowError:
        return None


def _case(plan: Plan, speedup: float, days: float, hours: float) -> Case:
    cost = days * plan.day + hours * plan.price
    freed = plan.devices * HOURS_A_MONTH * (1 - 1 / speedup)
    quicker = (plan.p50 or 0.0) * (1 - 1 / speedup) * (plan.requests or 0.0)
    value = quicker * plan.value_of_second
    gained = freed * plan.price + value
    pays = cost / gained * DAYS_A_MONTH if gained > 0 else None
    when = None if pays is None else _after(plan.start or date.today(), days * 7 / 5 + pays)
    net = 12 * gained - cost
    return Case(
        Figure(speedup, "times", ASSUMED), _money(cost), modelled(freed, "device hours a month"),
        _money(freed * plan.price), _money(value),
        None if pays is None else modelled(pays, "days"), when,
        modelled(net / cost if cost else float(gained > 0), "share of the cost"), _money(net),
    )  # fmt: skip


def _capacity(plan: Plan) -> dict[str, Figure]:
    figures = {}
    if plan.requests:
        today = plan.devices * HOURS_A_MONTH * plan.price / plan.requests * 1000
        figures["cost_today"] = modelled(today, "$ per 1,000 requests")
        figures["cost"] = modelled(today / plan.speedup[1], "$ per 1,000 requests")
    if plan.users is not None:
        users = floor(plan.users * plan.speedup[1] + 1e-9)
        needed = ceil(plan.devices * users / plan.users - 1e-9)
        figures["users"] = modelled(users, "users")
        figures["extra_users"] = modelled(users - plan.users, "users")
        figures["devices_avoided"] = modelled(max(0, needed - plan.devices), "devices")
    return figures


def _latency(plan: Plan) -> dict[str, Figure]:
    figures = {}
    for name, seconds in (("p50", plan.p50), ("p95", plan.p95)):
        if seconds is not None:
            figures[f"{name}_today"] = Figure(seconds, "s", ASSUMED)
            figures[name] = modelled(seconds / plan.speedup[1], "s")
    return figures


def _notes(plan: Plan, cases: Mapping[str, Case]) -> list[str]:
    holds = {
        "freed": True,
        "given": True,
        "slower": plan.speedup[0] < 1,
        "idle": plan.utilisation is not None,
        "never": cases["base"].break_even_days is None,
    }
    return told(data("notes")["roi"], holds, {"idle": 1 - (plan.utilisation or 0)})


def roi(plan: Plan) -> Roi:
    """Return what it costs to introduce speculation, what it saves, and when it pays off."""
    entry = data("efforts")["option"][plan.option]
    least, most = entry["days"] if plan.days is None else (plan.days, plan.days)
    few, many = entry.get("training_hours", (0.0, 0.0))
    if plan.training_hours is not None:
        few = many = plan.training_hours
    low, base, high = plan.speedup
    # The low case combines the least speedup with the most work.
    cases = {
        "low": _case(plan, low, most, many),
        "base": _case(plan, base, (least + most) / 2, (few + many) / 2),
        "high": _case(plan, high, least, few),
    }
    balance = {}
    for name, case in cases.items():
        gained = case.saved_a_month.value + case.latency_value_a_month.value
        balance[name] = [_money(month * gained - case.cost.value) for month in range(13)]
    memory = entry.get("memory")
    return Roi(
        entry["label"], (least, most), memory and (memory[0], memory[1]),
        _money(plan.devices * HOURS_A_MONTH * plan.price), cases, _capacity(plan), _latency(plan),
        balance, _notes(plan, cases),
    )  # fmt: skip


def speedups_of(advice: Advice) -> tuple[float, float, float]:
    """Return P10, P50 and P90 of an advice's speedup."""
    try:
        low, base, high = (advice.speedup[name].value for name in ("p10", "p50", "p90"))
    except KeyError:
        raise ConfigError(
            "the advice has no speedup; ask outrider ops advise with --hardware or --profile."
        ) from None
    return low, base, high


ROWS = (
    ("speedup", "speedup"), ("cost", "cost of the work"),
    ("device_hours_saved", "device hours freed a month"), ("saved_a_month", "saved a month"),
    ("latency_value_a_month", "value of latency a month"),
    ("break_even_days", "break-even, days after the work"), ("break_even_date", "break-even on"),
    ("roi", "return of 12 months"), ("net_first_year", "net of 12 months"),
)  # fmt: skip


def roi_markdown(answer: Roi) -> str:
    """Return the figures as Markdown; every number comes with its evidence."""
    rows = [
        (label, *(getattr(answer.cases[case], name) or "never" for case in CASES))
        for name, label in ROWS
    ]
    least, most = answer.days
    effort: dict[str, object] = {
        "work": f"{f'{least:g} to ' * (least < most)}{most:g} days (assumed)"
    }
    if answer.memory:
        effort["memory"] = f"{answer.memory[0]:+.0%} to {answer.memory[1]:+.0%} (assumed)"
    effort["spent a month today"] = answer.spent_a_month
    lines = [f"# Return on speculation: {answer.option}", "", *table(("", *CASES), rows)]
    for title, figures in (
        ("Effort", effort), ("Capacity, base case", answer.capacity),
        ("Seconds of a request", answer.latency),
    ):  # fmt: skip
        lines += section(title, listed(figures) if figures else [])
    return "\n".join([*lines, *(f"- {note}" for note in answer.notes)]) + "\n"


def roi_plot(answer: Roi) -> str:
    """Return the plot of the balance by month as an SVG element."""
    from ...base.plots import Series, line_chart

    months = list(range(13))
    series = [Series(name, months, [f.value for f in answer.balance[name]]) for name in CASES]
    return line_chart("Gained so far, less the cost", "months", "$ (modelled)", series, 0.0)


def roi_html(answer: Roi) -> str:
    """Return the figures and the plot as one HTML page that loads nothing."""
    try:
        picture = roi_plot(answer)
    except ConfigError as error:
        picture = f"<p>{escape(str(error))}</p>"
    return html(f"Return on speculation: {answer.option}", roi_markdown(answer), picture)
