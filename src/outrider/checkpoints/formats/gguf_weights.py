"""The tensors of a GGUF file, under the names of Hugging Face's models.

The native step multiplies by the codes of most types as they are; for torch, and for rare types,
the ``gguf`` package dequantises them.
"""

import re
from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...base.threads import on_all_threads
from ...errors import ModelError
from ..architecture import ExpertLayout
from ..coded import Coded, CodedPart
from ..dtypes import FLOAT32, Array
from ..quantize import Codes, Matrix, Quantized
from .gguf import GGUF, StoredTensor
from .gguf_config import form_of
from .gguf_types import Kind

GROUP = 32
"""Weights of a block of Q8_0 and Q4_0."""
CODED = (
    Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0, Kind.Q2_K, Kind.Q3_K, Kind.Q4_K,
    Kind.Q5_K, Kind.Q6_K, Kind.IQ4_NL, Kind.IQ4_XS, Kind.MXFP4,
)  # fmt: skip
"""Types that native/src/coded.cpp reads."""
PLAIN = {Kind.F32: np.float32, Kind.F16: np.float16, Kind.BF16: ml_dtypes.bfloat16}
CHUNK = 1 << 20
"""Elements that are dequantised at a time, in fp32."""

GATE_UP = "mlp.gate_up_proj"
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
IN_LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.choice": "exp_probs_b",
    **{f"mlp.experts.{p}_proj": f"ffn_{p}_exps" for p in ("gate", "up", "down", "gate_up")},
    **{f"mlp.shared_expert.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")},
}
EXPERTS = ExpertLayout(shared_gate="mlp.shared_expert_gate", bias="mlp.choice.bias")
"""The names by which parts of mixtures are requested, whatever the family's names."""
_AFTER = {
    "post_attention_layernorm": "post_attention_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
_AROUND = {**_AFTER, "pre_feedforward_layernorm": "ffn_norm"}
_LFM2 = {f"conv.{name}": f"shortconv.{name}" for name in ("in_proj", "conv", "out_proj")}
_QWEN35 = {
    "post_attention_layernorm": "post_attention_norm",
    "linear_attn.in_proj_qkv": "attn_qkv", "linear_attn.in_proj_z": "attn_gate",
    "linear_attn.in_proj_b": "ssm_beta", "linear_attn.in_proj_a": "ssm_alpha",
    "linear_attn.conv1d": "ssm_conv1d", "linear_attn.norm": "ssm_norm",
    "linear_attn.out_proj": "ssm_out",
}  # fmt: skip
_MAMBA = {
    "mamba.in_proj": "ssm_in", "mamba.conv1d": "ssm_conv1d", "mamba.norm": "ssm_norm",
    "mamba.out_proj": "ssm_out",
}  # fmt: skip
OTHERWISE = {
    "granitehybrid": {**_MAMBA, "shared_mlp.output_linear": "ffn_down"},
    "nemotron_h": _MAMBA,
    "nemotron_h_moe": _MAMBA,
    "falcon-h1": _MAMBA,
    "lfm2": _LFM2,
    "lfm2moe": _LFM2,
    "qwen35": _QWEN35,
    "qwen35moe": _QWEN35,
    "gpt-oss": {"post_attention_layernorm": "post_attention_norm"},
    "glm4moe": {"post_attention_layernorm": "post_attention_norm"},
    "gemma2": _AROUND,
    "gemma3": _AROUND,
    "olmo2": _AFTER,
    "exaone4": _AFTER,
    "phi3": {"self_attn.qkv_proj": "attn_qkv", GATE_UP: "ffn_up"},
}
"""Names that differ in some architectures."""
SHIFTED = ("gemma2", "gemma3", "qwen35", "qwen35moe")
"""Their files have norms as 1 + w, except those of delta nets."""
TOPS = {name: {"model.norm": "token_embd_norm"} for name in ("lfm2", "lfm2moe")}
"""Names outside of layers that differ in some architectures."""
PARAMETERS = {
    "linear_attn.dt_bias": "ssm_dt.bias", "linear_attn.A_log": "ssm_a",
    "mamba.dt_bias": "ssm_dt.bias", "mamba.A_log": "ssm_a", "mamba.D": "ssm_d",
    "self_attn.sinks": "attn_sinks.weight",
}  # fmt: skip
"""Parameters of layers that do not belong to a module."""
OF_HEADS, NORM = ("mamba.A_log", "mamba.D"), "mamba.norm.weight"
STACKED = "shared_mlp.input_linear"
"""Granite 4's tensor of gate and up in checkpoints, which files do not have."""


def key_of(name: str, in_layer: Mapping[str, str] = IN_LAYER, top: Mapping[str, str] = TOP) -> str:
    """Return the name that the tensor ``name`` has in a file with these module names."""
    module, _, part = name.rpartition(".")
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer and (own := PARAMETERS.get(f"{layer[2]}.{part}")):
        return f"blk.{layer[1]}.{own}"
    key = f"blk.{layer[1]}.{in_layer.get(layer[2])}" if layer else top.get(module)
    return f"{key}.{part}"


def row_order(name: str, rows: int, head_dim: int) -> NDArray[np.int64] | None:
    """Return where a file has each row of a query or key matrix; None keeps the file's order.

    Llama's files pair element i of a head with i + 1; Hugging Face pairs it with i + head_dim / 2.
    """
    if not re.search(r"\.[qk]_proj\.", name):
        return None
    return np.arange(rows).reshape(-1, head_dim // 2, 2).swapaxes(1, 2).ravel()


def _usual_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape that a checkpoint gives the tensor ``name``: a file gives it ``shape``."""
    if name.endswith(("conv.conv.weight", "conv1d.weight")) and len(shape) == 2:
        return shape[0], 1, shape[1]
    return (prod(shape),) if name.endswith((*OF_HEADS, NORM)) else shape


def rows_of(file: GGUF, stored: StoredTensor, first: int, count: int) -> Array:
    """Return ``count`` rows of a tensor from ``first`` on, dequantised: [count, columns].

    They have the file's dtype if that is a plain one, else fp32.
    """
    columns = stored.shape[-1]
    width = stored.nbytes // (prod(stored.shape) // columns)  # bytes of a row
    octets = file.read(stored, first * width, count * width)
    if stored.kind in PLAIN:
        plain: Array = octets.view(PLAIN[stored.kind])
        return plain.reshape(count, columns)
    from gguf.constants import GGMLQuantizationType  # slow to import, and seldom needed
    from gguf.quants import dequantize

    kind = GGMLQuantizationType(stored.kind)
    try:
        rows: Array = dequantize(octets.reshape(count, width), kind)
        return rows
    except NotImplementedError:
        raise ModelError(
            f"{file.path}: weights of type {stored.kind.name} are not read; give a file of another "
            "quantisation, such as Q8_0 or Q4_K_M."
        ) from None


class GGUFTensors:
    """The tensors of a GGUF file, read as ``Tensors``' are; ``head_dim`` orders rows of heads."""

    def __init__(self, file: GGUF, head_dim: int) -> None:
        self.folder = file.path
        self._head_dim = head_dim
        self._file = file
        self._architecture = name = str(file.metadata.get("general.architecture"))
        self._interleaved, self._shifted = form_of(file.metadata).interleaved, name in SHIFTED
        self._in_layer = {**IN_LAYER, **OTHERWISE.get(name, {})}
        self._top = {**TOP, **TOPS.get(name, {})}
        own = "mamba." if self._in_layer.keys() >= _MAMBA.keys() else "linear_attn."
        owned = (own, "self_attn.")
        self._by_parameter = {v: k for k, v in PARAMETERS.items() if k.startswith(owned)}
        kinds = {t.kind for t in file.tensors.values()} - set(CODED) - set(PLAIN)
        names = ", ".join(sorted(kind.name for kind in kinds))
        self.note = (
            f"{file.path}: weights of type {names} are dequantised at load." if names else None
        )

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> Array:
        """Return the tensor ``name`` of ``shape``, in ``dtype``, fp32 if None."""
        if STACKED in name:
            halves = self._halves(name, shape)
            return np.concatenate([self.get(half, size, dtype) for half, size in halves])
        narrow = tuple(size for size in shape if size != 1) or shape  # as files hold convolutions
        stored = self._find(name, narrow)
        tensor = self._plain(stored, dtype or FLOAT32).reshape(shape)
        if self._shifted and self.is_shifted(name):
            tensor -= 1
        if name.endswith("A_log"):
            with np.errstate(all="ignore"):
                return np.log(-tensor)
        order = self._order(name, shape[0])
        return tensor if order is None else tensor[order]

    def is_shifted(self, name: str) -> bool:
        """Return True if a tensor is a norm that is stored as 1 + w, in files that do so."""
        return name.endswith("norm.weight") and "linear_attn" not in name

    def matrix(self, name: str, shape: tuple[int, int], dtype: np.dtype[Any] | None) -> Matrix:
        """Return the matrix ``name`` of ``shape`` (out, in): as stored, or in ``dtype``."""
        if STACKED in name:
            halves = [self.matrix(half, size, dtype) for half, size in self._halves(name, shape)]
            coded = [half for half in halves if isinstance(half, Coded)]
            together = Coded.stacked(coded) if len(coded) == len(halves) else None
            return self.get(name, shape, dtype) if together is None else together
        if ".mlp.experts." in name:
            return self._experts(name, shape, dtype)
        stored = self._find(name, shape)
        if stored.kind not in CODED:
            return self.get(name, shape, dtype)
        count = 2 if GATE_UP in name else 1  # gate and up are one part each
        rows, width = shape[0] // count, stored.nbytes // shape[0]
        parts = [
            CodedPart(
                stored.file, stored.begin + first * width, int(stored.kind), stored.kind.name,
                rows, width, self._order(name, rows),
                partial(self._plain, stored, first=first, rows=rows),
            )
            for first in range(0, count * rows, rows)
        ]  # fmt: skip
        return Coded(tuple(parts), shape[1])

    def _experts(self, name: str, shape: tuple[int, int], dtype: np.dtype[Any] | None) -> Matrix:
        """Return the matrices of all experts, one after the other.

        Some files have gates and ups as one tensor, expert by expert.
        """
        key = self._key(name)
        stored = self._stored_experts(key)
        if stored is None:
            raise ModelError(f"{self.folder} has no tensor {key!r}; its metadata requires one.")
        halves = 2 if key not in self._file.tensors else 1
        count = stored.shape[0]
        rows = shape[0] // count
        told = self._file.metadata.get(f"{self._architecture}.expert_count")
        fits = stored.shape == (count, halves * rows, shape[1]) and count * rows == shape[0]
        if count != told or not fits:
            raise ModelError(
                f"{self.folder}: tensor {key!r} is {list(stored.shape)}, but its metadata says "
                f"{list(shape)} for all experts."
            )
        first = rows if "up_proj" in name and halves == 2 else 0
        if stored.kind not in CODED:
            plain = self._plain(stored, dtype or FLOAT32)[:, first : first + rows]
            return np.ascontiguousarray(plain).reshape(shape)

        def read(dtype: np.dtype[Any]) -> Array:
            return self._plain(stored, dtype).reshape(-1, shape[1])

        all_rows = count * halves * rows
        whole = CodedPart(
            stored.file, stored.begin, int(stored.kind), stored.kind.name, all_rows,
            stored.nbytes // all_rows, None, read,
        )  # fmt: skip
        if halves == 1:
            return Coded((whole,), shape[1])
        begins = range(first, all_rows, halves * rows)
        return Coded(tuple(whole.within(range(at, at + rows)) for at in begins), shape[1])

    def _stored_experts(self, key: str) -> StoredTensor | None:
        """Return the tensor of experts that a file calls ``key``, or the one that it is part of."""
        tensors = self._file.tensors
        return tensors.get(key) or tensors.get(re.sub("_(gate|up)_exps", "_gate_up_exps", key))

    def grid(self, name: str, shape: tuple[int, int]) -> Quantized | None:
        """Return a matrix of Q8_0 (int8) or Q4_0 (nibbles), whose codes form a plain grid."""
        stored = self._find(name, shape)
        if stored.kind not in (Kind.Q8_0, Kind.Q4_0):
            return None
        blocks = self._file.read(stored).reshape(shape[0], shape[1] // GROUP, -1)
        halves = np.ascontiguousarray(blocks[..., :2]).view(np.float16)[..., 0]
        octets = blocks[..., 2:]
        codes: Codes
        if stored.kind == Kind.Q8_0:
            codes, bits = octets ^ np.uint8(128), 8  # as int8 + 128
        else:
            codes, bits = np.concatenate((octets & np.uint8(15), octets >> np.uint8(4)), -1), 4
        scales, codes = halves.astype(np.float32), codes.reshape(len(codes), -1)
        matrix = Quantized(codes, scales, None, bits, GROUP)
        order = self._order(name, shape[0])
        return matrix if order is None else matrix.rows(order)

    def kept(self, name: str) -> str | None:
        """Return the type of the codes that the matrix ``name`` keeps; None if it keeps none."""
        if STACKED in name:
            kinds = {self.kept(half) for half, _ in self._halves(name, (0, 0))}
            return kinds.pop() if len(kinds) == 1 else None
        stored = self._stored_experts(self._key(name))
        return stored.kind.name if stored is not None and stored.kind in CODED else None

    def nbytes(self, name: str) -> int:
        """Return the number of stored bytes of the tensor ``name``."""
        if STACKED in name:
            return sum(self.nbytes(half) for half, _ in self._halves(name, (0, 0)))
        return self._file.tensors[self._key(name)].nbytes

    def held(self, size: int, keeps: bool) -> dict[str, int]:
        """See ``Tensors.held``."""
        return {
            key: stored.nbytes if keeps and stored.kind in CODED else size * prod(stored.shape)
            for key, stored in self._file.tensors.items()
        }

    @property
    def files(self) -> tuple[Path, ...]:
        """The files that hold the tensors."""
        return self._file.files

    @property
    def file_bytes(self) -> int:
        """The bytes of the file, or of all parts."""
        return sum(file.stat().st_size for file in self._file.files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each of the model's tensors by name, layer by layer.

        They are a checkpoint's: convolutions [width, 1, taps], and Mamba-2's vectors have one axis.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for key, tensor in self._file.tensors.items():
            name = self._name(key)
            if name is None or (STACKED in name and name in shapes):
                continue
            shape = _usual_shape(name, tensor.shape)
            shapes[name] = (2 * shape[0], *shape[1:]) if STACKED in name else shape
        return shapes

    def _halves(self, name: str, shape: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, int]]]:
        """Yield names and shapes of the gate and up that ``name`` stands for."""
        for half in ("gate", "up"):
            yield name.replace(STACKED, f"mlp.{half}_proj"), (shape[0] // 2, shape[1])

    def _key(self, name: str) -> str:
        """Return the name that the tensor ``name`` has in the file."""
        key = key_of(name, self._in_layer, self._top)
        short = key.removesuffix(".weight")  # the converters' name of a norm of Falcon-H1
        return short if key not in self._file.tensors and short in self._file.tensors else key

    def _name(self, key: str) -> str | None:
        """Return the name of the tensor that the file calls ``key``; None if no model reads it."""
        own = re.fullmatch(r"blk\.(\d+)\.(.+)", key)
        if own and own[2] in self._by_parameter:
            return f"model.layers.{own[1]}.{self._by_parameter[own[2]]}"
        if own and own[2] in self._in_layer.values():
            key = f"{key}.weight"
        module, _, part = key.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(.+)", module)
        names = {theirs: name for name, theirs in (self._in_layer if layer else self._top).items()}
        name = names.get(layer[2] if layer else module)
        if name is None:
            return None
        if self._architecture == "granitehybrid" and name in ("mlp.gate_proj", "mlp.up_proj"):
            name = STACKED
        return f"model.layers.{layer[1]}.{name}.{part}" if layer else f"{name}.{part}"

    def _find(self, name: str, shape: tuple[int, ...]) -> StoredTensor:
        key = self._key(name)
        stored = self._file.tensors.get(key)
        if stored is None:
            raise ModelError(f"{self.folder} has no tensor {key!r}; its metadata requires one.")
        if stored.shape != shape and stored.shape not in self._other_shapes(name, shape):
            raise ModelError(
                f"{self.folder}: tensor {key!r} is {list(stored.shape)}, but its metadata says "
                f"{list(shape)}."
            )
        return stored

    def _other_shapes(self, name: str, shape: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Return other shapes that files give a vector: a row, a column, or a row per group."""
        if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight")):  # of one expert
            return [(1, shape[-1]), shape[-1:]]
        if name.endswith(OF_HEADS):
            return [(shape[0], 1), (1, shape[0])]
        groups = self._file.metadata.get(f"{self._architecture}.ssm.group_count")
        if not name.endswith(NORM) or type(groups) is not int or groups < 1:
            return []
        return [(groups, shape[0] // groups)]

    def _plain(
        self, stored: StoredTensor, dtype: np.dtype[Any], first: int = 0, rows: int | None = None
    ) -> Array:
        """Return a tensor, or ``rows`` of it from ``first`` on, in ``dtype``."""
        shape = stored.shape if rows is None else (rows, *stored.shape[1:])
        tensor = np.empty(shape, dtype)
        flat = tensor.reshape(-1, shape[-1])
        step = max(1, CHUNK // shape[-1])

        @np.errstate(all="ignore")
        def one(at: int) -> None:
            count = min(step, len(flat) - at)
            flat[at : at + step] = rows_of(self._file, stored, first + at, count)

        for _ in on_all_threads(one, range(0, len(flat), step)):
            pass
        return tensor

    def _order(self, name: str, rows: int) -> NDArray[np.int64] | None:
        return row_order(name, rows, self._head_dim) if self._interleaved else None
