"""Measures acceptance as it is served: a drafter against plain decoding, in the engine itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf, sqrt
from pathlib import Path
from statistics import median, stdev
from typing import NamedTuple

from ..base.types import SamplingParams
from ..bench.intervals import student
from ..bench.record import Pass, frozen, run_all, total
from ..drafters.base import NoSpec
from ..engine.build import build_engine
from ..engine.setup import set_up
from ..errors import ConfigError, TrainingError
from ..llm import LLM
from ..models.base import Model
from .samples import Samples

ROUNDS = 3
"""Passes over all prompts; speeds are medians of them."""
SLOW = 30.0
"""If a pass of plain decoding takes more seconds, one is enough, shared by all drafters."""
MOST_PROMPTS = 24


class Served(NamedTuple):
    """The acceptance and speed of a drafter at one temperature.

    ``acceptance_length`` is of all drafts, with a 95 % interval over prompts; ``lengths`` are those
    of each prompt. ``acceptance_rate`` is accepted / drafted. ``speedup`` is over plain decoding,
    one request at a time, the median of rounds. Slow targets have one round, and all drafters share
    its plain decoding.
    """

    temperature: float
    acceptance_length: float
    interval: tuple[float, float]
    acceptance_rate: float
    by_position: list[float]
    tokens_per_second: float
    plain_tokens_per_second: float
    speedup: float
    lengths: list[float]


class Serving:
    """A target, and prompts (lists of ids) that it continues, plainly and with drafters."""

    def __init__(
        self,
        target: Path,
        model: Model,
        prompts: Sequence[list[int]],
        max_tokens: int,
        context: int,
    ) -> None:
        self._target, self._model, self.prompts = target, model, [*prompts]
        self._max_tokens, self._context = max_tokens, context
        self._plain = self._open(None)
        self._slow: dict[float, Pass] = {}
        """Passes of plain decoding that are not repeated, by temperature."""

    def _open(self, drafter: Path | None, longest: int | None = None) -> LLM:
        """Return the target with a drafter, of drafts up to the ``longest``."""
        spec = NoSpec() if drafter is None else drafter
        options = {
            "max_num_seqs": 1, "max_model_len": self._context, "enable_prefix_caching": False,
            "num_speculative_tokens": longest,
        }  # fmt: skip
        setup = set_up(self._target, spec, options)
        return LLM.from_engine(setup, build_engine(setup, model=self._model))

    def measure(
        self,
        drafter: Path,
        length: int,
        temperatures: Sequence[float],
        rounds: int | None = None,
    ) -> list[Served]:
        """Return a drafter's figures with drafts of ``length``, at each temperature.

        Raises TrainingError: an output differs from plain decoding's, which must not happen.
        """
        llm = self._open(drafter, length)
        return [self._in_turn(llm, [length], heat, rounds)[0] for heat in temperatures]

    def compare(self, drafter: Path, lengths: Sequence[int]) -> list[Served]:
        """Return a drafter's figures with drafts of each of ``lengths``, at temperature 0.

        They take turns, so that their speeds can be compared. Raises as ``measure`` does.
        """
        return self._in_turn(self._open(drafter, max(lengths)), lengths, 0.0, None)

    def _in_turn(
        self, llm: LLM, lengths: Sequence[int], temperature: float, rounds: int | None
    ) -> list[Served]:
        """Return the figures of each length; plain decoding and all lengths take turns.

        Raises ConfigError: no output has a second token.
        """
        params = [
            SamplingParams(temperature=temperature, seed=i, max_tokens=self._max_tokens)
            for i in range(len(self.prompts))
        ]
        plain: list[Pass] = []
        drafted: dict[int, list[Pass]] = {length: [] for length in lengths}
        with frozen():
            known = self._slow.get(temperature)
            for _ in range(rounds or ROUNDS):
                plain.append(known or run_all(self._plain, self.prompts, params))
                for length, runs in drafted.items():
                    llm.set_speculation(replace(llm.speculation, num_speculative_tokens=length))
                    runs.append(run_all(llm, self.prompts, params))
                if plain[0].seconds > SLOW:
                    self._slow[temperature] = plain[0]
                    break
        if not plain[0].decode_tokens:
            raise ConfigError(
                "all outputs end with their first token, so no speed can be measured; give prompts "
                "with longer answers."
            )
        if any(runs[0].outputs != plain[0].outputs for runs in drafted.values()):
            raise TrainingError(
                "outputs with the drafter differ from plain decoding; please report this."
            )
        return [_served(temperature, plain, runs) for runs in drafted.values()]


def _served(temperature: float, plain: Sequence[Pass], drafted: Sequence[Pass]) -> Served:
    """Return the figures of passes with a drafter, compared with plain ones."""
    counts = total(state.counts for state in drafted[0].states)
    lengths = [
        1 + state.counts.accepted / max(1, state.counts.drafts) for state in drafted[0].states
    ]
    mean, near = counts.acceptance_length or 1.0, error_of_mean(lengths)
    ratios = [a.speed / b.speed for a, b in zip(drafted, plain, strict=True)]
    return Served(
        temperature,
        mean,
        (mean - near, mean + near),
        counts.acceptance_rate or 0.0,
        counts.acceptance_by_position or [],
        median(run.speed for run in drafted),
        median(run.speed for run in plain),
        median(ratios),
        lengths,
    )


def held_out_prompts(samples: Samples, most: int, count: int = MOST_PROMPTS) -> list[list[int]]:
    """Return the prompts of up to ``count`` held-out samples, each of less than ``most`` ids."""
    prompts = (s.tokens[: int(s.said.argmax())].tolist() for s in samples.held_out if s.said.any())
    return [ids for ids in prompts if len(ids) < most][:count]


def error_of_mean(values: Sequence[float]) -> float:
    """Return half of the 95 % interval of a mean; infinite for fewer than two values."""
    if len(values) < 2:
        return inf
    return student(len(values) - 1) * stdev(values) / sqrt(len(values))
