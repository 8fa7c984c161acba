"""The result of a tuning: the best setting, its certainty, and configs with it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, log
from statistics import fmean, median
from typing import Any

from ..base.methods import AUTO, BY_NAME
from ..drafters.base import NoSpec
from ..engine.control.schedules import Lengths, limit, sglang, tensorrt, vllm
from .intervals import median_interval
from .race import PLAIN_SETTING, Race, RaceRun, Setting
from .record import Pass, total

METHODS = {str(BY_NAME[name].ours): name for name in ("draft_model", "ngram", "suffix", "eagle3")}
"""Drafters that other engines also have, and their methods in ``outrider ops deploy``."""


@dataclass(frozen=True)
class Tuned:
    """The finding at one batch size: the ``race``, and ``passes``, all that was measured."""

    batch_size: int
    race: Race
    passes: Mapping[Setting, Sequence[Pass]]

    @property
    def best(self) -> Setting:
        return self.race.winner

    def speed(self, setting: Setting) -> float:
        """Return the mean speed of a raced setting, else its prediction, in tokens per second."""
        if setting in self.race.runs:
            return exp(self.race.level(setting))
        return self.race.promised[setting]

    def latency(self, setting: Setting) -> float:
        """Return the median seconds per token of a sequence with a measured setting."""
        return median([each.latency for each in self.passes[setting]])

    def of_drafter(self, drafter: str) -> list[Setting]:
        """Return plain decoding and the drafter's chains; only raced ones if there are any."""
        chains = [each for each in self.race.promised if each.drafter == drafter and not each.nodes]
        return [PLAIN_SETTING, *([each for each in chains if each in self.race.runs] or chains)]

    def rows(self) -> list[dict[str, Any]]:
        """Return every setting with its measured or predicted figures, raced ones first."""
        plain = self.race.runs[PLAIN_SETTING]
        order = sorted(self.race.promised, key=self.speed, reverse=True)
        order.sort(key=lambda each: each not in self.race.runs)
        return [self._row(each, plain) for each in order]

    def _row(self, setting: Setting, plain: Sequence[RaceRun]) -> dict[str, Any]:
        runs, passes = self.race.runs.get(setting, ()), self.passes.get(setting, ())
        counts = total(each.counts for each in passes)
        ratios = [run.speed / other.speed for run, other in zip(runs, plain, strict=False)]
        verdict = "not raced"
        if setting == self.best:
            verdict = "best"
        elif runs:
            verdict = "not told apart" if setting in self.race.contenders else "slower"
        return {
            "drafter": setting.drafter,
            "num_speculative_tokens": setting.length,
            "max_draft_nodes": setting.nodes,
            "verdict": verdict,
            "promised": self.race.promised[setting],
            "rounds": len(runs),
            "tokens_per_second": self.speed(setting) if runs else None,
            "speedup": median(ratios) if runs else None,
            "speedup_interval": median_interval(ratios) if runs else None,
            "latency_per_token_ms": 1e3 * self.latency(setting) if passes else None,
            "acceptance_length": counts.acceptance_length,
            "acceptance_by_position": counts.acceptance_by_position,
        }


