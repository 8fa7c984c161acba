"""Writes a quantised copy of a checkpoint as one GGUF file, which llama.cpp also reads.

Tensors get the types that llama.cpp chooses (``llama-quantize``): the head, or the embedding if the
two are tied, has more bits, and with "Q4_K_M" so have the values and the down matrices of some
layers.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFWriter
from gguf.constants import GGML_QUANT_VERSION, GGMLQuantizationType, GGUFValueType, LlamaFileType
from tqdm import tqdm

from ..base.fields import one_line
from ..base.stored import StoredFile
from ..base.threads import on_all_threads
from ..errors import ConfigError, ModelError, shown
from .architecture import Architecture
from .blocks import encode
from .checkpoint import Checkpoint, open_checkpoint
from .dtypes import FLOAT32, Array, cast
from .files import Files, new_file
from .formats.gguf import GGUF, StoredTensor
from .formats.gguf_config import FORMS
from .formats.gguf_types import SIZES, Kind
from .formats.gguf_weights import key_of, row_order, rows_of
from .gguf_metadata import NAMES, gguf_metadata, rope_divisors, unfit
from .matrices import plain
from .mtp import has_mtp
from .quantize import Codes
from .tokenizers import has_tokenizer, read_codec

logger = logging.getLogger("outrider")

RECIPES = {
    "F16": (Kind.F16, LlamaFileType.MOSTLY_F16),
    "BF16": (Kind.BF16, LlamaFileType.MOSTLY_BF16),
    "Q8_0": (Kind.Q8_0, LlamaFileType.MOSTLY_Q8_0),
    "Q4_0": (Kind.Q4_0, LlamaFileType.MOSTLY_Q4_0),
    "Q4_K_M": (Kind.Q4_K, LlamaFileType.MOSTLY_Q4_K_M),
}
"""For each name the type of most matrices, and its number in a file."""
FALLBACK = {Kind.Q4_K: Kind.Q5_0, Kind.Q5_K: Kind.Q5_1, Kind.Q6_K: Kind.Q8_0}
"""Types for matrices whose width is not a multiple of 256; F16 if not of 32 either."""
PLAIN = (Kind.F32, Kind.F16, Kind.BF16)
EMBEDDING, HEAD, DIVISORS = "token_embd.weight", "output.weight", "rope_freqs.weight"
LARGE = 80
"""Layers of Llama's and Qwen2's largest models, whose few value heads serve many queries."""
DROPPED = re.compile(r"general\.(alignment|file_type|quantization_version)|(split|quantize)\..+")
"""Keys of a source that do not apply to the copy."""
CHUNK = 1 << 16
"""Weights that are searched at a time; every pass over them stays in the cache."""

Rows = Callable[[int, int], Array]
"""Called with a first row and a count; returns these rows of a tensor."""


@dataclass(frozen=True)
class Part:
    """A tensor to write: its ``shape``, its type, and its source.

    ``open`` is called when its turn comes; ``was`` is its type in the source, and ``raw`` returns
    its bytes there.
    """

    shape: tuple[int, ...]
    kind: Kind
    was: Kind
    open: Callable[[], Rows]
    raw: Callable[[], Codes] | None = None

    @property
    def stored(self) -> StoredTensor:
        """The tensor as a reader sees it, without a place."""
        block, octets = SIZES[self.kind]
        size = prod(self.shape) // block * octets
        return StoredTensor(StoredFile(Path(), 0, 0), self.shape, self.kind, 0, size)


def kind_of(key: str, shape: tuple[int, ...], most: Kind, a: Architecture, family: str) -> Kind:
    """Return the type of the tensor ``key`` of a model whose matrices are mostly ``most``.

    ``family`` is GGUF's name of the architecture.
    """
    if len(shape) < 2:
        return Kind.F32
    kind = most
    if most in PLAIN:
        return kind
    if most != Kind.Q8_0 and key == (EMBEDDING if a.tied else HEAD):
        kind = Kind.Q6_K
    elif most == Kind.Q4_K and (
        layer := re.match(r"blk\.(\d+)\.(attn_v|attn_qkv|ffn_down)\.", key)
    ):
        number, eighth = int(layer[1]), a.num_layers // 8
        more = number < eighth or number >= 7 * a.num_layers // 8 or (number - eighth) % 3 == 2
        grouped = a.num_heads > a.num_kv_heads and a.num_layers == LARGE
        if more:
            kind = Kind.Q6_K
        elif layer[2] != "ffn_down" and grouped and family in ("llama", "qwen2"):
            kind = Kind.Q5_K
    if shape[-1] % SIZES[kind][0]:
        kind = FALLBACK.get(kind, Kind.F16)
    return Kind.F16 if shape[-1] % SIZES[kind][0] else kind


def parse(name: str) -> str:
    """Return the recipe ``name`` in llama.cpp's spelling; refuse an unknown one."""
    if name.upper() not in RECIPES:
        known = ", ".join(RECIPES)
        raise ConfigError(f"quantization is {shown(name)}; a .gguf file takes one of {known}.")
    return name.upper()


