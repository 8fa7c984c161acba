"""From runs to figures: the JSON contract of ``python -m benchmarks peers``.

The report has an entry of ``pairs`` a pair. Speeds and times are medians over rounds,
``*_interval`` beside them the confidence interval of that median, null with fewer than 6 rounds:
see ``bench/intervals.py``. Every ratio is ours / theirs, the median over rounds of the ratio within
a round.
"""

from collections.abc import Sequence
from dataclasses import replace
from statistics import geometric_mean, median
from typing import Any

from outrider.bench.intervals import METHOD, median_interval, ranks
from outrider.bench.machine import machine
from outrider.native.choice import available

from ..common import ratio
from .known import OWN, products_of_prompt, weights_read
from .measure import Bench, first_difference
from .settings import Setting, Trial

NOISY = 0.2
"""Cores used by others from which on a timed run counts as disturbed."""


def run_figures(bench: Bench, setting: Setting, trials: list[Trial]) -> dict[str, Any]:
    """One entry of ``runs``.

    ``tokens_per_second`` depends on the load. "decode": (N-1)/(T(N)-T(1)) over the prompts of a
    round, run one by one; T(1) is a call of its own for one token. "batch N": the output of N
    requests that start together over the time until the last is done. "prefill N": N over T(1).
    ``ttft_ms`` is T(1), the mean over prompts, under "batch" that of all together.
    ``end_to_end_*`` is output over T(N), prompts included. ``bits_per_weight`` is the size of the
    weights over their number, null where unknown. ``peak_memory_bytes`` adds up the peaks of the
    peer's processes in this mode and load, loading included. ``others_cores`` lists, by round, how
    many cores other processes used, the most of any prompt; ``disturbed_rounds`` counts those above
    0.2. ``identical_to_plain`` compares with the same peer's plain outputs under that load,
    ``identical_to_outrider`` with our plain ones of the same dtype; null where that was not run, or
    where a temperature above 0 makes every engine draw its own noise. ``first_difference`` is the
    earliest index of an output token that is not our plain one's. ``memory_share`` is set for plain
    decoding: the bytes of all weights that a token reads, times tokens/s, over the bandwidth that
    was measured before the same round; the median over rounds. ``peak_share`` is set for prefill:
    products with weights a second over those that the instruction set can do with Outrider's
    numbers, measured before the same round. ``roofline_share`` is set for plain decoding of several
    requests: the least time that both figures allow over the time taken, see ``roofline_share``.
    """
    plain = plain_outputs(bench, setting.peer, setting)
    ours = plain_outputs(bench, OWN, setting)
    comparable = bench.options.temperature == 0 or setting.peer == OWN
    outputs = [t.outputs for t in trials]
    parted = [first_difference(ours, o) for o in outputs] if ours and comparable else []
    speeds, others = [t.speed for t in trials], [t.others for t in trials]
    return {
        "peer": setting.peer,
        "version": bench.versions[setting.peer],
        "dtype": setting.dtype,
        "bits_per_weight": bench.bits[setting.peer, setting.dtype],
        "load": setting.load.name,
        "mode": setting.mode,
        "num_speculative_tokens": setting.k,
        "threads": setting.threads,
        "arguments": setting.variant,
        "tokens_per_second": median(speeds),
        "tokens_per_second_interval": median_interval(speeds),
        "tokens_per_second_by_round": speeds,
        "end_to_end_tokens_per_second": median(t.end_to_end for t in trials),
        "end_to_end_tokens_per_second_interval": median_interval([t.end_to_end for t in trials]),
        "ttft_ms": median(1000 * t.ttft for t in trials if t.ttft is not None),
        "peak_memory_bytes": max(a.peak_memory for t in trials for a in t.answers),
        "others_cores": others,
        "disturbed_rounds": sum(cores > NOISY for cores in others),
        "identical_to_plain": all(o == plain for o in outputs) if plain and comparable else None,
        "identical_to_outrider": all(p is None for p in parted) if parted else None,
        "memory_share": memory_share(bench, setting, speeds),
        "peak_share": peak_share(bench, setting, speeds),
        "roofline_share": roofline_share(bench, setting, trials),
        "first_difference": min((p for p in parted if p is not None), default=None),
    }


