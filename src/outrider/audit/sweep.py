"""The same requests, plain and speculative, in many mixes: the same tokens or a difference."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..drafters.base import Drafter, DrafterContext, DrafterSpec, Needs
from ..errors import NumericalError
from ..llm import LLM
from ..sampling.draws import Noise
from ..types import Draft, DraftBudget, SamplingParams, Scheduled
from .record import PENALTIES

MOST_ALLOWED = 200


def unlike_before(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    """A custom processor that depends on the tokens before: the last two are made unlikely."""
    out = logits.clone()
    out[ids[-2:]] -= 3
    return out


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.7": {"temperature": 0.7},
    "T 1.3": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 20},
    "top_p": {"temperature": 1.0, "top_p": 0.9},
    "min_p": {"temperature": 1.0, "min_p": 0.05},
    "all of them": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "min_tokens": {"temperature": 1.0, "min_tokens": 16, "ignore_eos": False},
    "penalties": {"temperature": 0.8, **PENALTIES},
    # Below 0 they draw the text to what was just said, so that a stale count shows at once.
    "penalties below 0": {"temperature": 1.0, "presence_penalty": -2.0, "frequency_penalty": -2.0},
    "penalties below 0, T 1.3": {"temperature": 1.3, "frequency_penalty": -2.0, "min_p": 0.001},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.3},
    "logit_bias": {"temperature": 1.0, "logit_bias": {5: 3.0, 7: -100.0}, "top_p": 0.95},
    "allowed_token_ids": {"temperature": 1.0, "allowed_token_ids": list(range(4, MOST_ALLOWED))},
    "processor": {"temperature": 1.0, "logits_processors": [unlike_before]},
    "n": {"temperature": 0.8, "n": 2},
}
TEXT_OPTIONS: dict[str, dict[str, Any]] = {
    "JSON schema": {
        "temperature": 1.0,
        "ignore_eos": False,
        "structured_outputs": {
            "json": {
                "type": "object",
                "properties": {"name": {"type": "string", "maxLength": 12},
                               "sizes": {"type": "array", "items": {"type": "integer"}}},
                "required": ["name", "sizes"],
                "additionalProperties": False,
            }
        },
    },
    "bad_words and stop": {
        "temperature": 0.9, "bad_words": ["the", "self.", "("], "stop": ["\n\n"],
    },
}  # fmt: skip
"""For models with a tokenizer."""
PAGE_SIZE = 16


@dataclass(frozen=True)
class Ask:
    """One request; its seed is no other's."""

    option: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Mix:
    """One way to run them: ``batch`` at once, prompts in pieces of ``chunk``, drafts ``length``
    long; ``tight`` gives so little memory that sequences are preempted.
    """

    drafter: str
    length: int
    batch: int
    chunk: int = 512
    tight: bool = False

    def __str__(self) -> str:
        how = f"{self.drafter}, K = {self.length}" if self.drafter != "none" else "plain"
        return f"{how}, {self.batch} at once" + (", preempted" if self.tight else "")


MIXES = (
    Mix("none", 4, 8),
    Mix("model", 4, 5),
    Mix("model", 1, 16, chunk=24),
    Mix("model", 7, 5, tight=True),
    Mix("ngram", 4, 5),
    Mix("ngram", 7, 1),
    Mix("tree", 4, 5),
    Mix("tree", 6, 5, tight=True),
)
MORE_MIXES = (
    *MIXES,
    *(Mix("model", length, batch) for length in (2, 3, 5, 10) for batch in (1, 8)),
    *(Mix("ngram", length, 8, chunk=7) for length in (1, 2, 10)),
    *(Mix("tree", length, batch) for length in (1, 3, 8) for batch in (1, 8)),
    Mix("none", 4, 16, chunk=7, tight=True),
)


