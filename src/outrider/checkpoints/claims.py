"""Checks of a config.json's sizes against the checkpoint's files, before transformers sees it.

transformers creates as many layers as a config says: a damaged config costs time and memory out of
proportion to the checkpoint's files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..base.fields import Fields
from ..errors import ModelError, shown
from .files import Files

if TYPE_CHECKING:
    from transformers import PretrainedConfig

LAYERS = frozenset(
    {
        "num_hidden_layers", "num_layers", "n_layer", "n_layers", "num_decoder_layers",
        "num_encoder_layers", "decoder_layers", "encoder_layers", "num_nextn_predict_layers",
        "attention_types",
    }
)  # fmt: skip
"""Options that count layers."""
POSITIVE = ("num_attention_heads", "num_key_value_heads", "hidden_size")
"""Options that transformers divides by: 0 is an error."""
MOST_LAYERS = 10_000
"""Bound on the layers of a config without weights."""
PARAMETERS_PER_STORED = 2
SPARE = 1 << 24
"""A model may have twice the elements of its files (tied weights), and ``SPARE`` more."""
MOST_TABLES = 1 << 30
"""Bound on the bytes of masks and rotary tables."""


def check_claims(config: Mapping[str, Any], files: Files) -> None:
    """Refuse a ``config`` that has more layers than the files beside it have tensors."""
    file = files.folder / "config.json"
    values = Fields(config, str(file))
    if not isinstance(config.get("quantization_config") or {}, Mapping):
        raise values.refuse("quantization_config", "an object")
    for name in POSITIVE:
        if type(config.get(name)) is int and config[name] < 1:
            raise values.refuse(name, "a whole number from 1")
    most = len(files.tensors) or MOST_LAYERS
    for name, value in _numbers(config):
        if name in LAYERS and value < 0:
            raise Fields({name: value}, str(file)).refuse(name, "a whole number")
        if name in LAYERS and value > most:
            raise ModelError(
                f"{file}: {name} is {shown(value)}, but its checkpoint has {most} tensors; at "
                "least one for each layer is needed."
            )


def _numbers(options: Mapping[str, Any]) -> Iterator[tuple[str, int | float]]:
    """Yield every (option, number), at any depth of sections; only ``LAYERS`` may be lists."""
    left: list[tuple[str, Any]] = list(options.items())
    while left:
        name, value = left.pop()
        if isinstance(value, Mapping):
            left.extend(value.items())
        elif isinstance(value, list) and name in LAYERS:
            left.extend((name, item) for item in value)
        elif isinstance(value, int | float):
            yield str(name), value


def check_model(
    config: PretrainedConfig, shapes: Mapping[str, tuple[int, ...]], folder: Path
) -> None:
    """Refuse a config whose model is larger than the checkpoint's tensors.

    transformers allocates every parameter of the config, whether the files have it or not. The
    check creates the model without memory for its parameters.
    """
    stored = sum(map(prod, shapes.values()))
    largest = max((max(shape, default=1) for shape in shapes.values()), default=0)
    for name, value in _numbers(config.to_dict()):
        if "experts" in name and value > len(shapes) + largest:
            raise ModelError(
                f"{folder / 'config.json'}: {name} is {shown(value)}, which is more than its "
                "tensors hold."
            )
    import torch
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    except Exception:
        return  # transformers fails in the same way at load, and says why
    parameters = sum(each.numel() for each in model.parameters())
    tables = sum(each.nbytes for each in model.buffers())  # masks, which no file holds
    if parameters > PARAMETERS_PER_STORED * stored + SPARE or tables > MOST_TABLES:
        raise ModelError(
            f"{folder}: the model of its config.json has {parameters} parameters and {tables} "
            f"bytes of tables, but the files hold {stored} parameters; correct its config.json."
        )
