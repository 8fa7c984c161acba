"""transformers' model of a checkpoint in fp32, the reference of the audit."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.config import Recipe
from ..checkpoints.architecture import LinearAttention
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.configs import whole
from ..checkpoints.dtypes import FLOAT32
from ..checkpoints.export import recipe_of
from ..checkpoints.formats.shared import usual_name
from ..checkpoints.matrices import plain, quantized
from ..errors import ModelError
from ..models.tensors import as_array, as_tensor


def transformers_model(folder: Path, recipe: Recipe | None = None) -> Any:
    """Return transformers' model of the checkpoint in ``folder``, quantised by ``recipe``, in fp32.

    Outrider's readers dequantise weights and GGUF files, for most of which transformers needs other
    packages: the audit is about decoding, not about readers.

    Raises ModelError: the checkpoint cannot be read, or is a quantised mixture of experts.
    """
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]
    checkpoint = open_checkpoint(folder)
    if recipe is None and not checkpoint.quantised:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    config, architecture = checkpoint.config, checkpoint.architecture
    if architecture is None or any(architecture.sparse):
        raise ModelError(f"{folder}: a quantised mixture of experts cannot be audited.")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(whole(config), dtype=torch.float32).eval()
    with torch.no_grad():
        source, linear = checkpoint.tensors, architecture.linear
        for own_name, weight in model.named_parameters():
            name = usual_name(own_name, architecture.layout.names)
            if weight.dim() != 2:
                values = as_tensor(source.get(name, tuple(weight.shape), FLOAT32))
                weight.copy_(values if linear is None else grouped(name, values, linear))
                continue
            outputs, inputs = weight.shape
            own = recipe_of(name, recipe, architecture.tied)
            if own is None:
                matrix = source.matrix(name, (outputs, inputs), FLOAT32)
            else:
                matrix = quantized(source, name, (outputs, inputs), own)
            values = as_tensor(plain(matrix, FLOAT32))
            weight.copy_(values if linear is None else grouped(name, values, linear))
    return model


def grouped(name: str, values: torch.Tensor, linear: LinearAttention) -> torch.Tensor:
    """Return a tensor of a delta net with value heads grouped by key heads, as in transformers."""
    if not linear.tiled_heads:
        return values
    mixed = linear.conv_width - linear.values

    def turned(rows: torch.Tensor) -> torch.Tensor:
        parts = rows.unflatten(0, (-1, linear.key_heads, len(rows) // linear.value_heads))
        out: torch.Tensor = parts.transpose(0, 1).flatten(0, 2)
        return out

    match name.split(".")[-2:]:
        case ["in_proj_qkv" | "conv1d", _]:
            return torch.cat((values[:mixed], turned(values[mixed:])))
        case ["in_proj_z" | "in_proj_a" | "in_proj_b", _] | ["linear_attn", _]:
            return turned(values)
        case ["out_proj", _] if "linear_attn" in name:
            return turned(values.T).T
    return values


@torch.inference_mode()
def logits_of(model: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits of a transformers model after each of ``ids``: [ids, vocabulary]."""
    return as_array(model(torch.tensor([ids])).logits[0])
