"""Advice as Markdown, and its plot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .advice import Advice
from .chart import Series, line_chart
from .figure import Figure


def table(names: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return a table in Markdown, followed by an empty line."""
    lines = [names, ["--"] * len(names), *rows]
    return ["| " + " | ".join(map(str, line)) + " |" for line in lines] + [""]


def _listed(figures: Mapping[str, Figure]) -> list[str]:
    return [f"- {name.replace('_', ' ')}: {figure}" for name, figure in figures.items()] + [""]


def _claim(claims: Mapping[str, Any]) -> str:
    """Return what is claimed of a technique in words."""
    words = [str(claims["note"])] if "note" in claims else []
    for name, span in claims.items():
        if name == "latency_factor":
            words.append(f"{span[0]:g} to {span[1]:g} times faster")
        elif name != "note":
            words.append(f"{name} {100 * span[0]:+.0f} to {100 * span[1]:+.0f} %")
    return ", ".join(words)


def _stack(stack: Mapping[str, Any], advice: Advice) -> list[str]:
    lines = [f"## Stack for {stack['priority']}", ""]
    parts = [("take", stack["take"]), ("consider", stack["optional"]), ("leave", stack["leave"])]
    rows = [(part, name, _claim(stack["claims"][name])) for part, names in parts for name in names]
    lines += table(("", "technique", "claimed, not measured here"), rows)
    lines += [f"Claimed of {stack['claim']}."] if "claim" in stack else []
    lines += [f"{stack['caveat'][0].upper()}{stack['caveat'][1:]}."] if "caveat" in stack else []
    if advice.speedup:
        lines.append(f"The model expects of speculation alone: {advice.speedup['p50']}.")
    return [*lines, ""]


def _candidates(advice: Advice) -> list[str]:
    """Return a table of the drafters that fit, and the best one with its speedup and memory."""
    best, *_ = advice.candidates
    what = f"the {best.method} head {best.checkpoint}" if best.drafter == best.method else ""
    what = what if best.checkpoint else best.drafter
    lines = ["## Drafters that fit", ""]
    if best.speedup is None:
        lines += [f"First by rules of thumb: {what or best.drafter}.", ""]
    else:
        taken = f", with {best.memory} of memory" if best.memory is not None else ""
        lines += [f"Best: {what or best.drafter}, {best.speedup['p50']}{taken}.", ""]
    rows = [
        (
            each.drafter, each.checkpoint or "none is needed", each.ratio.said(),
            each.k or ("off" if each.k is not None else ""),
            ", ".join(map(str, (each.speedup or {}).values())) or "not known",
            each.memory or "not known",
        )
        for each in advice.candidates
    ]  # fmt: skip
    names = ("drafter", "checkpoint", "of the target", "K", "speedup: P10, P50, P90", "memory")
    return [*lines, *table(names, rows)]


def advice_markdown(advice: Advice) -> str:
    """Return advice as Markdown; every number has its evidence beside it."""
    lines = [
        f"# {advice.target} with {advice.drafter}: {advice.verdict}", "",
        f"{advice.reason[0].upper()}{advice.reason[1:]}. (Decided by {advice.decided_by}.)", "",
        *(_candidates(advice) if advice.candidates else []),
    ]  # fmt: skip
    if advice.speedup:
        spans = ", ".join(f"{name.upper()} {each}" for name, each in advice.speedup.items())
        rates = "-".join(f"{each.value:.2f}" for each in advice.acceptance.values())
        rate = advice.acceptance["p50"]
        lines += [
            "Speedup: tokens per second with speculation over those without, prompts included.", "",
            f"- speedup over the traffic: {spans}",
            f"- acceptance, P10-P50-P90: {rates} {rate.unit} ({rate.evidence}; "
            f"{advice.acceptance_source})",
            f"- break-even acceptance: {advice.break_even or 'none: no acceptance would win'}",
            *(f"- a drafter tuned on the traffic, {n}: {f}" for n, f in advice.tuned.items()), "",
            "## Draft length by batch size", "",
            *table(
                ("batch", "K", "least speedup"),
                ((f"{r.first} to {r.last}", r.k or "off", r.speedup) for r in advice.ranges),
            ),
            "vLLM: `\"num_speculative_tokens_per_batch_size\": "
            f"{[list(each) for each in advice.schedule]}`", "",
            "## The traffic", "",
            *table(
                ("batch", "share", "K", "speedup", "TPOT", "plain TPOT", "break-even acceptance",
                 "service levels"),
                (
                    (a.batch, a.share, a.k or "off", a.speedup, a.tpot, a.plain_tpot,
                     a.break_even or "none",
                     ", ".join(f"{n} {'met' if ok else 'missed'}" for n, ok in a.meets.items()))
                    for a in advice.at
                ),
            ),
            "## Time to the first token", "", *_listed(advice.ttft),
            *(["## Memory", "", *_listed(advice.memory)] if advice.memory else []),
            *(["## Cost", "", *_listed(advice.cost)] if advice.cost else []),
            "## What limits it", "", "The speedup if half of it were gone:", "",
            *_listed(advice.halved),
            "## Alerts", "",
            *(f"- {t.metric} {t.when} {t.value} {t.action}" for t in advice.trips), "",
        ]  # fmt: skip
    lines += ["## Rules of thumb", ""]
    lines += table(
        ("rule", "says", "the model", "where they differ"),
        ((r.name, r.says, r.model, r.reason) for r in advice.rules),
    )
    lines += _stack(advice.stack, advice)
    lines += [f"- {note}" for note in advice.notes]
    return "\n".join(lines).rstrip() + "\n"


def advice_plot(advice: Advice) -> str:
    """Return the plot of the speedup by acceptance as an SVG element."""
    series = [
        Series(
            f"batch {line.batch}, K = {line.k}",
            [each.value for each in line.acceptance], [each.value for each in line.speedup],
        )
        for line in advice.sensitivity
    ]  # fmt: skip
    title = f"{advice.target} with {advice.drafter}: speedup by acceptance"
    return line_chart(title, "accepted / drafted at K", "speedup (modelled)", series, 1.0)