def memory_share(bench: Bench, setting: Setting, speeds: Sequence[float]) -> float | None:
    """Return the share of the measured bandwidth that plain decoding uses; None if unknown."""
    bits = bench.bits[setting.peer, setting.dtype]
    if bits is None or setting.mode != "plain" or setting.load.kind != "decode":
        return None
    size = weights_read(bench.pair.target) * bits / 8
    measured = bench.bandwidth[setting.dtype, setting.load]
    shares = [size * v / b for v, b in zip(speeds, measured, strict=False) if b is not None]
    return median(shares) if shares else None


def peak_share(bench: Bench, setting: Setting, speeds: Sequence[float]) -> float | None:
    """Return the share of the measured peak that prefill uses; None under another load."""
    if setting.load.kind != "prefill":
        return None
    tokens = setting.load.size
    products = products_of_prompt(bench.pair.target, tokens)
    measured = bench.peaks[setting.dtype, setting.load]
    shares = [
        products * v / tokens / peak for v, peak in zip(speeds, measured, strict=False) if peak
    ]
    return median(shares) if shares else None


def roofline_share(bench: Bench, setting: Setting, trials: Sequence[Trial]) -> float | None:
    """Return the share of the roofline that plain decoding of several requests reaches, or None.

    Prompts take the time of their products at the measured peak. Each further token of the requests
    is a step, which takes the time of its products or of reading the weights, whichever is longer.
    """
    bits, load = bench.bits[setting.peer, setting.dtype], setting.load
    if bits is None or setting.mode != "plain" or load.kind != "batch":
        return None
    target, (prompts,) = bench.pair.target, bench.prompts(load)
    reading = sum(products_of_prompt(target, len(prompt)) for prompt in prompts)
    step, size = len(prompts) * products_of_prompt(target, 1), weights_read(target) * bits / 8
    shares = []
    measured = (bench.bandwidth[setting.dtype, load], bench.peaks[setting.dtype, load])
    for trial, bandwidth, peak in zip(trials, *measured, strict=False):
        if bandwidth is not None and peak is not None:
            steps = max(map(len, trial.outputs)) - 1
            least = reading / peak + steps * max(step / peak, size / bandwidth)
            shares.append(least / sum(answer.seconds for answer in trial.answers))
    return median(shares) if shares else None


def plain_outputs(bench: Bench, peer: str, like: Setting) -> list[list[int]] | None:
    """A peer's plain outputs in its first round, None if there are none."""
    free: dict[str, Any] = {"threads": 0, "variant": ""}
    plain = replace(like, peer=peer, mode="plain", k=0, **free)
    runs = {replace(s, **free): trials[0] for s, trials in bench.rounds.items()}
    return runs[plain].outputs if plain in runs else None


