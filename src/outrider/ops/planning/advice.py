"""The answer of ``advise``: a verdict with the figures behind it, and its report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from ...base.limits import LARGEST_DRAFT
from ...base.methods import NAMES
from ...base.outside.documents import parse_json, read_json
from ...base.outside.models import DataPart, checked
from ...base.outside.text import printable
from ...engine.control.schedules import Range, check_ranges
from ...errors import ConfigError, shown
from ..markdown import listed, section, table
from .catalogue import Shape, checkpoint_of, find_device, head_of
from .checks import MOST_TOKENS, Batch, Devices, Gibibytes, OneLine, Tokens, one_of
from .figure import Figure, Report
from .forecast import Forecast
from .roofline import BYTES, Dtype
from .rules import LEAVE, RuleOfThumb
from .situation import Placement, PlannedDrafter, Situation

ADVICE_VERSION = 1
LARGEST_ADVICE = 1 << 20
WRITE = "write a new one with outrider ops advise --out FILE"
GIB = 2**30
MOST_SEQUENCES = 256
"""Most concurrent sequences that an advice gives a server, even if more fit."""


@dataclass(frozen=True)
class ServedModel(DataPart):
    """A model: its given name, and how it is served; an engine loads ``checkpoint``, if known."""

    name: OneLine
    checkpoint: OneLine | None
    dtype: Dtype
    attention_heads: Tokens
    vocab_size: Tokens
    weights_gib: Gibibytes


@dataclass(frozen=True)
class ServedTraffic(DataPart):
    """The share of time at each number of concurrent sequences, and the tokens of a request."""

    concurrency: dict[Batch, float]
    input_tokens: Tokens
    output_tokens: Tokens
    tasks: dict[str, float]
    temperature: float
    max_ttft: float | None = None
    max_tpot: float | None = None


@dataclass(frozen=True)
class Deployment(DataPart):
    """One replica of an advice.

    ``drafter`` is None if there is no model or head, or its shape is unknown. ``hardware`` and
    ``memory_gib`` (of one device) are None if costs were measured or no device was named.
    ``max_model_len`` is the tokens of a request, ``max_num_seqs`` how many of that length fit.
    """

    target: ServedModel
    method: Annotated[str, one_of(NAMES)]
    drafter: ServedModel | None
    other_vocabulary: bool
    placement: Placement
    hardware: OneLine | None
    memory_gib: Gibibytes | None
    tensor_parallel: Devices
    max_model_len: Annotated[int, Field(ge=1, le=2 * MOST_TOKENS)]
    max_num_seqs: Batch | None
    traffic: ServedTraffic
    replicas: Annotated[int, Field(ge=1, le=2**20)] = 1


@dataclass(frozen=True)
class At(DataPart):
    """The figures at one batch size of the traffic; ``k`` = 0 is plain decoding."""

    batch: int
    share: Figure
    k: int
    speedup: Figure
    tpot: Figure
    plain_tpot: Figure
    tokens_per_second: Figure
    plain_tokens_per_second: Figure
    break_even: Figure | None
    """Acceptance at which the best draft length breaks even; None if there is none."""
    meets: dict[str, bool]
    """Whether each given service level is met, with speculation and without."""


@dataclass(frozen=True)
class BatchRange(DataPart):
    """Batch sizes with one draft length, and the least speedup among them."""

    first: int
    last: int
    k: int
    speedup: Figure


@dataclass(frozen=True)
class Sensitivity(DataPart):
    """The speedup at one batch size, by acceptance."""

    batch: int
    k: int
    acceptance: list[Figure]
    speedup: list[Figure]


@dataclass(frozen=True)
class Trip(DataPart):
    """An alert: if ``metric`` is ``when`` (above, below) ``value`` for minutes, do ``action``."""

    metric: str
    when: str
    value: Figure
    action: str


@dataclass(frozen=True)
class Candidate(DataPart):
    """A drafter that fits; if costs are known, with its forecast at the median batch size."""

    drafter: str
    method: str
    checkpoint: str | None
    ratio: Figure
    k: int | None = None
    speedup: dict[str, Figure] | None = None
    memory: Figure | None = None


@dataclass(frozen=True)
class Advice(DataPart, Report):
    """The result of ``advise``; without costs, only the verdict of rules of thumb.

    ``verdict`` is use, do not, or only at some batch sizes; ``decided_by`` the model or rules of
    thumb. ``acceptance`` is accepted / drafted at ``k``, the draft length at the traffic's median
    batch size. ``deploy render``, ``alerts rules``, ``roi`` and the guard read it as JSON.
    """

    verdict: OneLine
    reason: str
    decided_by: str
    target: OneLine
    drafter: OneLine
    deployment: Deployment
    acceptance: dict[str, Figure]
    acceptance_source: str
    k: int
    rules: list[RuleOfThumb]
    stack: dict[str, Any]
    notes: list[str]
    limiting: str = ""
    halved: dict[str, Figure] = field(default_factory=dict)
    """The speedup if each cost, or the number of refused tokens, were halved."""
    speedup: dict[str, Figure] = field(default_factory=dict)
    """P10, P50, P90 over the traffic, of tokens per second with over without, prompts included."""
    ranges: list[BatchRange] = field(default_factory=list)
    schedule: Annotated[list[Range], AfterValidator(check_ranges)] = field(default_factory=list)
    """First and last batch size and K: vLLM's num_speculative_tokens_per_batch_size."""
    at: list[At] = field(default_factory=list)
    ttft: dict[str, Figure] = field(default_factory=dict)
    memory: dict[str, Figure] = field(default_factory=dict)
    cost: dict[str, Figure] = field(default_factory=dict)
    """Dollars for a million tokens, if a price was given."""
    break_even: Figure | None = None
    """Acceptance at ``k`` at which speculation breaks even; None if there is none."""
    trips: list[Trip] = field(default_factory=list)
    sensitivity: list[Sensitivity] = field(default_factory=list)
    tuned: dict[str, Figure] = field(default_factory=dict)
    """The speedup with a drafter tuned on the traffic, if that was asked for."""
    candidates: list[Candidate] = field(default_factory=list)
    """The catalogue's drafters that fit, the best first, if none was named."""
    version: int = ADVICE_VERSION


