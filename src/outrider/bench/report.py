"""From runs to figures: the JSON contract of ``outrider bench``.

Rates and times are medians over rounds; ``speedup`` is the median ratio to plain decoding in the
same round, temperature and batch size. ``*_interval`` is a confidence interval of the median, [low,
high], null with fewer than 6 rounds.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict
from statistics import median
from typing import Any

from ..audit.ties import Difference, compare
from .intervals import METHOD, median_interval, ranks
from .machine import machine
from .offline import PLAIN, Bench, BenchCell
from .record import Pass, total
from .repeats import fresh_acceptance_length, repeats

TURNS = {
    None: "",
    "all": ", conversations turn by turn behind the model's own greedy answers",
    "first": ", first turns of conversations alone",
}
"""A heading's note on conversations."""


def setting(bench: Bench) -> dict[str, Any]:
    """Return the machine and the settings of a benchmark."""
    engine = bench.options.engine
    return {
        **machine(),
        "dtype": str(bench.plain.engine.model.dtype),
        **{name: engine.get(name) for name in ("quantization", "drafter_window", "preset")},
        "drafter_quantization": engine.get("drafter_quantization") or "auto",
    }


def differences(
    bench: Bench, cell: BenchCell, runs: list[Pass], plain: list[Pass]
) -> list[tuple[int, Difference]]:
    """Return every difference from plain decoding's first outputs, as (prompt, difference)."""
    params = bench.params(cell.temperature)
    parted = []
    for i, expected in enumerate(plain[0].outputs):
        for output in sorted({tuple(run.outputs[i]) for run in runs}):
            difference = compare(bench.plain, bench.prompts[i], params[i], expected, output, seed=i)
            if difference is not None:
                parted.append((i, difference))
    return parted


def figures(bench: Bench, cell: BenchCell, runs: list[Pass], plain: list[Pass]) -> dict[str, Any]:
    """Return one entry of ``runs``.

    ``tokens_per_second`` is decode speed, (N-1)/(T(N)-T(1)) over all prompts of a round,
    ``latency_per_token_ms`` the time per token of a sequence: (T(N)-T(1))/(N-1). ``end_to_end_*``
    count from the call on. ``sequence_length`` is the mean of prompt + output, in tokens;
    ``num_samples`` the number of sequences in a round. ``acceptance_*`` are defined at ``Counts``
    and null without a drafter. ``peak_memory_bytes`` is the process's, all engines loaded.
    ``numerical_ties`` counts sequences that diverge from plain decoding at a tie, where their
    comparison ends; ``outputs_identical`` is false only for a difference that is not a tie.
    ``replay`` describes a replay target, null for a real one. ``controller`` is what the engine
    believed at the end of the last round, null if it was told how to draft. See
    ``bench/repeats.py`` for ``acceptance_length_without_repeats`` and ``repeated_share`` (of
    tokens). ``turns`` is "first" if later turns of conversations were left out, "all" if they
    follow the model's own answers, null without conversations. ``categories``: see ``by_category``.
    """
    drafts = cell.drafter != PLAIN
    samples, counts = runs[0].samples, total(run.counts for run in runs)
    lengths = [len(p) + len(s.token_ids) for p, s in zip(bench.prompts, samples, strict=True)]
    paired = list(zip(runs, plain, strict=True))
    speeds, latencies = [run.speed for run in runs], [1000 * run.latency for run in runs]
    speedups = [mine.speed / theirs.speed for mine, theirs in paired]
    parted = differences(bench, cell, runs, plain)
    texts = [(p, s.token_ids, s.origins) for p, s in zip(bench.prompts, samples, strict=True)]
    again = [r for prompt, output, _ in texts for r in repeats(prompt, output)]
    return {
        "drafter": cell.drafter,
        "target": bench.options.target,
        "num_speculative_tokens": cell.length,
        "temperature": cell.temperature,
        "batch_size": cell.batch_size,
        "sequence_length": round(sum(lengths) / len(lengths)),
        "num_samples": len(samples),
        "tokens_per_second": median(speeds),
        "latency_per_token_ms": median(latencies),
        "speedup": median(speedups) if drafts else 1.0,
        "acceptance_rate": counts.acceptance_rate if drafts else None,
        "acceptance_length": counts.acceptance_length if drafts else None,
        "acceptance_by_position": counts.acceptance_by_position if drafts else None,
        "peak_memory_bytes": max(run.peak_memory for run in runs),
        "utilisation": median(run.utilisation for run in runs),
        "outputs_identical": all(d.is_tie for _, d in parted),
        "numerical_ties": len({i for i, d in parted if d.is_tie}),
        "end_to_end_tokens_per_second": median(run.end_to_end for run in runs),
        "end_to_end_speedup": median(m.end_to_end / p.end_to_end for m, p in paired),
        "workload": bench.workload.name,
        "turns": turns_of(bench),
        "categories": by_category(bench, cell, runs, plain, parted),
        "structured_outputs": any(item.schema is not None for item in bench.workload.items),
        "replay": bench.replay and bench.replay.about,
        "tokens_per_second_interval": median_interval(speeds),
        "latency_per_token_ms_interval": median_interval(latencies),
        "speedup_interval": median_interval(speedups),
        "speedup_by_round": speedups,
        "acceptance_length_without_repeats": fresh_acceptance_length(texts) if drafts else None,
        "repeated_share": sum(again) / len(again),
        "controller": bench.beliefs[cell],
        "differences": [
            # JSON has no infinity: the gap to a token that is never drawn is null.
            {"sample": i, **asdict(d), "gap": d.gap if math.isfinite(d.gap) else None}
            for i, d in parted
        ],
    }


