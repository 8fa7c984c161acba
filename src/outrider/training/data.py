"""Makes a data folder of a target's answers, or resumes one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from time import monotonic

from ..base.alone import alone
from ..base.limits import LARGEST_CONTEXT
from ..bench.workload import Item
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.folders import find_folder
from ..errors import ConfigError, shown
from ..llm import LLM
from ..models.native import is_native
from .answers import write_answers
from .forecast import check_data
from .plan import LEAST_MINUTES
from .prompts import digest, read_prompts, save_prompts
from .samples import CONFIG, HOTTEST, MANIFEST, About, DataFolder, check_out
from .self_prompts import TOKENS, write_prompts
from .states import StateTap, kept_layers

TOGETHER = 64
"""Answers that are decoded in a batch."""
CONTEXT = 1024
"""Default for the most tokens of a sample, if the model's context is not shorter."""
OWN_PROMPTS = 5000
"""Default number of prompts that a target writes itself."""
MOST_PROMPTS = 10_000_000
PROMPTS = "prompts.jsonl"
ANSWERED = 0.7
"""Assumed length of an answer, as a share of the most tokens, to divide a limited time."""
MOST_MINUTES = 1_000_000
SPACE = " " * TOKENS
"""Placeholder, in forecasts, for a prompt that the target will write, at a byte for a token."""


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """The options of data, see ``outrider train data --help``.

    Without ``prompts`` the target writes them itself. A ``context`` of None is ``CONTEXT``, or the
    model's. With ``states`` the target's hidden states are kept beside the answers. After
    ``minutes`` no more prompts are written or answered.
    """

    prompts: Path | None = None
    temperatures: tuple[float, ...] = (0.0, 0.8)
    max_tokens: int = 256
    context: int | None = None
    seed: int = 0
    samples: int | None = None
    skip_bad: bool = False
    states: bool = False
    minutes: float | None = None

    def __post_init__(self) -> None:
        if not all(0 <= heat <= HOTTEST for heat in self.temperatures):  # false for NaN
            raise ConfigError(f"a temperature is not between 0 and {HOTTEST:g}; give others.")
        if self.minutes is not None and not LEAST_MINUTES <= self.minutes <= MOST_MINUTES:
            raise ConfigError(
                f"minutes is {shown(self.minutes)}; give {LEAST_MINUTES} to {MOST_MINUTES:,}."
            )
        for name, most in (("max_tokens", LARGEST_CONTEXT), ("samples", MOST_PROMPTS)):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= most:
                raise ConfigError(f"{name} is {shown(value)}; give 1 to {most}.")


def make_data(
    target: str, out: Path, options: DataOptions, told: Callable[..., None],
    said: Callable[[str], None], wanted: Sequence[int] = (),
) -> DataFolder:  # fmt: skip
    """Let ``target`` answer the prompts, write the answers to ``out``, and return that folder.

    ``told`` is called with the numbers of finished and of all prompts, ``said`` with sentences
    about what is left out. States of the layers ``wanted`` are kept, see ``kept_layers``. Raises
    ConfigError: the folder holds other data, or a prompt is bad.
    """
    check_out(out, MANIFEST, (CONFIG,))
    with alone(out):
        return _answered(target, out, options, told, said, wanted)


def _answered(
    target: str, out: Path, options: DataOptions, told: Callable[..., None],
    said: Callable[[str], None], wanted: Sequence[int],
) -> DataFolder:  # fmt: skip
    """Let ``target`` answer the prompts, in a folder that no other process writes."""
    begin, minutes = monotonic(), inf if options.minutes is None else options.minutes
    file, folder = options.prompts, find_folder(target)
    items = [] if file is None else read_prompts(file, options.skip_bad, said)[: options.samples]
    checkpoint = open_checkpoint(folder)
    known = checkpoint.shape.context
    context = min(CONTEXT, known) if options.context is None else options.context
    asked = items or [Item(SPACE)] * (options.samples or OWN_PROMPTS)
    a = checkpoint.architecture
    if options.states and (a is None or not is_native(checkpoint)):
        raise ConfigError(
            f"{target} is not run by the native step, whose states are kept; leave out --states."
        )
    layers = kept_layers(a.num_layers, wanted) if options.states and a is not None else ()
    check_data(checkpoint, asked, options.max_tokens, context, TOGETHER, out, layers)
    llm = LLM(
        folder, max_num_seqs=TOGETHER, max_model_len=context,
        enable_prefix_caching=not layers,  # shared rows have no states
    )  # fmt: skip
    if file is None:

        def enough(tokens: float) -> bool:
            """Return whether answers need the rest of the time, for prompts of ``tokens`` each."""
            share = tokens / (tokens + ANSWERED * options.max_tokens)
            return monotonic() >= begin + 60 * minutes * share

        items = _own_prompts(llm, out / PROMPTS, context, options, told, enough)
    about = About(
        str(folder), llm.engine.model.shape.vocab_size, digest(items), len(items),
        options.temperatures, options.max_tokens, context, options.seed,
    )  # fmt: skip
    data = DataFolder(out, about, ())
    if (out / MANIFEST).exists():
        data = DataFolder.opened(out)
        differing = about.differs(data.about)
        if differing:
            raise ConfigError(
                f"{out} holds other data ({differing[0]}); give the same to go on, or a new folder."
            )
    told(data.done, len(items))
    tap = StateTap(layers) if layers else None
    if tap is not None:
        llm.engine.drafting.watch(tap)
    left_out = write_answers(
        llm, items, data, options.skip_bad, lambda done: told(done, len(items)), tap,
        begin + 60 * minutes,
    )  # fmt: skip
    if data.done < len(items):
        said(f"answered {data.done} of {len(items)} prompts in time; the same command goes on.")
    if left_out:
        said(f"left out: {left_out} prompts that are too long or that the template refuses.")
    return data


def _own_prompts(
    llm: LLM, file: Path, context: int, options: DataOptions, told: Callable[..., None],
    enough: Callable[[float], bool],
) -> list[Item]:  # fmt: skip
    """Return prompts that the target writes itself, or wrote before; they are kept in ``file``.

    Fewer than asked for are written if ``enough`` says so, see ``write_prompts``. Raises
    ConfigError: ``file`` has another number of prompts.
    """
    count = options.samples or OWN_PROMPTS
    if file.exists():
        items = read_prompts(file, False, lambda said: None)
        if len(items) > count or (len(items) < count and options.minutes is None):
            raise ConfigError(
                f"{file} has {len(items)} prompts; give --samples {len(items)}, or a new folder."
            )
        return items
    writing = partial(told, what="writing prompts")
    items = write_prompts(llm, count, context, options.seed, writing, enough)
    save_prompts(items, file)
    return items