def deployment_of(
    situation: Situation, target: Shape, drafter: PlannedDrafter, outlook: Forecast | None,
    drafts: bool,
) -> Deployment:  # fmt: skip
    """Return the deployment that a situation describes; ``drafts`` says whether it speculates."""
    memory = outlook.memory if outlook is not None else None
    fit = None
    if memory is not None:
        most = memory.speculative if drafts else memory.plain
        fit = max(1, int(min(most, MOST_SEQUENCES)))
    device = None if situation.hardware is None else find_device(situation.hardware)
    asked = str(situation.target)
    return Deployment(
        _model(asked, situation.dtype, target, checkpoint_of(asked)),
        drafter.name, _drafter(situation, target, drafter), drafter.prior == "retokenize",
        situation.placement, None if device is None else device.name,
        None if device is None else device.memory / GIB,
        situation.tensor_parallel, situation.input_tokens + situation.output_tokens, fit,
        ServedTraffic(
            dict(situation.concurrency), situation.input_tokens, situation.output_tokens,
            dict(situation.tasks), situation.temperature, situation.max_ttft, situation.max_tpot,
        ),
    )  # fmt: skip


def _model(name: str, dtype: str, shape: Shape, checkpoint: str | None) -> ServedModel:
    weights = shape.parameters * BYTES[dtype] / GIB
    return ServedModel(name, checkpoint, dtype, shape.heads, shape.vocabulary, weights)


def _drafter(situation: Situation, target: Shape, drafter: PlannedDrafter) -> ServedModel | None:
    """Return the drafter's model. A head named only by its method comes from the catalogue."""
    if drafter.shape is None:
        return None
    name = str(situation.drafter)
    checkpoint = checkpoint_of(name) or head_of(str(situation.target), target, drafter.name)
    return _model(name, situation.dtype_of(drafter), drafter.shape, checkpoint)


def load_advice(file: Path, option: str = "--advice") -> Advice:
    """Return the advice in a file, which ``option`` names in messages; see ``read_advice``."""
    name = f"{option} {printable(file)}"
    return _advice(read_json(file, name, limit=LARGEST_ADVICE), name)


def read_advice(text: str, source: str) -> Advice:
    """Return the advice in the JSON of ``Advice.to_json``. Raises ConfigError: it is not one."""
    return _advice(parse_json(text, source, limit=LARGEST_ADVICE, unique=True), source)


