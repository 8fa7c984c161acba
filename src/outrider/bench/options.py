"""What options cost under speculation: ``python -m outrider.bench.options MODEL PROMPTS``.

The same requests plainly, with penalties, min_p and log probabilities, and with a form, by turns in
one engine. Options and form are too weak to move a token, so that all decode the same text with the
same drafts, and all that differs is the work: the ratio is what they leave of the speed. Once on
the given pair, and once on random weights of the pocket pair's shape with a vocabulary of 128k,
where a law is thirty times as long.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from copy import copy
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from ..llm import LLM
from ..types import Counts, SamplingParams
from .intervals import median_interval
from .replay import SIZES, write_random

VOCABULARY = 2**17
LARGE = 10**6
WEAK: dict[str, Any] = {
    "repetition_penalty": 1 + 1 / LARGE,
    "presence_penalty": 1 / LARGE,
    "frequency_penalty": 1 / LARGE,
    "min_p": 1 / LARGE**2,
    "logprobs": 5,
}
FORM: dict[str, Any] = {"structured_outputs": {"regex": r"(.|\n)*"}}
SIDES: dict[str, dict[str, Any]] = {"plain": {}, "options": WEAK, "form": FORM}


def write_tokenizer(folder: Path) -> None:
    """Save a tokenizer of ``VOCABULARY`` tokens: an end, bytes, and numbers that no text needs."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<|end|>", *letters, *(f"<{i}>" for i in range(VOCABULARY))][:VOCABULARY]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def run(
    llm: LLM, prompts: Sequence[str | Sequence[int]], params: SamplingParams, batch: int
) -> tuple[float, list[list[int]]]:
    """Seconds that all prompts take, so many at a time, and what was said."""
    start, found = perf_counter(), []
    for first in range(0, len(prompts), batch):
        answers = llm.generate(prompts[first : first + batch], params)
        found += [answer.outputs[0].token_ids for answer in answers]
    return perf_counter() - start, found


def compare(
    llm: LLM, prompts: Sequence[str | Sequence[int]], tokens: int, rounds: int, batch: int
) -> dict[str, Any]:
    """How much of the speed is left with options and with a form, medians over rounds."""
    sides = {
        name: SamplingParams(temperature=0.8, max_tokens=tokens, min_tokens=tokens, seed=1, **more)
        for name, more in SIDES.items()
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    same, before = True, Counts()
    for number in tqdm(range(rounds + 1), leave=False, disable=None):
        texts = []
        if number == 1:
            before = copy(llm.engine.counts)
        for name in list(sides)[:: 1 if number % 2 else -1]:
            taken, said = run(llm, prompts, sides[name], batch)
            texts.append(said)
            if number:  # the first round warms up
                seconds[name].append(taken)
        same = same and all(said == texts[0] for said in texts)
    total = tokens * len(prompts)
    counts = llm.engine.counts
    drafts, accepted = counts.drafts - before.drafts, counts.accepted - before.accepted
    found: dict[str, Any] = {
        "vocabulary": llm.engine.model.shape.vocab_size,
        "batch": batch,
        "same_tokens": same,
        "acceptance_length": round(1 + accepted / drafts, 2) if drafts else 0,
    }
    for name, mine in seconds.items():
        left = [a / b for a, b in zip(seconds["plain"], mine, strict=True)]
        found[name] = {
            "tokens_per_second": round(total / median(mine), 1),
            "left": round(median(left), 3),
            "left_interval": [round(v, 3) for v in median_interval(left) or ()] or None,
        }
    return found


def main() -> None:
    """Print both comparisons as JSON."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.options")
    parser.add_argument("model", help="a checkpoint's folder; src/outrider/pocket/model")
    parser.add_argument("prompts", help="a JSON list of texts; src/outrider/pocket/prompts.json")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    options = {
        "num_speculative_tokens": args.num_speculative_tokens, "max_num_seqs": args.batch_size,
        "enable_prefix_caching": False,
    }  # fmt: skip
    count = max(4, args.batch_size)
    prompts = (json.loads(Path(args.prompts).read_text(encoding="utf-8")) * count)[:count]
    sizes = args.rounds, args.batch_size
    found = [compare(LLM(args.model, **options), prompts, args.tokens, *sizes)]
    with TemporaryDirectory() as place:
        folder = Path(place)
        write_random(SIZES["20m"], folder, VOCABULARY, 1024, (0,), 0)
        write_random(SIZES["3m"], folder / "drafter", VOCABULARY, 1024, (0,), 1)
        write_tokenizer(folder)
        write_tokenizer(folder / "drafter")
        llm = LLM(folder, **options)
    ids = [[(7 * i + j) % VOCABULARY for j in range(64)] for i in range(count)]
    found.append(compare(llm, ids, args.tokens // 2, *sizes))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
