"""Shared by the benchmarks: arguments, rounds, tables."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, TypeVar

import typer
from tqdm import tqdm

from outrider import pocket
from outrider.bench.intervals import median_interval
from outrider.bench.offline import turned
from outrider.errors import ConfigError

K = TypeVar("K")
V = TypeVar("V")
POCKET = str(pocket.PATH)
PROMPTS = pocket.PATH.with_name("prompts.json")

Model = Annotated[str, typer.Argument(help="A checkpoint's folder, or a GGUF file.")]
Prompts = Annotated[Path, typer.Argument(help="A JSON list of texts.", exists=True)]
Length = Annotated[
    int, typer.Option("--num-speculative-tokens", help="Draft length K: tokens drafted a step.")
]
Tokens = Annotated[int, typer.Option("--tokens", min=1, help="Output tokens of each prompt.")]
Rounds = Annotated[int, typer.Option("--rounds", min=1, help="Interleaved rounds.")]
Seed = Annotated[int, typer.Option("--seed", help="What random choices depend on.")]


def read_prompts(file: Path) -> list[str]:
    """Return the texts of a JSON list."""
    try:
        texts = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{file} is not JSON ({error}); give a list of texts.") from None
    if not isinstance(texts, list) or not texts or not all(isinstance(t, str) for t in texts):
        raise ConfigError(f"{file} holds no texts; give a JSON list of one or more.")
    return texts


def in_turns(settings: Iterable[K], run: Callable[[K, int], V], rounds: int) -> dict[K, list[V]]:
    """Return what ``run`` gave of every setting, a value a round; settings take turns.

    ``run`` gets the number of the round; round -1 is there to warm up.
    """
    values: dict[K, list[V]] = {setting: [] for setting in settings}
    for number in tqdm(range(-1, rounds), leave=False, disable=None):
        for setting in turned(list(values), number):
            values[setting].append(run(setting, number))
    return {setting: each[1:] for setting, each in values.items()}


def ratio(values: Sequence[float], base: Sequence[float]) -> dict[str, Any]:
    """Return the median of the ratios within rounds, and its interval."""
    ratios = [a / b for a, b in zip(values, base, strict=False)]
    return {"ratio": median(ratios), "interval": median_interval(ratios)}


def table(names: Iterable[str], rows: Iterable[Iterable[Any]]) -> Iterator[str]:
    """Yield the lines of a Markdown table."""
    names = list(names)
    for cells in (names, ["---"] * len(names), *rows):
        yield f"| {' | '.join(map(str, cells))} |"


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return P50 and P99 of latencies, 0 where there are fewer than two."""
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [0.0] * 99
    return {"p50": cuts[49], "p99": cuts[98]}
