"""Published rules of thumb and stacks of techniques, for comparison with the model's verdict."""

from __future__ import annotations

from operator import gt, le, lt
from typing import Any, NamedTuple

from .catalogue import Shape, data
from .forecast import Forecast
from .situation import PlannedDrafter, Situation

USE, LEAVE = "use", "do not"
RULES_K = 5
"""Draft length K of the acceptance in rules: assumed."""


class RuleOfThumb(NamedTuple):
    """A rule of thumb with the model's verdict; ``reason`` is empty if they agree."""

    name: str
    fact: str
    value: float
    says: str
    model: str
    reason: str


def facts(situation: Situation, target: Shape, drafter: PlannedDrafter) -> dict[str, float]:
    """Return the facts that rules ask for, as far as they were given; a prior is left out."""
    acceptance = situation.acceptance.rate(RULES_K) if situation.acceptance else None
    billions = target.parameters / 1e9
    known: dict[str, float | None] = {
        "target_billions": billions,
        "latency_sensitive_billions": billions if situation.priority == "latency" else None,
        "batch": max(situation.concurrency),
        "output_tokens": situation.output_tokens,
        "utilisation": situation.utilisation,
        "memory_used": situation.memory_used,
        "acceptance": acceptance,
    }
    if drafter.shape is not None:
        known["draft_ratio"] = drafter.shape.parameters / target.parameters
        if drafter.method == "model":
            known["drafter_billions"] = drafter.shape.parameters / 1e9
    return {name: float(value) for name, value in known.items() if value is not None}


def _applies(rule: dict[str, Any], value: float) -> bool:
    if rule["is"] == "within":
        return bool(rule["value"][0] <= value <= rule["value"][1])
    return bool({"<": lt, "<=": le, ">": gt}[rule["is"]](value, rule["value"]))


def _reason(fact: str, forecast: Forecast, batch: int) -> str:
    """Return why the model decides otherwise than a rule, in figures of the forecast."""
    sentences, memory, steps = data("notes")["rules"], forecast.memory, forecast.steps
    k, speedup = forecast.best(batch)
    running = forecast.batch(batch, k)
    if not running:
        return str(sentences["no_room"])
    even, drafted = forecast.break_even(batch, k), forecast.acceptance.drafted(k)
    values = {
        "batch": batch,
        "k": k,
        "speedup": speedup,
        "rate": forecast.acceptance.rate(k),
        "need": "no acceptance would do" if even is None else f"that breaks even at {even:.2f}",
        "drafting": steps.draft(running, k) / steps.seconds(running, 0),
        "verifying": steps.verify(running, drafted) / steps.verify(running, 0),
        "prompt": 1000 * forecast.draft_prefill,
    }
    values["costs"] = sentences["costs"].format_map(values)
    if memory is not None:
        values["fit"] = int(memory.speculative)
        values["lost"] = int(memory.plain) - int(memory.speculative)
    elif fact == "memory_used":
        fact = "other"
    return str(sentences.get(fact, sentences["other"]).format_map(values))


def judge(
    known: dict[str, float], model: str | None, forecast: Forecast | None, batch: int, largest: int
) -> list[RuleOfThumb]:
    """Return every rule that applies, with the model's verdict on the traffic, if there is one.

    Reasons are for the median size ``batch``, or for the ``largest`` in rules on the batch size.
    """

    def rule(name: str, fact: str, value: float, says: str) -> RuleOfThumb:
        agrees = model is None or forecast is None or model.startswith(says)
        size = largest if fact == "batch" else batch
        reason = "" if agrees else _reason(fact, forecast, size)  # type: ignore[arg-type]
        return RuleOfThumb(name, fact, value, says, model or "", reason)

    table = data("rules")
    rules = [
        rule(each["name"], each["fact"], known[each["fact"]], each["says"])
        for each in table["rule"]
        if each["fact"] in known and _applies(each, known[each["fact"]])
    ]
    return rules or [rule(table["default_name"], "", 0.0, table["default"])]


def decide(rules: list[RuleOfThumb]) -> tuple[str, str]:
    """Return the rules' verdict and its reason: a single rule against speculation decides."""
    against = [rule for rule in rules if rule.says == LEAVE]
    reason = "rules of thumb: " + "; ".join(rule.name for rule in against or rules)
    return LEAVE if against else USE, reason


def stack(priority: str) -> dict[str, Any]:
    """Return the stack of techniques for a priority, with the claims about each."""
    techniques = data("techniques")
    entry = techniques["stack"][priority]
    names = (*entry["take"], *entry["optional"], *entry["leave"])
    claims = {name: techniques["technique"][name] for name in names}
    return {"priority": priority, **entry, "claims": claims, "source": techniques["source"]}
