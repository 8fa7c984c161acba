"""The weights of a checkpoint as torch's forward needs them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..base.config import Recipe
from ..checkpoints.architecture import Architecture
from ..checkpoints.dtypes import Array
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
    Source,
    layer_numbers,
    plain,
)
from .tensors import as_tensor

# Multiplies by a ``packed`` weight; None in a torch built without oneDNN.
PACKED_LINEAR: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)

TorchMlp = Mlp[torch.Tensor, torch.Tensor]
TorchExperts = Experts[torch.Tensor, torch.Tensor]
TorchLinear = LinearWeights[torch.Tensor, torch.Tensor]
TorchLayer = LayerWeights[torch.Tensor, torch.Tensor]


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
    """Makes tensors of what a ``Loader`` reads."""

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

    def layer(self, layer: LayerWeights[Matrix, Array]) -> TorchLayer:
        mlp: TorchMlp | TorchExperts | None = None
        if isinstance(layer.mlp, Experts):
            mlp = Experts(self.matrix(layer.mlp.router), tuple(map(self.mlp, layer.mlp.mlps)))
        elif layer.mlp is not None:
            mlp = self.mlp(layer.mlp)
        return LayerWeights(
            input_norm=self.maybe(layer.input_norm),
            qkv=None if layer.qkv is None else self.matrix(layer.qkv),
            qkv_bias=self.maybe(layer.qkv_bias),
            q_norm=self.maybe(layer.q_norm),
            k_norm=self.maybe(layer.k_norm),
            output=None if layer.output is None else self.matrix(layer.output),
            output_bias=self.maybe(layer.output_bias),
            attention_norm=self.maybe(layer.attention_norm),
            mlp_norm=self.maybe(layer.mlp_norm),
            mlp=mlp,
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
    layers = tuple(placed.layer(loader.layer(number)) for number in numbers)
    table = plain(loader.table(), dtype)
    embedding = placed.vector(table)
    head = packed(embedding) if architecture.tied else placed.matrix(loader.head(table))
    return Weights(embedding, layers, placed.vector(loader.norm("model.norm")), head)
