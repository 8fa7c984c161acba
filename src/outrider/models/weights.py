"""Safetensors checkpoints, sharded or not, into the fused weights that the forward wants."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ..errors import ModelError
from .families import Shape
from .rows import TILE

# The product with a ``packed`` weight; None in a torch built without oneDNN.
PACKED_LINEAR: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. ``qkv`` stacks the query, key and value rows, ``gate_up`` gate and up."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    output_bias: torch.Tensor | None
    post_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Weights:
    """A model's weights; products go through ``packed`` matrices, norms stand twice."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


class Checkpoint:
    """The tensors of a folder's safetensors files, by name, read when asked for.

    Raises:
        ModelError: there are none, a file is damaged, or a tensor is missing or misshapen.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            try:
                names = set(json.loads(index.read_text())["weight_map"].values())
                files = sorted(folder / name for name in names)
            except (ValueError, KeyError, AttributeError, TypeError):
                raise ModelError(f"{index} is damaged; fetch the checkpoint again.") from None
        else:
            files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ModelError(
                f"{folder} has no .safetensors file; convert the checkpoint with "
                "save_pretrained() (pickled weights are not read)."
            )
        self._where = {}
        for file in files:
            if not file.is_file():
                raise ModelError(f"{file} is missing; fetch the checkpoint again.")
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except SafetensorError as error:
                raise ModelError(f"{file} is damaged ({error}); fetch it again.") from None
            for name in handle.keys():  # noqa: SIM118  (a handle, not a dict)
                self._where[name] = handle

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor ``name`` of ``shape``, in ``dtype``."""
        if name not in self._where:
            raise ModelError(f"{self.folder} has no tensor {name!r}; its config.json promises one.")
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.folder}: tensor {name!r} is {list(tensor.shape)}, but its config.json "
                f"says {list(shape)}."
            )
        return tensor.to(dtype)


def packed(weight: torch.Tensor) -> torch.Tensor:
    """``weight`` [out, in] in the layout of oneDNN's kernels, where those would repack it anyway.

    For bf16 on a CPU with bf16 instructions: without this every product rearranges its weight anew,
    which costs as much as the product of a few rows. The results are the same bits.
    """
    if weight.dtype != torch.bfloat16 or weight.device.type != "cpu" or not bf16_kernels():
        return weight
    out: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, TILE)
    return out


def bf16_kernels() -> bool:
    """True where torch has oneDNN's prepacked products and the CPU's bf16 instructions."""
    ops = torch.ops.mkldnn
    return PACKED_LINEAR is not None and bool(ops._is_mkldnn_bf16_supported())


def load_weights(folder: Path, shape: Shape, dtype: torch.dtype, device: torch.device) -> Weights:
    """Read the checkpoint in ``folder`` as ``shape`` says, into ``dtype`` on ``device``.

    Raises:
        ModelError: see ``Checkpoint``.
    """
    with ExitStack() as stack:
        source = Checkpoint(folder, stack)

        def get(name: str, *size: int) -> torch.Tensor:
            return source.get(name, size, dtype).to(device)

        def norm(name: str, size: int) -> torch.Tensor:
            weight = get(f"{name}.weight", size)
            return torch.cat((weight, weight))  # as ``transformer.rms_norm`` wants it

        def stacked(prefix: str, parts: dict[str, int], suffix: str, *rest: int) -> torch.Tensor:
            return torch.cat(
                [get(f"{prefix}{p}_proj.{suffix}", n, *rest) for p, n in parts.items()]
            )

        width, inner = shape.hidden_size, shape.intermediate_size
        queries = shape.num_heads * shape.head_dim
        keys = shape.num_kv_heads * shape.head_dim
        attention = {"q": queries, "k": keys, "v": keys}
        gated = {"gate": inner, "up": inner}
        layers = []
        for i in range(shape.num_layers):
            base = f"model.layers.{i}."
            attn, mlp = f"{base}self_attn.", f"{base}mlp."
            layers.append(
                LayerWeights(
                    input_norm=norm(f"{base}input_layernorm", width),
                    qkv=packed(stacked(attn, attention, "weight", width)),
                    qkv_bias=stacked(attn, attention, "bias") if shape.qkv_bias else None,
                    q_norm=norm(f"{attn}q_norm", shape.head_dim) if shape.qk_norm else None,
                    k_norm=norm(f"{attn}k_norm", shape.head_dim) if shape.qk_norm else None,
                    output=packed(get(f"{attn}o_proj.weight", width, queries)),
                    output_bias=get(f"{attn}o_proj.bias", width) if shape.output_bias else None,
                    post_norm=norm(f"{base}post_attention_layernorm", width),
                    gate_up=packed(stacked(mlp, gated, "weight", width)),
                    gate_up_bias=stacked(mlp, gated, "bias") if shape.mlp_bias else None,
                    down=packed(get(f"{mlp}down_proj.weight", width, inner)),
                    down_bias=get(f"{mlp}down_proj.bias", width) if shape.mlp_bias else None,
                )
            )
        embedding = get("model.embed_tokens.weight", shape.vocab_size, width)
        head = embedding if shape.tied else get("lm_head.weight", shape.vocab_size, width)
        return Weights(embedding, tuple(layers), norm("model.norm", width), packed(head))