def export_gguf(folder: Path, out: Path, recipe: str) -> float:
    """Write the checkpoint in ``folder`` to the new file ``out``; return the mean bits of a weight.

    A GGUF file's metadata are copied. Tensors that already have the type stay as they are.
    """
    most, number = RECIPES[parse(recipe)]
    files = Files(folder)
    checkpoint = open_checkpoint(files)
    if files.gguf is not None:
        family = str(files.gguf.metadata["general.architecture"])
        parts = _of_file(files.gguf, checkpoint, most, family)
        metadata = {k: v for k, v in files.gguf.metadata.items() if not DROPPED.fullmatch(k)}
        kinds = {key: files.gguf.kinds[key] for key in metadata}
    else:
        if not has_tokenizer(files):
            raise ModelError(f"{folder} has no tokenizer, which a GGUF file holds; put it there.")
        family, parts = _of_folder(checkpoint, most)
        if has_mtp(files):
            logger.warning("%s: its MTP layers are left out of the file.", folder)
        stored = {key: part.stored for key, part in parts.items() if key != DIVISORS}
        metadata, kinds = gguf_metadata(checkpoint, read_codec(files), stored), {}
    again = [key for key, part in parts.items() if part.was not in (part.kind, *PLAIN)]
    if again:
        logger.warning(
            "%s: %d of %d tensors are quantised already and are quantised again; a file of 16 bits "
            "loses less.", folder, len(again), len(parts),
        )  # fmt: skip
    metadata["general.file_type"] = int(number)
    metadata["general.quantization_version"] = GGML_QUANT_VERSION
    with new_file(out) as new:
        writer = GGUFWriter(new, family)
        try:
            _describe(writer, metadata, kinds, parts)
            _write(writer, parts, folder)
        except (UnicodeError, struct.error) as error:
            what = f"{folder}: a text or number of its config or tokenizer cannot be written"
            raise ModelError(f"{what} ({one_line(error)}).") from None
        except OSError as error:  # NumPy's error does not name the file
            raise ModelError(f"{out} cannot be written ({one_line(error)}).") from None
        finally:
            writer.close()
    weights = sum(prod(part.shape) for part in parts.values())
    return 8 * sum(part.stored.nbytes for part in parts.values()) / weights


def _of_file(file: GGUF, checkpoint: Checkpoint, most: Kind, family: str) -> dict[str, Part]:
    """Return the parts of a copy of a GGUF file."""
    if checkpoint.architecture is None:
        raise unfit(file.path, f"a {checkpoint.shape.family!r} model as configured")

    def part(key: str, stored: StoredTensor) -> Part:
        kind = stored.kind
        if len(stored.shape) > 1:
            kind = kind_of(key, stored.shape, most, architecture, family)
        return Part(
            stored.shape, kind, stored.kind,
            lambda: lambda first, count: rows_of(file, stored, first, count),
            lambda: file.read(stored),
        )  # fmt: skip

    architecture = checkpoint.architecture
    return {key: part(key, stored) for key, stored in file.tensors.items()}


def _of_folder(checkpoint: Checkpoint, most: Kind) -> tuple[str, dict[str, Part]]:
    """Return GGUF's name of the architecture, and the parts of a checkpoint's file."""
    a, source = checkpoint.architecture, checkpoint.tensors
    if a is None or a.family not in NAMES:
        raise unfit(checkpoint.folder, f"a {checkpoint.shape.family!r} model as configured")
    family = NAMES[a.family]

    def opened(name: str, shape: tuple[int, ...]) -> Rows:
        if len(shape) == 1:
            tensor = source.get(name, shape)
        else:
            tensor = plain(source.matrix(name, (shape[0], shape[1]), None), FLOAT32)
        order = row_order(name, shape[0], a.head_dim) if FORMS[family].interleaved else None
        if order is not None:
            tensor = tensor[order.argsort()]
        rows = tensor if len(shape) > 1 else tensor[None]
        return lambda first, count: rows[first : first + count]

    parts: dict[str, Part] = {}
    for name, shape in _names(a):
        key = key_of(name)
        kind = kind_of(key, shape, most, a, family)
        coded = len(shape) > 1 and source.kept(name) is not None
        was = Kind.I8 if coded else Kind.F32
        parts[key] = Part(shape, kind, was, partial(opened, name, shape))
    factors = rope_divisors(checkpoint)
    if factors is not None:
        rows = factors[None]
        parts[DIVISORS] = Part(factors.shape, Kind.F32, Kind.F32, lambda: lambda first, count: rows)
    return family, parts


