"""Acceptance of each rule on a pair.

Every rule decodes the same prompts with the same drafter. Beside what it accepted stand the bounds
of theory for the first position of a draft, averaged over the steps of that very run: 1 - TV(p, q)
is what the ratio rule accepts there and no rule that looks at one token can exceed it; coupled
sampling accepts its closed form, at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, 2024). Block
verification exceeds 1 - TV, since what comes later counts too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import typer

from outrider.bench.machine import machine
from outrider.cli.common import numbers
from outrider.errors import ConfigError
from outrider.input_processor import InputProcessor
from outrider.llm import LLM
from outrider.sampling.acceptance import AcceptanceRule
from outrider.sampling.pipeline import StepLogits
from outrider.sampling.ratio import RULES, make_rule
from outrider.sampling.shared_noise import Noise, SharedNoise
from outrider.types import Counts, Draft, SamplingParams, Verdict

from .common import (
    POCKET,
    PROMPTS,
    Length,
    Model,
    Prompts,
    Seed,
    Tokens,
    open_engine,
    read_prompts,
    table,
)

COLUMNS = ("T", "rule", "rate", "length", "survival", "1 - TV", "coupled", "(1 - TV) / (1 + TV)")


@dataclass
class Bounds:
    """Sums over ``steps`` drafts of what theory says of their first position."""

    steps: int = 0
    ratio: float = 0.0
    coupled: float = 0.0
    coupled_least: float = 0.0

    @property
    def totals(self) -> tuple[float, float, float]:
        return self.ratio, self.coupled, self.coupled_least

    def add(self, p: torch.Tensor, q: torch.Tensor) -> None:
        """Count laws p and q, fp64 [rows, vocabulary] both."""
        ratio = torch.minimum(p, q).sum(-1)
        self.steps += len(p)
        self.ratio += float(ratio.sum())
        self.coupled += float(coupled_acceptance(p, q).sum())
        self.coupled_least += float((ratio / (2 - ratio)).sum())


def coupled_acceptance(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """``oracle.coupled_acceptance`` of many laws: fp64 [rows] from p and q, fp64 [rows, ids].

    max(p_j / p_i, q_j / q_i) is the first where p_j / q_j exceeds p_i / q_i; with ids in that order
    the sums over j are running sums.
    """
    order = (p / q).nan_to_num(nan=0, posinf=torch.inf).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    behind = p.flip(-1).cumsum(-1).flip(-1) - p
    total = behind / p + q.cumsum(-1) / q
    return torch.where((p > 0) & (q > 0), 1 / total, 0.0).sum(-1)


class Recorder:
    """A rule that also notes the bounds of every draft that it decides."""

    trees = False
    needs_logits = True

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule
        self.name = rule.name
        self.bounds = Bounds()

    def drafting(self, noise: SharedNoise) -> Noise:
        return self.rule.drafting(noise)

    def __call__(self, target: StepLogits, draft: Draft, noise: SharedNoise) -> Verdict:
        drafted = list(zip(target.first, draft.logits or [], strict=False))
        pairs = [(f, z) for f, z in drafted if f is not None and z is not None]
        if pairs:
            p = target.logits[torch.tensor([f for f, _ in pairs])].double().softmax(-1)
            q = torch.stack([z[0] for _, z in pairs]).double().softmax(-1)
            self.bounds.add(p, q)
        return self.rule(target, draft, noise)


def opened(inputs: InputProcessor, rule: AcceptanceRule) -> tuple[LLM, Recorder]:
    """Return an engine for ``inputs``, whose drafter is a model, and what records its drafts."""
    recorder = Recorder(rule)
    return LLM.from_engine(inputs, open_engine(inputs, recorder)), recorder


def measure(
    llm: LLM,
    recorder: Recorder,
    prompts: Sequence[str | Sequence[int]],
    temperature: float,
    tokens: int,
    seed: int,
) -> tuple[Counts, Bounds]:
    """Decode every prompt; what was accepted, and what theory says of it.

    Args:
        llm, recorder: see ``opened``; fresh.
        tokens: output tokens of each prompt.
        seed: of the first prompt, the next one's is one more.
    """
    params = [
        SamplingParams(temperature=temperature, seed=seed + i, max_tokens=tokens, ignore_eos=True)
        for i in range(len(prompts))
    ]
    llm.generate(list(prompts), params)
    return llm.engine.counts, recorder.bounds


def main(
    model: Model = POCKET,
    prompts: Prompts = PROMPTS,
    drafter: Annotated[str, typer.Option(help="A checkpoint's folder.")] = "auto",
    temperatures: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0.3,0.7,1.0",
    tokens: Tokens = 256,
    num_speculative_tokens: Length = 4,
    seed: Seed = 0,
) -> None:
    """Measure what each rule accepts, beside the bounds of theory, as a Markdown table."""
    inputs = InputProcessor(model, drafter, {"num_speculative_tokens": num_speculative_tokens})
    if inputs.spec.name != "model":
        raise ConfigError("the rules differ by the drafter's law; give a drafter that is a model.")
    texts, rows = read_prompts(prompts), []
    for temperature in numbers(temperatures, float, "--temperatures"):
        for name in RULES:
            llm, recorder = opened(inputs, make_rule(name))
            counts, bounds = measure(llm, recorder, texts, temperature, tokens, seed)
            rows.append([
                f"{temperature:g}", name, f"{counts.acceptance_rate or 0.0:.3f}",
                f"{counts.acceptance_length or 1.0:.2f}",
                " ".join(f"{share:.3f}" for share in counts.acceptance_by_position),
                *(f"{total / max(1, bounds.steps):.3f}" for total in bounds.totals),
            ])  # fmt: skip
    print("\n".join(table(COLUMNS, rows)))
    dtype = str(llm.engine.model.dtype).removeprefix("torch.")
    where = machine()
    print(
        f"\n{model}, K = {num_speculative_tokens}, {len(texts)} prompts of {tokens} output tokens, "
        f"first seed {seed}, {dtype}; {where['cpu']}, {where['cores']} cores, torch "
        f"{where['torch']}, {where['date'][:10]}."
    )
