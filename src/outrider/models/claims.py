"""Checks of a config.json before transformers sees it: sizes that the files can hold.

transformers makes lists and modules of as many layers as a config says, and so takes time and
memory by the config, not by the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig

from ..errors import ModelError, shown
from .files import find_tensors

LAYERS = frozenset(
    {
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers",
        "num_encoder_layers", "decoder_layers", "encoder_layers", "num_nextn_predict_layers",
        "attention_types",
    }
)  # fmt: skip
"""Options that transformers counts up to."""
POSITIVE = ("num_attention_heads", "num_key_value_heads", "hidden_size")
"""Options that transformers divides by."""
MOST_LAYERS = 10_000
"""Layers of a config without weights beside it."""
MOST_OF_HELD = 2
SPARE = 1 << 24
"""A model may have twice the elements of its files, for what is tied, and so many more."""
MOST_TABLES = 1 << 30
"""Bytes of masks and rotary tables."""


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
    for name in POSITIVE:
        if type(config.get(name)) is int and config[name] < 1:
            raise ModelError(f"{file}: {name} is {config[name]}; a whole number from 1 is needed.")
    most = len(find_tensors(file.parent)) or MOST_LAYERS
    for name, value in _counts(config):
        if value > most:
            raise ModelError(
                f"{file}: {name} is {shown(value)}, but its checkpoint has {most} tensors; at "
                "least one for each layer is needed."
            )


def _experts(config: Mapping[str, Any]) -> Iterator[tuple[str, int]]:
    """Every number of experts."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _experts(value)
        elif "experts" in str(name) and type(value) is int:
            yield name, value


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


def check_model(config: PretrainedConfig, folder: Path) -> None:
    """Refuse a config whose model is larger than the checkpoint's tensors.

    transformers makes room for every parameter of the config, in the files or not. Here the model
    is made without memory for its parameters.

    Raises:
        ModelError: it is larger.
    """
    tensors = find_tensors(folder)
    held = sum(prod(tensor.shape) for tensor in tensors.values())
    for name, value in _experts(config.to_dict()):
        if value > len(tensors) + max(max(t.shape, default=1) for t in tensors.values()):
            raise ModelError(
                f"{folder / 'config.json'}: {name} is {shown(value)}, which is more than its "
                "tensors hold."
            )
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:
        return  # transformers makes it in the same way when it loads, and says why it cannot
    wanted = sum(each.numel() for each in model.parameters())
    tables = sum(each.nbytes for each in model.buffers())  # masks, which no file holds
    if wanted > MOST_OF_HELD * held + SPARE or tables > MOST_TABLES:
        raise ModelError(
            f"{folder}: the model of its config.json has {wanted} parameters and {tables} bytes of "
            f"tables, but the files hold {held} parameters; correct its config.json."
        )
