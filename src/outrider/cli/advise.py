"""``outrider ops advise``: whether speculation is worth it, with what, and how far."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ..errors import ConfigError
from .common import AsJson, Out, read_text, status, writable
from .flags import argument, setting, with_flags

if TYPE_CHECKING:
    from ..engine.control.costs import Costs
    from ..ops.planning import Acceptance

SAMPLE_TOKENS = 128
"""Tokens that follow each prompt of a sample."""


def shares(text: str, option: str) -> dict[str, float]:
    """Return ``code=0.7,qa=0.3`` by name; a name alone has the share 1."""
    by_name = {}
    for part in text.split(","):
        name, equals, share = part.partition("=")
        try:
            by_name[name.strip()] = float(share) if equals else 1.0
        except ValueError:
            raise typer.BadParameter(f"{option} is {text!r}; give NAME=SHARE,...") from None
    return by_name


def sizes(text: str) -> dict[int, float]:
    """Return ``8`` or ``1=0.5,16=0.5`` by number."""
    try:
        return {int(name): share for name, share in shares(text, "--concurrency").items()}
    except ValueError:
        remedy = "give a number, or NUMBER=SHARE,..."
        raise typer.BadParameter(f"--concurrency is {text!r}; {remedy}") from None


def sampled(
    target: str, drafter: str | None, file: Path, k: int, temperature: float, costs_too: bool
) -> tuple[Acceptance, Costs | None]:
    """Return the acceptance on the prompts of a file, one a line, and what steps cost here."""
    from ..ops.planning import of_counts

    prompts = [line for line in read_text(file, f"--prompts {file}").splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {file} has no prompts; give one per line.")
    if drafter is None:
        raise ConfigError("--prompts measures one drafter's acceptance; name it with --drafter.")
    k = max(k, 2)  # one token alone does not tell a pass from a call
    with status("decoding the sample"):
        from .. import LLM
        from ..bench.steps import SIZES, profile, timed

        llm = LLM(target, drafter=drafter, num_speculative_tokens=k, max_num_seqs=max(SIZES))
        costs = profile(llm, prompts, longest=k) if costs_too else None
        _, counts = timed(llm, prompts, 1, k, SAMPLE_TOKENS, temperature)
    if not counts.drafts:
        raise ConfigError(f"nothing was drafted on --prompts {file}; give more prompts.")
    source = f"measured on {len(prompts)} sample prompts, {counts.drafts} drafts"
    return of_counts(counts, k, source), costs


@dataclass(frozen=True, kw_only=True)
class AdviseFlags:
    """The options of ``outrider ops advise``; most are fields of ``Situation``."""

    drafter: str | None = setting(
        None,
        "The same, or eagle3, eagle, medusa, layerskip, suffix, ngram. Without it the drafters of "
        "the catalogue that fit are ranked.",
    )
    hardware: str | None = setting(
        None, "A device of the catalogue; without it and a profile, rules decide."
    )
    profile: Path | None = setting(
        None, "Costs that outrider serve measured and kept.", metavar="FILE"
    )
    tensor_parallel: int = setting(1, "Devices that share the target.")
    concurrency: str = setting("1", "Sequences at once, or NUMBER=SHARE,... for several.")
    tasks: str = setting(
        "conversation",
        "NAME=SHARE,... of conversation, code, qa, creative, reasoning, predictable.",
    )
    temperature: float = setting(0.0, "Sampling temperature.")
    acceptance: str | None = setting(
        None,
        "A report with measured acceptance; accepted / drafted at its K (0.73@5); or the shares "
        "of drafts accepted up to each position (0.92,0.81,0.71).",
        metavar="FILE|RATE@K|SHARES",
    )
    prompts: Path | None = setting(
        None,
        "Prompts, one a line: measure acceptance here, and without --hardware and --profile what "
        "steps cost, too.",
        metavar="FILE",
    )
    full: bool = setting(False, "Show traffic, TTFT, cost, alerts, rules and stack too.")
    json_: AsJson = False
    out: Out = None
    dtype: str = setting("bf16", "Dtype of the weights: fp32, bf16, fp8, int8, int4.")
    drafter_dtype: str | None = setting(None, "Dtype of the drafter's weights.")
    input_tokens: int = setting(512, "Prompt tokens of a request.")
    output_tokens: int = setting(256, "Output tokens of a request.")
    max_ttft: float | None = setting(None, "Service level in seconds.")
    max_tpot: float | None = setting(None, "Service level in seconds.")
    priority: str = setting("latency", "latency, throughput, memory or 'zero loss'.")
    placement: str = setting("same", "Where the drafter runs: same, own or cpu.")
    drafter_hardware: str | None = setting(None, "The drafter's own device.")
    fine_tune: bool = setting(False, "Also forecast a drafter that is trained on the traffic.")
    utilisation: float | None = setting(None, "Share of the device in use today, 0 to 1.")
    memory_used: float | None = setting(None, "Share of the device's memory in use today, 0 to 1.")
    price: float | None = setting(None, "Dollars per hour and device.")
    num_speculative_tokens: int = setting(8, "Longest draft K to consider.")
    plot: str | None = setting(
        None, "Write the speedup by acceptance here, an SVG.", metavar="FILE", callback=writable
    )


@with_flags(AdviseFlags)
def advise(
    flags: AdviseFlags,
    model: str = argument(
        "MODEL", "A model of the catalogue, a folder with a config.json, or a hub name."
    ),
) -> None:
    """Judge whether speculation is worth it: verdict, draft length and reasons."""
    from ..ops.planning import Situation
    from ..ops.planning import advise as judge
    from ..ops.planning.acceptance import parse_acceptance
    from ..ops.planning.advice import advice_markdown, advice_plot, advice_summary
    from .reports import deliver

    known, costs, longest = None, None, flags.num_speculative_tokens
    if flags.acceptance is not None:
        known = parse_acceptance(flags.acceptance, flags.drafter)
    elif flags.prompts is not None:
        here = flags.hardware is None and flags.profile is None
        known, costs = sampled(
            model, flags.drafter, flags.prompts, longest, flags.temperature, here
        )
    own = {n: v for n, v in vars(flags).items() if n in Situation.__dataclass_fields__}
    own |= {"concurrency": sizes(flags.concurrency), "tasks": shares(flags.tasks, "--tasks")}
    own |= {"profile": flags.profile or costs, "acceptance": known, "longest": longest}
    advice = judge(Situation(model, **own))
    if flags.plot is not None:
        if not advice.sensitivity:
            raise ConfigError("--plot needs --hardware or --profile.")
        Path(flags.plot).write_text(advice_plot(advice), encoding="utf-8")
    whole, short = advice_markdown(advice), advice_summary(advice)
    deliver(advice.to_json(), whole, flags.json_, flags.out, whole if flags.full else short)
