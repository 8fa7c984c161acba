"""What options cost under speculation: ``python -m outrider.bench.options MODEL PROMPTS``.

The same requests with penalties, min_p and log probabilities, and without, by turns in one engine.
The options are too weak to move a token, so that both decode the same text with the same drafts,
and all that differs is the work: their ratio is what the options leave of the speed. Once on the
given pair, and once on random weights of the pocket pair's shape with a vocabulary of 128k, where
a law is thirty times as long.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

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


def run(
    llm: LLM, prompts: Sequence[str | Sequence[int]], params: SamplingParams
) -> tuple[float, list[list[int]]]:
    """Seconds that all prompts take, one after the other, and what was said."""
    start = perf_counter()
    found = [llm.generate([p], params)[0].outputs[0].token_ids for p in prompts]
    return perf_counter() - start, found


def compare(
    llm: LLM, prompts: Sequence[str | Sequence[int]], tokens: int, rounds: int
) -> dict[str, Any]:
    """How much of the speed is left with the options, medians over rounds."""
    without = SamplingParams(temperature=0.8, max_tokens=tokens, seed=1, ignore_eos=True)
    sides = (without, SamplingParams(**(vars(without) | WEAK)))
    seconds: list[list[float]] = [[], []]
    same = True
    for number in tqdm(range(rounds + 1), leave=False, disable=None):
        texts = []
        for side in (0, 1) if number % 2 else (1, 0):
            if number == 1:
                llm.engine.counts = Counts()
            taken, said = run(llm, prompts, sides[side])
            texts.append(said)
            if number:  # the first round warms up
                seconds[side].append(taken)
        same = same and texts[0] == texts[1]
    left = [a / b for a, b in zip(*seconds, strict=True)]
    total = tokens * len(prompts)
    return {
        "vocabulary": llm.engine.model.shape.vocab_size,
        "tokens_per_second": round(total / median(seconds[0]), 1),
        "with_options": round(total / median(seconds[1]), 1),
        "left": round(median(left), 3),
        "left_interval": [round(v, 3) for v in median_interval(left) or ()] or None,
        "same_tokens": same,
        "acceptance_length": round(llm.engine.counts.acceptance_length or 0, 2),
    }


def main() -> None:
    """Print both comparisons as JSON."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.options")
    parser.add_argument("model", help="a checkpoint's folder; src/outrider/pocket/model")
    parser.add_argument("prompts", help="a JSON list of texts; src/outrider/pocket/prompts.json")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    options = {
        "num_speculative_tokens": args.num_speculative_tokens, "max_num_seqs": 1,
        "enable_prefix_caching": False,
    }  # fmt: skip
    prompts = json.loads(Path(args.prompts).read_text(encoding="utf-8"))[:4]
    found = [compare(LLM(args.model, **options), prompts, args.tokens, args.rounds)]
    with TemporaryDirectory() as place:
        folder = Path(place)
        write_random(SIZES["20m"], folder, VOCABULARY, 1024, (), 0)
        write_random(SIZES["3m"], folder / "drafter", VOCABULARY, 1024, (), 1)
        llm = LLM(folder, **options)
    ids = [[(7 * i + j) % VOCABULARY for j in range(64)] for i in range(4)]
    found.append(compare(llm, ids, args.tokens // 2, args.rounds))
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
