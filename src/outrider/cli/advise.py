"""``outrider ops advise``: whether speculation is worth it, with what, and how far."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ..errors import ConfigError
from .common import AsJson, Out, read_text, status, writable

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
        raise typer.BadParameter(
            f"--concurrency is {text!r}; give a number, or NUMBER=SHARE,..."
        ) from None


def sampled(
    target: str, drafter: str | None, file: Path, k: int, temperature: float, costs_too: bool
) -> tuple[Acceptance, Costs | None]:
    """Return the acceptance on the prompts of a file, one a line, and what steps cost here.

    This machine decodes the prompts with both models.
    """
    from ..ops.planning import of_counts

    prompts = [line for line in read_text(file, f"--prompts {file}").splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts {file} has no prompts: one a line is expected.")
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


def advise(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A model of the catalogue, a folder with a config.json, or a hub name.",
        ),
    ],
    drafter: Annotated[
        str | None,
        typer.Option(
            help="The same, or eagle3, eagle, medusa, layerskip, suffix, ngram. Without it the "
            "drafters of the catalogue that fit are ranked."
        ),
    ] = None,
    hardware: Annotated[
        str | None,
        typer.Option(help="A device of the catalogue; without it and a profile, rules decide."),
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Costs that outrider serve measured and kept."),
    ] = None,
    tensor_parallel: Annotated[int, typer.Option(help="Devices that share the target.")] = 1,
    dtype: Annotated[
        str, typer.Option(help="Of the weights: fp32, bf16, fp8, int8, int4.")
    ] = "bf16",
    drafter_dtype: Annotated[str | None, typer.Option(help="Of the drafter's weights.")] = None,
    concurrency: Annotated[
        str, typer.Option(help="Sequences at once, or NUMBER=SHARE,... for several.")
    ] = "1",
    input_tokens: Annotated[int, typer.Option(help="Of a request.")] = 512,
    output_tokens: Annotated[int, typer.Option(help="Of a request.")] = 256,
    tasks: Annotated[
        str,
        typer.Option(
            help="NAME=SHARE,... of conversation, code, qa, creative, reasoning, predictable."
        ),
    ] = "conversation",
    temperature: Annotated[float, typer.Option(help="Of sampling.")] = 0.0,
    max_ttft: Annotated[float | None, typer.Option(help="Service level, seconds.")] = None,
    max_tpot: Annotated[float | None, typer.Option(help="Service level, seconds.")] = None,
    priority: Annotated[
        str, typer.Option(help="latency, throughput, memory or 'zero loss'.")
    ] = "latency",
    acceptance: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|RATE@K|SHARES",
            help="A report with measured acceptance; accepted / drafted at its K (0.73@5); or the "
            "shares of drafts accepted up to each position (0.92,0.81,0.71).",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, one a line: measure acceptance here, and without --hardware and "
            "--profile what steps cost, too.",
        ),
    ] = None,
    placement: Annotated[str, typer.Option(help="Of the drafter: same, own or cpu.")] = "same",
    drafter_hardware: Annotated[
        str | None, typer.Option(help="The device that the drafter has for itself.")
    ] = None,
    fine_tune: Annotated[
        bool,
        typer.Option("--fine-tune", help="Ask what a drafter tuned on the traffic would bring."),
    ] = False,
    utilisation: Annotated[float | None, typer.Option(help="Of the device today, 0 to 1.")] = None,
    memory_used: Annotated[float | None, typer.Option(help="Of the device today, 0 to 1.")] = None,
    price: Annotated[float | None, typer.Option(help="Dollars for an hour of a device.")] = None,
    num_speculative_tokens: Annotated[
        int, typer.Option(help="Longest draft K that is looked at.")
    ] = 8,
    full: Annotated[
        bool,
        typer.Option("--full", help="Show traffic, TTFT, cost, alerts, rules and stack too."),
    ] = False,
    json_: AsJson = False,
    out: Out = None,
    plot: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", callback=writable, help="Write the speedup by acceptance here, an SVG."
        ),
    ] = None,
) -> None:
    """Say whether speculation is worth it: a verdict, the draft length, and what it rests on."""
    from ..ops.planning import Situation
    from ..ops.planning import advise as judge
    from ..ops.planning.acceptance import parse_acceptance
    from ..ops.planning.report import advice_markdown, advice_plot, advice_summary
    from .reports import deliver

    known, costs = None, None
    if prompts is not None and acceptance is None:
        here = hardware is None and profile is None
        known, costs = sampled(model, drafter, prompts, num_speculative_tokens, temperature, here)
    elif acceptance is not None:
        known = parse_acceptance(acceptance, drafter)
    situation = Situation(
        model, drafter, hardware, tensor_parallel, dtype, drafter_dtype, profile or costs,
        sizes(concurrency), input_tokens, output_tokens, shares(tasks, "--tasks"), temperature,
        max_ttft, max_tpot, priority, known, placement, drafter_hardware, fine_tune, utilisation,
        memory_used, price, num_speculative_tokens,
    )  # fmt: skip
    advice = judge(situation)
    if plot is not None:
        if not advice.sensitivity:
            raise ConfigError("nothing can be drawn without --hardware or --profile.")
        Path(plot).write_text(advice_plot(advice), encoding="utf-8")
    whole = advice_markdown(advice)
    deliver(advice.to_json(), whole, json_, out, whole if full else advice_summary(advice))
