"""Advice as Markdown, and its plot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..markdown import listed, section, table
from .advice import Advice

OTHERS = 2
"""Drafters beside the best one that the summary names."""


def advice_summary(advice: Advice) -> str:
    """Return what decides, on one screen: verdict, K by batch size, memory, risks."""
    lines = _verdict(advice)
    if advice.candidates:
        others = [each.drafter for each in advice.candidates[1 : 1 + OTHERS]]
        lines += [f"{_best(advice)} Next: {', '.join(others)}.", ""]
    if advice.ranges:
        lines += _lengths(advice)
    if advice.speedup:
        lines += _figures(advice)
    if advice.memory:
        drafter, fewer = advice.memory["drafter"], advice.memory["concurrency"]
        plain = advice.memory["plain_concurrency"].value
        lines.append(f"- memory: {drafter} for the drafter; {fewer} fit, {plain:,.0f} without it")
    lines += [f"- risk: {note}" for note in advice.notes]
    return "\n".join(lines).rstrip() + "\n"


def advice_markdown(advice: Advice) -> str:
    """Return all of an advice as Markdown; every number has its evidence beside it."""
    lines = _verdict(advice)
    if advice.candidates:
        lines += _candidates(advice)
    if advice.speedup:
        levels = ("batch", "share", "K", "speedup", "TPOT", "plain TPOT", "break-even acceptance",
                  "service levels")  # fmt: skip
        traffic = [
            (at.batch, at.share, at.k or "off", at.speedup, at.tpot, at.plain_tpot,
             at.break_even or "none",
             ", ".join(f"{name} {'met' if ok else 'missed'}" for name, ok in at.meets.items()))
            for at in advice.at
        ]  # fmt: skip
        lines += [
            "Speedup: tokens per second with speculation over those without, prompts included.", "",
            *_figures(advice),
            *(f"- a drafter tuned on the traffic, {n}: {f}" for n, f in advice.tuned.items()), "",
            *section("Draft length by batch size", _lengths(advice)),
            "vLLM: `\"num_speculative_tokens_per_batch_size\": "
            f"{[list(each) for each in advice.schedule]}`", "",
            *section("The traffic", table(levels, traffic)),
            *section("Time to the first token", listed(advice.ttft)),
            *section("Memory", listed(advice.memory) if advice.memory else []),
            *section("Cost", listed(advice.cost) if advice.cost else []),
            "## What limits it", "", "The speedup if half of it were gone:", "",
            *listed(advice.halved),
            "## Alerts", "",
            *(f"- {t.metric} {t.when} {t.value} {t.action}" for t in advice.trips), "",
        ]  # fmt: skip
    rules = [(rule.name, rule.says, rule.model, rule.reason) for rule in advice.rules]
    names = ("rule", "says", "the model", "where they differ")
    lines += section("Rules of thumb", table(names, rules))
    lines += _stack(advice.stack, advice)
    lines += [f"- {note}" for note in advice.notes]
    return "\n".join(lines).rstrip() + "\n"


def _verdict(advice: Advice) -> list[str]:
    reason = advice.reason[0].upper() + advice.reason[1:]
    title = f"# {advice.target} with {advice.drafter}: {advice.verdict}"
    return [title, "", f"{reason}. (Decided by {advice.decided_by}.)", ""]


def _lengths(advice: Advice) -> list[str]:
    rows = [(f"{r.first} to {r.last}", r.k or "off", r.speedup) for r in advice.ranges]
    return table(("batch", "K", "least speedup"), rows)


def _figures(advice: Advice) -> list[str]:
    spans = ", ".join(f"{name.upper()} {each}" for name, each in advice.speedup.items())
    rates = "-".join(f"{each.value:.2f}" for each in advice.acceptance.values())
    rate = advice.acceptance["p50"]
    return [
        f"- speedup over the traffic: {spans}",
        f"- acceptance, P10-P50-P90: {rates} {rate.unit} ({rate.evidence}; "
        f"{advice.acceptance_source})",
        f"- break-even acceptance: {advice.break_even or 'none: no acceptance would win'}",
    ]


def _best(advice: Advice) -> str:
    """Return the best drafter with its speedup and memory."""
    best, *_ = advice.candidates
    name = best.drafter
    if best.checkpoint and best.drafter == best.method:
        name = f"the {best.method} head {best.checkpoint}"
    if best.speedup is None:
        return f"First by rules of thumb: {name}."
    taken = f", with {best.memory} of memory" if best.memory is not None else ""
    return f"Best: {name}, {best.speedup['p50']}{taken}."


def _candidates(advice: Advice) -> list[str]:
    rows = [
        (
            each.drafter, each.checkpoint or "none is needed", each.ratio.said(),
            "" if each.k is None else each.k or "off",
            ", ".join(map(str, (each.speedup or {}).values())) or "not known",
            each.memory or "not known",
        )
        for each in advice.candidates
    ]  # fmt: skip
    names = ("drafter", "checkpoint", "of the target", "K", "speedup: P10, P50, P90", "memory")
    return section("Drafters that fit", [_best(advice), "", *table(names, rows)])


def _stack(stack: Mapping[str, Any], advice: Advice) -> list[str]:
    parts = [("take", stack["take"]), ("consider", stack["optional"]), ("leave", stack["leave"])]
    rows = [(part, name, _claim(stack["claims"][name])) for part, names in parts for name in names]
    lines = table(("", "technique", "claimed, not measured here"), rows)
    lines += [f"Claimed of {stack['claim']}."] if "claim" in stack else []
    lines += [f"{stack['caveat'][0].upper()}{stack['caveat'][1:]}."] if "caveat" in stack else []
    if advice.speedup:
        lines.append(f"The model expects of speculation alone: {advice.speedup['p50']}.")
    return [*section(f"Stack for {stack['priority']}", lines), ""]


def _claim(claims: Mapping[str, Any]) -> str:
    """Return what is claimed of a technique in words."""
    words = [str(claims["note"])] if "note" in claims else []
    for name, span in claims.items():
        if name == "latency_factor":
            words.append(f"{span[0]:g} to {span[1]:g} times faster")
        elif name != "note":
            words.append(f"{name} {100 * span[0]:+.0f} to {100 * span[1]:+.0f} %")
    return ", ".join(words)


def advice_plot(advice: Advice) -> str:
    """Return the plot of the speedup by acceptance as an SVG element."""
    from ...base.plots import Series, line_chart

    series = [
        Series(
            f"batch {line.batch}, K = {line.k}",
            [each.value for each in line.acceptance], [each.value for each in line.speedup],
        )
        for line in advice.sensitivity
    ]  # fmt: skip
    title = f"{advice.target} with {advice.drafter}: speedup by acceptance"
    return line_chart(title, "accepted / drafted at K", "speedup (modelled)", series, 1.0)
