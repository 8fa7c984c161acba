"""Trains a head, from data and a target to a measured checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate import PartialState

from ..base.alone import alone
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.folders import name_of
from ..checkpoints.head_export import LAYOUTS, SPECULATORS
from ..checkpoints.heads import EAGLE3, MEDUSA, PEAGLE
from ..errors import ConfigError
from ..models.base import Model
from ..models.native import NativeTransformer
from .card import write_card
from .curves import draw_curves
from .fit import fitted_fuse
from .head_files import (
    NewHead,
    frequent_ids,
    ids_of,
    load_eagle3,
    open_head,
    save_eagle3,
    write_new_eagle3,
)
from .heads import HeadTask
from .loop import RUN, Judged, Training, on_cpu
from .losses import LOSSES
from .measure import note
from .medusa import load_medusa, save_medusa, write_new_medusa
from .needs import check_training, head_trainee
from .parity import check_served
from .plan import Plan
from .samples import CONFIG, MANIFEST, DataFolder, Samples, check_out
from .served import Served, Serving, held_out_prompts
from .states import usual_layers
from .targets import Target, open_target
from .teacher import Teacher

WORK, BEGUN = "training", "begun"
"""The training's folder inside the head's; inside it, the folder of the head that it began as."""
SERVED_PROMPTS, SERVED_TOKENS = 8, 64
"""Held-out prompts that a trained head is served with, and tokens of each answer."""
CHECKED = 4
"""Held-out samples on which a trained head is compared with the served one."""
RATE, BATCH = 2e-3, 512
"""Default learning rate, and default number of tokens in a batch."""
MOST_IDS = 32768
"""Most ids that a new EAGLE-3 head drafts."""


class Method(NamedTuple):
    """The functions that begin, read and write heads of a kind."""

    write_new: Callable[[Path, Checkpoint, NewHead], None]
    load: Callable[..., Any]
    save: Callable[..., None]


METHODS: Mapping[str, Method] = {
    EAGLE3: Method(write_new_eagle3, load_eagle3, save_eagle3),
    PEAGLE: Method(write_new_eagle3, load_eagle3, save_eagle3),
    MEDUSA: Method(write_new_medusa, load_medusa, save_medusa),
}


@dataclass(frozen=True)
class HeadOptions:
    """The options of a head's training.

    Drafts are ``depth`` tokens long in training, and the loss of each depth has ``fading`` times
    the weight of the one before. A new EAGLE-3 head drafts the ids that make up a share
    ``coverage`` of the target's answers, reads the outputs of ``layers``, and is written in a
    ``layout``. It is trained on a ``share`` of the samples.
    """

    loss: str = "forward-kl"
    depth: int = 4
    fading: float = 0.9
    coverage: float = 0.97
    layers: tuple[int, ...] | None = None
    share: float = 1.0
    layout: str = SPECULATORS

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(f"loss is {self.loss!r}; known are {', '.join(LOSSES)}.")
        if self.layout not in LAYOUTS:
            raise ConfigError(f"layout is {self.layout!r}; give {' or '.join(LAYOUTS)}.")
        if not 1 <= self.depth <= 16:
            raise ConfigError(f"depth is {self.depth}; give 1 to 16.")
        for name in ("fading", "coverage", "share"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give a share up to 1.")


def chosen_head(
    kind: str, target: Path, model: Model, samples: Samples, seed: int, options: HeadOptions
) -> NewHead:
    """Return the description of a new head: the ids that it drafts and the layers that it reads."""
    counts = samples.counts(model.shape.vocab_size)
    ids = frequent_ids(counts, options.coverage, MOST_IDS)
    layers = options.layers or usual_layers(model.hidden_layers)
    mask = int(counts.argmin()) if kind == PEAGLE else None
    name = name_of(target)
    return NewHead(name, ids, layers, options.depth, seed, options.layout, mask_token=mask)


class Trained(NamedTuple):
    """The acceptance of a trained drafter: as forecast, and as served on a few prompts."""

    judged: Judged
    served: list[Served]


def about_training(kind: str, target: Path, begin: Path | None, data: DataFolder) -> dict[str, Any]:
    """Return what identifies a training; its folder is resumed only with the same."""
    return {
        "kind": kind, "target": str(target), "begin": None if begin is None else str(begin),
        "data": [shard.sha256 for shard in data.shards],
    }  # fmt: skip


@contextmanager
def held(out: Path) -> Iterator[PartialState]:
    """Lock the folder of a training, in the first process if there are several.

    Yields the state of this process. Raises ConfigError: another training has locked it, or it has
    other contents.
    """
    check_out(out, f"{WORK}/{RUN}", (CONFIG, MANIFEST))
    state = PartialState(cpu=on_cpu())
    with alone(out / WORK) if state.is_main_process else nullcontext():
        yield state


def train_head(
    kind: str,
    target: Path,
    data: DataFolder,
    begin: Path | None,
    out: Path,
    plan: Plan,
    options: HeadOptions,
    opened: Target | None = None,
) -> Trained:
    """Train a head for ``target`` and write it to the folder ``out``.

    It begins as the head in the folder ``begin``, or as a new one. An interrupted training in
    ``out`` goes on. The result describes the parameters that were written; only the first process
    has served figures. The target may be ``opened`` already.
    """
    with held(out) as state:
        method, context = METHODS[kind], data.about.context
        checkpoint, model = opened or open_target(target, data)
        if not isinstance(model, NativeTransformer):
            raise ConfigError(
                f"{target} is not run by the native step, which heads draft beside; give a target "
                "of a native family (docs/models.md), or train a small drafter (outrider train "
                "distill)."
            )
        samples, begun = data.read(states=True).share(options.share), out / WORK / BEGUN
        with state.main_process_first():
            new = None
            # A head that another command created but did not train is created again.
            stale = state.is_main_process and not (out / WORK / RUN).exists()
            if begin is None and (stale or not (begun / CONFIG).exists()):
                new = chosen_head(kind, target, model, samples, plan.seed, options)
            source = new or open_head(begin or begun, kind)
            trainee = head_trainee(
                kind, checkpoint, samples, source, plan, options.depth, context, begin is None
            )
            room = check_training(trainee, checkpoint, plan, out)
            if new is not None:
                if kind != MEDUSA:
                    new = new._replace(fuse=fitted_fuse(model, samples.train, new.layers, context))
                method.write_new(begun, checkpoint, new)
        head = open_head(begin or begun, kind)
        ids = ids_of(head)
        whole = np.array_equal(ids, np.arange(model.shape.vocab_size))
        layers = head.target_layers(model.hidden_layers)
        teacher = Teacher(model, context, layers, None if whole else ids, room, stored=True)
        module = method.load(head, checkpoint, context)
        task = HeadTask(module, teacher, ids, options.depth, LOSSES[options.loss], options.fading)
        about = about_training(kind, target, begin, data) | asdict(options)
        training = Training(task, samples, plan, out / WORK, about)
        judged = training.run()
        served: list[Served] = []
        if training.accelerator.is_main_process:
            method.save(module, training.average.values, out)
            draw_curves(out / WORK)
            write_card(out, out / WORK, data, judged)
            with training.average.applied():
                check_served(out, module, model, teacher, samples.held_out[:CHECKED])
            served = served_on(samples, target, model, out, options.depth, data)
        return Trained(judged, served)


def served_on(
    samples: Samples, target: Path, model: Model, out: Path, depth: int, data: DataFolder
) -> list[Served]:
    """Measure the drafter in ``out`` on a few held-out prompts; write the figures and return them.

    Returns nothing if fewer than two prompts are short enough, since they have no interval.
    """
    context = data.about.context
    tokens = min(SERVED_TOKENS, context // 2)
    prompts = held_out_prompts(samples, context - tokens, SERVED_PROMPTS)
    if len(prompts) < 2:
        return []
    served = Serving(target, model, prompts, tokens, context).measure(
        out, min(depth, context - 1), (0.0, 1.0), rounds=1
    )
    note(out, "held out", served, data.about.prompts, "held-out prompts of its data")
    return served
