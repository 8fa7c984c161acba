"""The replicas and devices that some traffic needs, with speculation and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil
from random import Random

from ...base.tables import told
from ..markdown import table
from ..planning.acceptance import P90
from ..planning.advise import drafter_name, rank
from ..planning.catalogue import data
from ..planning.figure import ASSUMED, Figure, Report, modelled
from ..planning.forecast import EXPECTED, Draw, Forecast, forecast
from .demand import Demand
from .queueing import QueueRun, Replica, simulate

LARGEST_LOAD = 0.9
"""Largest share of its sustainable rate that a replica gets, whatever the service levels."""
SIMULATED_REQUESTS = 12_000
RATE_HALVINGS = 12
PERCENTILES = (0.5, 0.95, 0.99)


@dataclass(frozen=True)
class Fleet:
    """Replicas of one kind: the highest rate of one, what limits it, and how many are needed.

    ``replicas`` (at the peak) and ``hours`` (replicas in each hour) leave out spares and standby.
    ``times`` are those at the peak, by level and percentile.
    """

    per_replica: Figure
    limited_by: str
    batch: Figure
    k: int
    replicas: Figure
    spare: Figure
    standby: Figure
    devices: Figure
    times: dict[str, dict[str, Figure]]
    hours: list[Figure]
    device_hours_a_day: dict[str, Figure]
    """With ``fixed`` replicas, and with replicas that follow the traffic (``scaled``)."""
    dollars_a_day: dict[str, Figure]
    """The cost of those device hours; empty without a price."""


@dataclass(frozen=True)
class Capacity(Report):
    """The result of ``plan``; a fleet is None if no number of replicas keeps the service levels.

    ``cautious`` is the number of speculative replicas at the P10 of acceptance. ``rollback`` counts
    replicas if all traffic decodes plainly: needed, there (with standby, no spares), missing.
    """

    target: str
    drafter: str
    peak: Figure
    slo: dict[str, Figure]
    acceptance: Figure
    acceptance_source: str
    plain: Fleet | None
    speculative: Fleet | None
    cautious: Figure | None
    rollback: dict[str, Figure]
    notes: list[str]


def plan(demand: Demand) -> Capacity:
    """Return the replicas and devices that keep the service levels, with and without speculation.

    Costs of steps are those of ``outrider ops advise``, and a queue is simulated. Requests go to
    replicas at random, as Services and weighted routes do; lengths are exponential.

    Raises ConfigError: the model does not fit; ModelError: a config.json cannot be used.
    """
    situation = demand.situation
    target = situation.target_shape()
    if situation.drafter is None:
        situation = replace(situation, drafter=rank(situation, target)[0].drafter)
    drafter = situation.find_drafter(target)
    outlook = forecast(situation, target, drafter)
    assert outlook is not None  # a demand names hardware or a profile
    plain = _fleet(demand, outlook, False, 0)
    standby = 1
    if plain is not None:
        standby = _at_least_one(demand.standby * demand.peak / plain.per_replica.value)
    speculative = _fleet(demand, outlook, True, standby)
    careful = speculative and _rate(demand, outlook, True, Draw(acceptance=-P90))
    cautious = _replicas(_at_least_one(demand.peak / careful[0])) if careful else None
    k = speculative.k if speculative and speculative.k else outlook.best(1)[0]
    name = drafter_name(situation, drafter)
    known = outlook.acceptance
    return Capacity(
        target.name, name,
        Figure(demand.peak, "requests/s", ASSUMED),
        {level: Figure(seconds, "s", ASSUMED) for level, seconds in demand.slo.items()},
        Figure(known.rate(k), f"accepted / drafted at K = {k}", known.evidence), known.source,
        plain, speculative, cautious, _rollback(plain, speculative),
        _notes(demand, outlook, plain, speculative, cautious),
    )  # fmt: skip


def _replica(demand: Demand, outlook: Forecast, drafts: bool, draw: Draw = EXPECTED) -> Replica:
    """Return a replica for the queue: its prefill, and the time per token by running sequences."""
    most = outlook.batch(demand.max_num_seqs, int(drafts))
    sizes = range(1, most + 1)
    lengths = [outlook.chosen(size) if drafts else 0 for size in sizes]
    token = [outlook.tpot(size, k, draw) for size, k in zip(sizes, lengths, strict=True)]
    return Replica(outlook.ttft(int(drafts)), tuple(token))


def _run(demand: Demand, replica: Replica, rate: float) -> QueueRun:
    """Return a simulation; the number of tokens after the first is exponentially distributed."""
    tokens = demand.situation.output_tokens - 1

    def work(source: Random) -> float:
        return source.expovariate(1 / tokens) if tokens else 0.0

    return simulate(replica, rate, work, SIMULATED_REQUESTS)


def _broken(demand: Demand, run: QueueRun) -> list[str]:
    """Return the service levels that a run does not keep."""
    return [name for name, most in demand.slo.items() if run.at(name, demand.percentile) > most]


def _rate(
    demand: Demand, outlook: Forecast, drafts: bool, draw: Draw = EXPECTED
) -> tuple[float, str, Replica] | None:
    """Return a replica's highest rate in requests per second, what limits it, and the replica.

    None if not even one request fits, or no rate keeps the service levels.
    """
    replica = _replica(demand, outlook, drafts, draw)
    if not replica.token:
        return None
    most = LARGEST_LOAD * replica.limit(demand.situation.output_tokens - 1)
    broken = _broken(demand, _run(demand, replica, most))
    if not broken:
        return most, "load", replica
    low, high = 0.0, most
    for _ in range(RATE_HALVINGS):
        middle = (low + high) / 2
        misses = _broken(demand, _run(demand, replica, middle))
        low, high = (low, middle) if misses else (middle, high)
        broken = misses or broken
    return (low, broken[0], replica) if low else None


def _at_least_one(count: float) -> int:
    """Return a number of replicas, rounded up, at least 1; excess up to 1e-9 is ignored."""
    return max(1, ceil(count - 1e-9))


def _replicas(count: float) -> Figure:
    return modelled(count, "replicas")


def _fleet(demand: Demand, outlook: Forecast, drafts: bool, standby: int) -> Fleet | None:
    side = _rate(demand, outlook, drafts)
    if side is None:
        return None
    rate, limit, replica = side
    needed = _at_least_one(demand.peak / rate)
    run = _run(demand, replica, demand.peak / needed)
    batch = max(1, round(run.running))
    situation = demand.situation
    own = int(drafts and situation.placement != "same")
    count = (needed + demand.spare) * (situation.tensor_parallel + own)
    count += standby * situation.tensor_parallel
    hours = [_at_least_one(each / rate) for each in demand.by_hour]
    fixed = 24.0 * count
    idle = 24 / len(hours) * sum(needed - each for each in hours)
    scaled = fixed - idle * (situation.tensor_parallel + own)
    days = {"fixed": fixed, "scaled": scaled} if len(hours) > 1 else {"fixed": fixed}
    price = situation.price
    return Fleet(
        modelled(rate, "requests/s"), limit, modelled(batch, "sequences"),
        outlook.chosen(batch) if drafts else 0,
        _replicas(needed), Figure(demand.spare, "replicas", ASSUMED), _replicas(standby),
        modelled(count, "devices"),
        {
            name: {f"p{100 * p:g}": modelled(run.at(name, p), "s") for p in PERCENTILES}
            for name in ("wait", "ttft", "tpot", "e2e")
        },
        [_replicas(each) for each in hours],
        {name: modelled(each, "device hours") for name, each in days.items()},
        {} if price is None else {n: modelled(each * price, "$") for n, each in days.items()},
    )  # fmt: skip


def _rollback(plain: Fleet | None, speculative: Fleet | None) -> dict[str, Figure]:
    if plain is None or speculative is None:
        return {}
    needed = plain.replicas.value
    there = speculative.replicas.value + speculative.standby.value
    counts = {"needed": needed, "there": there, "missing": max(0.0, needed - there)}
    return {name: _replicas(count) for name, count in counts.items()}


def _notes(
    demand: Demand, outlook: Forecast, plain: Fleet | None, speculative: Fleet | None,
    cautious: Figure | None,
) -> list[str]:  # fmt: skip
    holds = {
        "random": True,
        "gateway": True,
        "modelled": outlook.steps.evidence != "measured",
        "assumed": outlook.acceptance.evidence == ASSUMED,
        "memory": outlook.memory is None,
        "plain": plain is None,
        "speculative": speculative is None,
        "cautious": speculative is not None and cautious is None,
        "nothing": speculative is not None and speculative.k == 0,
    }
    return told(data("notes")["capacity"], holds, {"most": demand.max_num_seqs})


NEVER = "does not meet the service levels"


def _count(figure: Figure) -> str:
    """Return a number without its unit, which the row's label names."""
    return f"{figure.value:,.0f} ({figure.evidence})"