def asks(
    prompts: Sequence[Sequence[int]],
    tokens: int,
    seeds: int,
    vocabulary: int,
    text: bool,
    rng: random.Random,
) -> list[Ask]:
    """Every prompt under every option with so many seeds, in mixed order.

    Args:
        vocabulary: the model's; what the options say of ids beyond it is left out.
        text: whether the model has a tokenizer, for ``TEXT_OPTIONS``.
    """
    options = OPTIONS | (TEXT_OPTIONS if text else {})
    numbers = rng.sample(range(2**53), len(prompts) * len(options) * seeds)
    found = []
    for number, seed in enumerate(numbers):
        option = list(options)[number % len(options)]
        prompt = tuple(prompts[number // len(options) % len(prompts)])
        given = {"ignore_eos": True, "max_tokens": tokens, **options[option]}
        if "allowed_token_ids" in given:
            given["allowed_token_ids"] = [i for i in given["allowed_token_ids"] if i < vocabulary]
        if "logit_bias" in given:
            bias = given["logit_bias"].items()
            given["logit_bias"] = {i: b for i, b in bias if i < vocabulary}
        given["min_tokens"] = min(tokens, given.get("min_tokens", 0))
        found.append(Ask(option, prompt, SamplingParams(seed=seed, **given)))
    rng.shuffle(found)
    return found


Answers = dict[int, list[list[int]]]  # the samples' ids by seed


class Branches(Drafter):
    """A drafter of trees that knows what plain decoding said, and hides it among wrong branches.

    Args:
        answers: the tokens that are to come.
        length: how deep a tree may be; it has up to three times as many nodes.
        vocabulary: ids that wrong branches are made of.
    """

    name = "tree"

    def __init__(self, answers: Answers, length: int, vocabulary: int, rng: random.Random) -> None:
        self.max_length, self.max_nodes = length, 3 * length
        self._answers = answers
        self._vocabulary = vocabulary
        self._rng = rng

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        trees = []
        for item, (length, _) in zip(batch, budgets, strict=True):
            sequence = item.sequence
            answer = self._answers[sequence.request.seed][sequence.sample_index]
            coming = answer[sequence.num_output : sequence.num_output + length]
            trees.append(self._tree(coming, length) if length else ([], []))
        return Draft([tokens for tokens, _ in trees], [parents for _, parents in trees])

    def _tree(self, coming: list[int], length: int) -> tuple[list[int], list[int]]:
        """A random tree that holds the coming tokens down to a random depth."""
        tokens: list[int] = []
        parents: list[int] = []
        depths: dict[int, int] = {-1: 0}
        path = [-1]  # the nodes of the right branch so far
        for _ in range(self._rng.randint(1, self.max_nodes)):
            right = len(path) <= len(coming) and self._rng.random() < 0.6
            parent = path[-1] if right else self._rng.choice(list(depths))
            token = coming[len(path) - 1] if right else self._rng.randrange(self._vocabulary)
            if depths[parent] == length or (parent, token) in zip(parents, tokens, strict=True):
                continue
            if right:
                path.append(len(tokens))
            depths[len(tokens)] = depths[parent] + 1
            tokens.append(token)
            parents.append(parent)
        return tokens, parents


@dataclass(frozen=True)
class BranchesSpec(DrafterSpec):
    """Makes ``Branches`` of these answers."""

    name = Branches.name
    answers: Answers
    rng: random.Random

    def needs(self, context: DrafterContext) -> Needs:
        return Needs(max_nodes=3 * context.config.num_speculative_tokens)

    def make(self, context: DrafterContext) -> Branches:
        length = context.config.num_speculative_tokens
        return Branches(self.answers, length, context.model.shape.vocab_size, self.rng)


def open_mix(
    mix: Mix,
    options: dict[str, Any],
    page_bytes: int,
    answers: Answers,
    longest: int,
    rng: random.Random,
) -> LLM:
    """An engine for one mix.

    Args:
        options: those of every engine: model, dtype, and the drafter's folder where there is one.
        page_bytes: what a page of its cache takes.
        longest: the longest request, prompt and output, in tokens.
    """
    given = dict(options)
    if mix.drafter == "tree":
        given["drafter"] = BranchesSpec(answers, rng)
    elif mix.drafter != "model":
        given["drafter"] = "ngram" if mix.drafter == "ngram" else None
    given |= {"num_speculative_tokens": mix.length, "max_num_seqs": mix.batch,
              "max_num_batched_tokens": mix.chunk}  # fmt: skip
    if mix.tight:
        # Room for half of them: the younger ones are thrown out as the older ones grow.
        pages = max(longest // PAGE_SIZE + 2, mix.batch * longest // PAGE_SIZE // 2)
        given["memory"] = page_bytes * max(3, pages + 1)
    return LLM(**given)


def decode(llm: LLM, queued: Sequence[Ask], batch: int) -> Iterator[tuple[Ask, list[list[int]]]]:
    """Each request's samples; up to ``batch`` times four are given to the engine at a time.

    Raises:
        NumericalError: a request failed.
    """
    for start in range(0, len(queued), 4 * batch):
        part = queued[start : start + 4 * batch]
        ids: list[list[list[int]]] = [[[] for _ in range(ask.params.n)] for ask in part]
        for i, event in llm.stream([list(a.prompt) for a in part], [a.params for a in part]):
            if event.error is not None:
                raise NumericalError(f"a request of the audit failed: {event.error}")
            if event.token_id is not None:
                ids[i][event.sample_index].append(event.token_id)
        yield from zip(part, ids, strict=True)
