"""Trains a small drafter, from data and a target to a measured checkpoint."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch

from ..checkpoints.files import Files
from ..errors import ConfigError
from .card import write_card
from .curves import draw_curves
from .distill import DistillTask
from .drafter_files import config_of, made_of, read_drafter, save_drafter
from .loop import Training
from .lora import add_low_rank, merged_weights
from .losses import LOSSES
from .needs import check_training, drafter_trainee
from .parity import check_drafter
from .plan import Plan
from .run_heads import CHECKED, WORK, Trained, about_training, held, served_on
from .samples import DataFolder
from .served import Served
from .targets import Target, open_target
from .teacher import Teacher

RATE, NEW_RATE, LOW_RANK_RATE = 2e-5, 1e-3, 2e-4
"""Learning rates for an existing drafter, for a new one, and for LoRA."""


@dataclass(frozen=True)
class DistillOptions:
    """The options of a small drafter's training, see ``outrider train distill --help``.

    ``rank`` is LoRA's, whose changes are scaled by ``alpha`` / ``rank``; 0 trains all weights.
    ``own`` is the share of answers that the drafter writes itself. A new drafter has ``layers`` of
    the target, with ``neurons`` in each MLP. Acceptance is judged by drafts of ``depth`` tokens. It
    is trained on a ``share`` of the samples.
    """

    loss: str = "forward-kl"
    temperature: float = 1.0
    own: float = 0.0
    rank: int = 0
    alpha: float = 32.0
    layers: tuple[int, ...] = (0, -1)
    neurons: int | None = None
    depth: int = 5
    share: float = 1.0

    def __post_init__(self) -> None:
        if self.loss not in LOSSES:
            raise ConfigError(f"loss is {self.loss!r}; known are {', '.join(LOSSES)}.")
        if not 0.01 <= self.temperature <= 100:  # false for NaN
            raise ConfigError(f"temperature is {self.temperature}; give 0.01 to 100.")
        if not 0 <= self.own <= 1:
            raise ConfigError(f"own is {self.own}; give a share up to 1.")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share is {self.share}; give one up to 1.")
        if not 0 <= self.rank <= 4096 or not 0 < self.alpha <= 1e6:
            raise ConfigError("a rank is up to 4096, and alpha is above 0; give others.")


def usual_rate(begin: Path | None, rank: int) -> float:
    """Return the default learning rate."""
    if rank:
        return LOW_RANK_RATE
    return NEW_RATE if begin is None else RATE


def train_drafter(
    target: Path, data: DataFolder, begin: Path | None, out: Path, plan: Plan,
    options: DistillOptions, opened: Target | None = None,
) -> Trained:  # fmt: skip
    """Train a small drafter for ``target`` and write it to the folder ``out``.

    It begins as the checkpoint ``begin``, or as some of the target's layers. An interrupted
    training in ``out`` goes on. The result describes the parameters that were written; only the
    first process has served figures. The target may be ``opened`` already.
    """
    with held(out):
        context = data.about.context
        checkpoint, model = opened or open_target(target, data)
        files, known = Files(checkpoint.folder), model.shape.vocab_size
        samples = data.read(states=True).share(options.share)
        config = config_of(checkpoint, begin, options.layers, options.neurons)
        trainee = drafter_trainee(checkpoint, samples, config, options.rank, context)
        if options.own:  # its answers are new each time
            trainee = trainee._replace(lessons=0)
        room = check_training(trainee, checkpoint, plan, out)
        small = (
            made_of(checkpoint, options.layers, options.neurons)
            if begin is None
            else read_drafter(begin, files)
        )
        if options.rank:
            add_low_rank(small.module, options.rank, options.alpha, plan.seed)
        ids = min(known, small.config["vocab_size"])  # some only round the number up
        whole = None if ids == known else np.arange(ids)
        teacher = Teacher(model, context, (), whole, room, stored=True)
        task = DistillTask(
            small.module, teacher, ids, LOSSES[options.loss], options.temperature, options.own,
            options.depth, plan.seed,
        )  # fmt: skip
        about = about_training("distill", target, begin, data) | asdict(options)
        training = Training(task, samples, plan, out / WORK, about)
        judged = training.run()
        served: list[Served] = []
        if training.accelerator.is_main_process:
            with training.average.applied(), torch.no_grad():
                save_drafter(small.config, merged_weights(small.module), files, out)
                draw_curves(out / WORK)
                write_card(out, out / WORK, data, judged)
                check_drafter(out, task, context, samples.held_out[:CHECKED])
            served = served_on(samples, target, model, out, options.depth, data)
        return Trained(judged, served)
