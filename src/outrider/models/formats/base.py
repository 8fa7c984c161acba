"""What the readers of quantised safetensors share."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Protocol

import torch

from ...errors import ModelError
from ...fields import Fields
from ...limits import LARGEST_INT
from ..quantize import Matrix, Quantized

logger = logging.getLogger("outrider")

PLAIN = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
REMEDY = "give the checkpoint in float32, bfloat16 or float16"


class Tensors(Protocol):
    """The tensors of a checkpoint's files."""

    folder: Path

    def __contains__(self, name: str) -> bool: ...

    def raw(self, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
        """The tensor ``name`` as it is stored, of ``shape`` if given; ModelError if it is not."""
        ...

    def get(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The plain tensor ``name`` of ``shape``, in ``dtype``."""
        ...


class Format(Protocol):
    """How a quantised checkpoint holds its matrices."""

    @property
    def note(self) -> str | None:
        """What is not done as the checkpoint wants it, for the log."""
        ...

    def matrix(
        self, source: Tensors, name: str, shape: tuple[int, int], dtype: torch.dtype
    ) -> Matrix:
        """The matrix ``name`` ("....weight") of ``shape`` (out, in).

        What the checkpoint did not quantise, or ``Quantized`` cannot say, comes in ``dtype``.

        Raises:
            ModelError: a tensor is missing, misshapen or of a type that is not read.
        """
        ...


@lru_cache(maxsize=1024)
def say(sentence: str) -> None:
    """Log ``sentence``, once."""
    logger.warning("%s", sentence)


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The codes in int32 ``words`` [rows, n], low bits first: uint8 [rows, n * 32 / bits]."""
    octets = words.contiguous().view(torch.uint8)
    return octets if bits == 8 else torch.stack((octets & 15, octets >> 4), -1).flatten(-2)


def words_for(count: int, bits: int) -> int:
    """int32 words that hold ``count`` codes."""
    return -(-count * bits // 32)


def words(source: Tensors, name: str, shape: tuple[int, ...] | None = None) -> torch.Tensor:
    """The tensor ``name`` of int32 words.

    Raises:
        ModelError: it is missing, misshapen or of another type.
    """
    found = source.raw(name, shape)
    if found.dtype != torch.int32 or found.dim() != 2:
        raise ModelError(f"{source.folder}: tensor {name!r} does not hold rows of int32 words.")
    return found


def misshapen(
    source: Tensors, name: str, found: torch.Tensor, shape: tuple[int, int]
) -> ModelError:
    """The error for a part of a quantised matrix that does not fit the matrix."""
    return ModelError(
        f"{source.folder}: tensor {name!r} is {list(found.shape)}, which is no part of the "
        f"{list(shape)} matrix that its config.json says."
    )


def group_size(groups: int, inputs: int, sizes: Iterable[int]) -> int | None:
    """Inputs a group, given how many ``groups`` there are and the ``sizes`` that a config names."""
    for size in (inputs, *sizes):
        if size > 0 and -(-inputs // size) == groups:
            return min(size, inputs)
    return inputs // groups if groups and inputs % groups == 0 else None


def block_size(fields: Fields, name: str) -> tuple[int, int] | None:
    """The block ``name``, [outputs, inputs], of a quantisation config; None where it has none.

    Raises:
        ModelError: it is something else.
    """
    if name not in fields:
        return None
    found = fields.listed(name, int)
    if len(found) != 2 or not all(1 <= size <= LARGEST_INT for size in found):
        raise fields.refuse(name, f"a list of two whole numbers from 1 to {LARGEST_INT}")
    return found[0], found[1]


def stated_group(fields: Fields, name: str) -> int:
    """The group size ``name`` of a quantisation config; -1 stands for a whole row.

    Raises:
        ModelError: it is something else.
    """
    return fields.whole(name, -1, default=-1) or -1


def read_scales(
    source: Tensors,
    name: str,
    shape: tuple[int, int],
    sizes: Iterable[int],
    block: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, int]:
    """The scales ``name`` of a matrix of ``shape`` (out, in), and the inputs that share one.

    Args:
        sizes: of groups, as the config names them.
        block: outputs and inputs of a block, where the config names them.

    Returns:
        fp32 [out, groups], whether they were stored by tensor, output, block or group.

    Raises:
        ModelError: they are missing, or are none of these.
    """
    found = source.raw(name)
    outputs, inputs = shape
    scales = found.float()
    if scales.numel() == 1:
        return scales.reshape(1, 1).repeat(outputs, 1), inputs
    if scales.dim() == 1:
        scales = scales[:, None]
    if scales.dim() == 2 and block is not None:
        blocks = (-(-outputs // block[0]), -(-inputs // block[1]))
        if tuple(scales.shape) == blocks:
            return scales.repeat_interleave(min(block[0], outputs), 0)[:outputs], min(
                block[1], inputs
            )
    if scales.dim() == 2 and scales.shape[0] == outputs:
        group = group_size(scales.shape[1], inputs, sizes)
        if group is not None:
            return scales, group
    raise misshapen(source, name, found, shape)


def scaled(
    found: torch.Tensor, scales: torch.Tensor, group: int, dtype: torch.dtype
) -> torch.Tensor:
    """float8 ``found`` [out, in] times ``scales`` [out, groups], in ``dtype``."""
    wide = scales.repeat_interleave(group, 1)[:, : found.shape[1]]
    return (found.float() * wide).to(dtype)


def unread(source: Tensors, name: str, found: torch.Tensor) -> ModelError:
    """The error for a tensor of a type that no format says."""
    return ModelError(
        f"{source.folder}: tensor {name!r} holds {found.dtype}, which is not read; {REMEDY}."
    )


def in_order(
    source: Tensors, name: str, codes: Quantized, index: torch.Tensor, dtype: torch.dtype
) -> Matrix:
    """``codes``, whose input i belongs to group ``index[i]``.

    Groups that do not follow one another (a checkpoint quantised in the order of activations) are
    dequantised, and the log says so.

    Raises:
        ModelError: the index ``name`` names groups that there are not.
    """
    inputs, groups = codes.shape[1], codes.scales.shape[1]
    if int(index.min()) < 0 or int(index.max()) >= groups:
        raise ModelError(f"{source.folder}: tensor {name!r} names more than {groups} groups.")
    group = int((index == 0).sum())
    if group and torch.equal(index.long(), torch.arange(inputs) // group):
        return Quantized(codes.codes, codes.scales, codes.zeros, codes.bits, group)
    say(
        f"{source.folder}: matrices quantised in the order of activations (g_idx) are dequantised "
        "at load."
    )
    return codes.dequantized(dtype, index.long())


def without_symmetry(zeros: torch.Tensor, bits: int) -> torch.Tensor | None:
    """``zeros``, or None where all are the middle that a symmetric recipe has."""
    return None if bool((zeros == 1 << (bits - 1)).all()) else zeros.contiguous()
