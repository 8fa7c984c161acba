"""The weights of a checkpoint as torch's forward needs them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..base.config import Recipe
from ..checkpoints.architecture import Architecture, Mixture
from ..checkpoints.dtypes import Array
from ..checkpoints.matrices import Source, plain
from ..checkpoints.quantize import Matrix
from ..checkpoints.weights import (
    SLOW_TO_QUANTISE,
    TILE,
    Beside,
    Experts,
    LayerWeights,
    LinearWeights,
    Loader,
    Mlp,
    layer_numbers,
)
from .tensors import as_tensor

# Multiplies by a ``packed`` weight; None in a torch built without oneDNN.
PACKED_LINEAR: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)

TorchMlp = Mlp[torch.Tensor, torch.Tensor]
TorchLinear = LinearWeights[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class TorchExperts:
    """A mixture of MLPs, and the router that scores them; see ``weights.Experts``."""

    router: torch.Tensor
    router_bias: torch.Tensor | None
    choice_bias: torch.Tensor | None
    mlps: tuple[TorchMlp, ...]
    shared: TorchMlp | None


@dataclass(frozen=True)
class TorchLayer(LayerWeights[torch.Tensor, torch.Tensor]):
    """One decoder layer."""

    mixed: TorchExperts | None = None

    def products(self) -> list[torch.Tensor]:
        """Return the matrices that multiply every row."""
        mixed = self.mixed
        shared = mixed.shared if mixed else None
        more = [mixed.router] if mixed else []
        more += [shared.gate_up, shared.down] if shared else []
        return super().products() + more


@dataclass(frozen=True)
class Weights:
    """A model's weights: matrices are ``packed``, norms are repeated twice."""

    embedding: torch.Tensor
    layers: tuple[TorchLayer, ...]
    norm: torch.Tensor
    head: torch.Tensor


def packed(weight: torch.Tensor) -> torch.Tensor:
    """Return ``weight`` [out, in] in the layout of oneDNN's bf16 kernels, if those would run.

    Otherwise every product rearranges its weight, which costs as much as the product of a few
    rows. The results are the same bits.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not bf16_kernels():
        return weight
    out: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TILE)
    return out


def bf16_kernels() -> bool:
    """Return whether torch has oneDNN's prepacked products and the CPU has bf16 instructions."""
    ops = torch.ops.mkldnn
    return PACKED_LINEAR is not None and bool(ops._is_mkldnn_bf16_supported())


@dataclass(frozen=True)
class _Placed:
    """Makes tensors from the arrays that a ``Loader`` reads."""

    dtype: np.dtype[Any]
    device: str

    def vector(self, array: Array) -> torch.Tensor:
        return as_tensor(array).to(self.device)

    def maybe(self, array: Array | None) -> torch.Tensor | None:
        return None if array is None else self.vector(array)

    def matrix(self, matrix: Matrix) -> torch.Tensor:
        return packed(self.vector(plain(matrix, self.dtype)))

    def mlp(self, mlp: Mlp[Matrix, Array]) -> TorchMlp:
        return Mlp(
            gate_up=self.matrix(mlp.gate_up),
            gate_up_bias=self.maybe(mlp.gate_up_bias),
            down=self.matrix(mlp.down),
            down_bias=self.maybe(mlp.down_bias),
        )

    def experts(self, given: Experts[Matrix, Array], count: int) -> TorchExperts:
        """Return a mixture with a matrix of its own for each of its ``count`` experts."""
        gate_up, down = plain(given.gate_up, self.dtype), plain(given.down, self.dtype)
        gates = gate_up.reshape(-1, count, down.shape[1], gate_up.shape[1])
        last = down.reshape(count, len(down) // count, -1)
        by_gate, by_last = (
            None if bias is None else bias.reshape(-1, count, len(bias) // (parts * count))
            for bias, parts in ((given.gate_up_bias, 2), (given.down_bias, 1))
        )
        mlps = [
            Mlp(
                gate_up=self.matrix(np.ascontiguousarray(gates[:, i]).reshape(-1, gates.shape[-1])),
                gate_up_bias=None if by_gate is None else self.vector(by_gate[:, i].ravel()),
                down=self.matrix(np.ascontiguousarray(last[i])),
                down_bias=None if by_last is None else self.vector(by_last[0, i]),
            )
            for i in range(count)
        ]
        return TorchExperts(
            router=self.matrix(given.router),
            router_bias=self.maybe(given.router_bias),
            choice_bias=self.maybe(given.choice_bias),
            mlps=tuple(mlps),
            shared=None if given.shared is None else self.mlp(given.shared),
        )

    def linear(self, linear: LinearWeights[Matrix, Array]) -> TorchLinear:
        return LinearWeights(
            rates=self.matrix(linear.rates),
            decay=self.vector(linear.decay),
            dt_bias=self.vector(linear.dt_bias),
            norm=self.vector(linear.norm),
            skip=self.maybe(linear.skip),
        )

    def beside(self, beside: Beside[Matrix]) -> Beside[torch.Tensor]:
        return Beside(self.matrix(beside.qkv), self.matrix(beside.output))

    def layer(self, layer: LayerWeights[Matrix, Array], mixture: Mixture | None) -> TorchLayer:
        mixed = None
        if layer.experts is not None and mixture is not None:
            mixed = self.experts(layer.experts, mixture.experts)
        return TorchLayer(
            input_norm=self.maybe(layer.input_norm),
            qkv=None if layer.qkv is None else self.matrix(layer.qkv),
            qkv_bias=self.maybe(layer.qkv_bias),
            q_norm=self.maybe(layer.q_norm),
            k_norm=self.maybe(layer.k_norm),
            output=None if layer.output is None else self.matrix(layer.output),
            output_bias=self.maybe(layer.output_bias),
            attention_norm=self.maybe(layer.attention_norm),
            mlp_norm=self.maybe(layer.mlp_norm),
            mlp=None if layer.mlp is None else self.mlp(layer.mlp),
            mixed=mixed,
            sinks=self.maybe(layer.sinks),
            output_norm=self.maybe(layer.output_norm),
            taps=self.maybe(layer.taps),
            taps_bias=self.maybe(layer.taps_bias),
            linear=None if layer.linear is None else self.linear(layer.linear),
            beside=None if layer.beside is None else self.beside(layer.beside),
        )


def load_weights(
    source: Source,
    architecture: Architecture,
    dtype: np.dtype[Any],
    device: str,
    recipe: Recipe | None = None,
) -> Weights:
    """Return the weights of a checkpoint, dequantised to ``dtype``."""
    loader, placed = Loader(source, architecture, dtype, recipe=recipe), _Placed(dtype, device)
    slow = math.inf if recipe is None else SLOW_TO_QUANTISE
    numbers = layer_numbers(architecture, "Quantising weights", slow)
    layers = tuple(placed.layer(loader.layer(number), architecture.mixture) for number in numbers)
    table = plain(loader.table(), dtype)
    embedding = placed.vector(table)
    head = packed(embedding) if architecture.tied else placed.matrix(loader.head(table))
    return Weights(embedding, layers, placed.vector(loader.norm("model.norm")), head)
