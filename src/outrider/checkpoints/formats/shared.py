"""Helpers that the readers of quantised safetensors share."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any, Protocol

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ...base.fields import Fields, readable
from ...base.limits import LARGEST_INT
from ...errors import ModelError
from ..dtypes import FLOAT32, PLAIN, Array, cast
from ..files import TYPES, Entry, Files
from ..quantize import Codes, Floats, Matrix, Quantized

logger = logging.getLogger("outrider")

PICKLED = (".bin", ".pt", ".pth", ".bin.index.json")
NAMED = ("pytorch_model", "medusa_lm_head", "model")
"""Suffixes of pickled files, and prefixes of the names of those that hold weights."""
FLOAT8 = tuple(map(np.dtype, (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)))
IN_WRAPPERS = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
)
"""Beginnings of names in models of images and text, and those of the text part alone."""
ROOT = "backbone."
"""Nemotron-H's beginning of names, instead of "model."."""
REMEDY = "give the checkpoint in float32, bfloat16 or float16"


class Format(Protocol):
    """One way to store quantised matrices."""

    note: str | None
    """A sentence for the log about ignored parts of the checkpoint's config."""
    keeps: bool
    """True if quantised matrices keep their codes; otherwise they are dequantised at load."""

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: np.dtype[Any]
    ) -> Matrix:
        """Return the matrix ``name`` ("....weight") of ``shape`` (out, in).

        A matrix that is stored unquantised, or that ``Quantized`` cannot represent, is returned in
        ``dtype``.
        """


def _remedy(folder: Path) -> str:
    """Return the remedy for a folder without safetensors."""
    pickled = [f for f in folder.iterdir() if f.name.endswith(PICKLED)] if folder.is_dir() else []
    if not pickled:
        return "fetch it again, or convert pickled weights with outrider convert"
    first = min(pickled, key=lambda file: (not file.name.startswith(NAMED), file.name))
    return (
        f"{first.name} is a pickle, which Outrider does not serve: write a copy once with "
        f"outrider convert {folder} NEW_FOLDER, and give that"
    )


Names = Sequence[tuple[str, str]]
"""Llama's names of modules, and a family's."""


def usual_name(name: str, names: Names) -> str:
    """Return the name that a family's tensor would have in Llama."""
    name = f"model.{name.removeprefix(ROOT)}" if name.startswith(ROOT) else name
    parts = re.fullmatch(r"(model\.layers\.\d+\.)?(.+)(\.\w+)", name)
    if parts is None:
        return name
    module = {own: usual for usual, own in names}.get(parts[2], parts[2])
    return f"{parts[1] or ''}{module}{parts[3]}"


def _alone(name: str) -> str:
    for begins, alone in IN_WRAPPERS:
        if name.startswith(begins):
            return alone + name.removeprefix(begins)
    return name


