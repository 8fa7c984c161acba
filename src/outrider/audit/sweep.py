"""Requests and engines for the equality check: every option, in many mixes."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.types import SamplingParams
from ..drafters.registry import find_drafter
from ..errors import NumericalError
from ..llm import LLM
from .adversary import AdversarySpec, Answers
from .contexts import PENALTIES
from .faults import Fault, FaultySpec
from .oracle import TRUNCATIONS

MOST_ALLOWED = 200


def unlike_before(ids: list[int], logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return logits with the last two tokens made unlikely: a processor that needs the text."""
    out = logits.copy()
    out[ids[-2:]] -= 3
    return out


OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "T 0.7": {"temperature": 0.7},
    "T 1.3": {"temperature": 1.3},
    **{name: {"temperature": 1.0, name: value} for name, value in TRUNCATIONS.items()},
    "all of them": {"temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
    "min_tokens": {"temperature": 1.0, "min_tokens": 16, "ignore_eos": False},
    "penalties": {"temperature": 0.8, **PENALTIES},
    # Negative ones favour recent tokens, so a stale count shows at once.
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
    """One request, with a seed of its own."""

    option: str
    prompt: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Mix:
    """One way to run the requests; ``tight`` leaves so little memory that some are preempted."""

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
    Mix("auto", 6, 5),
)
MORE_MIXES = (
    *MIXES,
    *(Mix("model", length, batch) for length in (2, 3, 5, 10) for batch in (1, 8)),
    *(Mix("ngram", length, 8, chunk=7) for length in (1, 2, 10)),
    *(Mix("tree", length, batch) for length in (1, 3, 8) for batch in (1, 8)),
    Mix("none", 4, 16, chunk=7, tight=True),
)


def asks(
    prompts: Sequence[Sequence[int]], tokens: int, seeds: int, vocabulary: int, text: bool,
    rng: random.Random,
) -> list[Ask]:  # fmt: skip
    """Return every prompt under every option with ``seeds`` seeds, in random order."""
    options = OPTIONS | (TEXT_OPTIONS if text else {})
    numbers = rng.sample(range(2**53), len(prompts) * len(options) * seeds)
    requests = []
    for number, seed in enumerate(numbers):
        option = list(options)[number % len(options)]
        prompt = tuple(prompts[number // len(options) % len(prompts)])
        values = {"ignore_eos": True, "max_tokens": tokens, **options[option]}
        if "allowed_token_ids" in values:
            values["allowed_token_ids"] = [i for i in values["allowed_token_ids"] if i < vocabulary]
        if "logit_bias" in values:
            bias = values["logit_bias"].items()
            values["logit_bias"] = {i: b for i, b in bias if i < vocabulary}
        values["min_tokens"] = min(tokens, values.get("min_tokens", 0))
        requests.append(Ask(option, prompt, SamplingParams(seed=seed, **values)))
    rng.shuffle(requests)
    return requests


def open_mix(
    mix: Mix, options: dict[str, Any], page_bytes: int, answers: Answers, longest: int,
    rng: random.Random, fault: Fault,
) -> LLM:  # fmt: skip
    """Return an engine for one mix; ``longest`` is the longest request in tokens."""
    values = dict(options)
    if mix.drafter == "tree":
        values["drafter"] = AdversarySpec("ragged", answers, rng)
    elif mix.drafter != "model":
        values["drafter"] = mix.drafter
    if fault.pipeline is not None:
        values["drafter"] = FaultySpec(
            find_drafter(values["drafter"], values["model"]), fault.pipeline
        )
    values |= {"num_speculative_tokens": mix.length, "max_num_seqs": mix.batch,
              "max_num_batched_tokens": mix.chunk}  # fmt: skip
    if mix.tight:
        # Room for half of them: as older sequences grow, younger ones are preempted.
        pages = max(longest // PAGE_SIZE + 2, mix.batch * longest // PAGE_SIZE // 2)
        values["memory"] = page_bytes * max(3, pages + 1)
    return LLM(**values)


def decode(llm: LLM, queued: Sequence[Ask], batch: int) -> Iterator[tuple[Ask, list[list[int]]]]:
    """Yield each request with the ids of its samples, or raise NumericalError: one failed."""
    for start in range(0, len(queued), 4 * batch):
        part = queued[start : start + 4 * batch]
        ids: list[list[list[int]]] = [[[] for _ in range(ask.params.n)] for ask in part]
        for event in llm.stream([list(a.prompt) for a in part], [a.params for a in part]):
            if event.error is not None:
                raise NumericalError(f"a request of the audit failed: {event.error}")
            if event.token_id is not None:
                ids[event.prompt_index][event.sample_index].append(event.token_id)
        yield from zip(part, ids, strict=True)
