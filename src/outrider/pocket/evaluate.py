"""The model card's figures: the pocket pair on modules that it was not trained on."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from ..base.types import SamplingParams
from ..bench.repeats import fresh_acceptance_length
from ..llm import LLM
from .corpus import Corpus, Module
from .train import logits

PROMPTS = 32
PROMPT_TOKENS = 64
OUTPUT_TOKENS = 128
WINDOW = 1024
OPENINGS = ("def ", "class ", "    def ", "    @")


def held_out_prompts(modules: list[Module], tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return beginnings of functions and classes of held-out modules."""
    return prompts_of([m for m in modules if m.held_out], tokenizer, PROMPTS)


def prompts_of(
    modules: Sequence[Module], tokenizer: PreTrainedTokenizerFast, count: int
) -> list[str]:
    """Return ``count`` beginnings of functions and classes of modules, always the same.

    They are whole lines, of 64 tokens or more; no two are equal.
    """
    rng = random.Random(0)
    prompts = dict[str, None]()
    sources = [m.text.splitlines() for m in modules]
    while len(prompts) < count:
        lines = rng.choice(sources)
        starts = [i for i, line in enumerate(lines) if line.startswith(OPENINGS)]
        if not starts:
            continue
        start = rng.choice(starts)
        for stop in range(start + 1, len(lines)):
            prompt = "\n".join(lines[start:stop]) + "\n"
            length = len(tokenizer(prompt)["input_ids"])
            if length >= PROMPT_TOKENS:
                if length < 3 * PROMPT_TOKENS:
                    prompts[prompt] = None
                break
    return [*prompts]


@torch.no_grad()
def held_out_loss(model: LlamaForCausalLM, corpus: Corpus) -> tuple[float, float]:
    """Return held-out cross-entropy (nats a token, nats a byte), in windows of 1,024 tokens."""
    total, count = 0.0, 0
    for document in corpus.held_out:
        for i in range(0, len(document) - 1, WINDOW):
            ids = torch.from_numpy(document[None, i : i + WINDOW + 1])
            z = logits(model, ids[:, :-1])
            total += F.cross_entropy(z[0], ids[0, 1:], reduction="sum").item()
            count += ids.shape[1] - 1
    return total / count, total / corpus.held_out_bytes


@torch.no_grad()
def teacher_forced(
    target: LlamaForCausalLM, drafter: LlamaForCausalLM, corpus: Corpus, tokens: int = 40_000
) -> dict[str, float]:
    """Return the agreement along held-out code: of the argmaxes, and of draws with shared noise.

    "top-m" is the chance that the target's token is among the drafter's m best of log q + g.
    """
    generator = torch.Generator().manual_seed(0)
    hits: dict[str, int] = {}
    seen = 0
    for document in corpus.held_out:
        ids = torch.from_numpy(document[None, :WINDOW])
        zp, zq = logits(target, ids)[0], logits(drafter, ids)[0]
        g = -(-torch.rand(zp.shape, generator=generator).log()).log()
        for name, t in (("T=0.7", 0.7), ("T=1.0", 1.0)):
            y = (zp / t + g).argmax(-1, keepdim=True)
            best = (zq / t + g).topk(4, -1).indices
            for m in (1, 2, 4):
                key = f"{name} top-{m}"
                hits[key] = hits.get(key, 0) + int((best[:, :m] == y).sum())
        hits["argmax"] = hits.get("argmax", 0) + int((zp.argmax(-1) == zq.argmax(-1)).sum())
        seen += ids.shape[1]
        if seen >= tokens:
            break
    return {key: count / seen for key, count in hits.items()}


def acceptance(folder: Path, prompts: list[str]) -> dict[str, Any]:
    """Return the acceptance of the finished pair at K = 4 over ``prompts``, 128 tokens each."""
    llm = LLM(folder, folder / "drafter", num_speculative_tokens=4)
    lengths: dict[str, Any] = {}
    for temperature in (0.0, 0.7, 1.0):
        params = [
            SamplingParams(
                temperature=temperature, seed=i, max_tokens=OUTPUT_TOKENS, ignore_eos=True
            )
            for i in range(len(prompts))
        ]
        counts = llm.engine.counts
        drafts, accepted = -counts.drafts, -counts.accepted
        outputs = llm.generate(prompts, params)
        drafts, accepted = drafts + counts.drafts, accepted + counts.accepted
        samples = [
            (o.prompt_token_ids, o.outputs[0].token_ids, o.outputs[0].origins) for o in outputs
        ]
        lengths[f"T={temperature}"] = {
            "acceptance_length": 1 + accepted / drafts,
            "without_repeating_steps": fresh_acceptance_length(samples),
        }
    return lengths


def model_card(card: dict[str, Any]) -> str:
    """Return the model card in Markdown."""
    accepted = [
        f"| {name} | {row['acceptance_length']:.2f} | {row['without_repeating_steps']:.2f} |"
        for name, row in card["acceptance"].items()
    ]
    agreement = [f"| {name} | {share:.3f} |" for name, share in card["teacher_forced"].items()]
    template = Path(__file__).with_name("card.md").read_text(encoding="utf-8")
    return template.format(
        **card,
        held_out=len(card["held_out_modules"]),
        prompts=PROMPTS,
        output=OUTPUT_TOKENS,
        acceptance_rows="\n".join(accepted),
        agreement_rows="\n".join(agreement),
    )