def turns_of(bench: Bench) -> str | None:
    """Return which turns of conversations were asked; None without conversations."""
    if any(item.turns for item in bench.workload.items):
        return "all" if bench.turns else "first"
    return None


def by_category(
    bench: Bench,
    cell: BenchCell,
    runs: list[Pass],
    plain: list[Pass],
    parted: list[tuple[int, Difference]],
) -> dict[str, Any]:
    """Return figures of the prompts of each category; empty if prompts have no category.

    ``tokens_per_second`` is the speed of a sequence after its first token, ``speedup`` its ratio to
    plain decoding in the same round.
    """
    members: dict[str, list[int]] = {}
    for i, item in enumerate(bench.workload.items):
        if item.category is not None:
            members.setdefault(item.category, []).append(i)
    drafts, found = cell.drafter != PLAIN, dict[str, Any]()
    for category, chosen in sorted(members.items()):
        mine, theirs = ([run.speed_of(chosen) for run in each] for each in (runs, plain))
        counts = total(run.states[i].counts for run in runs for i in chosen)
        apart = [d for i, d in parted if i in chosen]
        found[category] = {
            "num_samples": len(chosen),
            "tokens_per_second": median(mine),
            "speedup": median(m / t for m, t in zip(mine, theirs, strict=True)) if drafts else 1.0,
            "acceptance_rate": counts.acceptance_rate if drafts else None,
            "acceptance_length": counts.acceptance_length if drafts else None,
            "outputs_identical": all(d.is_tie for d in apart),
            "numerical_ties": len({i for i, d in parted if i in chosen and d.is_tie}),
        }
    return found


def report(bench: Bench, timings: dict[BenchCell, list[Pass]]) -> dict[str, Any]:
    """Return the report: ``machine``, and ``runs`` in the order of the cells."""
    plain = {cell.conditions: each for cell, each in timings.items() if cell.drafter == PLAIN}
    runs = [figures(bench, cell, each, plain[cell.conditions]) for cell, each in timings.items()]
    rounds = bench.options.rounds
    return {
        "machine": setting(bench),
        "rounds": rounds,
        "fresh": bench.options.fresh,
        "intervals": {"confidence": ranks(rounds)[1], "method": METHOD},
        "runs": runs,
    }


def heading(report: dict[str, Any]) -> list[str]:
    """Return the lines above every table and figure: what ran where, and any replay target."""
    run, machine = report["runs"][0], report["machine"]
    workload = run["workload"] + (" (held to JSON schemas)" if run["structured_outputs"] else "")
    weights = machine["dtype"]
    for what, name in (
        ("", "quantization"), ("drafter ", "drafter_quantization"),
        ("drafter's window ", "drafter_window"), ("preset ", "preset"),
    ):  # fmt: skip
        weights += f", {what}{machine[name]}" if machine[name] not in (None, "auto") else ""
    workload += TURNS[run["turns"]]
    where = f"{weights} · {machine['cpu']}, {machine['cores']} cores"
    line = f"{run['target']} · workload {workload} · {where}"
    return [line, f"replay: {run['replay']['what']}"] if run["replay"] else [line]


def best(runs: Sequence[dict[str, Any]], run: dict[str, Any]) -> dict[str, Any]:
    """Return the run with the largest speedup of ``run``'s temperature and batch size."""
    same = (r for r in runs if all(r[key] == run[key] for key in ("temperature", "batch_size")))
    return max(same, key=lambda r: r["speedup"])
