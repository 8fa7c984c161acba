"""Checks of a config.json before transformers sees it: sizes that the files can hold.

transformers makes lists and modules of as many layers as a config says, and so takes time and
memory by the config, not by the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import ModelError
from ..fields import shown
from .files import find_tensors

LAYERS = frozenset(
    {
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers",
        "num_encoder_layers", "decoder_layers", "encoder_layers", "num_nextn_predict_layers",
        "attention_types",
    }
)  # fmt: skip
"""Options that transformers counts up to."""
MOST_LAYERS = 10_000
"""Layers of a config without weights beside it."""


def check_claims(config: Mapping[str, Any], file: Path) -> None:
    """Refuse a ``config`` that has more layers than the files beside it have tensors.

    Args:
        config: the object in ``file``.
        file: the config.json.

    Raises:
        ModelError: there are fewer tensors than layers, or a section is no object.
    """
    if not isinstance(config.get("quantization_config") or {}, Mapping):
        said = shown(config["quantization_config"])
        raise ModelError(f"{file}: quantization_config is {said}; an object is needed.")
    most = len(find_tensors(file.parent)) or MOST_LAYERS
    for name, value in _counts(config):
        if value > most:
            raise ModelError(
                f"{file}: {name} is {shown(value)}, but its checkpoint has {most} tensors; at "
                "least one for each layer is needed."
            )


def _counts(config: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Every number under one of the names in ``LAYERS``, however deep it stands."""
    left: list[tuple[str, Any]] = list(config.items())
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            left.extend(value.items())
        elif isinstance(value, list) and name in LAYERS:
            left.extend((name, item) for item in value)
        elif isinstance(value, int | float) and name in LAYERS:
            yield name, value