def _advice(document: Any, source: str) -> Advice:
    if not isinstance(document, dict) or not {"version", "verdict"} <= document.keys():
        raise ConfigError(f"{source} is JSON, but not an advice with a version; {WRITE}.")
    if document["version"] != ADVICE_VERSION or isinstance(document["version"], bool):
        raise ConfigError(
            f"{source} has advice version {shown(document['version'])}, but this Outrider reads "
            f"version {ADVICE_VERSION}; {WRITE}."
        )
    advice = checked(Advice, document, source)
    if not 0 <= advice.k <= LARGEST_DRAFT or (advice.k == 0 and advice.verdict != LEAVE):
        raise ConfigError(
            f"{source}: k is {advice.k}; give a draft length from 1 to {LARGEST_DRAFT}."
        )
    if (even := advice.break_even) is not None and not 0 <= even.value <= 1:
        raise ConfigError(f"{source}: break_even is {even.value:g}; give a share from 0 to 1.")
    return advice


OTHERS_NAMED = 2


def advice_summary(advice: Advice) -> str:
    """Return what matters on one screen: verdict, K by batch size, memory, risks."""
    lines = _verdict(advice)
    if advice.candidates:
        others = [each.drafter for each in advice.candidates[1 : 1 + OTHERS_NAMED]]
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
    """Return a whole advice as Markdown; every number comes with its evidence."""
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
            "Speedup: tokens per second with speculation, divided by tokens per second without it. "
            "Prompts are included.", "",
            *_figures(advice),
            *(f"- speedup with a tuned drafter, {n}: {f}" for n, f in advice.tuned.items()), "",
            *section("Draft length by batch size", _lengths(advice)),
            "vLLM: `\"num_speculative_tokens_per_batch_size\": "
            f"{[list(each) for each in advice.schedule]}`", "",
            *section("The traffic", table(levels, traffic)),
            *section("Time to the first token", listed(advice.ttft)),
            *section("Memory", listed(advice.memory) if advice.memory else []),
            *section("Cost", listed(advice.cost) if advice.cost else []),
            "## What limits it", "",
            "The speedup if one factor were halved (for acceptance, the rejected tokens):", "",
            *listed(advice.halved),
            "## Alerts", "",
            *(f"- {t.metric} {t.when} {t.value} {t.action}" for t in advice.trips), "",
        ]  # fmt: skip
    rules = [(rule.name, rule.says, rule.model, rule.reason) for rule in advice.rules]
    names = ("rule", "the rule says", "the model says", "why they differ")
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
    return table(("batch", "K", "lowest speedup"), rows)


def _figures(advice: Advice) -> list[str]:
    spans = ", ".join(f"{name.upper()} {each}" for name, each in advice.speedup.items())
    rates = "-".join(f"{each.value:.2f}" for each in advice.acceptance.values())
    rate = advice.acceptance["p50"]
    return [
        f"- speedup over the traffic: {spans}",
        f"- acceptance, P10-P50-P90: {rates} {rate.unit} ({rate.evidence}; "
        f"{advice.acceptance_source})",
        f"- break-even acceptance: {advice.break_even or 'none: no acceptance is high enough'}",
    ]


def _best(advice: Advice) -> str:
    """Return the best drafter with its speedup and memory."""
    best, *_ = advice.candidates
    name = best.drafter
    if best.checkpoint and best.drafter == best.method:
        name = f"the {best.method} head {best.checkpoint}"
    if best.speedup is None:
        return f"Best by rules of thumb: {name}."
    taken = f", which takes {best.memory} of memory" if best.memory is not None else ""
    return f"Best: {name}, {best.speedup['p50']}{taken}."


def _candidates(advice: Advice) -> list[str]:
    rows = [
        (
            each.drafter, each.checkpoint or "not needed", each.ratio.said(),
            "" if each.k is None else each.k or "off",
            ", ".join(map(str, (each.speedup or {}).values())) or "unknown",
            each.memory or "unknown",
        )
        for each in advice.candidates
    ]  # fmt: skip
    names = ("drafter", "checkpoint", "target share", "K", "speedup: P10, P50, P90", "memory")
    return section("Drafters that fit", [_best(advice), "", *table(names, rows)])


def _stack(stack: Mapping[str, Any], advice: Advice) -> list[str]:
    parts = [("use", stack["take"]), ("consider", stack["optional"]), ("avoid", stack["leave"])]
    rows = [(part, name, _claim(stack["claims"][name])) for part, names in parts for name in names]
    lines = table(("", "technique", "claimed, not measured here"), rows)
    lines += [f"Claimed: {stack['claim']}."] if "claim" in stack else []
    lines += [f"{stack['caveat'][0].upper()}{stack['caveat'][1:]}."] if "caveat" in stack else []
    if advice.speedup:
        lines.append(f"The model expects {advice.speedup['p50']} from speculation alone.")
    return [*section(f"Stack for {stack['priority']}", lines), ""]


def _claim(claims: Mapping[str, Any]) -> str:
    """Return the claims about a technique in words."""
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
