"""The layers of a checkpoint that predict tokens further on (MTP), and their tensors.

They are those of Qwen3.5: ``mtp.fc`` joins a token's embedding and the target's state before it,
behind a norm each; a layer of attention follows, a norm, and the target's own output matrix.
"""

from __future__ import annotations

import re
from dataclasses import replace

from ..errors import ModelError
from .families import MIXERS, Architecture
from .files import Files
from .formats.shared import Format, Tensors

PREFIX = "mtp."
NORMS = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
"""The norms of a token's embedding and of a state."""


def num_layers(files: Files) -> int:
    """Return how many layers of a checkpoint predict tokens further on; 0 where it has none."""
    found = (re.match(r"mtp\.layers\.([0-9]{1,4})\.", name) for name in files.tensors)
    return 1 + max((int(layer[1]) for layer in found if layer), default=-1)


def has_mtp(files: Files) -> bool:
    """Return True if a checkpoint has such layers, which join embedding and state."""
    if files.config is None:  # of a GGUF file, in which they are not read yet
        return False
    return num_layers(files) > 0 and f"{PREFIX}fc.weight" in files.tensors


class MtpTensors(Tensors):
    """The tensors of such layers, by the names that a model of these layers alone would have."""

    def __init__(self, files: Files, format: Format | None = None) -> None:
        super().__init__(files, format)
        self._entries = {_alone(name): entry for name, entry in files.tensors.items()}

    def _told(self, name: str) -> str:
        module = name.removeprefix("model.")
        return f"{PREFIX}{module}"


def _alone(name: str) -> str:
    if not name.startswith(PREFIX):
        return f"target.{name}"
    rest = name.removeprefix(PREFIX)
    return f"model.{rest}" if rest.startswith(("layers.", "norm.")) else rest


def mtp_architecture(files: Files, target: Architecture) -> Architecture:
    """Return the architecture of such layers of a target. Raises ModelError: it is not known."""
    count = num_layers(files)
    if not count:
        raise ModelError(
            f"{files.folder} has no layers that predict further tokens (mtp.layers.0)."
        )
    full, attention = next(iter(target.attending)), MIXERS["full_attention"]
    return replace(
        target,
        num_layers=count,
        mixers=(attention,) * count,
        kinds=(target.kinds[full],) * count,
        windows=(target.windows[full],) * count,
        mlps=(True,) * count,
        sparse=(False,) * count,
        linear=None,
    )
