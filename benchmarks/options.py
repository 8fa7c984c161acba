"""The cost of sampling options under speculation.

The same requests plainly, with penalties, min_p and log probabilities, and with a form, by turns in
one engine. Options and form are too weak to move a token, so that all decode the same text with the
same drafts, and all that differs is the work: the ratio is what they leave of the speed. Once on
the given pair, and once on random weights of the pocket pair's shape with a vocabulary of 128k,
where a law is thirty times as long.
"""

from collections.abc import Sequence
from functools import partial
from itertools import chain, cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from outrider.base.types import SamplingParams
from outrider.bench.record import Pass, run_all, total
from outrider.bench.replay import SIZES, write_random
from outrider.cli.common import JsonFile, write_json
from outrider.frontend.inputs import Prompt
from outrider.llm import LLM

from .common import (
    POCKET,
    PROMPTS,
    Length,
    Model,
    Prompts,
    Rounds,
    Tokens,
    measured,
    ratio,
    read_prompts,
)
from .peers.pairs import write_tokenizer

VOCABULARY = 2**17
LARGE = 10**6
WEAK: dict[str, Any] = {
    "repetition_penalty": 1 + 1 / LARGE,
    "presence_penalty": 1 / LARGE,
    "frequency_penalty": 1 / LARGE,
    "min_p": 1 / LARGE**2,
    "logprobs": 5,
}
SIDES: dict[str, dict[str, Any]] = {
    "plain": {}, "options": WEAK, "form": {"structured_outputs": {"regex": r"(.|\n)*"}},
}  # fmt: skip


def compare(
    llm: LLM, prompts: Sequence[Prompt], tokens: int, rounds: int, batch: int
) -> dict[str, Any]:
    """Return how much of the speed is left with options and with a form, medians over rounds."""

    def decode(more: dict[str, Any], _: int) -> Pass:
        params = SamplingParams(
            temperature=0.8, max_tokens=tokens, min_tokens=tokens, seed=1, **more
        )
        return run_all(llm, prompts, [params] * len(prompts), batch)

    runs = measured({name: partial(decode, more) for name, more in SIDES.items()}, rounds)
    plain, counts = runs["plain"], total(run.counts for run in chain(*runs.values()))
    report: dict[str, Any] = {
        "vocabulary": llm.engine.model.shape.vocab_size,
        "batch": batch,
        "same_tokens": all(run.outputs == plain[0].outputs for run in chain(*runs.values())),
        "acceptance_length": round(counts.acceptance_length or 0, 2),
    }
    for name, mine in runs.items():
        left = ratio([run.end_to_end for run in mine], [run.end_to_end for run in plain])
        report[name] = {
            "tokens_per_second": round(median(run.end_to_end for run in mine), 1),
            "left": round(left["ratio"], 3),
            "left_interval": [round(v, 3) for v in left["interval"] or ()] or None,
        }
    return report


def main(
    model: Model = POCKET,
    prompts: Prompts = PROMPTS,
    num_speculative_tokens: Length = 4,
    tokens: Tokens = 128,
    batch_size: Annotated[int, typer.Option(min=1, help="How many prompts run together.")] = 1,
    rounds: Rounds = 7,
    json_: JsonFile = "-",
) -> None:
    """Measure what sampling options and grammars leave of the speed."""
    options: dict[str, Any] = {
        "num_speculative_tokens": num_speculative_tokens, "max_num_seqs": batch_size,
        "enable_prefix_caching": False,
    }  # fmt: skip
    count = max(4, batch_size)
    texts = list(islice(cycle(read_prompts(prompts)), count))
    reports = [compare(LLM(model, **options), texts, tokens, rounds, batch_size)]
    with TemporaryDirectory() as place:
        target = Path(place)
        for folder, size, seed in ((target, "20m", 0), (target / "drafter", "3m", 1)):
            write_random(SIZES[size], folder, VOCABULARY, 1024, (0,), seed)
            write_tokenizer(folder, VOCABULARY)
        llm = LLM(target, **options)
    ids = [[(7 * i + j) % VOCABULARY for j in range(64)] for i in range(count)]
    reports.append(compare(llm, ids, tokens // 2, rounds, batch_size))
    write_json(reports, json_)
