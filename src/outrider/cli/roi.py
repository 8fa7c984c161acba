"""``outrider ops roi``: what speculation costs to bring in, and when it has paid for itself."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from pathlib import Path
from typing import Annotated

import typer

from .common import Advised, AsJson, Out, writable
from .flags import setting, with_flags

File = Annotated[str | None, typer.Option(metavar="FILE", callback=writable)]


def three(text: str) -> tuple[float, float, float]:
    """Return ``2.5`` or ``2,2.5,3`` as low, base and high."""
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 3):
        raise typer.BadParameter(f"--speedup is {text!r}; give a number, or LOW,BASE,HIGH.")
    return numbers[0], numbers[len(numbers) // 2], numbers[-1]


def day_of(text: str | None) -> date | None:
    """Return the day of an ISO date."""
    try:
        return None if text is None else datetime.strptime(text, "%Y-%m-%d").date()
    except ValueError:
        raise typer.BadParameter(f"--start is {text!r}; give a date such as 2026-12-01.") from None


@dataclass(frozen=True, kw_only=True)
class RoiFlags:
    """The options of ``outrider ops roi``; most are fields of ``Plan``."""

    devices: Annotated[int, typer.Option(help="Accelerators in use today.")]
    price: Annotated[float, typer.Option(help="Dollars per hour and accelerator.")]
    speedup: str | None = setting(
        None, "Speedup on the same devices, or one number.", metavar="LOW,BASE,HIGH"
    )
    advice: Advised = None
    option: str = setting("draft-model", "draft-model, eagle3, tensorrt-llm or custom-drafter.")
    requests: float | None = setting(None, "Requests per month.")
    users: int | None = setting(None, "Users served at once today.")
    p50: float | None = setting(None, "Seconds of a request today.")
    p95: float | None = setting(None, "Seconds of a request today.")
    utilisation: float | None = setting(None, "Share of the devices in use today, 0 to 1.")
    json_: AsJson = False
    out: Out = None
    days: float | None = setting(None, "Working days; those of the option unless given.")
    day: float = setting(800.0, "Dollars per engineer's day.")
    training_hours: float | None = setting(
        None, "Hours of an accelerator; those of the option unless given."
    )
    value_of_second: float = setting(
        0.0, "Value in dollars of a request that ends a second earlier."
    )
    start: str | None = setting(None, "First day of the work; today unless given.", metavar="DATE")
    markdown: File = None
    html: File = None


@with_flags(RoiFlags)
def roi(flags: RoiFlags) -> None:
    """Forecast what speculation costs, what it saves and when it pays for itself."""
    from ..ops.planning import Plan, load_advice
    from ..ops.planning import roi as judge
    from ..ops.planning.roi import roi_html, roi_markdown, speedups_of
    from .reports import deliver

    if (flags.speedup is None) == (flags.advice is None):
        raise typer.BadParameter("give one of --speedup and --advice.")
    own = {n: v for n, v in vars(flags).items() if n in Plan.__dataclass_fields__}
    own["start"] = day_of(flags.start)
    if flags.advice is None:
        own["speedup"] = three(flags.speedup or "")
    else:
        own["speedup"] = speedups_of(load_advice(flags.advice))
    answer = judge(Plan(**own))
    if flags.html is not None:
        Path(flags.html).write_text(roi_html(answer), encoding="utf-8")
    if flags.markdown is not None:
        Path(flags.markdown).write_text(roi_markdown(answer), encoding="utf-8")
    deliver(answer.to_json(), roi_markdown(answer), flags.json_, flags.out)
