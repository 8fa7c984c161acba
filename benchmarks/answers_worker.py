"""Answers random requests by the package below a folder: FOLDER REQUESTS SEED FILE."""

import json
import random
import sys
from pathlib import Path
from typing import Any

from .builds_worker import use_package

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "size": {"type": "integer"}},
    "required": ["name", "size"],
    "additionalProperties": False,
}
FORMS = ({"json": SCHEMA}, {"regex": "[a-z_]{3,20}\\([a-z]\\)"}, {"choice": ["yes", "no", "maybe"]})
TOGETHER = 10
"""Requests of one call."""


def engines(drafter: str) -> dict[str, dict[str, Any]]:
    """Return the options of every engine by its name."""
    return {
        "plain": {"drafter": "none"},
        "ngram": {"drafter": "ngram", "num_speculative_tokens": 5},
        "model": {"drafter": drafter, "num_speculative_tokens": 4},
        "int8": {"drafter": drafter, "num_speculative_tokens": 3, "quantization": "int8"},
        "preempted": {"drafter": drafter, "dtype": "float32", "max_num_seqs": 8, "memory": 2**24},
    }


def options_of(rng: random.Random, vocabulary: int) -> dict[str, Any]:
    """Return random options of a request."""

    def ids(count: int) -> list[int]:
        return rng.sample(range(4, vocabulary), count)

    options: dict[str, Any] = {
        "temperature": rng.choice([0.0, 0.3, 0.7, 1.0, 1.5]),
        "seed": rng.randrange(2**63),
        "max_tokens": rng.randint(1, 40),
        "ignore_eos": rng.random() < 0.3,
    }
    for chance, more in (
        (0.3, {"top_p": rng.uniform(0.3, 1.0)}),
        (0.3, {"top_k": rng.randint(1, 200)}),
        (0.15, {"min_p": rng.uniform(0.0, 0.2)}),
        (0.2, {"presence_penalty": rng.uniform(-1.0, 1.5)}),
        (0.2, {"frequency_penalty": rng.uniform(-1.0, 1.5)}),
        (0.15, {"repetition_penalty": rng.uniform(0.8, 1.5)}),
        (0.2, {"logit_bias": {id: rng.uniform(-8.0, 8.0) for id in ids(5)}}),
        (0.15, {"bad_words": ["return", "for i in", "self"]}),
        (0.1, {"allowed_token_ids": ids(400)}),
        (0.15, {"min_tokens": options["max_tokens"] // 2}),
        (0.2, {"stop": ["\n\n", "):"], "include_stop_str_in_output": rng.random() < 0.5}),
        (0.1, {"stop_token_ids": ids(30)}),
        (0.2, {"logprobs": rng.randint(0, 5)}),
        (0.1, {"prompt_logprobs": rng.randint(0, 3)}),
        (0.2, {"n": rng.randint(2, 3)}),
    ):
        if rng.random() < chance:
            options |= more
    if rng.random() < 0.15:
        for name in ("allowed_token_ids", "bad_words", "min_tokens", "ignore_eos", "logit_bias"):
            options.pop(name, None)
        options["structured_outputs"] = rng.choice(FORMS)
    return options


def run(count: int, seed: int) -> list[dict[str, Any]]:
    """Return the answers to ``count`` requests, shared out among the engines."""
    from outrider import LLM, SamplingParams, pocket

    answers: list[dict[str, Any]] = []
    kinds = engines(str(pocket.PATH / "drafter"))
    for place, (name, options) in enumerate(kinds.items()):
        llm = LLM(pocket.PATH, **options)
        rng = random.Random(f"{seed} {name}")
        mine = range(place, count, len(kinds))
        for first in range(0, len(mine), TOGETHER):
            numbers = mine[first : first + TOGETHER]
            texts = [rng.choice(pocket.prompts())[: rng.randint(20, 400)] for _ in numbers]
            asked = [options_of(rng, 4096) for _ in numbers]
            made = llm.generate(texts, [SamplingParams(**each) for each in asked])
            for number, each, output in zip(numbers, asked, made, strict=True):
                outputs = [
                    [o.text, [*o.token_ids], o.finish_reason, o.stop_reason, repr(o.logprobs)]
                    for o in output.outputs
                ]
                about = {"engine": name, "request": number, "options": repr(each)}
                answers.append(about | {"prompt": repr(output.prompt_logprobs), "outputs": outputs})
    return answers


def main() -> None:
    """Write the answers to the file that is named last."""
    folder, count, seed, file = sys.argv[1:]
    use_package(folder)
    Path(file).write_text(json.dumps(run(int(count), int(seed))), encoding="utf-8")


if __name__ == "__main__":
    main()
