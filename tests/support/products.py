"""Products of what equality tests vary: options, batches, lengths, chunks, caches and numbers."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from outrider.base.types import SamplingParams
from outrider.engine.engine import Engine
from tests.support.exactness import VOCABULARY, make_engine, requests, run
from tests.support.pages import check_engine

Between = Callable[[Engine], None] | None

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "0.8": {"temperature": 0.8},
    "n": {"temperature": 0.8, "n": 3},
    "penalties": {"temperature": 0.9, "repetition_penalty": 1.3, "frequency_penalty": 0.3},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2, "min_p": 0.02},
    "regex": {"structured_outputs": {"regex": "[a-d]+(-[a-d]+){2,}"}, "min_tokens": 5},
}
UNBOUND = ("greedy", "0.8", "n")
"""Options under which drafts of these tests are accepted now and then."""
BATCHES, LENGTHS, CHUNKS, POOLS = (1, 4), (1, 4, 7), (3, 16, 512), ("ample", "tight")
NUMBERS: dict[str, dict[str, Any]] = {
    "float32": {}, "bfloat16": {"dtype": "bfloat16"},
    "int8": {"quantization": "int8", "drafter_quantization": "int8"},
}  # fmt: skip


def prompts(first: int = 4, repeated: Iterable[int] = (11, 12, 13, 14, 15)) -> list[list[int]]:
    """Short and long prompts of ids from ``first`` on; two share a page, one repeats itself."""
    rng = random.Random(0)
    found = [[rng.randrange(first, VOCABULARY) for _ in range(n)] for n in (1, 2, 19, 40)]
    return [*found, [*found[-1][:32], 9, 8], [*repeated] * 6]


def dealt(drafters: Iterable[str]) -> list[tuple[Any, ...]]:
    """Every drafter under every option, with the other dimensions dealt out over them.

    Over six drafters an option meets both batches in all kinds of numbers, and over four both
    batches with both caches.
    """
    found, numbers = [], [*NUMBERS]
    for (d, drafter), (o, option) in itertools.product(enumerate(drafters), enumerate(OPTIONS)):
        batch, pool = BATCHES[(o + o // 3 + d) % 2], POOLS[(o // 2 + d // 2) % 2]
        length, chunk = LENGTHS[(o // 2 + d) % 3], CHUNKS[(o + 2 * d) % 3]
        found.append((drafter, option, batch, length, chunk, pool, numbers[(o + d) % 3]))
    return found


def some_for_engines(cases: Sequence[Any]) -> list[Any]:
    """The same cases, two of seven marked to run again on other kernels.

    Seven divides none of the dimensions, so that these meet every value of each.
    """
    again = pytest.mark.engine
    return [
        pytest.param(*(case if isinstance(case, list) else [case]), marks=again)
        if i % 7 in (0, 3)
        else case
        for i, case in enumerate(cases)
    ]


def rest() -> Iterator[tuple[Any, ...]]:
    """Every batch, length, chunk, cache and kind of numbers."""
    return itertools.product(BATCHES, LENGTHS, CHUNKS, POOLS, NUMBERS)


class Product:
    """Outputs of engines that draft beside those of one that does not.

    Args:
        make: an engine of a target, a drafter and a draft length, with options.
        prompts: see ``prompts``.
        tokens: of an output.
        pages: of a cache in which sequences are preempted.
    """

    def __init__(
        self, make: Callable[..., Engine], prompts: list[list[int]], tokens: int, pages: int
    ) -> None:
        self.make, self.prompts, self.tokens, self.pages = make, prompts, tokens, pages
        self.expected: dict[tuple[str, str], dict[str, list[Any]]] = {}

    def plain(self, target: Path, option: str, numbers: str) -> dict[str, list[Any]]:
        """What an engine without a drafter says, one request at a time."""
        key = option, numbers
        if key not in self.expected:
            engine = make_engine(target, "none", **NUMBERS[numbers])
            self.expected[key] = self.outputs(engine, option, 1)
        return self.expected[key]

    def outputs(
        self, engine: Engine, option: str, batch: int, between: Between = None
    ) -> dict[str, list[Any]]:
        """Outputs of all prompts, so many at a time; ``between`` looks at the engine after each."""
        queued = requests(self.prompts, SamplingParams(max_tokens=self.tokens, **OPTIONS[option]))
        found: dict[str, list[Any]] = {}
        for first in range(0, len(queued), batch):
            found |= run(engine, queued[first : first + batch])
            if between is not None:
                between(engine)
        return found

    def holds(
        self, target: Path, drafter: str, option: str, batch: int, length: int, chunk: int,
        pool: str, numbers: str, between: Between = None,
    ) -> Engine:  # fmt: skip
        """Check that drafts change nothing and are accepted now and then; return the engine."""
        pages = self.pages if pool == "tight" else None
        engine = self.make(
            target, drafter, length, pages=pages, max_num_batched_tokens=chunk, **NUMBERS[numbers]
        )
        expected = self.plain(target, option, numbers)
        assert self.outputs(engine, option, batch, between) == expected
        assert not engine.menu.switched_off
        check_engine(engine)
        if option in UNBOUND and length > 1 and pool == "ample":
            assert 0 < engine.counts.accepted < engine.counts.nodes
        if option == "n":
            assert engine.scheduler.hit > 0
            # Steps of few rows may bring a request to its end before the next needs pages.
            crowded = (pool, batch) == ("tight", 4) and chunk >= batch
            assert engine.scheduler.preemptions or not crowded
        return engine