def _times(level: str) -> Callable[[Fleet], str]:
    return lambda fleet: ", ".join(f"{p.upper()} {t.said()}" for p, t in fleet.times[level].items())


ROWS: tuple[tuple[str, Callable[[Fleet], str]], ...] = (
    ("requests/s per replica", lambda fleet: f"{fleet.per_replica.value:.3g} (modelled)"),
    ("limited by", lambda fleet: fleet.limited_by),
    ("concurrent sequences", lambda fleet: _count(fleet.batch)),
    ("draft length", lambda fleet: f"{fleet.k or 'off'} (modelled)"),
    ("replicas at peak", lambda fleet: _count(fleet.replicas)),
    ("spare replicas", lambda fleet: _count(fleet.spare)),
    ("plain standby replicas", lambda fleet: _count(fleet.standby)),
    ("**total devices**", lambda fleet: f"**{_count(fleet.devices)}**"),
    ("queue wait", _times("wait")),
    ("TTFT", _times("ttft")),
    ("TPOT", _times("tpot")),
    ("E2E", _times("e2e")),
)


def capacity_markdown(capacity: Capacity) -> str:
    """Return a capacity as Markdown; every number comes with its evidence."""
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
    lines += ["The times are modelled for the peak, with spares and standby idle.", ""]
    lines += _days(capacity)
    if capacity.cautious is not None:
        needs = f"At P10 acceptance, the peak needs {capacity.cautious} with speculation."
        lines += [needs, ""]
    if capacity.rollback:
        needed, there, missing = (capacity.rollback[n] for n in ("needed", "there", "missing"))
        lines += [
            f"If all traffic uses plain decoding at the peak, it needs {_count(needed)} replicas. "
            f"Without spares, {_count(there)} replicas are available: the standby, and the "
            "speculative replicas, which then also use plain decoding. Missing replicas: "
            f"{_count(missing)}.", "",
        ]  # fmt: skip
    lines += [f"- {note}" for note in capacity.notes]
    return "\n".join(lines) + "\n"


def _days(capacity: Capacity) -> list[str]:
    """Return device hours and dollars of a day, and replicas by hour where hours are known."""
    sides = (("plain", capacity.plain), ("speculative", capacity.speculative))
    both = [(name, each) for name, each in sides if each]
    rows = [
        (name, how, hours, each.dollars_a_day.get(how, "unknown"))
        for name, each in both
        for how, hours in each.device_hours_a_day.items()
    ]
    lines = table(("", "replicas", "device hours per day", "dollars per day"), rows) if rows else []
    if any(len(each.hours) > 1 for _, each in both):
        lines += ["Replicas for each hour (modelled), without spares and standby:", ""]
        for name, each in both:
            lines.append(f"- {name}: {' '.join(f'{hour.value:g}' for hour in each.hours)}")
        lines.append("")
    return lines
