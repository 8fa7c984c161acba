"""The cells of the portfolio benchmark: what is asked, and by which engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import product
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from outrider import pocket
from outrider.base.types import SamplingParams
from outrider.bench.machine import machine
from outrider.bench.offline import recorded_answers
from outrider.bench.replay import Replay, find_size, parse_planted
from outrider.bench.workload import CODE, Workload, load_workload
from outrider.checkpoints.tokenizers import read_codec
from outrider.engine.build import build_engine, load_target
from outrider.engine.setup import set_up
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.models.base import Model
from outrider.params import StructuredOutputsParams

WORKLOADS = (CODE, "edit", "prose", "json")
"""Code by the pocket pair; editing, free text and structured JSON by replay targets."""
CONCURRENCY = (1, 8, 32)
TEMPERATURES = (0.0, 1.0)
ALONE = 4
"""Prompts of a round that run one after the other, at a concurrency of 1."""
FILLING = 4
"""A sequence may have this many times the tokens that count, to keep the others company."""

AUTO, PLAIN = "auto", "plain"

Cells = Annotated[
    str,
    typer.Option("--cells", help="WORKLOAD/CONCURRENCY/TEMPERATURE, with commas and *: edit/*/0."),
]
CountedTokens = Annotated[
    int, typer.Option("--tokens", min=2, help="Tokens of a sequence that count.")
]
ReplayTarget = Annotated[str, typer.Option("--replay", help="Size of the replay targets.")]
ReplayDrafter = Annotated[
    str, typer.Option("--drafter", help="Model drafter of the replay targets.")
]


class Choice(NamedTuple):
    """A drafter, "model" standing for the pair's own, and options of ``LLM``."""

    drafter: str
    options: Mapping[str, int] = {}


CHOICES: dict[str, Choice] = {
    AUTO: Choice("auto"),
    PLAIN: Choice("none"),
    "model K=3": Choice("model", {"num_speculative_tokens": 3}),
    "model K=8": Choice("model", {"num_speculative_tokens": 8}),
    "model tree 16": Choice("model", {"num_speculative_tokens": 5, "max_draft_nodes": 16}),
    "suffix K=8": Choice("suffix", {"num_speculative_tokens": 8}),
    "model+suffix K=8": Choice("model+suffix", {"num_speculative_tokens": 8}),
}
FIXED = tuple(name for name in CHOICES if name != AUTO)


class Cell(NamedTuple):
    """Conditions under which all choices are compared."""

    workload: str
    concurrency: int
    temperature: float

    @property
    def name(self) -> str:
        """Its name in arguments and reports, as in "edit/8/0"."""
        return f"{self.workload}/{self.concurrency}/{self.temperature:g}"


CELLS = [Cell(*each) for each in product(WORKLOADS, CONCURRENCY, TEMPERATURES)]


def chosen_cells(patterns: str) -> list[Cell]:
    """Return the cells that a comma list of patterns names."""
    chosen: list[Cell] = []
    for pattern in patterns.split(","):
        named = [cell for cell in CELLS if fnmatchcase(cell.name, pattern.strip())]
        if not named:
            raise ConfigError(
                f"--cells has {pattern!r}, which names no cell; give WORKLOAD/CONCURRENCY/"
                f"TEMPERATURE of {', '.join(WORKLOADS)}, {', '.join(map(str, CONCURRENCY))} and "
                f"{', '.join(f'{t:g}' for t in TEMPERATURES)}, or * for any of them."
            )
        chosen += named
    return [cell for cell in CELLS if cell in chosen]


@dataclass(frozen=True)
class Pair:
    """The models of all workloads but code, and the tokens that a sequence has in a round."""

    size: str
    drafter: str
    tokens: int


class Source:
    """Prompts of a workload, and the engines that continue them, which share a target."""

    def __init__(self, name: str, pair: Pair) -> None:
        self._pair = pair
        self._code = name == CODE
        codec = read_codec(pocket.PATH)
        workload = (
            Workload.of_prompts(name, pocket.prompts()) if self._code else load_workload(name)
        )
        self.prompts = [item.encode(codec) for item in workload.items]
        self._forms = [
            None if item.schema is None else StructuredOutputsParams(json=item.schema)
            for item in workload.items
        ]
        self._answers = [] if self._code else recorded_answers(workload, codec)
        self._model: Model | None = None

    @cached_property
    def _replay(self) -> Replay:
        return Replay(self._pair.size, pocket.PATH, self.prompts, self._answers)

    @property
    def _most(self) -> int:
        """Tokens that a sequence may have in a round."""
        return 1 + FILLING * self._pair.tokens

    def open(self, choice: Choice, concurrency: int) -> LLM:
        """Return an engine of that choice, for so many sequences at once."""
        options: dict[str, Any] = {
            **choice.options,
            "max_num_seqs": concurrency,
            "max_model_len": max(map(len, self.prompts)) + self._most,
            "enable_prefix_caching": True,  # rounds ask the same, and prompts do not count
        }
        if self._code:
            return self._pocket(choice.drafter, options)
        drafter = choice.drafter.replace("model", self._pair.drafter)
        if drafter == "auto":
            drafter = f"auto+{self._pair.drafter}"
        return self._replay.open(drafter, **options)

    def _pocket(self, drafter: str, options: Mapping[str, Any]) -> LLM:
        setup = set_up(pocket.PATH, drafter, options)
        if self._model is None:
            self._model = load_target(setup.checkpoint, setup.config)
        return LLM.from_engine(setup, build_engine(setup, model=self._model))

    def asked(self, cell: Cell, number: int) -> list[tuple[list[int], SamplingParams]]:
        """Return the prompts and parameters of a cell in round ``number``, seeds and all.

        At a concurrency of 1 they are the next ``ALONE`` prompts, else as many as run together,
        the workload's over and over.
        """
        count, first = max(ALONE, cell.concurrency), 0
        if cell.concurrency == 1:
            first = number * ALONE
        chosen: Sequence[int] = [i % len(self.prompts) for i in range(first, first + count)]
        return [
            (
                self.prompts[i],
                SamplingParams(
                    temperature=cell.temperature, seed=1000 * (number + 1) + place,
                    max_tokens=self._most, ignore_eos=self._forms[i] is None,
                    structured_outputs=self._forms[i],
                ),
            )
            for place, i in enumerate(chosen)
        ]  # fmt: skip


def settings_of(pair: Pair, out: Path) -> dict[str, Any]:
    """Return what a report says of a measurement.

    A pair that there is none of, and a file whose folder is not there, are refused.
    """
    find_size(pair.size)
    if parse_planted(pair.drafter)[1] is None:
        raise ConfigError(
            f"--drafter is {pair.drafter!r}, which costs nothing; give its size as well, as in "
            "planted:0.7:3m."
        )
    if not out.parent.is_dir():
        raise ConfigError(f"--out is {out}, whose folder is not there; make it.")
    where = {key: value for key, value in machine().items() if key in ("cpu", "cores", "threads")}
    return {"replay": pair.size, "drafter": pair.drafter, "tokens": pair.tokens, **where}
