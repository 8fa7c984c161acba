"""Linear attention in torch, row by row: the reference of the native step's.

Gated delta nets (Yang et al., "Gated delta networks: improving Mamba2 with delta rule", 2025) and
Mamba-2 (Dao and Gu, "Transformers are SSMs", 2024).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from ..checkpoints.architecture import LinearAttention
from .states import Tensors, Walks, alike, convolved
from .torch_weights import TorchLinear

SMALLEST = 1e-6
"""Added to the squares of a query or key before their root is taken."""


def unit(x: torch.Tensor) -> torch.Tensor:
    """Return vectors [..., size] of length 1, in fp32."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + SMALLEST)


def linear_attention(
    walks: Walks,
    layer: int,
    inputs: torch.Tensor,
    rates: torch.Tensor,
    taps: torch.Tensor,
    taps_bias: torch.Tensor | None,
    weights: TorchLinear,
    shape: LinearAttention,
    eps: float,
) -> torch.Tensor:
    """Return the output of linear attention over each sequence's rows, [padded rows, values].

    ``inputs`` [padded rows, .] are queries, keys, values and gates. ``rates`` [padded rows, 2 *
    value heads] are strengths and decays; Mamba-2 has one rate for both [padded rows, value heads].
    The state of a head is fp32 [key_dim, value_dim].
    """
    s, dtype = shape, inputs.dtype
    mixed, gates = inputs.split((s.conv_width, s.values), -1)
    if s.gate_scale != 1:
        gates = gates * s.gate_scale
    steps = rates if s.mamba else rates.chunk(2, -1)[1]
    strengths = alike(F.softplus, steps.float() * s.step_scale + weights.dt_bias)
    decays = alike(torch.exp, weights.decay * strengths)
    if not s.mamba:
        strengths = alike(torch.sigmoid, rates.chunk(2, -1)[0]).float()
    keys, places = s.key_heads * s.key_dim, torch.arange(s.value_heads, device=inputs.device)
    sharing = places % s.key_heads if s.tiled_heads else places // (s.value_heads // s.key_heads)

    def advance(state: Tensors, rows: Tensors) -> tuple[torch.Tensor, Tensors]:
        past, memory = state
        line, past = convolved(past, rows[0], taps, taps_bias)
        line = alike(F.silu, line).float()
        parts = [
            each.view(len(line), s.key_heads, s.key_dim)
            for each in (line[:, :keys], line[:, keys : 2 * keys])
        ]
        if not s.mamba:
            parts = [unit(each) for each in parts]
            parts[0] = parts[0] / s.key_dim**0.5
        queries, own = (each.index_select(1, sharing) for each in parts)
        values = line[:, 2 * keys :].view(len(line), s.value_heads, s.value_dim)
        out = []
        for q, k, v, strength, decay in zip(queries, own, values, *rows[1:], strict=True):
            memory = memory * decay[:, None, None]
            known = 0 if s.mamba else (memory * k[:, :, None]).sum(1)
            update = (v - known) * strength[:, None]
            memory = memory + k[:, :, None] * update[:, None]
            found = (memory * q[:, :, None]).sum(1)
            out.append(found if weights.skip is None else found + v * weights.skip[:, None])
        return torch.stack(out).to(dtype), (past, memory)

    zero = (
        mixed.new_zeros(len(taps) - 1, s.conv_width),
        inputs.new_zeros(s.value_heads, s.key_dim, s.value_dim, dtype=torch.float32),
    )
    out = walks.run(layer, (mixed, strengths, decays), zero, advance).float()
    out, gates = out.flatten(1), alike(F.silu, gates.float())
    out = out * gates if s.gate_first else out
    if s.norm_groups:
        groups = out.unflatten(1, (s.norm_groups, -1))
        out = (groups * torch.rsqrt(groups.pow(2).mean(-1, keepdim=True) + eps)).flatten(1)
    out = weights.norm * out.to(dtype)
    return (out if s.gate_first else out * gates).to(dtype)
