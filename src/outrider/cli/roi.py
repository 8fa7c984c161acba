"""``outrider ops roi``: what speculation costs to bring in, and when it has paid for itself."""

from __future__ import annotations

from datetime import date, datetime
from pathlib import Path
from typing import Annotated

import typer

from .common import Advised, AsJson, Out, writable

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


def roi(
    devices: Annotated[int, typer.Option(help="Accelerators that serve today.")],
    price: Annotated[float, typer.Option(help="Dollars for an hour of one.")],
    speedup: Annotated[
        str | None,
        typer.Option(metavar="LOW,BASE,HIGH", help="Of the same devices; or one number."),
    ] = None,
    advice: Advised = None,
    option: Annotated[
        str, typer.Option(help="draft-model, eagle3, tensorrt-llm or custom-drafter.")
    ] = "draft-model",
    days: Annotated[
        float | None, typer.Option(help="Working days; the option's unless given.")
    ] = None,
    day: Annotated[float, typer.Option(help="Dollars for a day of an engineer.")] = 800.0,
    training_hours: Annotated[
        float | None, typer.Option(help="Of an accelerator; the option's unless given.")
    ] = None,
    requests: Annotated[float | None, typer.Option(help="A month.")] = None,
    users: Annotated[int | None, typer.Option(help="Served at once today.")] = None,
    p50: Annotated[float | None, typer.Option(help="Seconds of a request today.")] = None,
    p95: Annotated[float | None, typer.Option(help="Seconds of a request today.")] = None,
    utilisation: Annotated[float | None, typer.Option(help="Of the devices today, 0 to 1.")] = None,
    value_of_second: Annotated[
        float, typer.Option(help="Dollars that a second less of a request is worth.")
    ] = 0.0,
    start: Annotated[
        str | None, typer.Option(metavar="DATE", help="First day of the work; today unless given.")
    ] = None,
    json_: AsJson = False,
    out: Out = None,
    markdown: File = None,
    html: File = None,
) -> None:
    """Say what speculation costs to bring in, what it saves, and when it has paid for itself."""
    from ..ops.planning import Plan, load_advice
    from ..ops.planning import roi as judge
    from ..ops.planning.roi import speedups_of
    from ..ops.planning.roi_report import roi_html, roi_markdown
    from .reports import deliver

    if (speedup is None) == (advice is None):
        raise typer.BadParameter("give one of --speedup and --advice.")
    spans = three(speedup or "") if advice is None else speedups_of(load_advice(advice))
    answer = judge(Plan(
        devices, price, spans, option, days, day, training_hours, requests, users, p50, p95,
        utilisation, value_of_second, day_of(start),
    ))  # fmt: skip
    if html is not None:
        Path(html).write_text(roi_html(answer), encoding="utf-8")
    if markdown is not None:
        Path(markdown).write_text(roi_markdown(answer), encoding="utf-8")
    deliver(answer.to_json(), roi_markdown(answer), json_, out)
