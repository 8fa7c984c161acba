"""Experts of tiny checkpoints as one tensor, as some families are published."""

from __future__ import annotations

import re

import torch


def fuse_experts(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """``tensors`` with those of all experts of a layer stacked, gates before what they gate."""
    left, parts = dict[str, torch.Tensor](), dict[str, dict[tuple[str, int], torch.Tensor]]()
    for name, tensor in tensors.items():
        part = re.fullmatch(r"(.*mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight", name)
        if part is None:
            left[name] = tensor
        else:
            parts.setdefault(part[1], {})[part[3], int(part[2])] = tensor
    for base, own in parts.items():
        count = len(own) // 3
        each = [torch.cat((own["gate", i], own["up", i])) for i in range(count)]
        left[f"{base}gate_up_proj"] = torch.stack(each)
        left[f"{base}down_proj"] = torch.stack([own["down", i] for i in range(count)])
    return left