class Tensors:
    """The tensors of a folder's safetensors files, by name, read one by one.

    Every method refuses a folder without files, and a tensor that is missing, misshapen or of an
    unsupported type. ``format`` is that of the quantised matrices. With ``wrapped`` the model is
    the text part of another, and its tensors have the names that they would have alone. Tensors of
    a family with other ``names`` have Llama's names.
    """

    def __init__(
        self,
        files: Files,
        format: Format | None = None,
        wrapped: bool = False,
        names: Names = (),
    ) -> None:
        self.folder = files.folder
        self.note = None if format is None else format.note
        self._entries, self._format = files.tensors, format
        self._names = dict(names)
        if wrapped:
            self._entries = {_alone(name): entry for name, entry in self._entries.items()}
        if names:
            self._entries = {usual_name(n, names): entry for n, entry in self._entries.items()}

    def _told(self, name: str) -> str:
        """Return the name of a tensor in the files."""
        return usual_name(name, [(own, usual) for usual, own in self._names.items()])

    @property
    def entries(self) -> Mapping[str, Entry]:
        """The place of each tensor, by the name in the files."""
        if not self._entries:
            raise ModelError(f"{self.folder} has no .safetensors file; {_remedy(self.folder)}.")
        return self._entries

    @property
    def names(self) -> Collection[str]:
        """The names of all tensors; none without files."""
        return self._entries.keys()

    def entry(self, name: str) -> Entry | None:
        """Return the place of the tensor ``name``; None if there is none."""
        return self.entries.get(name)

    def __contains__(self, name: str) -> bool:
        return self.entry(name) is not None

    def raw(self, name: str, shape: tuple[int, ...] | None = None) -> Array:
        """Return the tensor ``name`` as stored, checked against ``shape`` unless None."""
        entry = self.entry(name)
        if entry is None:
            raise ModelError(
                f"{self.folder} has no tensor {self._told(name)!r}; its config.json promises one."
            )
        if shape is not None and entry.shape != shape:
            raise self.wrong(
                name, f"is {list(entry.shape)}, but its config.json says {list(shape)}"
            )
        return entry.read()

    def wrong(self, name: str, what: str) -> ModelError:
        """Return the error for a tensor; ``what`` says what it is or holds."""
        return ModelError(f"{self.folder}: tensor {self._told(name)!r} {what}.")

    def misshapen(self, name: str, tensor: Array, shape: tuple[int, ...]) -> ModelError:
        """Return the error for a part of a quantised matrix that does not fit the matrix."""
        what = f"is {list(tensor.shape)}, which is no part of the {list(shape)} matrix"
        return self.wrong(name, f"{what} that its config.json says")

    def unread(self, name: str, tensor: Array) -> ModelError:
        """Return the error for a tensor whose dtype no format uses."""
        return self.wrong(name, f"holds {tensor.dtype}, which is not read; {REMEDY}")

    def words(self, name: str, shape: tuple[int, ...] | None = None) -> NDArray[np.int32]:
        """Return the tensor ``name``, rows of int32 words."""
        words = self.raw(name, shape)
        if words.dtype != np.int32 or words.ndim != 2:
            raise self.wrong(name, "does not hold rows of int32 words")
        return words

    def octets(self, name: str, shape: tuple[int, ...]) -> NDArray[np.uint8]:
        """Return the tensor ``name`` of bytes."""
        octets = self.raw(name, shape)
        if octets.dtype != np.uint8:
            raise self.wrong(name, "does not hold bytes")
        return octets

    def is_float8(self, name: str) -> bool:
        """Return True if the tensor ``name`` holds FP8."""
        entry = self.entry(name)
        return entry is not None and TYPES.get(entry.type) in FLOAT8

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> Array:
        """Return the tensor ``name``, which is not quantised, in ``dtype``, or as stored."""
        tensor = self.raw(name, shape)
        if tensor.dtype not in PLAIN:
            why = f"and its config.json does not say how to read that; {REMEDY}"
            raise self.wrong(name, f"holds {tensor.dtype}, {why}")
        return tensor if dtype is None else cast(tensor, dtype)

    def matrix(self, name: str, shape: tuple[int, int], dtype: np.dtype[Any] | None) -> Matrix:
        """Return the matrix ``name`` of ``shape`` (out, in), quantised as stored or in ``dtype``.

        ``dtype`` None keeps the stored dtype; dequantised matrices are then fp32.
        """
        if self._format is None:
            return self.get(name, shape, dtype)
        with readable(f"{self.folder}: tensor {name!r} cannot be read", f"{REMEDY}."):
            return self._format.matrix(self, name, shape, dtype or FLOAT32)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def nbytes(self, name: str) -> int:
        """Return the number of stored bytes of the tensor ``name``."""
        return self.entries[name].nbytes

    def held(self, size: int, keeps: bool) -> dict[str, int]:
        """Return the bytes of each tensor in memory, by name.

        An unquantised number has ``size`` bytes; ``keeps`` is true if quantised matrices stay
        quantised.
        """
        return {
            name: size * prod(entry.shape) if TYPES.get(entry.type) in PLAIN else entry.nbytes
            for name, entry in self._entries.items()
        }

    @property
    def file_bytes(self) -> int:
        """The bytes of all files."""
        return sum(file.size for file in {e.file for e in self._entries.values()})

    def kept(self, name: str) -> str | None:
        """Return the kind of codes that the matrix ``name`` keeps; None if it keeps none."""
        return "quantised" if self._format is not None and self._format.keeps else None


@lru_cache(maxsize=1024)
def warn_once(sentence: str | None) -> None:
    """Log ``sentence``, if it is one, as a warning, unless it was logged before."""
    if sentence:
        logger.warning("%s", sentence)


