"""Safetensors checkpoints, sharded or not, into the fused weights that the forward wants."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from ..config import Recipe
from ..errors import ModelError
from .families import Architecture
from .packed import read_packed, read_schemes
from .quantize import Matrix, Quantized, quantize
from .rope import half_split
from .rows import TILE

SLOW_TO_QUANTISE = 1 << 26
"""Matrices of this many elements and more are quantised under a progress bar."""
# The product with a ``packed`` weight; None in a torch built without oneDNN.
PACKED_LINEAR: Any = getattr(getattr(torch.ops.mkldnn, "_linear_pointwise", None), "default", None)


M = TypeVar("M", torch.Tensor, Quantized, Matrix)


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
        self._schemes = read_schemes(folder)

    def names(self) -> list[str]:
        """Of all tensors, in order."""
        return sorted(self._where)

    def raw(self, name: str) -> torch.Tensor:
        """The tensor ``name``, which must be there, as it is stored."""
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor

    def described(self, name: str) -> tuple[list[int], int]:
        """Shape of the tensor ``name``, which must be there, and bits of an element; not read."""
        found = self._where[name].get_slice(name)
        width = re.search(r"\d+", found.get_dtype())  # BF16, F8_E4M3, I64, BOOL
        return found.get_shape(), int(width.group()) if width else 8

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The tensor ``name`` of ``shape``, in ``dtype``."""
        if name not in self._where:
            raise ModelError(f"{self.folder} has no tensor {name!r}; its config.json promises one.")
        tensor = self.raw(name)
        if tuple(tensor.shape) != shape:
            raise ModelError(
                f"{self.folder}: tensor {name!r} is {list(tensor.shape)}, but its config.json "
                f"says {list(shape)}."
            )
        return tensor.to(dtype)

    def quantize(self, name: str, shape: tuple[int, int], recipe: Recipe) -> Quantized:
        """The matrix ``name`` of ``shape``, quantised by ``recipe`` from what is stored."""
        try:
            return quantize(self.get(name, shape, torch.float32), recipe)
        except ValueError as error:
            raise ModelError(
                f"{self.folder}: tensor {name!r} cannot be quantised: {error}."
            ) from None

    def quantized(self, name: str, shape: tuple[int, int]) -> Quantized | None:
        """The matrix ``name`` of ``shape`` if it is stored quantised, else None."""
        recipe = self._schemes.of(name) if self._schemes else None
        return None if recipe is None else read_packed(self, name, shape, recipe)


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

    ``pack`` makes of every matrix what its products want. With a ``recipe`` the matrices are
    quantised as they are read; router, norms, biases and an embedding of its own are not.
    """

    def __init__(
        self,
        source: Checkpoint,
        architecture: Architecture,
        dtype: torch.dtype,
        device: torch.device,
        pack: Callable[..., Matrix],
        recipe: Recipe | None = None,
    ) -> None:
        self._source = source
        self._recipe = recipe
        self._tied: Quantized | None = None
        self._pack = pack
        self._a = architecture
        self._dtype = dtype
        self._device = device

    def get(self, name: str, *size: int) -> torch.Tensor:
        """The tensor ``name``, of ``size``."""
        return self._source.get(name, size, self._dtype).to(self._device)

    def norm(self, name: str, size: int | None = None) -> torch.Tensor:
        """A norm's weight, standing twice as ``transformer.rms_norm`` wants it."""
        weight = self.get(f"{name}.weight", size or self._a.hidden_size)
        weight = weight + 1 if self._a.gemma else weight
        return torch.cat((weight, weight))

    def matrix(self, name: str, out: int, inputs: int, recipe: Recipe | None) -> Matrix:
        """The matrix ``name``, quantised if the checkpoint has it so or a ``recipe`` is given."""
        found = self._source.quantized(name, (out, inputs))
        if found is not None:
            return found
        if recipe is None:
            return self.get(name, out, inputs)
        return self._source.quantize(name, (out, inputs), recipe)

    def _names(self, prefix: str, parts: dict[str, int], suffix: str) -> dict[str, int]:
        """Projections that stand on top of each other, and their outputs; fused ones are one."""
        if self._a.fused:
            name = {"q": "qkv", "gate": "gate_up"}[next(iter(parts))]
            return {f"{prefix}{name}_proj.{suffix}": sum(parts.values())}
        return {f"{prefix}{p}_proj.{suffix}": n for p, n in parts.items()}

    def _bias(self, prefix: str, parts: dict[str, int]) -> torch.Tensor:
        """The biases of several projections, one after the other."""
        return torch.cat([self.get(*item) for item in self._names(prefix, parts, "bias").items()])

    def _stacked(self, prefix: str, parts: dict[str, int], inputs: int) -> Matrix:
        """Several projections on top of each other."""
        names = self._names(prefix, parts, "weight")
        found = [self.matrix(name, n, inputs, self._recipe) for name, n in names.items()]
        quantised = [m for m in found if isinstance(m, Quantized)]
        if not quantised:
            return torch.cat([m for m in found if isinstance(m, torch.Tensor)])
        if (
            len(quantised) < len(found)
            or len({(m.bits, m.group, m.zeros is None) for m in quantised}) > 1
        ):
            raise ModelError(
                f"{self._source.folder}: {' and '.join(names)} are quantised in different ways, "
                "but run as one matrix; give a checkpoint that treats them alike."
            )
        return Quantized.stacked(quantised)

    def _turnable(self, qkv: M) -> M:
        """``qkv`` [rows, ...] with the elements of query and key heads as ``half_split`` has them.

        Products of queries and keys do not mind, and then all heads turn alike.
        """
        a = self._a
        if a.rotary_dim == a.head_dim:
            return qkv
        heads = torch.arange(qkv.shape[0]).view(-1, a.head_dim)
        turning = a.num_heads + a.num_kv_heads
        heads[:turning] = heads[:turning, half_split(a.head_dim, a.rotary_dim)]
        order = heads.flatten()
        return qkv.rows(order) if isinstance(qkv, Quantized) else qkv[order]

    def layer(self, index: int) -> LayerWeights:
        """The weights of one layer."""
        a, base = self._a, f"model.layers.{index}."
        attn, width = f"{base}self_attn.", a.hidden_size
        queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        parts = {"q": queries, "k": keys, "v": keys}
        bias = self._turnable(self._bias(attn, parts)) if a.qkv_bias else None
        behind = f"{base}post_attention_layernorm"
        return LayerWeights(
            input_norm=self.norm(f"{base}input_layernorm"),
            qkv=self._pack(self._turnable(self._stacked(attn, parts, width))),
            qkv_bias=bias,
            q_norm=self.norm(f"{attn}q_norm", a.head_dim) if a.qk_norm else None,
            k_norm=self.norm(f"{attn}k_norm", a.head_dim) if a.qk_norm else None,
            output=self._pack(self.matrix(f"{attn}o_proj.weight", width, queries, self._recipe)),
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
            gate_up=self._pack(self._stacked(prefix, gated, width)),
            gate_up_bias=self._bias(prefix, gated) if a.mlp_bias else None,
            down=self._pack(self.matrix(f"{prefix}down_proj.weight", width, inner, self._recipe)),
            down_bias=self.get(f"{prefix}down_proj.bias", width) if a.mlp_bias else None,
        )

    def _experts(self, prefix: str) -> Experts:
        a = self._a
        each = [f"{prefix}experts.{i}." for i in range(a.num_experts)]
        return Experts(
            router=self._pack(self.get(f"{prefix}gate.weight", a.num_experts, a.hidden_size)),
            mlps=tuple(self._mlp(name, a.expert_size) for name in each),
        )

    def embedding(self) -> torch.Tensor:
        """[vocabulary, hidden_size]; that of a quantised head, rounded alike, where it is tied."""
        a, name = self._a, "model.embed_tokens.weight"
        recipe = self._recipe.head if self._recipe and a.tied else None
        found = self.matrix(name, a.vocab_size, a.hidden_size, recipe)
        if isinstance(found, torch.Tensor):
            return found
        self._tied = found
        return found.dequantized(self._dtype).to(self._device)

    def head(self, embedding: torch.Tensor) -> Matrix:
        """What makes logits of the last hidden states; tied checkpoints have but the embedding."""
        a = self._a
        if a.tied:
            return self._pack(embedding if self._tied is None else self._tied)
        recipe = self._recipe.head if self._recipe else None
        return self._pack(self.matrix("lm_head.weight", a.vocab_size, a.hidden_size, recipe))


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

    def pack(matrix: Matrix) -> torch.Tensor:
        plain = matrix.dequantized(dtype) if isinstance(matrix, Quantized) else matrix
        return packed(plain.to(device))

    with ExitStack() as stack:
        loader = Loader(Checkpoint(folder, stack), architecture, dtype, device, pack, recipe)
        count = architecture.num_layers
        size = count * architecture.hidden_size * architecture.intermediate_size
        quiet = recipe is None or size < SLOW_TO_QUANTISE
        numbers = tqdm(range(count), "Quantising weights", disable=quiet, leave=False)
        layers = tuple(loader.layer(i) for i in numbers)
        embedding = loader.embedding()
        return Weights(embedding, layers, loader.norm("model.norm"), loader.head(embedding))
