"""Opens the target that a drafter is trained for."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.files import Files
from ..checkpoints.tokenizers import differences, has_tokenizer
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

    Raises ConfigError: the data is of a target with other ids.
    """
    setup = set_up(folder, None, {"max_model_len": data.about.context, "max_num_seqs": 1})
    check_weights(setup.checkpoint)
    _check_tokenizer(setup.checkpoint, data)
    target = Target(setup.checkpoint, load_target(setup.checkpoint, setup.config))
    known = target.model.shape.vocab_size
    if data.about.vocab_size != known:
        raise ConfigError(
            f"{data.folder} is of a target with {data.about.vocab_size} ids, and {folder} has "
            f"{known}; give the target that the data is of."
        )
    return target


def _check_tokenizer(checkpoint: Checkpoint, data: DataFolder) -> None:
    """Raise ConfigError if the data's ids mean other text; not checked if its target is gone."""
    source = Path(data.about.target)
    files, other = Files(source), Files(checkpoint.folder)
    if not source.exists() or source.samefile(checkpoint.folder):
        return
    if has_tokenizer(files) and has_tokenizer(other) and (entries := differences(files, other)):
        raise ConfigError(
            f"{data.folder} is of {source}, which has another tokenizer than {checkpoint.folder} "
            f"({'; '.join(entries[:3])}); give the target that the data is of."
        )