@dataclass(frozen=True)
class TuningResult:
    """The result of ``tune`` for a target as it was given; ``cells`` by rising batch size.

    ``names`` are those that ``serve --drafter`` takes for drafters that are checkpoints,
    ``folders`` their checkpoints, ``auto`` the choice among all. ``max_tpot`` is the most seconds
    per token of a sequence, ``setting`` how it was measured, ``engine`` options of the engine.
    """

    model: str
    names: Mapping[str, str]
    folders: Mapping[str, str]
    auto: str
    cells: Sequence[Tuned]
    max_tpot: float | None
    setting: Mapping[str, Any]
    engine: Mapping[str, Any] = field(default_factory=dict)

    @property
    def best(self) -> Setting:
        """The winner of a size, ``auto`` or plain that keeps the most of each size's best speed."""
        winners = [cell.best for cell in self.cells]
        others = [each for each in self.cells[0].race.promised if each.drafter == AUTO]
        return max(dict.fromkeys([*winners, *others, PLAIN_SETTING]), key=self._kept_on_average)

    def _kept_on_average(self, setting: Setting) -> float:
        return fmean([log(cell.speed(setting) / cell.speed(cell.best)) for cell in self.cells])

    @property
    def kept(self) -> dict[int, float]:
        """The share of each batch size's best speed that the best setting for all of them has."""
        best = self.best
        return {c.batch_size: c.speed(best) / c.speed(c.best) for c in self.cells}

    @property
    def max_num_seqs(self) -> int | None:
        """Most sequences that should run together; None if nothing limits them."""
        cells = ((c.batch_size, c.speed(c.best), c.latency(c.best)) for c in self.cells)
        return limit(list(cells), self.max_tpot)

    @property
    def portable(self) -> str | None:
        """The drafter that other engines should use: the best one of ``METHODS``, if any wins."""
        names = {each.drafter for each in self.cells[0].race.promised} & METHODS.keys()
        gains = {name: self._gain(name) for name in sorted(names)}
        best = max(gains, key=gains.__getitem__, default=None)
        return best if best is not None and gains[best] > 0 else None

    def _gain(self, drafter: str) -> float:
        """Return the mean logarithm of a drafter's speedup at its best lengths, among them 0."""
        ratios = (c.speed(_fastest(c, drafter)) / c.speed(PLAIN_SETTING) for c in self.cells)
        return fmean(map(log, ratios))

    @property
    def lengths(self) -> Lengths:
        """The best draft length of the portable drafter by batch size; 0 drafts nothing."""
        drafter = self.portable
        return [
            (cell.batch_size, _fastest(cell, drafter).length if drafter else 0)
            for cell in self.cells
        ]

    @property
    def tiers(self) -> list[tuple[int, list[int]]]:
        """By batch size, the lengths of the portable drafter that may be as fast as the best."""
        tiers = []
        for cell, (size, best) in zip(self.cells, self.lengths, strict=True):
            alike = {s.length for s in cell.of_drafter(self.portable or "")}
            alike &= {s.length for s in cell.race.contenders if s.drafter == self.portable}
            tiers.append((size, sorted(alike | {best}) if best else [0]))
        return tiers

    @property
    def serve(self) -> dict[str, Any]:
        """Options of ``outrider serve``, except the model's name."""
        best = self.best
        options: dict[str, Any] = {"drafter": NoSpec.name}
        if best.length:
            parts = (self.names.get(part, part) for part in best.drafter.split("+"))
            name = self.auto if best.drafter == AUTO else "+".join(parts)
            options = {"drafter": name, "num_speculative_tokens": best.length}
        if best.nodes:
            options["max_draft_nodes"] = best.nodes
        if self.max_num_seqs is not None:
            options["max_num_seqs"] = self.max_num_seqs
        return options | dict(self.engine)

    @property
    def deploy(self) -> dict[str, dict[str, Any]]:
        """The spec of ``outrider ops deploy``: the portable drafter, its lengths by batch size."""
        drafter: dict[str, Any] = {"method": "none"}
        name, longest = self.portable, max(length for _, length in self.lengths)
        if name is not None and longest:
            drafter = {"method": METHODS[name]}
            if name in self.folders:
                drafter["model"] = self.folders[name]
            drafter |= {"num_speculative_tokens": longest, "schedule": vllm(self.lengths)}
        weights = {n: self.engine[n] for n in ("dtype", "quantization") if n in self.engine}
        if "model" in drafter and "drafter_quantization" in self.engine:
            drafter["quantization"] = self.engine["drafter_quantization"]
        spec = {"target": {"model": self.model, **weights}, "drafter": drafter}
        if self.max_num_seqs is not None:
            spec["limits"] = {"max_num_seqs": self.max_num_seqs}
        return spec

    def report(self) -> dict[str, Any]:
        """Return all of it as JSON."""
        cells = [
            {
                "batch_size": cell.batch_size,
                "best": str(cell.best),
                "loss_at_most": cell.race.loss,
                "kept": self.kept[cell.batch_size],
                "settings": cell.rows(),
            }
            for cell in self.cells
        ]
        return {
            **self.setting,
            "model": self.model,
            "best": str(self.best),
            "batch_sizes": cells,
            "pareto": self.pareto(),
            "serve": self.serve,
            "deploy": self.deploy,
            "vllm": vllm(self.lengths),
            "sglang": sglang(self.tiers) if self.portable == "eagle3" else None,
            "tensorrt_llm": tensorrt(vllm(self.lengths)),
        }

    def pareto(self) -> list[dict[str, Any]]:
        """Return the settings that none beats in both throughput and latency, by rising latency."""
        points = [
            (1e3 * cell.latency(each), -cell.speed(each), cell.batch_size, str(each))
            for cell in self.cells
            for each in cell.race.runs
        ]
        front: list[dict[str, Any]] = []
        for latency, slowness, size, name in sorted(points):
            if not front or -slowness > front[-1]["tokens_per_second"]:
                front.append(
                    {"batch_size": size, "setting": name, "tokens_per_second": -slowness,
                     "latency_per_token_ms": latency}
                )  # fmt: skip
        return front


def _fastest(cell: Tuned, drafter: str) -> Setting:
    """Return the fastest of plain decoding and a drafter's chains."""
    return max(cell.of_drafter(drafter), key=cell.speed)
