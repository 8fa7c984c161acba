"""transformers' model of a checkpoint in fp32, which the audit compares with."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.config import Recipe
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.configs import whole
from ..checkpoints.dtypes import FLOAT32
from ..checkpoints.export import recipe_of
from ..checkpoints.weights import plain, quantized
from ..errors import ModelError
from ..models.tensors import as_array, as_tensor


def transformers_model(folder: Path, recipe: Recipe | None = None) -> Any:
    """Return transformers' model of the checkpoint in ``folder``, quantised by ``recipe``, in fp32.

    Outrider's readers dequantise quantised weights and GGUF files: transformers needs other
    packages for most of them, and the audit is about decoding.

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
        source = checkpoint.tensors
        for name, weight in model.named_parameters():
            if weight.dim() == 1:
                weight.copy_(as_tensor(source.get(name, tuple(weight.shape), FLOAT32)))
                continue
            outputs, inputs = weight.shape
            own = recipe_of(name, recipe, architecture.tied)
            if own is None:
                matrix = source.matrix(name, (outputs, inputs), FLOAT32)
            else:
                matrix = quantized(source, name, (outputs, inputs), own)
            weight.copy_(as_tensor(plain(matrix, FLOAT32)))
    return model


@torch.inference_mode()
def logits_of(model: Any, ids: Sequence[int]) -> NDArray[np.float32]:
    """Return the logits of a model of transformers behind each of ``ids``: [ids, vocabulary]."""
    return as_array(model(torch.tensor([ids])).logits[0])
