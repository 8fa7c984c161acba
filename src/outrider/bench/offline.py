"""Plain decoding against drafters, interleaved in one process: the runs, not yet the figures."""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from ..base.methods import AUTO
from ..base.types import Request, SamplingParams
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.files import Files
from ..checkpoints.folders import find_folder
from ..checkpoints.tokenizers import read_codec
from ..drafters.heads import HeadSpec
from ..drafters.mtp import MtpSpec
from ..drafters.ngram import NgramSpec
from ..drafters.registry import beside, find_drafter, known_specs
from ..engine.build import build_engine, takes_cpus
from ..engine.setup import set_up
from ..errors import ConfigError, RequestError
from ..llm import LLM
from ..models.base import Model
from ..models.native import is_native
from ..native.choice import library
from ..text.codec import TextCodec
from .record import Pass, frozen, params_of, run_all
from .replay import Replay, parts_of
from .workload import BUNDLED, Item, Workload

PLAIN = "none"
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """The settings of a measurement; a value out of its range raises ConfigError.

    Args:
        model: the target, and ``target`` its name in the report.
        replay: the size of a replay target, see ``bench/replay.py``; ``model`` then lends its
            tokenizer only.
        drafters: as ``LLM`` takes them or, for a replay target, ``Replay.open``. None takes the
            checkpoints ``beside`` the target, ngram and auto.
        max_tokens: output tokens of each prompt, 2 or more; EOS is ignored. A replay target ends
            with the recorded answer, and an item with a schema when its JSON is complete.
        fresh: start an engine for each measurement, so that its time to learn is counted.
        engine: further options of ``LLM``; those that are None take their defaults.
    """

    model: str | Path
    target: str
    replay: str | None = None
    drafters: tuple[str, ...] | None = None
    lengths: tuple[int, ...] = (4,)
    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 128
    batch_sizes: tuple[int, ...] = (1,)
    rounds: int = 7
    fresh: bool = False
    engine: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("lengths", "temperatures", "drafters", "batch_sizes"):
            if getattr(self, name) == ():
                raise ConfigError(f"{name} is empty; give one or more.")
        least_value = {
            "max_tokens": (self.max_tokens, 2), "batch_size": (min(self.batch_sizes), 1),
            "rounds": (self.rounds, 1), "num_speculative_tokens": (min(self.lengths), 1),
        }  # fmt: skip
        for name, (value, least) in least_value.items():
            if value < least:
                raise ConfigError(f"{name} is {value}; give {least} or more.")


@dataclass(frozen=True)
class BenchCell:
    """One row of the report: a drafter ("none" with K = 0 is plain), and its conditions."""

    drafter: str
    length: int
    temperature: float
    batch_size: int

    @property
    def conditions(self) -> tuple[float, int]:
        return self.temperature, self.batch_size


def drafter_names(options: BenchOptions) -> list[str]:
    """Return the drafters to run. Raises ConfigError: one is unknown, or not for this target."""
    if options.replay is not None:
        chosen = [d for d in options.drafters or ("planted:0.8", "ngram") if d != PLAIN]
        for drafter in chosen:
            parts_of(drafter)
        return chosen
    names = []
    folder = find_folder(options.model)
    for drafter in options.drafters or (*_near(folder, options), NgramSpec.name, AUTO):
        if drafter.startswith("planted:"):
            raise ConfigError(f"drafter {drafter!r} needs a replay target; give --replay as well.")
        if find_drafter(drafter, folder).name != PLAIN:
            names.append(drafter)
    return names


def _near(folder: Path, options: BenchOptions) -> list[str]:
    """Return the names of the drafters beside a target; heads only if the native step runs."""
    dtype = str(options.engine.get("dtype", "auto"))
    native = library() is not None and is_native(open_checkpoint(folder), dtype)
    heads = (HeadSpec, MtpSpec)
    return [
        name
        for name, spec in known_specs().items()
        if (native or not issubclass(spec, heads)) and beside(folder, name) is not None
    ]


def recorded_answers(workload: Workload, codec: TextCodec) -> list[list[int]]:
    """Return every answer's ids, without special ones. Raises ConfigError: an item has none."""
    answers = []
    for i, item in enumerate(workload.items, 1):
        if item.answer is None:
            raise ConfigError(
                f"prompt {i} of workload {workload.name!r} has no recorded answer, which a replay "
                f"target needs; give it one, or take one of {', '.join(BUNDLED)}."
            )
        answers.append(codec.backend.encode(item.answer, add_special_tokens=False).ids)
    return answers


def answered(llm: LLM, workload: Workload, codec: TextCodec, most: int) -> Workload:
    """Return the workload with an item for each turn, after the model's own earlier answers.

    Answers are plain and greedy, with at most ``most`` tokens. So every drafter, temperature and
    round gets the same prompts.
    """
    behind = [[item] for item in workload.items]
    for depth in range(1, max(len(item.messages) for item in workload.items)):
        open_ = [i for i, item in enumerate(workload.items) if item.turns and depth < item.count]
        asked = [behind[i][-1].encode(codec) for i in open_]
        outputs = llm.generate(asked, SamplingParams(temperature=0, max_tokens=most))
        for i, output in zip(open_, outputs, strict=True):
            item, said = workload.items[i], {"role": "assistant", "content": output.outputs[0].text}
            messages = (*behind[i][-1].opening, said, item.messages[depth])
            behind[i].append(Item(messages=messages, category=item.category))
    return Workload(workload.name, tuple(chain.from_iterable(behind)))


