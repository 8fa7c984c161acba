"""Losses of distillation beside each other: drafters that differ in nothing else.

Drafters are trained on the same data, in the same order, from the same beginning, and are served on
the same held-out prompts. A difference is that of acceptance lengths prompt by prompt, with its
95 % interval.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated, Any, NamedTuple

import typer

from outrider.bench.machine import machine
from outrider.checkpoints.folders import find_folder
from outrider.checkpoints.heads import EAGLE3
from outrider.errors import ConfigError
from outrider.training.losses import LOSSES
from outrider.training.plan import Plan
from outrider.training.run_distill import NEW_RATE, DistillOptions, train_drafter
from outrider.training.run_heads import RATE, HeadOptions, train_head
from outrider.training.samples import DataFolder
from outrider.training.served import Serving, error_of_mean, held_out_prompts
from outrider.training.targets import Target, open_target

from .common import POCKET, Length, Model, Seed, Tokens, table

DISTILL = "distill"
OWN = "forward-kl, own answers"
"""Forward KL where the drafter itself writes half of the answers."""
TEMPERATURES = (0.0, 1.0)


class Job(NamedTuple):
    """The part of a training that all losses share; ``kind`` is ``EAGLE3`` or ``DISTILL``."""

    kind: str
    target: Path
    opened: Target
    data: DataFolder
    plan: Plan

    def train(self, loss: str, out: Path) -> None:
        """Train a drafter by a loss, or go on where that was interrupted."""
        own, name = (0.5, "forward-kl") if loss == OWN else (0.0, loss)
        if self.kind == EAGLE3:
            options = HeadOptions(loss=name)
            train_head(EAGLE3, self.target, self.data, None, out, self.plan, options, self.opened)
        else:
            small = DistillOptions(loss=name, own=own)
            train_drafter(self.target, self.data, None, out, self.plan, small, self.opened)


def compared(
    losses: Sequence[str], base: str, lengths: dict[tuple[str, float], list[float]]
) -> list[dict[str, Any]]:
    """Return each loss's acceptance length by temperature, and its difference to ``base``'s."""
    rows: list[dict[str, Any]] = []
    for loss in losses:
        for heat in TEMPERATURES:
            own, other = lengths[loss, heat], lengths[base, heat]
            apart = [a - b for a, b in zip(own, other, strict=True)]
            rows.append({
                "loss": loss, "temperature": heat, "acceptance_length": mean(own),
                "difference": mean(apart), "near": error_of_mean(apart),
            })  # fmt: skip
    return rows


def main(
    data: Annotated[Path, typer.Argument(help="A folder that outrider train data wrote.")],
    work: Annotated[Path, typer.Argument(help="The folder for drafters; goes on there.")],
    model: Model = POCKET,
    kind: Annotated[str, typer.Option(help=f"{EAGLE3} or {DISTILL}.")] = EAGLE3,
    losses: Annotated[str, typer.Option(help="Losses, with commas; the first is the base.")] = (
        "hard,forward-kl,reverse-kl,tvd,coupled,hybrid"
    ),
    own: Annotated[bool, typer.Option("--own", help="Own answers, too; for distill.")] = False,
    steps: Annotated[int, typer.Option(help="Steps of each training.", min=1)] = 300,
    batch: Annotated[int, typer.Option(help="Tokens of a step.", min=1)] = 512,
    rate: Annotated[float | None, typer.Option(help="The learning rate.")] = None,
    prompts: Annotated[int, typer.Option(help="Held-out prompts that are served.")] = 96,
    tokens: Tokens = 128,
    num_speculative_tokens: Length = 4,
    seed: Seed = 0,
    out: Annotated[Path | None, typer.Option(help="A report as JSON.")] = None,
) -> None:
    """Train a drafter by each loss and compare what is accepted of them, as a Markdown table."""
    names = [name.strip() for name in losses.split(",")] + ([OWN] if own else [])
    unknown = [name for name in names if name not in (*LOSSES, OWN)]
    if unknown or kind not in (EAGLE3, DISTILL) or (own and kind != DISTILL):
        raise ConfigError(
            f"known are {', '.join(LOSSES)} for --losses, {EAGLE3} and {DISTILL} for --kind, and "
            f"--own for {DISTILL}; correct that."
        )
    target, folder = find_folder(model), DataFolder.opened(data)
    opened = open_target(target, folder)
    usual = RATE if kind == EAGLE3 else NEW_RATE
    plan = Plan(steps=steps, batch=batch, rate=rate or usual, seed=seed, judge_every=steps)
    job, context = Job(kind, target, opened, folder, plan), folder.about.context
    asked = held_out_prompts(folder.read(), context - tokens, prompts)
    serving = Serving(target, opened.model, asked, tokens, context)
    lengths: dict[tuple[str, float], list[float]] = {}
    for name in names:
        drafter = work / name.replace(", ", "-").replace(" ", "-")
        job.train(name, drafter)
        for served in serving.measure(drafter, num_speculative_tokens, TEMPERATURES, rounds=1):
            lengths[name, served.temperature] = served.lengths
    rows, here = compared(names, names[0], lengths), machine()
    print("\n".join(table(
        ("loss", "T", "tokens a step", f"difference to {names[0]}"),
        [
            (
                row["loss"], f"{row['temperature']:g}", f"{row['acceptance_length']:.2f}",
                f"{row['difference']:+.3f} ± {row['near']:.3f}",
            )
            for row in rows
        ],
    )))  # fmt: skip
    print(
        f"\n{model}, {kind}, {steps} steps of {batch} tokens, K = {num_speculative_tokens}, "
        f"{len(asked)} held-out prompts of {tokens} output tokens, seed {seed}; {here['cpu']}, "
        f"{here['date'][:10]}."
    )
    if out is not None:
        report = {"rows": rows, "machine": here, "model": str(model), "kind": kind, "steps": steps}
        out.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