def unpack(words: NDArray[np.int32], bits: int) -> Codes:
    """Return the codes in int32 ``words`` [rows, n], low bits first, as uint8 [rows, codes]."""
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets
    rows, size = octets.shape
    return np.stack((octets & 15, octets >> 4), -1).reshape(rows, 2 * size)


def num_words(count: int, bits: int) -> int:
    """Return how many int32 words ``count`` codes take."""
    return -(-count * bits // 32)


def group_size(groups: int, inputs: int, sizes: Iterable[int]) -> int | None:
    """Return how many of ``inputs`` share a scale if there are ``groups`` scales.

    ``sizes`` are the candidates that the config names. None: no size fits.
    """
    for size in (inputs, *sizes):
        if size > 0 and -(-inputs // size) == groups:
            return min(size, inputs)
    return inputs // groups if groups and inputs % groups == 0 else None


def stated_group(fields: Fields, name: str) -> int:
    """Return the group size ``name`` of a quantisation config; -1 stands for a whole row."""
    return fields.whole(name, -1, default=-1) or -1


def block_size(fields: Fields, name: str) -> tuple[int, int] | None:
    """Return the block ``name``, (outputs, inputs), of a quantisation config, if it has one."""
    if name not in fields:
        return None
    sizes = fields.listed(name, int)
    if len(sizes) != 2 or not all(1 <= size <= LARGEST_INT for size in sizes):
        raise fields.refuse(name, f"a list of two whole numbers from 1 to {LARGEST_INT}")
    return sizes[0], sizes[1]


def read_scales(
    source: Tensors,
    name: str,
    shape: tuple[int, int],
    sizes: Iterable[int],
    block: tuple[int, int] | None = None,
) -> tuple[Floats, int]:
    """Return the scales ``name`` of a matrix of ``shape`` (out, in) and the inputs that share one.

    They are fp32 [out, groups], whether they are stored per tensor, output, ``block`` (outputs,
    inputs) or group, of which the config names ``sizes``.
    """
    stored = source.raw(name)
    outputs, inputs = shape
    scales: Floats = cast(stored, FLOAT32)
    if scales.size == 1:
        return np.full((outputs, 1), scales.item(), np.float32), inputs
    if scales.ndim == 1:
        scales = scales[:, None]
    blocks = block and (-(-outputs // block[0]), -(-inputs // block[1]))
    if block is not None and scales.shape == blocks:
        wide = np.repeat(scales, min(block[0], outputs), 0)[:outputs]
        return wide, min(block[1], inputs)
    if scales.ndim == 2 and scales.shape[0] == outputs:
        group = group_size(scales.shape[1], inputs, sizes)
        if group is not None:
            return scales, group
    raise source.misshapen(name, stored, shape)


def dequantized_float8(codes: Array, scales: Floats, group: int, dtype: np.dtype[Any]) -> Array:
    """Return float8 ``codes`` [out, in] times ``scales`` [out, groups], in ``dtype``."""
    with np.errstate(all="ignore"):
        matrix = codes.astype(np.float32)
        matrix *= np.repeat(scales, group, 1)[:, : codes.shape[1]]
    return cast(matrix, dtype)


def regrouped(
    source: Tensors, name: str, matrix: Quantized, index: Array, dtype: np.dtype[Any]
) -> Matrix:
    """Return ``matrix`` where input i belongs to group ``index[i]``.

    Groups that are not contiguous (a checkpoint quantised in the order of activations) are
    dequantised, and the log says so.
    """
    inputs, groups = matrix.shape[1], matrix.scales.shape[1]
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise source.wrong(name, f"names more than {groups} groups")
    group = int((index == 0).sum())
    if group and np.array_equal(index.astype(np.int64), np.arange(inputs) // group):
        return replace(matrix, group=group)
    warn_once(
        f"{source.folder}: matrices quantised in the order of activations (g_idx) are dequantised "
        "at load."
    )
    return matrix.dequantized(dtype, index.astype(np.int64))


def unless_symmetric(zeros: Codes, bits: int) -> Codes | None:
    """Return ``zeros``, or None if all are the middle code, as in a symmetric recipe."""
    return None if (zeros == 1 << (bits - 1)).all() else np.ascontiguousarray(zeros)
