"""Shared by the benchmarks: arguments, rounds, tables."""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from statistics import median, quantiles
from typing import Annotated, Any, TypeVar

import typer
from tqdm import tqdm

from outrider import pocket
from outrider.bench.intervals import median_interval
from outrider.bench.offline import turned
from outrider.cli.common import write_json
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


def named(text: str, known: Collection[str]) -> list[str]:
    """Return the shapes that ``text`` names, with commas between; one that is not known raises."""
    names = text.split(",")
    for name in names:
        if name not in known:
            raise ConfigError(f"shape {name!r} is not known; give some of {', '.join(known)}.")
    return names


def report(found: Sequence[dict[str, Any]], out: str | None) -> None:
    """Write measurements as JSON, and print a table of them unless that goes to stdout."""
    write_json(found, out)
    if out != "-":
        names = list(dict.fromkeys(key for each in found for key in each))
        for line in table(names, ([each.get(key, "") for key in names] for each in found)):
            print(line)


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Return P50 and P99 of latencies, 0 where there are fewer than two."""
    cuts = quantiles(seconds, n=100, method="inclusive") if len(seconds) > 1 else [0.0] * 99
    return {"p50": cuts[49], "p99": cuts[98]}
