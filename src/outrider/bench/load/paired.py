"""Loads two sides in turns with the same load; gives the interval of their ratios."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, NamedTuple

from ...errors import ConfigError, EndpointError
from ..intervals import METHOD, median_interval, ranks
from .measure import LoadedServer, LoadOptions, Progress, report_of
from .stream import message

SWITCH = "/v1/speculation"
COMPARED = ("output_throughput", "median_ttft_ms", "median_tpot_ms", "median_e2el_ms")
LEAST_ROUNDS = 6  # fewest rounds for a 95 % interval of a median


class LoadSide(NamedTuple):
    """One of two sides: a server, with its switch on or off if that is what is compared."""

    name: str
    server: LoadedServer
    enabled: bool | None = None


async def switch(server: LoadedServer, enabled: bool) -> None:
    """Turn speculation on or off. Raises EndpointError: the server has no such switch."""
    answer = await server.client.ask(SWITCH, {"enabled": enabled})
    if not answer.ok:
        raise EndpointError(
            f"{server.client.url}{SWITCH} cannot switch speculation (HTTP {answer.status}: "
            f"{message(answer.body)}); compare two endpoints instead."
        )


async def _pair(
    options: LoadOptions, other: str | None, rounds: int, progress: Progress
) -> list[dict[str, Any]]:
    """Return the runs of both sides, in the order in which they ran."""
    first = second = LoadedServer(options)
    sides = [LoadSide("off", first, False), LoadSide("on", first, True)]
    if other is not None:
        second = LoadedServer(replace(options, url=other, model=None))
        sides = [LoadSide("A", first), LoadSide("B", second)]
    runs: list[dict[str, Any]] = []
    try:
        for server in dict.fromkeys((first, second)):
            await server.open()
        for number in range(rounds):
            # Each side goes first in every other round, so that drift favours neither.
            for side in sides if number % 2 == 0 else sides[::-1]:
                if side.enabled is not None:
                    await switch(first, side.enabled)
                side.server.options = replace(options, seed=options.seed + number)
                for shape in options.shapes:
                    title = f"round {number + 1}, {side.name}"
                    run = await side.server.run(shape, _titled(progress, title))
                    runs.append(run | {"side": side.name, "round": number})
                    if run["interrupted"]:
                        return runs
        return runs
    finally:
        if other is None and runs:
            await switch(first, True)
        await first.client.close()
        await second.client.close()


def _titled(progress: Progress, title: str) -> Progress:
    return lambda label, *more: progress(f"{title}: {label}", *more)


def compare(
    options: LoadOptions, other: str | None, rounds: int, progress: Progress = lambda *_: None
) -> dict[str, Any]:
    """Load two sides in interleaved rounds, at least 6, and return the report.

    It is that of ``measure_load`` with ``comparison``: for each load the medians over rounds of
    both sides, and of the ratio of the second to the first within a round, with its confidence
    interval. Rounds cut off by an interrupt are left out. Without the address of an ``other``
    server, the first one's speculation is turned off and on; it is on afterwards.
    """
    if rounds < LEAST_ROUNDS:
        raise ConfigError(f"rounds is {rounds}; give {LEAST_ROUNDS} or more for an interval.")
    runs = asyncio.run(_pair(options, other, rounds, progress))
    names = ("off", "on") if other is None else ("A", "B")
    report = report_of(runs, [options])
    report["comparison"] = [comparison(shape.label, runs, names) for shape in options.shapes]
    report["intervals"] = {"confidence": ranks(rounds)[1], "method": METHOD}
    return report


def comparison(
    label: str, runs: Sequence[dict[str, Any]], names: tuple[str, str]
) -> dict[str, Any]:
    """Return medians of both sides and of their ratios under one load."""
    figures: dict[str, Any] = {"label": label, "sides": list(names)}
    for key in COMPARED:
        values: dict[str, dict[int, float]] = {name: {} for name in names}
        for run in runs:
            whole = not run["interrupted"] and not run["failed"] and run[key]
            if run["label"] == label and whole:
                values[run["side"]][run["round"]] = run[key]
        shared = sorted(values[names[0]].keys() & values[names[1]].keys())
        ratios = [values[names[1]][i] / values[names[0]][i] for i in shared]
        figures[key] = {
            "rounds": len(shared),
            **{name: median(values[name][i] for i in shared) if shared else None for name in names},
            "ratio": median(ratios) if ratios else None,
            "interval": median_interval(ratios),
        }
    return figures