def _names(a: Architecture) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and the shape of each tensor of a model."""
    width, inner = a.hidden_size, a.intermediate_size
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    yield "model.embed_tokens.weight", (a.vocab_size, width)
    for layer in range(a.num_layers):
        base = f"model.layers.{layer}."
        yield f"{base}input_layernorm.weight", (width,)
        for part, rows, columns, biased in (
            ("self_attn.q", queries, width, a.qkv_bias), ("self_attn.k", keys, width, a.qkv_bias),
            ("self_attn.v", keys, width, a.qkv_bias),
            ("self_attn.o", width, queries, a.output_bias), ("mlp.gate", inner, width, a.mlp_bias),
            ("mlp.up", inner, width, a.mlp_bias), ("mlp.down", width, inner, a.mlp_bias),
        ):  # fmt: skip
            yield f"{base}{part}_proj.weight", (rows, columns)
            if biased:
                yield f"{base}{part}_proj.bias", (rows,)
        if a.layout.qk_norm:
            yield f"{base}self_attn.q_norm.weight", (a.head_dim,)
            yield f"{base}self_attn.k_norm.weight", (a.head_dim,)
        yield f"{base}post_attention_layernorm.weight", (width,)
    yield "model.norm.weight", (width,)
    if not a.tied:
        yield "lm_head.weight", (a.vocab_size, width)


def _describe(
    writer: GGUFWriter,
    metadata: dict[str, Any],
    kinds: dict[str, tuple[int, int | None]],
    parts: dict[str, Part],
) -> None:
    """Write the header; values of unknown kind get the usual one."""
    for key, value in metadata.items():
        if value == [] or key == "general.architecture":
            continue
        kind, items = kinds.get(key, (_usual(value), None))
        writer.add_key_value(
            key, value, GGUFValueType(kind), None if items is None else GGUFValueType(items)
        )
    for key, part in parts.items():
        kind_there = GGMLQuantizationType(part.kind)
        size = part.stored.nbytes
        writer.add_tensor_info(key, part.shape, np.dtype(np.float32), size, kind_there)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()


def _usual(value: object) -> GGUFValueType:
    kind = GGUFValueType.get_type(value)
    return GGUFValueType.UINT32 if kind == GGUFValueType.INT32 else kind


def _write(writer: GGUFWriter, parts: dict[str, Part], source: Path) -> None:
    """Write the tensors, one after the other; all threads work on the rows of one."""
    total = sum(prod(part.shape) for part in parts.values())
    with tqdm(
        total=total, desc="Quantising weights", unit=" weights", unit_scale=True,
        disable=None, leave=False,
    ) as bar:  # fmt: skip
        for key, part in parts.items():
            if part.kind == part.was and part.raw is not None:
                writer.write_tensor_data(part.raw())
                bar.update(prod(part.shape))
                continue
            octets = np.empty(part.stored.nbytes, np.uint8)
            count = 1 if len(part.shape) == 1 else prod(part.shape[:-1])
            step = max(1, CHUNK // part.shape[-1])
            one = partial(_encode, part.open(), part.kind, octets.reshape(count, -1), step)
            try:
                for done in on_all_threads(one, range(0, count, step)):
                    bar.update(done)
            except ValueError as error:
                what = f"tensor {key!r} cannot be quantised: {error}"
                raise ModelError(f"{source}: {what}.") from None
            writer.write_tensor_data(octets)


def _encode(rows: Rows, kind: Kind, table: Codes, step: int, first: int) -> int:
    """Fill ``step`` rows of ``table`` from ``first`` on, and return how many weights these hold."""
    some = cast(rows(first, min(step, len(table) - first)), FLOAT32)
    table[first : first + len(some)] = encode(some, kind)
    return some.size