def turned(items: Sequence[T], by: int) -> list[T]:
    """Return the items rotated by ``by`` places."""
    start = by % max(len(items), 1)
    return [*items[start:], *items[:start]]


class Bench:
    """The engines of a benchmark, one per drafter, its prompts, and a replay target's answers.

    Raises OutriderError: a model cannot be loaded, or the prompts do not fit model and batches.
    """

    def __init__(self, options: BenchOptions, workload: Workload) -> None:
        self.options, self.workload = options, workload
        names = [PLAIN, *dict.fromkeys(drafter_names(options))]
        folder = find_folder(options.model)
        files = Files(folder)
        open_checkpoint(files)  # gives the best error for a folder without a model
        codec = read_codec(files)
        # A replay target repeats the recording, and a base model has no turns.
        self.turns = bool(codec.templates) and options.replay is None
        count = workload.turns if self.turns else len(workload.items)
        for size in options.batch_sizes:
            if count % size:
                raise ConfigError(
                    f"batch_size {size} does not divide the {count} prompts into full batches; "
                    "give another one or another --num-prompts."
                )
        self.prompts = [item.encode(codec) for item in workload.items]
        self.limits = [options.max_tokens] * count
        self.replay: Replay | None = None
        if options.replay is not None:
            answers = recorded_answers(workload, codec)
            self.limits = [min(options.max_tokens, len(answer)) for answer in answers]
            self.replay = Replay(options.replay, folder, self.prompts, answers)
        self._targets: dict[str | None, Model] = {}  # by the CPUs reserved for a drafter
        specs = {} if self.replay else {name: find_drafter(name, folder) for name in names}
        self._placed = [name for name, spec in specs.items() if takes_cpus(spec)]
        self.engines = {name: self._open(name) for name in names}
        self.plain = self.engines[PLAIN]
        if self.turns and count > len(workload.items):
            self.workload = workload = answered(self.plain, workload, codec, options.max_tokens)
            self.prompts = [item.encode(codec) for item in workload.items]
        self.beliefs: dict[BenchCell, dict[str, Any] | None] = {}
        """What the engine's controller believed at the end of each cell's last run."""
        variants = [(n, k) for n in names for k in (options.lengths if n != PLAIN else (0,))]
        self.conditions = [(t, b) for t in options.temperatures for b in options.batch_sizes]
        self.cells = [BenchCell(n, k, t, b) for t, b in self.conditions for n, k in variants]
        for i, params in enumerate(self.params(0.0)):
            try:
                self.plain.engine.pipeline_of(Request("check", tuple(self.prompts[i]), params, 0))
            except RequestError as error:  # a schema that cannot be used
                raise ConfigError(
                    f"prompt {i + 1} of workload {workload.name!r}: {error}"
                ) from None
        longest = max(len(p) + n for p, n in zip(self.prompts, self.limits, strict=True))
        if longest > self.plain.engine.max_model_len:
            raise ConfigError(
                f"prompt and output have {longest} tokens, but the context of the model is "
                f"{self.plain.engine.max_model_len}; lower max_tokens."
            )

    def _open(self, drafter: str) -> LLM:
        options: dict[str, Any] = {
            **self.options.engine,
            "num_speculative_tokens": max(self.options.lengths),
            "max_num_seqs": max(self.options.batch_sizes),
            "enable_prefix_caching": False,  # prompts are repeated
        }
        if self.replay is not None:
            return self.replay.open(drafter, **options)
        if self._placed and drafter not in self._placed:
            options |= {"drafter_cpus": None, "draft_ahead": None}
        setup = set_up(self.options.model, drafter, options)
        cpus = setup.config.drafter_cpus
        engine = build_engine(setup, model=self._targets.get(cpus))
        self._targets[cpus] = engine.model
        return LLM.from_engine(setup, engine)

    def params(self, temperature: float) -> list[SamplingParams]:
        """Return each prompt's parameters; its seed is its index."""
        pairs = zip(self.workload.items, self.limits, strict=True)
        return [params_of(item, temperature, i, most) for i, (item, most) in enumerate(pairs)]

    def order(self, number: int) -> Iterator[BenchCell]:
        """Yield the cells of a round, rotated by one each round; compared ones stay together."""
        for conditions in turned(self.conditions, number):
            yield from turned([c for c in self.cells if c.conditions == conditions], number)

    def run(self, progress: Callable[[int, int], None]) -> dict[BenchCell, list[Pass]]:
        """Warm up, then run every round; ``progress`` gets (cells done, all cells)."""
        timings: dict[BenchCell, list[Pass]] = {cell: [] for cell in self.cells}
        rounds = map(self.order, range(self.options.rounds))
        schedule = [*self.cells, *chain.from_iterable(rounds)]
        with frozen():
            for done, cell in enumerate(schedule, 1):
                llm = self._open(cell.drafter) if self.options.fresh else self.engines[cell.drafter]
                length = cell.length or max(self.options.lengths)
                llm.set_speculation(replace(llm.speculation, num_speculative_tokens=length))
                gc.collect()
                params = self.params(cell.temperature)
                timings[cell].append(run_all(llm, self.prompts, params, cell.batch_size))
                self.beliefs[cell] = llm.engine.beliefs
                progress(done, len(schedule))
        return {cell: runs[1:] for cell, runs in timings.items()}
