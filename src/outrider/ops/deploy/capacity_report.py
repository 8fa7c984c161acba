"""A capacity as Markdown."""

from __future__ import annotations

from collections.abc import Callable

from ..markdown import table
from ..planning.figure import Figure
from .capacity import Capacity, Fleet

NEVER = "does not keep the service levels"


def _count(figure: Figure) -> str:
    """Return a number without its unit, which stands beside it."""
    return f"{figure.value:,.0f} ({figure.evidence})"


def _times(level: str) -> Callable[[Fleet], str]:
    return lambda fleet: ", ".join(f"{p.upper()} {t.said()}" for p, t in fleet.times[level].items())


ROWS: tuple[tuple[str, Callable[[Fleet], str]], ...] = (
    ("requests/s of a replica", lambda fleet: f"{fleet.per_replica.value:.3g} (modelled)"),
    ("more would break", lambda fleet: fleet.limited_by),
    ("sequences at once", lambda fleet: _count(fleet.batch)),
    ("draft length", lambda fleet: f"{fleet.k or 'off'} (modelled)"),
    ("replicas at the peak", lambda fleet: _count(fleet.replicas)),
    ("spare replicas", lambda fleet: _count(fleet.spare)),
    ("standby replicas, plain", lambda fleet: _count(fleet.standby)),
    ("**devices in all**", lambda fleet: f"**{_count(fleet.devices)}**"),
    ("wait", _times("wait")),
    ("TTFT", _times("ttft")),
    ("TPOT", _times("tpot")),
    ("E2E", _times("e2e")),
)


def capacity_markdown(capacity: Capacity) -> str:
    """Return a capacity as Markdown; every number has its evidence beside it."""
    peak = capacity.peak
    slo = ", ".join(f"{name.upper()} {each}" for name, each in capacity.slo.items())
    lines = [
        f"# {capacity.target} for {peak.value:,.6g} requests/s ({peak.evidence})", "",
        f"Service levels: {slo}. Acceptance of {capacity.drafter}: {capacity.acceptance} "
        f"({capacity.acceptance_source}).", "",
    ]  # fmt: skip
    both = (capacity.plain, capacity.speculative)
    cells = [(name, *(cell(each) if each else NEVER for each in both)) for name, cell in ROWS]
    lines += table(("", "plain", "speculative"), cells)
    lines += ["The times are modelled: at the peak, with spares and standby idle.", ""]
    lines += _days(capacity)
    if capacity.cautious is not None:
        takes = f"At the P10 of acceptance the peak takes {capacity.cautious} with speculation."
        lines += [takes, ""]
    if capacity.rollback:
        needed, there, missing = (capacity.rollback[n] for n in ("needed", "there", "missing"))
        lines += [
            f"If all traffic goes plain at the peak it needs {_count(needed)} replicas. Without "
            f"the spares {_count(there)} are there, standby and drafting ones, which then go "
            f"plain too: {_count(missing)} are missing.", "",
        ]  # fmt: skip
    lines += [f"- {note}" for note in capacity.notes]
    return "\n".join(lines) + "\n"


def _days(capacity: Capacity) -> list[str]:
    """Return device hours and dollars of a day, and replicas by hour where hours are known."""
    sides = (("plain", capacity.plain), ("speculative", capacity.speculative))
    both = [(name, each) for name, each in sides if each]
    rows = [
        (name, how, hours, each.dollars_a_day.get(how, "not known"))
        for name, each in both
        for how, hours in each.device_hours_a_day.items()
    ]
    lines = table(("", "replicas", "device hours a day", "dollars a day"), rows) if rows else []
    if any(len(each.hours) > 1 for _, each in both):
        lines += ["Replicas by hour (modelled), without spares and standby:", ""]
        for name, each in both:
            lines.append(f"- {name}: {' '.join(f'{hour.value:g}' for hour in each.hours)}")
        lines.append("")
    return lines
