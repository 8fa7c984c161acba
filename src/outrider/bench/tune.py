"""Finds the fastest drafter and draft length here, for a model, a workload and batch sizes."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from math import ceil
from pathlib import Path
from typing import Any

from ..base.limits import LARGEST_DRAFT
from ..base.methods import AUTO
from ..checkpoints.folders import find_folder
from ..checkpoints.tokenizers import read_codec
from ..drafters.base import NoSpec
from ..drafters.prediction import PredictionSpec
from ..drafters.registry import find_drafter
from ..engine.control.switch import SpeculationState
from ..errors import ConfigError, OutriderError
from ..llm import LLM
from .machine import machine
from .race import FEWEST_ROUNDS, MOST_ROUNDS, RaceRun, Setting, race
from .record import Pass, frozen, params_of, run_all
from .tuned import Tuned, TuningResult
from .workload import Workload


def tune(
    model: str | Path,
    workload: Workload,
    *,
    batch_sizes: Sequence[int] = (1, 4, 16),
    max_tpot: float | None = None,
    rounds: int = MOST_ROUNDS,
    told: Callable[[int, int, int], None] = lambda batch_size, done, total: None,
    **options: Any,
) -> TuningResult:
    """Return the fastest drafter and draft length by batch size, with all that was measured.

    Args:
        model: a folder, file or hub name.
        batch_sizes: numbers of sequences that run together.
        max_tpot: seconds that a sequence may wait for a token; bounds ``max_num_seqs``.
        rounds: most rounds of a race.
        told: called with the batch size, the number of finished runs, and its maximum.
        options: of ``Workbench``, and of ``LLM``.

    Raises OutriderError: a model cannot be loaded, or a value is out of its range.
    """
    sizes = sorted({*batch_sizes})
    _check("batch_sizes", sizes, 1)
    _check("rounds", [rounds], FEWEST_ROUNDS)
    if max_tpot is not None and not max_tpot > 0:
        raise ConfigError(f"max_tpot is {max_tpot:g}; give seconds, more than 0.")
    bench = Workbench(model, workload, sizes[-1], **options)
    cells = []
    with frozen():
        for size in sizes:
            passes: dict[Setting, list[Pass]] = {}
            measure, tell = partial(_measured, bench, size, passes), partial(told, size)
            result = race(measure, bench.families, bench.others, rounds, tell)
            cells.append(Tuned(size, result, passes))
    setting = {
        "machine": machine(), "workload": workload.name, "temperature": bench.temperature,
        "max_tokens": bench.max_tokens, "max_tpot": max_tpot,
    }  # fmt: skip
    return TuningResult(
        str(model), bench.names, bench.folders, bench.drafter, cells, max_tpot, setting,
        bench.options,
    )  # fmt: skip


def _measured(
    bench: Workbench, size: int, passes: dict[Setting, list[Pass]], setting: Setting, _: int
) -> RaceRun:
    """Return a run of the setting, which is kept in ``passes``."""
    result = bench.run(setting, size)
    passes.setdefault(setting, []).append(result)
    seconds = sum(batch.decode_seconds for batch in result.batches)
    return RaceRun(result.decode_tokens, seconds, result.counts)


class Workbench:
    """The engines of all settings of a target, and the prompts that they are measured with.

    Args:
        most: most sequences that run together.
        drafter: ``auto``, or ``auto+`` and others: what the engine would choose among.
        lengths: draft lengths K that are compared.
        trees: nodes and depth of trees that are compared, each by an engine of its own.
        num_prompts: prompts of the workload in a run, 8 by default; a larger batch takes more, and
            repeats the first ones if there are too few.
        max_tokens: output tokens of each prompt; EOS is ignored.
        engine: options of ``LLM``.
    """

    def __init__(
        self,
        model: str | Path,
        workload: Workload,
        most: int,
        *,
        drafter: str = AUTO,
        lengths: Sequence[int] = range(1, 11),
        trees: Sequence[tuple[int, int]] = (),
        num_prompts: int | None = None,
        max_tokens: int = 64,
        temperature: float = 0.0,
        **engine: Any,
    ) -> None:
        lengths = sorted({*lengths})
        _check("lengths", lengths, 1, LARGEST_DRAFT)
        _check("max_tokens", [max_tokens], 2)
        _check("trees", [min(tree) for tree in trees] or [1], 1)
        if AUTO not in drafter.split("+"):
            raise ConfigError(f"drafter is {drafter!r}; give auto, or auto+ and others to compare.")
        folder = find_folder(model)
        parts = [part for part in drafter.split("+") if part != AUTO]
        self.names = {find_drafter(part, folder).name: part for part in parts}
        """The names that ``LLM(drafter=)`` takes for drafters that were given."""
        options = {"max_num_seqs": most, "enable_prefix_caching": False, **engine}
        usual = LLM(model, drafter=drafter, num_speculative_tokens=lengths[-1], **options)
        menu = usual.engine.menu
        self.folders = {
            spec.name: str(spec.folder) for spec in usual.drafter.members if spec.folder is not None
        }
        """The checkpoints of drafters."""
        self._engines = {0: usual}
        first = menu.portfolio[0]
        for nodes, depth in trees:
            self._engines[nodes] = LLM(
                model, drafter=self.names.get(first, first), num_speculative_tokens=depth,
                max_draft_nodes=nodes, **options,
            )  # fmt: skip
        drafters = usual.engine.drafting.drafters
        families = {
            name: [k for k in lengths if k <= min(drafters[p].max_length for p in name.split("+"))]
            for name in menu.names
            if name not in (AUTO, NoSpec.name) and PredictionSpec.name not in name.split("+")
        }
        self.families = {name: each for name, each in families.items() if each}
        """Draft lengths by drafter."""
        self.others = [Setting(AUTO, lengths[-1])] if AUTO in menu.names else []
        self.others += [Setting(first, depth, nodes) for nodes, depth in trees]
        """Settings that no other run predicts."""
        self._num_prompts = len(workload.first(num_prompts).items)
        self._items = workload.items[: self._num_prompts + most]
        codec = read_codec(folder)
        self._prompts = [item.encode(codec) for item in self._items]
        self.drafter, self.options = drafter, engine
        self.max_tokens, self.temperature = max_tokens, temperature

    def run(self, setting: Setting, size: int) -> Pass:
        """Continue the prompts, ``size`` at a time; raise if there is nothing to time."""
        count = size * ceil(self._num_prompts / size)
        asked = list(islice(cycle(self._prompts), count))
        params = [
            params_of(item, self.temperature, seed, self.max_tokens)
            for seed, item in zip(range(count), cycle(self._items))
        ]
        llm = self._engines[setting.nodes]
        usual = llm.speculation
        state = SpeculationState(False, usual.drafter, usual.num_speculative_tokens)
        if setting.length:
            state = SpeculationState(True, setting.drafter, setting.length)
        llm.set_speculation(state)
        gc.collect()
        result = run_all(llm, asked, params, size)
        if not result.decode_tokens or not result.counts.steps:
            raise OutriderError(
                "all outputs end at their first token; give prompts that have longer ones."
            )
        return result


def _check(name: str, values: Sequence[int], least: int, most: int | None = None) -> None:
    if not values or min(values) < least or (most is not None and max(values) > most):
        wanted = f"{least} or more" if most is None else f"from {least} to {most}"
        raise ConfigError(f"{name} is {', '.join(map(str, values))}; give {wanted}.")
