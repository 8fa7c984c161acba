"""Safetensors checkpoints, sharded or not, into the fused weights that the forward wants."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from tqdm import tqdm

from ..config import Recipe
from ..errors import ModelError
from ..gguf import is_gguf
from ..text.guard import readable
from .families import Architecture, read_config
from .files import find_tensors
from .formats.base import PLAIN, REMEDY, say
from .formats.gguf import GGUFTensors
from .formats.registry import find_format
from .quantize import Matrix, Quantized, quantize
from .rope import half_split
from .rows import TILE

SLOW_TO_QUANTISE = 1 << 26
"""Matrices of this many elements and more are quantised under a progress bar."""
# The product with a ``packed`` weight; None in a torch built without oneDNN.
PACKED_LINEAR: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


@dataclass(frozen=True)
class Mlp:
    """A gated MLP; ``gate_up`` stacks gate and up."""

    gate_up: Matrix
    gate_up_bias: torch.Tensor | None
    down: Matrix
    down_bias: torch.Tensor | None


@dataclass(frozen=True)
class Experts:
    """A mixture of MLPs, and the router that scores them."""

    router: Matrix
    mlps: tuple[Mlp, ...]


@dataclass(frozen=True)
class LayerWeights:
    """One decoder layer. ``qkv`` stacks the query, key and value rows.

    The heads' elements stand in the order of ``rope.half_split``. ``attention_norm`` and
    ``output_norm`` are those behind attention and MLP, where a family has them.
    """

    input_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Matrix
    output_bias: torch.Tensor | None
    attention_norm: torch.Tensor | None
    mlp_norm: torch.Tensor
    mlp: Mlp | Experts
    output_norm: torch.Tensor | None

    def products(self) -> list[Matrix]:
        """The matrices that all rows go through."""
        mlp = self.mlp
        inner = [mlp.router] if isinstance(mlp, Experts) else [mlp.gate_up, mlp.down]
        return [self.qkv, self.output, *inner]


@dataclass(frozen=True)
class Weights:
    """A model's weights; products go through ``packed`` matrices, norms stand twice."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Matrix


