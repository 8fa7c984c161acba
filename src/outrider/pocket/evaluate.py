"""The model card's figures: the pocket pair on modules that it was not trained on."""

import random
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
    """Return beginnings of functions and classes of held-out modules: whole lines, 64 tokens up."""
    rng = random.Random(0)
    prompts: list[str] = []
    sources = [m.text.splitlines() for m in modules if m.held_out]
    while len(prompts) < PROMPTS:
        lines = rng.choice(sources)
        starts = [i for i, line in enumerate(lines) if line.startswith(OPENINGS)]
        if not starts:
            continue
        start = rng.choice(starts)
        for stop in range(start + 1, len(lines)):
            prompt = "\n".join(lines[start:stop]) + "\n"
            length = len(tokenizer(prompt)["input_ids"])
            if length >= PROMPT_TOKENS:
                if length < 3 * PROMPT_TOKENS and prompt not in prompts:
                    prompts.append(prompt)
                break
    return prompts


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
    llm = LLM(folder, num_speculative_tokens=4)
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


CARD = """\
---
license: psf-2.0
library_name: outrider
---
# The pocket pair

A Llama-style target of {target_parameters} parameters and, in `drafter/`, its drafter of
{drafter_parameters}: bf16, a byte-level BPE of 4,096 entries, a context of 4,096 tokens (trained up
to 2,048). It writes Python that looks like the standard library and is here to be decoded, not to
be believed.

Trained from scratch on {train_tokens:,} tokens: the source of Python {python}'s standard library
(PSF licence 2.0), tables and undecodable files left out, {held_out} of {modules} modules held out.
Target: {target_tokens:,} tokens of training in {target_hours:.2f} h. Drafter: starts from the
target's embeddings, first and last layer; {drafter_tokens:,} tokens of distillation in
{drafter_hours:.2f} h. On cpu ({cpu}), torch {torch}, {date}.

Everything below is over held-out modules, made by `python -m outrider.pocket.build`.

Held-out loss: target {target_nats[0]:.3f} nats a token ({target_nats[1]:.3f} a byte), drafter
{drafter_nats[0]:.3f} ({drafter_nats[1]:.3f}).

Acceptance length at K = 4 along the target's own continuation of {prompts} prompts, {output} tokens
each; the second column leaves out steps that repeat earlier output:

| temperature | acceptance length | without repeating steps |
|---|---|---|
{acceptance_rows}

Teacher-forced along real code: how often the argmaxes agree, and how often the target's draw is
among the drafter's m best under the same noise:

| | share |
|---|---|
{agreement_rows}
"""


def model_card(card: dict[str, Any]) -> str:
    """Return the model card in Markdown."""
    accepted = [
        f"| {name} | {row['acceptance_length']:.2f} | {row['without_repeating_steps']:.2f} |"
        for name, row in card["acceptance"].items()
    ]
    agreement = [f"| {name} | {share:.3f} |" for name, share in card["teacher_forced"].items()]
    return CARD.format(
        **card,
        held_out=len(card["held_out_modules"]),
        prompts=PROMPTS,
        output=OUTPUT_TOKENS,
        acceptance_rows="\n".join(accepted),
        agreement_rows="\n".join(agreement),
    )
