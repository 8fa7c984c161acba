"""How much each rule accepts on a pair: ``python -m outrider.bench.rules MODEL PROMPTS``.

Every rule decodes the same prompts with the same drafter. Beside what it accepted stand the bounds
of theory for the first position of a draft, averaged over the steps of that very run: 1 - TV(p, q)
is what the ratio rule accepts there and no rule that looks at one token can exceed it; coupled
sampling accepts its closed form, at least (1 - TV) / (1 + TV) (Daliri, Musco, Suresh, 2024). Block
verification exceeds 1 - TV, since what comes later counts too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch

from ..engine.build import build_engine
from ..intake import Intake
from ..llm import LLM
from ..sampling.acceptance import AcceptanceRule
from ..sampling.draws import Noise, SharedNoise
from ..sampling.law import Laws
from ..sampling.ratio import RULES, make_rule
from ..types import Counts, Draft, SamplingParams, Verdict
from .offline import available_cores
from .report import cpu_name

COLUMNS = ("T", "rule", "rate", "length", "survival", "1 - TV", "coupled", "(1 - TV) / (1 + TV)")


@dataclass
class Bounds:
    """Sums over ``steps`` drafts of what theory says of their first position."""

    steps: int = 0
    ratio: float = 0.0
    coupled: float = 0.0
    coupled_least: float = 0.0

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
    keeps_laws = True

    def __init__(self, rule: AcceptanceRule) -> None:
        self.rule = rule
        self.name = rule.name
        self.bounds = Bounds()

    def drafting(self, noise: SharedNoise) -> Noise:
        return self.rule.drafting(noise)

    def __call__(self, laws: Laws, draft: Draft, noise: SharedNoise) -> Verdict:
        drafted = list(zip(laws.first, draft.laws or [], strict=False))
        pairs = [(f, z) for f, z in drafted if f is not None and z is not None]
        if pairs:
            p = laws.z[torch.tensor([f for f, _ in pairs])].double().softmax(-1)
            q = torch.stack([z[0] for _, z in pairs]).double().softmax(-1)
            self.bounds.add(p, q)
        return self.rule(laws, draft, noise)


def opened(intake: Intake, rule: AcceptanceRule) -> tuple[LLM, Recorder]:
    """Return an engine for ``intake``, whose drafter is a model, and what records its drafts."""
    recorder = Recorder(rule)
    engine = build_engine(intake.folder, intake.spec, intake.config, intake.backend, rule=recorder)
    return LLM.from_engine(intake, engine), recorder


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


def row(temperature: float, name: str, counts: Counts, bounds: Bounds) -> str:
    """One line of the table."""
    rate, length = counts.acceptance_rate or 0.0, counts.acceptance_length or 1.0
    survival = " ".join(f"{share:.3f}" for share in counts.acceptance_by_position)
    theory = (bounds.ratio, bounds.coupled, bounds.coupled_least)
    means = " | ".join(f"{total / max(1, bounds.steps):.3f}" for total in theory)
    return f"| {temperature:g} | {name} | {rate:.3f} | {length:.2f} | {survival} | {means} |"


def main() -> None:
    """Print the table, in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.rules")
    parser.add_argument("model", help="a checkpoint's folder; src/outrider/pocket/model")
    parser.add_argument("prompts", help="a JSON list of texts; src/outrider/pocket/prompts.json")
    parser.add_argument("--drafter", default="auto", help="a checkpoint's folder")
    parser.add_argument("--temperatures", default="0.3,0.7,1.0")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    intake = Intake(
        args.model, args.drafter, {"num_speculative_tokens": args.num_speculative_tokens}
    )
    if intake.spec.name != "model":
        parser.error("the rules differ by the drafter's law: give a drafter that is a model")
    prompts = json.loads(Path(args.prompts).read_text(encoding="utf-8"))
    print(f"| {' | '.join(COLUMNS)} |\n{'|---' * len(COLUMNS)}|")
    for temperature in (float(t) for t in args.temperatures.split(",")):
        for name in RULES:
            llm, recorder = opened(intake, make_rule(name))
            found = measure(llm, recorder, prompts, temperature, args.tokens, args.seed)
            print(row(temperature, name, *found), flush=True)
    dtype = str(llm.engine.model.dtype).removeprefix("torch.")
    print(
        f"\n{args.model}, K = {args.num_speculative_tokens}, {len(prompts)} prompts of "
        f"{args.tokens} output tokens, first seed {args.seed}, {dtype}; {cpu_name()}, "
        f"{available_cores()} cores, torch {torch.__version__}, {datetime.now(UTC):%Y-%m-%d}."
    )


if __name__ == "__main__":
    main()
