"""Acceptance of each rule on a pair.

Every rule decodes the same prompts with the same drafter. Beside what it accepted stand the bounds
of theory for the first position of a draft, averaged over the steps of that very run: 1 - TV(p, q)
is what the ratio rule accepts there and no rule that looks at one token can exceed it; coupled
sampling accepts its closed form, at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, 2024). Block
verification exceeds 1 - TV, since what comes later counts too.
"""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
import typer

from outrider.base.types import Draft, SamplingParams, Verdict
from outrider.bench.machine import machine
from outrider.cli.common import numbers
from outrider.engine.build import build_engine
from outrider.engine.setup import EngineSetup, set_up
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.sampling.acceptance import AcceptanceRule
from outrider.sampling.arrays import softmax
from outrider.sampling.pipeline import StepLogits
from outrider.sampling.ratio import RULES, Floats
from outrider.sampling.shared_noise import Noise, SharedNoise

from .common import POCKET, PROMPTS, Length, Model, Prompts, Seed, Tokens, read_prompts, table

COLUMNS = ("T", "rule", "rate", "length", "survival", "1 - TV", "coupled", "(1 - TV) / (1 + TV)")


def coupled_acceptance(p: Floats, q: Floats) -> Floats:
    """``oracle.coupled_acceptance`` of many laws: fp64 [rows] from p and q, fp64 [rows, ids].

    max(p_j / p_i, q_j / q_i) is the first where p_j / q_j exceeds p_i / q_i; with ids in that order
    the sums over j are running sums.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        order = np.nan_to_num(p / q, nan=0, posinf=np.inf).argsort(-1)
        p, q = (np.take_along_axis(law, order, -1) for law in (p, q))
        behind = np.flip(np.flip(p, -1).cumsum(-1), -1) - p
        total = behind / p + q.cumsum(-1) / q
        alike: Floats = np.where((p > 0) & (q > 0), 1 / total, 0.0).sum(-1)
    return alike


def first_bounds(p: Floats, q: Floats) -> Floats:
    """Return what theory says of drafts' first position, fp64 [rows, 3].

    They are 1 - TV, the closed form of coupled sampling, and (1 - TV) / (1 + TV), from laws p and
    q, fp64 [rows, vocabulary] both.
    """
    ratio = np.minimum(p, q).sum(-1)
    return np.stack((ratio, coupled_acceptance(p, q), ratio / (2 - ratio)), -1)


class Recorder:
    """A rule that also notes the bounds of every draft that it decides."""

    trees = False
    needs_logits = True

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule
        self.name = rule.name
        self.bounds = [np.empty((0, 3))]

    def drafting(self, noise: SharedNoise) -> Noise:
        return self.rule.drafting(noise)

    def __call__(self, target: StepLogits, draft: Draft, noise: SharedNoise) -> Verdict:
        drafted = [(first, nodes.logits) for first, nodes in zip(target.first, draft, strict=True)]
        pairs = [(f, z) for f, z in drafted if f is not None and z is not None]
        if pairs:
            p = softmax(target.logits[[f for f, _ in pairs]].astype(np.float64))
            q = softmax(np.stack([z[0] for _, z in pairs]).astype(np.float64))
            self.bounds.append(first_bounds(p, q))
        return self.rule(target, draft, noise)


def measure(
    setup: EngineSetup,
    rule: AcceptanceRule,
    prompts: Sequence[str | Sequence[int]],
    temperature: float,
    tokens: int,
    seed: int,
) -> tuple[LLM, Floats]:
    """Decode every prompt in a new engine; return it, and the ``first_bounds`` of every draft.

    The setup's drafter is a model; ``seed`` is of the first prompt, the next one's is one
    more.
    """
    recorder = Recorder(rule)
    llm = LLM.from_engine(setup, build_engine(setup, rule=recorder))
    params = [
        SamplingParams(temperature=temperature, seed=seed + i, max_tokens=tokens, ignore_eos=True)
        for i in range(len(prompts))
    ]
    llm.generate(list(prompts), params)
    return llm, np.concatenate(recorder.bounds)


def main(
    model: Model = POCKET,
    prompts: Prompts = PROMPTS,
    drafter: Annotated[str, typer.Option(help="model, or a checkpoint's folder.")] = "model",
    temperatures: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0.3,0.7,1.0",
    tokens: Tokens = 256,
    num_speculative_tokens: Length = 4,
    seed: Seed = 0,
) -> None:
    """Measure what each rule accepts, beside the bounds of theory, as a Markdown table."""
    setup = set_up(model, drafter, {"num_speculative_tokens": num_speculative_tokens})
    if setup.spec.name != "model":
        raise ConfigError("the rules differ by the drafter's law; give a drafter that is a model.")
    texts, rows = read_prompts(prompts), []
    for temperature in numbers(temperatures, float, "--temperatures"):
        for name in RULES:
            llm, bounds = measure(setup, RULES[name](), texts, temperature, tokens, seed)
            counts = llm.engine.counts
            rows.append([
                f"{temperature:g}", name, f"{counts.acceptance_rate or 0.0:.3f}",
                f"{counts.acceptance_length or 1.0:.2f}",
                " ".join(f"{share:.3f}" for share in counts.acceptance_by_position),
                *(f"{bound:.3f}" for bound in np.nan_to_num(bounds.mean(0))),
            ])  # fmt: skip
    print("\n".join(table(COLUMNS, rows)))
    dtype = str(llm.engine.model.dtype)
    where = machine()
    print(
        f"\n{model}, K = {num_speculative_tokens}, {len(texts)} prompts of {tokens} output tokens, "
        f"first seed {seed}, {dtype}; {where['cpu']}, {where['cores']} cores, torch "
        f"{where['torch']}, {where['date'][:10]}."
    )
