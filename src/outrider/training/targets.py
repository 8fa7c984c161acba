"""Opens the target that a drafter is trained for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..checkpoints.checkpoint import Checkpoint
from ..engine.build import load_target
from ..engine.setup import set_up
from ..errors import ConfigError
from ..models.base import Model
from .forecast import check_weights
from .samples import DataFolder


class Target(NamedTuple):
    """A target as it is served: its checkpoint, and the model that runs it."""

    checkpoint: Checkpoint
    model: Model


def open_target(folder: Path, data: DataFolder) -> Target:
    """Return the target in a folder, for contexts as long as those of its data.

    Raises ConfigError: the data has another number of ids, so it is of another target.
    """
    setup = set_up(folder, None, {"max_model_len": data.about.context, "max_num_seqs": 1})
    check_weights(setup.checkpoint)
    target = Target(setup.checkpoint, load_target(setup.checkpoint, setup.config))
    known = target.model.shape.vocab_size
    if data.about.vocab_size != known:
        raise ConfigError(
            f"{data.folder} is of a target with {data.about.vocab_size} ids, and {folder} has "
            f"{known}; give the target that the data is of."
        )
    return target