def comparisons(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One entry of ``ratios`` a dtype, load and peer.

    ``plain`` is our plain speed / theirs, ``best`` our fastest mode / their fastest, plain decoding
    among the modes; null where either side lacks it.
    """
    entries: list[dict[str, Any]] = []
    keys = dict.fromkeys((r["dtype"], r["load"], r["peer"]) for r in runs if r["peer"] != OWN)
    for dtype, load, peer in keys:
        here = [r for r in runs if (r["dtype"], r["load"]) == (dtype, load)]
        plain = compared([r for r in here if r["mode"] == "plain"], peer)
        best = compared(here, peer)
        entries.append({"dtype": dtype, "load": load, "peer": peer, "plain": plain, "best": best})
    return entries


def compared(runs: list[dict[str, Any]], peer: str) -> dict[str, Any] | None:
    """Ours / theirs, of each side's fastest run; None where a side has none."""
    slowest_first = sorted(runs, key=lambda run: run["tokens_per_second"])
    fastest = {run["peer"]: run for run in slowest_first}
    if not {OWN, peer} <= fastest.keys():
        return None
    ours, theirs, speeds = fastest[OWN], fastest[peer], "tokens_per_second_by_round"
    return {**ratio(ours[speeds], theirs[speeds]), "ours": ours["mode"], "theirs": theirs["mode"]}


def counted(bench: Bench) -> set[str]:
    """Return the peers that a bar is set by: below the machine's own set, those that heed it."""
    isa = bench.options.isa
    own = isa is None or isa == available()[-1]
    return {name for name, peer in bench.sides.items() if own or peer.heeds}


def bars(ratios: list[dict[str, Any]], among: set[str]) -> list[dict[str, Any]]:
    """Return our speed over the fastest of these peers, an entry for each dtype and load.

    ``geometric_mean`` is over the two ratios; null unless both are there.
    """
    entries = []
    for dtype, load in dict.fromkeys((r["dtype"], r["load"]) for r in ratios):
        entry: dict[str, Any] = {"dtype": dtype, "load": load}
        cell = [
            r for r in ratios if (r["dtype"], r["load"], r["peer"] in among) == (dtype, load, True)
        ]
        for name in ("plain", "best"):
            here = [r for r in cell if r[name]]
            worst = min(here, key=lambda r: r[name]["ratio"], default=None)
            entry[name] = worst and {"peer": worst["peer"], **worst[name]}
        both = [entry[name]["ratio"] for name in ("plain", "best") if entry[name]]
        entry["geometric_mean"] = geometric_mean(both) if len(both) == 2 else None
        entries.append(entry)
    return entries


def pair_figures(bench: Bench) -> dict[str, Any]:
    """One entry of ``pairs``.

    ``conversions`` lists the peers whose conversion of the target gave our greedy float32 ids or
    did not (then ``skipped`` has it), ``now`` false where a run before this one found that out.
    """
    pair = bench.pair
    runs = [run_figures(bench, s, trials) for s, trials in bench.rounds.items()]
    ratios = comparisons(runs)
    return {
        "name": pair.name,
        "agreement": pair.agreement,
        "temperature": bench.options.temperature,
        "prompts": pair.single,
        "prompt_tokens": [
            min(len(p), bench.options.prompt_tokens) for p in pair.prompts[: pair.single]
        ],
        "conversions": [{"peer": peer, "now": now} for peer, now in bench.conversions.items()],
        "runs": runs,
        "ratios": ratios,
        "bars": bars(ratios, counted(bench)),
        "read_bandwidth": [
            {"dtype": dtype, "load": load.name, "bytes_per_second_by_round": measured}
            for (dtype, load), measured in bench.bandwidth.items()
        ],
        "search": [
            {
                "peer": s.peer,
                "dtype": s.dtype,
                "load": s.load.name,
                "mode": s.mode,
                "num_speculative_tokens": s.k,
                "threads": s.threads,
                "arguments": s.variant,
                "tokens_per_second": trial.speed,
                "others_cores": trial.others,
            }
            for s, trial in bench.search.items()
        ],
        "servers": bench.servers,
        "skipped": bench.skipped,
    }


def report(benches: Sequence[Bench]) -> dict[str, Any]:
    """The whole report, of one or more pairs with the same options but for the temperature."""
    options = benches[0].options
    return {
        "machine": machine(),
        "max_tokens": options.max_tokens,
        "batch_tokens": options.batch_tokens or options.max_tokens,
        "rounds": options.rounds,
        "isa": options.isa,
        "intervals": {"confidence": ranks(options.rounds)[1], "method": METHOD},
        "pairs": [pair_figures(bench) for bench in benches],
    }


def heading(report: dict[str, Any]) -> str:
    """Return a line that says what ran where, at which temperatures."""
    heats = {temperature(report, pair) for pair in report["pairs"]}
    shown = ", ".join(f"{heat:g}" for heat in sorted(heats))
    return f"{report['max_tokens']} tokens, T = {shown} · {machine_line(report)}"


def machine_line(report: dict[str, Any]) -> str:
    """Return a line that says where a report is from, and its day."""
    machine, isa = report["machine"], report.get("isa")
    return (
        f"{machine['cpu']}, {machine['cores']} cores{f' · {isa} at most' if isa else ''} · "
        f"{machine['date'][:10]}"
    )


def temperature(report: dict[str, Any], pair: dict[str, Any]) -> float:
    """Return what a pair was measured at, in the report itself before there were several."""
    return float(pair.get("temperature", report.get("temperature", 0)))


def label(pair: dict[str, Any]) -> str:
    """A pair's name, with the agreement of a planted one, and its temperature if that is not 0."""
    agreed = pair["agreement"] is not None
    name = f"{pair['name']} (agreement {pair['agreement']:.2f})" if agreed else str(pair["name"])
    return f"{name}, T = {pair['temperature']:g}" if pair.get("temperature") else name
