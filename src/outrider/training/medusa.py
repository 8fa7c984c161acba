"""Medusa heads in PyTorch: each drafts one token from the target's last hidden state.

Cai et al., "Medusa: Simple LLM inference acceleration framework with multiple decoding heads",
2024, section 2.1.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.dtypes import BFLOAT16, FLOAT32, Array
from ..checkpoints.dtypes import cast as to_dtype
from ..checkpoints.head_export import MEDUSA_DEFAULTS
from ..checkpoints.head_tensors import HeadTensors
from ..checkpoints.heads import BORROWS, Head
from ..checkpoints.matrices import plain
from .eagle3 import Rows, Unrolling
from .head_files import NewHead, target_loader, trained_config, write_checkpoint
from .optimisers import trained


class Block(nn.Module):
    """A residual block that begins as the identity."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` [rows, width] plus the block's output."""
        return x + F.silu(self.linear(x))


class Medusa(nn.Module):
    """Heads after the target's last norm, each with residual blocks and an output matrix.

    New heads share one output matrix, the target's, which is frozen.
    """

    norm: Tensor

    def __init__(self, head: Head, norm: Tensor, eps: float) -> None:
        super().__init__()
        self.head, self._eps = head, eps
        self.register_buffer("norm", norm, False)
        width, heads = head.hidden_size, range(head.longest or 1)
        self.blocks = nn.ModuleList(
            nn.Sequential(*(Block(width) for _ in range(head.blocks))) for _ in heads
        )
        outputs = [0] if head.borrows_output else heads
        self.lm_heads = nn.ModuleList(nn.Linear(width, head.vocab_size, False) for _ in outputs)
        self.lm_heads.requires_grad_(not head.borrows_output)

    def unroll(self, rows: Rows, depth: int) -> Unrolling:
        """Yield the inputs of each head's output matrix, [drafts, width]."""
        state = rows.fused[rows.drafts]
        normed = F.rms_norm(state, (state.shape[-1],), self.norm, self._eps)
        for blocks in self.blocks[:depth]:
            which = yield blocks(normed)
            if which is not None:
                normed = normed[which]

    def logits(self, depth: int, x: Tensor) -> Tensor:
        """Return the logits of one head, [rows, ids]."""
        said: Tensor = self.lm_heads[0 if self.head.borrows_output else depth](x)
        return said

    def tensor_name(self, parameter: str) -> str:
        """Return a parameter's name in a file, where the output matrix follows the blocks."""
        part, number, rest = parameter.split(".", 2)
        return f"{number}.{self.head.blocks}.{rest}" if part == "lm_heads" else f"{number}.{rest}"


def write_new_medusa(folder: Path, checkpoint: Checkpoint, new: NewHead) -> None:
    """Write untrained heads to a folder; each gives the target's own logits."""
    a, _ = target_loader(checkpoint)
    config = {
        "medusa_num_heads": new.length, "medusa_num_layers": 1,
        "base_model_name_or_path": new.verifier,
        "hidden_size": a.hidden_size, "vocab_size": a.vocab_size, "medusa_fc_bias": True,
        BORROWS: True,
    } | MEDUSA_DEFAULTS  # fmt: skip
    tensors: dict[str, Array] = {}
    for head in range(new.length):
        tensors[f"{head}.0.linear.weight"] = np.zeros((a.hidden_size, a.hidden_size), np.float32)
        tensors[f"{head}.0.linear.bias"] = np.zeros(a.hidden_size, np.float32)
    write_checkpoint(folder, config, tensors)


def load_medusa(head: Head, checkpoint: Checkpoint, context: int) -> Medusa:
    """Return heads with their weights, after the target's last norm."""
    a, loader = target_loader(checkpoint)
    norm = torch.from_numpy(loader.norm("model.norm")[: a.hidden_size])
    module, source = Medusa(head, norm, a.norm_eps), HeadTensors(head.files)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            array = plain(loader.head(loader.table()), FLOAT32)
        else:
            array = source.get(module.tensor_name(name), tuple(parameter.shape), FLOAT32)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    return module


def save_medusa(module: Medusa, values: Mapping[str, Tensor] | None, folder: Path) -> None:
    """Write trained heads to a folder, in bf16; ``values`` replace the module's parameters."""
    parameters = values or trained(module)
    tensors = {
        module.tensor_name(name): to_dtype(parameter.numpy(), BFLOAT16)
        for name, parameter in parameters.items()
    }
    write_checkpoint(folder, trained_config(module.head), tensors)
