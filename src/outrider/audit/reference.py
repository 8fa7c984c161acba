"""The model that the audit compares with: transformers' own, in fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..config import Recipe
from ..errors import ModelError
from ..gguf import is_gguf
from ..models.export import recipe_of
from ..models.families import read_architecture, read_config
from ..models.weights import open_source, plain, quantized


def transformers_model(folder: Path, recipe: Recipe | None = None) -> Any:
    """transformers' model of the checkpoint in ``folder``, in fp32, quantised by ``recipe``.

    Quantised weights and GGUF files are dequantised by Outrider's readers: transformers needs other
    packages for most of them, and what is audited is the decoding.

    Raises:
        ModelError: the checkpoint cannot be read; or it is a quantised mixture of experts.
    """
    config = read_config(folder)
    if recipe is None and not is_gguf(folder) and not getattr(config, "quantization_config", None):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    architecture = read_architecture(config, folder)
    if architecture is None or any(architecture.sparse):
        raise ModelError(f"{folder}: a quantised mixture of experts cannot be audited.")
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        source = open_source(folder, architecture)
        for name, weight in model.named_parameters():
            size = tuple(weight.shape)
            made = recipe_of(name, recipe, architecture.tied)
            if made is not None:
                few = quantized(source, name, (size[0], size[1]), made)
                found = few.dequantized(torch.float32)
            elif len(size) == 2:
                found = plain(source.matrix(name, (size[0], size[1]), torch.float32), torch.float32)
            else:
                found = source.get(name, size, torch.float32)
            weight.copy_(found)
    return model
