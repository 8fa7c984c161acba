"""From runs to figures: the JSON contract of ``outrider bench peers``.

Speeds and times are medians over rounds, ``*_interval`` beside them the confidence interval of that
median, null with fewer than 6 rounds: see ``bench/intervals.py``. Every ratio is ours / theirs, the
median over rounds of the ratio within a round.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from statistics import geometric_mean, median
from typing import Any

from ..intervals import METHOD, median_interval, ranks
from ..offline import available_cores
from ..report import cpu_name
from .known import OWN
from .measure import Bench, Setting, Trial, first_difference

NOISY = 0.2
"""Cores used by others from which on a timed run counts as disturbed."""


def run_figures(bench: Bench, setting: Setting, trials: list[Trial]) -> dict[str, Any]:
    """One entry of ``runs``.

    ``tokens_per_second`` is decode speed, (N-1)/(T(N)-T(1)) over all prompts of a round; T(1) is a
    call of its own for one token, and ``ttft_ms`` its mean over prompts. ``end_to_end_*`` is
    N/T(N), prompts included. ``peak_memory_bytes`` adds up the peaks of the peer's processes in
    this mode, loading included. ``others_cores`` lists, by round, how many cores other processes
    used, the most of any prompt; ``disturbed_rounds`` counts those above 0.2.
    ``identical_to_plain`` compares with the same peer's plain outputs, ``identical_to_outrider``
    with our plain ones of the same dtype; null where that was not run, or where a temperature above
    0 makes every engine draw its own noise. ``first_difference`` is the earliest index of an output
    token that is not our plain one's.
    """
    engine, found = setting.engine, bench.found
    plain = plain_outputs(bench, engine.peer, engine.dtype)
    ours = plain_outputs(bench, OWN, engine.dtype)
    comparable = bench.options.temperature == 0 or engine.peer == OWN
    outputs = [t.outputs for t in trials]
    parted = [first_difference(ours, o) for o in outputs] if ours and comparable else []
    speeds, others = [t.speed for t in trials], [t.others for t in trials]
    return {
        "peer": engine.peer,
        "version": found.versions[engine.peer],
        "dtype": engine.dtype,
        "mode": engine.mode,
        "num_speculative_tokens": setting.k,
        "threads": setting.threads,
        "temperature": bench.options.temperature,
        "tokens_per_second": median(speeds),
        "tokens_per_second_interval": median_interval(speeds),
        "tokens_per_second_by_round": speeds,
        "end_to_end_tokens_per_second": median(t.end_to_end for t in trials),
        "end_to_end_tokens_per_second_interval": median_interval([t.end_to_end for t in trials]),
        "ttft_ms": median(1000 * t.ttft for t in trials),
        "peak_memory_bytes": max(a.peak_memory for t in trials for a in t.answers),
        "others_cores": others,
        "disturbed_rounds": sum(o is not None and o > NOISY for o in others),
        "identical_to_plain": all(o == plain for o in outputs) if plain and comparable else None,
        "identical_to_outrider": all(p is None for p in parted) if parted else None,
        "first_difference": min((p for p in parted if p is not None), default=None),
    }


def plain_outputs(bench: Bench, peer: str, dtype: str) -> list[list[int]] | None:
    """A peer's plain outputs in its first round, None if there are none."""
    for setting, trials in bench.found.rounds.items():
        engine = setting.engine
        if (engine.peer, engine.dtype, engine.mode) == (peer, dtype, "plain") and trials:
            return trials[0].outputs
    return None


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> dict[str, Any]:
    """Ours / theirs by round: median and interval."""
    values = [a / b for a, b in zip(ours, theirs, strict=False)]
    return {"ratio": median(values), "interval": median_interval(values)}


def comparisons(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry of ``ratios`` a dtype and peer.

    ``plain`` is our plain speed / theirs, ``best`` our fastest mode / their fastest, plain decoding
    among the modes; null where either side lacks it.
    """
    found = []
    keys = dict.fromkeys((r["dtype"], r["peer"]) for r in runs if r["peer"] != OWN)
    for dtype, peer in keys:
        entry: dict[str, Any] = {"dtype": dtype, "peer": peer, "plain": None, "best": None}
        for name in ("plain", "best"):
            sides = [fastest(runs, dtype, who, name == "plain") for who in (OWN, peer)]
            if None not in sides:
                speeds = [side["tokens_per_second_by_round"] for side in sides if side]
                modes = [side["mode"] for side in sides if side]
                entry[name] = {**ratio(*speeds), "ours": modes[0], "theirs": modes[1]}
        found.append(entry)
    return found


def fastest(
    runs: list[dict[str, Any]], dtype: str, peer: str, plain: bool
) -> dict[str, Any] | None:
    """A peer's fastest run in a dtype, or its plain one."""
    mine = [r for r in runs if (r["dtype"], r["peer"]) == (dtype, peer)]
    mine = [r for r in mine if r["mode"] == "plain" or not plain]
    return max(mine, key=lambda r: r["tokens_per_second"], default=None)


def bars(ratios: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What the bars ask, an entry a dtype: ours against the peer that is fastest there.

    ``geometric_mean`` is over the two ratios; null unless both are there.
    """
    found = []
    for dtype in dict.fromkeys(r["dtype"] for r in ratios):
        entry: dict[str, Any] = {"dtype": dtype}
        for name in ("plain", "best"):
            known = [r for r in ratios if r["dtype"] == dtype and r[name] is not None]
            worst = min(known, key=lambda r: r[name]["ratio"], default=None)
            entry[name] = worst and {"peer": worst["peer"], **worst[name]}
        both = [entry[name]["ratio"] for name in ("plain", "best") if entry[name]]
        entry["geometric_mean"] = geometric_mean(both) if len(both) == 2 else None
        found.append(entry)
    return found


def report(bench: Bench) -> dict[str, Any]:
    """The whole report."""
    found, options, pair = bench.found, bench.options, bench.pair
    runs = [run_figures(bench, s, trials) for s, trials in found.rounds.items() if trials]
    ratios = comparisons(runs)
    return {
        "machine": {
            "cpu": cpu_name(),
            "cores": available_cores(),
            "platform": platform.platform(),
            "python": platform.python_version(),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "pair": {"name": pair.name, "agreement": pair.agreement},
        "prompts": len(pair.prompts),
        "prompt_tokens": [len(p) for p in pair.prompts],
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "rounds": options.rounds,
        "intervals": {"confidence": ranks(options.rounds)[1], "method": METHOD},
        "runs": runs,
        "ratios": ratios,
        "bars": bars(ratios),
        "search": [
            {
                "peer": s.engine.peer,
                "dtype": s.engine.dtype,
                "mode": s.engine.mode,
                "num_speculative_tokens": s.k,
                "threads": s.threads,
                "tokens_per_second": trial.speed,
                "others_cores": trial.others,
            }
            for s, trial in found.search.items()
        ],
        "skipped": [vars(skipped) for skipped in found.skipped],
    }


def heading(report: dict[str, Any]) -> str:
    """What ran where, in a line."""
    pair, machine = report["pair"], report["machine"]
    agreement = f" (agreement {pair['agreement']:.2f})" if pair["agreement"] is not None else ""
    return (
        f"{pair['name']}{agreement} · {report['prompts']} prompts, {report['max_tokens']} tokens, "
        f"T = {report['temperature']:g} · {machine['cpu']}, {machine['cores']} cores · "
        f"{machine['date'][:10]}"
    )