class Source(Protocol):
    """Where weights come from, under the names of Hugging Face's models.

    Both raise ModelError for what is missing, misshapen or not read.
    """

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The tensor ``name`` of ``shape``, in ``dtype``; None is the one that it is stored in."""
        ...

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        """The matrix ``name`` of ``shape`` (out, in): quantised as stored, or in ``dtype``."""
        ...


def open_source(folder: Path, architecture: Architecture) -> Source:
    """The weights of the checkpoint in ``folder``.

    Raises:
        ModelError: its files are missing or damaged.
    """
    if is_gguf(folder):
        return GGUFTensors(folder, architecture.head_dim)
    return Checkpoint(folder)


class Checkpoint:
    """The tensors of a folder's safetensors files, by name, read when asked for.

    Raises:
        ModelError: there are none, a file is damaged, a tensor is missing or misshapen, or the
            weights are quantised in a way that is not read.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        options = getattr(read_config(folder), "quantization_config", None)
        self._format = find_format(options, folder)
        if self._format is not None and self._format.note:
            say(self._format.note)
        self._entries = find_tensors(folder)
        if not self._entries:
            raise ModelError(
                f"{folder} has no .safetensors file; convert the checkpoint with "
                "save_pretrained() (pickled weights are not read)."
            )

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def names(self) -> list[str]:
        """Of all tensors, in order."""
        return sorted(self._entries)

    def described(self, name: str) -> tuple[list[int], int]:
        """Shape of the tensor ``name``, which must be there, and bits of an element; not read."""
        entry = self._entries[name]
        width = re.search(r"\d+", entry.type)  # BF16, F8_E4M3, I64, BOOL
        return list(entry.shape), int(width.group()) if width else 8

    def raw(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor ``name`` as it is stored, of ``shape`` if given."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self.folder} has no tensor {name!r}; its config.json promises one.")
        if shape is not None and entry.shape != shape:
            raise ModelError(
                f"{self.folder}: tensor {name!r} is {list(entry.shape)}, but its config.json "
                f"says {list(shape)}."
            )
        return entry.read()

    def get(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """The plain tensor ``name`` of ``shape``, in ``dtype``, as stored if None."""
        tensor = self.raw(name, shape)
        if tensor.dtype not in PLAIN:
            raise ModelError(
                f"{self.folder}: tensor {name!r} holds {tensor.dtype}, and its config.json does "
                f"not say how to read that; {REMEDY}."
            )
        return tensor if dtype is None else tensor.to(dtype)

    def matrix(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Matrix:
        """The matrix ``name`` of ``shape`` (out, in): quantised as stored, or in ``dtype``."""
        if self._format is None:
            return self.get(name, shape, dtype)
        with readable(f"{self.folder}: tensor {name!r} cannot be read", f"{REMEDY}."):
            return self._format.matrix(self, name, shape, dtype)


def quantized(source: Source, name: str, shape: tuple[int, int], recipe: Recipe) -> Quantized:
    """The matrix ``name`` of ``shape`` (out, in), quantised by ``recipe`` from what is stored.

    Raises:
        ModelError: it holds what is no number, or see ``Source``.
    """
    try:
        return quantize(source.get(name, shape), recipe)
    except ValueError as error:
        raise ModelError(f"tensor {name!r} cannot be quantised: {error}.") from None


def plain(matrix: Matrix, dtype: torch.dtype) -> torch.Tensor:
    """``matrix`` as a tensor."""
    return matrix.dequantized(dtype) if isinstance(matrix, Quantized) else matrix


def with_zeros(matrix: Quantized) -> Quantized:
    """``matrix``, its zeros written out."""
    if matrix.zeros is not None:
        return matrix
    zeros = torch.full(matrix.scales.shape, 1 << (matrix.bits - 1), dtype=torch.uint8)
    return replace(matrix, zeros=zeros)


def stacked(parts: list[Matrix], dtype: torch.dtype) -> Matrix:
    """``parts`` on top of each other, dequantised to ``dtype`` unless quantised all alike."""
    quantised = [p for p in parts if isinstance(p, Quantized)]
    if len(quantised) == len(parts) and len({(p.bits, p.group) for p in quantised}) == 1:
        if any(p.zeros is not None for p in quantised):
            quantised = [with_zeros(p) for p in quantised]
        return Quantized.stacked(quantised)
    return torch.cat([plain(p, dtype) for p in parts])


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


class Loader:
    """Reads what ``architecture`` says of a checkpoint, layer by layer.

    ``pack`` makes of every matrix what its products want. Quantised ones are dequantised before,
    or with ``keeps`` handed on as they are, and norms and biases in fp32. With a ``recipe``
    matrices are quantised as they are read; routers, norms and biases are not.
    """

    def __init__(
        self,
        source: Source,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        pack: Callable[[torch.Tensor], torch.Tensor] = packed,
        keeps: bool = False,
        recipe: Recipe | None = None,
    ) -> None:
        self._source = source
        self._keeps = keeps
        self._fine = torch.float32 if keeps else dtype
        self._recipe = recipe
        self._head_recipe = recipe.head if recipe else None
        self._pack = pack
        self._a = architecture
        self._dtype = dtype
        self._device = device

    def get(self, name: str, *size: int) -> torch.Tensor:
        """The norm or bias ``name``, of ``size``."""
        return self._source.get(name, size, self._fine).to(self._device)

    def matrix(self, name: str, outputs: int, inputs: int, recipe: Recipe | None) -> Matrix:
        """The matrix ``name``, quantised by ``recipe`` if given, else as it is stored."""
        if recipe is not None:
            return quantized(self._source, name, (outputs, inputs), recipe)
        found = self._source.matrix(name, (outputs, inputs), self._dtype)
        return found if isinstance(found, Quantized) else found.to(self._device)

    def _ready(self, matrix: Matrix) -> Matrix:
        """What products with ``matrix`` want."""
        if self._keeps and isinstance(matrix, Quantized):
            return matrix
        return self._pack(plain(matrix, self._dtype).to(self._device))

    def norm(self, name: str, size: int | None = None) -> torch.Tensor:
        """A norm's weight, standing twice as ``transformer.rms_norm`` wants it."""
        weight = self.get(f"{name}.weight", size or self._a.hidden_size)
        weight = weight + 1 if self._a.gemma else weight
        return torch.cat((weight, weight))

    def _stacked(self, prefix: str, parts: dict[str, int], width: int) -> Matrix:
        """Several projections on top of each other, which fused checkpoints hold as one tensor."""
        if self._a.fused:
            name = self._fused(prefix, parts, "weight")
            return self.matrix(name, sum(parts.values()), width, self._recipe)
        names = {f"{prefix}{p}_proj.weight": rows for p, rows in parts.items()}
        found = [self.matrix(name, n, width, self._recipe) for name, n in names.items()]
        return stacked(found, self._dtype)

    def _biases(self, prefix: str, parts: dict[str, int]) -> torch.Tensor:
        """The biases of several projections, one behind the other."""
        if self._a.fused:
            return self.get(self._fused(prefix, parts, "bias"), sum(parts.values()))
        return torch.cat([self.get(f"{prefix}{p}_proj.bias", n) for p, n in parts.items()])

    def _fused(self, prefix: str, parts: dict[str, int], suffix: str) -> str:
        name = {"q": "qkv", "gate": "gate_up"}[next(iter(parts))]
        return f"{prefix}{name}_proj.{suffix}"

    def _turnable(self) -> torch.Tensor | None:
        """The order of queries', keys' and values' rows in which heads are as ``half_split`` says.

        None where they are so already. Products of queries and keys do not mind, and then all heads
        turn alike.
        """
        a = self._a
        if a.rotary_dim == a.head_dim:
            return None
        turning = a.num_heads + a.num_kv_heads
        rows = torch.arange((turning + a.num_kv_heads) * a.head_dim).view(-1, a.head_dim)
        rows[:turning] = rows[:turning, half_split(a.head_dim, a.rotary_dim)]
        return rows.flatten()

    def layer(self, index: int) -> LayerWeights:
        """The weights of one layer."""
        a, base = self._a, f"model.layers.{index}."
        attn, width = f"{base}self_attn.", a.hidden_size
        queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        parts = {"q": queries, "k": keys, "v": keys}
        qkv = self._stacked(attn, parts, width)
        bias = self._biases(attn, parts) if a.qkv_bias else None
        order = self._turnable()
        if order is not None:
            qkv = qkv.rows(order) if isinstance(qkv, Quantized) else qkv[order]
            bias = None if bias is None else bias[order]
        behind = f"{base}post_attention_layernorm"
        return LayerWeights(
            input_norm=self.norm(f"{base}input_layernorm"),
            qkv=self._ready(qkv),
            qkv_bias=bias,
            q_norm=self.norm(f"{attn}q_norm", a.head_dim) if a.qk_norm else None,
            k_norm=self.norm(f"{attn}k_norm", a.head_dim) if a.qk_norm else None,
            output=self._ready(self.matrix(f"{attn}o_proj.weight", width, queries, self._recipe)),
            output_bias=self.get(f"{attn}o_proj.bias", width) if a.output_bias else None,
            attention_norm=self.norm(behind) if a.gemma else None,
            mlp_norm=self.norm(f"{base}pre_feedforward_layernorm" if a.gemma else behind),
            mlp=self._experts(f"{base}mlp.") if a.sparse[index] else self._mlp(f"{base}mlp."),
            output_norm=self.norm(f"{base}post_feedforward_layernorm") if a.gemma else None,
        )

    def _mlp(self, prefix: str, inner: int | None = None) -> Mlp:
        a = self._a
        inner, width = inner or a.intermediate_size, a.hidden_size
        gated = {"gate": inner, "up": inner}
        return Mlp(
            gate_up=self._ready(self._stacked(prefix, gated, width)),
            gate_up_bias=self._biases(prefix, gated) if a.mlp_bias else None,
            down=self._ready(self.matrix(f"{prefix}down_proj.weight", width, inner, self._recipe)),
            down_bias=self.get(f"{prefix}down_proj.bias", width) if a.mlp_bias else None,
        )

    def _experts(self, prefix: str) -> Experts:
        a = self._a
        each = [f"{prefix}experts.{i}." for i in range(a.num_experts)]
        router = self.matrix(f"{prefix}gate.weight", a.num_experts, a.hidden_size, None)
        return Experts(
            router=self._ready(router),
            mlps=tuple(self._mlp(name, a.expert_size) for name in each),
        )

    def embedding(self) -> Matrix:
        """[vocabulary, hidden_size]."""
        a, name = self._a, "model.embed_tokens.weight"
        return self.matrix(name, a.vocab_size, a.hidden_size, self._head_recipe)

    def head(self, embedding: Matrix) -> Matrix:
        """What makes logits of the last hidden states; tied checkpoints have but the embedding."""
        a = self._a
        if a.tied:
            return self._ready(embedding)
        name = "lm_head.weight"
        return self._ready(self.matrix(name, a.vocab_size, a.hidden_size, self._head_recipe))


def layer_numbers(architecture: Architecture, doing: str, slow: float) -> Iterable[int]:
    """0 and up, under a bar if matrices have ``slow`` elements or more and stderr is a terminal."""
    a = architecture
    quick = a.num_layers * a.hidden_size * a.intermediate_size < slow
    return tqdm(range(a.num_layers), doing, disable=quick or None, leave=False)


def load_weights(
    folder: Path,
    architecture: Architecture,
    dtype: torch.dtype,
    device: torch.device,
    recipe: Recipe | None = None,
) -> Weights:
    """Read the checkpoint in ``folder`` as ``architecture`` says, into ``dtype`` on ``device``.

    Torch has no products with quantised matrices: they are rounded to ``dtype`` once more.

    Raises:
        ModelError: see ``Checkpoint``.
    """
    source = open_source(folder, architecture)
    loader = Loader(source, architecture, dtype, device, recipe=recipe)
    slow = math.inf if recipe is None else SLOW_TO_QUANTISE
    layers = tuple(map(loader.layer, layer_numbers(architecture, "Quantising weights", slow)))
    embedding = loader.embedding()
    table = plain(embedding, dtype).to(device)
    return Weights(table, layers, loader.norm("model.norm"), loader.head(embedding))
