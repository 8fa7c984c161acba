"""The tensors of a head's checkpoint: their names, shapes and types, and the ids that it drafts."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from ..errors import ModelError, shown
from .checkpoint import find_format
from .dtypes import BFLOAT16, FLOAT32, PLAIN, Array
from .files import TYPES, Entry, Files
from .formats.compressed import METHOD
from .formats.shared import Tensors, num_words
from .heads import DFLASH2, DSPARK, EAGLE1, MEDUSA, PARTS, PEAGLE, SAFEAILAB, Head, has_midlayer
from .matrices import plain
from .quantize import BITS

QUANTIZATION = "quantization_config"
"""The key of a config's description of quantised matrices."""
CODES = ("I8", "F8_E4M3", "F8_E5M2")
"""Types of quantised matrices that are not packed."""
SELECTOR = "candidate_selector."
CODEBOOKS = {
    DFLASH2: (f"{SELECTOR}predecessor_codebook", f"{SELECTOR}successor_codebook"),
    DSPARK: ("markov_head.markov_w1.weight", "markov_head.markov_w2.weight"),
}
"""Tensors with the numbers of each id as the token before, and as the token that is scored."""
CONVOLVED = "attention", "mlp"
"""Sublayers whose rows are mixed by DFlash2's kernels."""
PART = re.compile(r"_(packed|scale|shape|zero_point|g_idx)$")
"""Ends the names of the tensors that a quantised matrix becomes."""


class HeadTensors(Tensors):
    """The tensors of a head's checkpoint, those of EAGLE-3 by the names of Hugging Face's models.

    Matrices may be quantised in compressed-tensors' formats; other quantisations are ignored.
    """

    def __init__(self, files: Files) -> None:
        options = (files.config or {}).get(QUANTIZATION)
        method = options.get("quant_method") if isinstance(options, dict) else None
        self.quantised = method == METHOD
        super().__init__(files, find_format(options, files.folder) if self.quantised else None)
        self._first = SAFEAILAB if has_midlayer(files) else "layers.0."

    @property
    def stems(self) -> list[str]:
        """The names that all tensors would have if no matrix were quantised."""
        names = (PART.sub("", name) if self.quantised else name for name in self.entries)
        return [*dict.fromkeys(names)]

    def __contains__(self, name: str) -> bool:
        return super().__contains__(name) or super().__contains__(f"{name}_packed")

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> Array:
        """Return the tensor ``name`` in ``dtype``, or as stored; a quantised one dequantised."""
        if not self.quantised or len(shape) != 2:
            return super().get(name, shape, dtype)
        return plain(self.matrix(name, (shape[0], shape[1]), dtype), dtype or FLOAT32)

    def whole(self, name: str) -> Array:
        """Return the tensor ``name`` as stored; a quantised one in bf16."""
        entry = self.entry(name)
        if entry is None:
            shape = tuple(map(int, self.raw(f"{name}_shape", (2,))))
            return self.get(name, shape, BFLOAT16)
        coded = self.quantised and len(entry.shape) == 2 and entry.type in CODES
        return self.get(name, entry.shape, BFLOAT16) if coded else entry.read()

    def stored(self, name: str) -> str:
        """Return the name in the files of the tensor ``name``."""
        name = name.removeprefix("model.")
        return name.replace("layers.0.", self._first, 1) if name.startswith("layers.0.") else name

    def entry(self, name: str) -> Entry | None:
        return self.entries.get(self.stored(name))


def expected_tensors(head: Head) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a head must have, as ``HeadTensors`` names them."""
    shapes: dict[str, tuple[int, ...]] = {}
    if head.kind == MEDUSA:
        for place in range(head.longest or 1):
            for each in range(head.blocks):
                shapes[f"{place}.{each}.linear.weight"] = (head.hidden_size, head.hidden_size)
            if not head.borrows_output:
                shapes[f"{place}.{head.blocks}.weight"] = (head.vocab_size, head.hidden_size)
        return shapes
    a = head.architecture
    assert a is not None
    joins, blocks = head.kind == EAGLE1, head.block is not None
    wide = (2 if joins else PARTS if head.layers is None else len(head.layers)) * head.hidden_size
    width, queries, keys = a.hidden_size, a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    shapes["fc.weight"] = width, wide
    if not head.borrows_logits:
        shapes["lm_head.weight"] = a.vocab_size, width
    if not joins:
        own = "model.hidden_norm" if blocks else "model.layers.0.hidden_norm"
        shapes |= {"model.norm.weight": (width,), f"{own}.weight": (width,)}
    for index in range(a.num_layers):
        base, inputs = f"model.layers.{index}.", width if index or joins or blocks else 2 * width
        shapes |= {f"{base}self_attn.{n}_proj.weight": (keys, inputs) for n in "kv"}
        shapes[f"{base}self_attn.q_proj.weight"] = queries, inputs
        shapes[f"{base}self_attn.o_proj.weight"] = width, queries
        inner = a.intermediate_size
        shapes |= {f"{base}mlp.{n}_proj.weight": (inner, width) for n in ("gate", "up")}
        shapes[f"{base}mlp.down_proj.weight"] = width, inner
        biased = {"q": queries, "k": keys, "v": keys} if a.qkv_bias else {}
        biased |= {"o": width} if a.output_bias else {}
        shapes |= {f"{base}self_attn.{n}_proj.bias": (size,) for n, size in biased.items()}
        norms = ("post_attention",) if joins and not index else ("input", "post_attention")
        shapes |= {f"{base}{n}_layernorm.weight": (width,) for n in norms}
        if blocks:
            shapes |= {f"{base}self_attn.{n}_norm.weight": (a.head_dim,) for n in "qk"}
    if blocks:
        shapes |= _of_block(head)
    if a.vocab_size != head.vocab_size:
        shapes["d2t"] = (a.vocab_size,)
    shapes |= {name: (wide // len(head.fused_norms),) for name in head.fused_norms}
    if head.kind == PEAGLE:
        shapes["mask_hidden"] = (1, 1, wide)
    return shapes


def _of_block(head: Head) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that a head of ``BLOCKS`` has besides its layers."""
    block, a = head.block, head.architecture
    assert block is not None
    assert a is not None
    width, rank, kernels = a.hidden_size, block.rank, 2 * block.taps * a.hidden_size // block.group
    shapes: dict[str, tuple[int, ...]] = {}
    for index, part in itertools.product(range(a.num_layers if block.taps else 0), CONVOLVED):
        base = f"model.layers.{index}.{part}_conv."
        shapes[f"{base}base_kernel"] = 2, block.taps, width
        shapes[f"{base}kernel_projection.weight"] = kernels, width
    if head.kind == DFLASH2:
        shapes[f"{SELECTOR}hidden_projection.weight"] = rank, width
    if rank:
        before, behind = CODEBOOKS[head.kind]
        shapes |= {before: (head.vocab_size, rank), behind: (a.vocab_size, rank)}
    return shapes


def optional_tensors(head: Head) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tensors that a head may have."""
    if head.block:
        return {}
    if head.kind != MEDUSA:
        bias = {"fc.bias": (head.hidden_size,)} if head.kind == EAGLE1 else {}
        return {"model.embed_tokens.weight": (head.vocab_size, head.hidden_size), **bias}
    places = itertools.product(range(head.longest or 1), range(head.blocks))
    return {f"{place}.{block}.linear.bias": (head.hidden_size,) for place, block in places}


class Misfit(NamedTuple):
    """A tensor that does not match its head's config: what it is, and what is needed."""

    name: str
    actual: str
    needed: str


def misfits(head: Head) -> Iterator[Misfit]:
    """Yield the tensors of a head's checkpoint that are missing, or of another shape or type."""
    tensors, needed = HeadTensors(head.files), expected_tensors(head)
    for name, shape in {**needed, **optional_tensors(head)}.items():
        entry = tensors.entry(name)
        packed = tensors.entry(f"{name}_packed") if tensors.quantised and not entry else None
        if packed is not None:
            yield from _packed(tensors, name, packed, shape)
        elif entry is None:
            if name in needed:
                yield Misfit(name, "missing", f"its config.json says {[*shape]}")
        elif entry.shape != shape:
            yield Misfit(name, shown([*entry.shape]), f"its config.json says {[*shape]}")
        elif len(shape) == 2 and tensors.quantised and entry.type in CODES:
            yield from _scaled(tensors, name)
        elif name != "d2t" and TYPES.get(entry.type) not in PLAIN:
            yield Misfit(name, f"of type {entry.type}", "F32, BF16 or F16 is needed")


def _packed(
    tensors: HeadTensors, name: str, packed: Entry, shape: tuple[int, ...]
) -> Iterator[Misfit]:
    """Yield what is wrong with a matrix whose codes are ``packed``."""
    words = [(shape[0], num_words(shape[-1], bits)) for bits in BITS]
    stated = tensors.entry(f"{name}_shape")
    if len(shape) != 2 or packed.shape not in words or packed.type != "I32":
        said = f"{[*packed.shape]} of type {packed.type}"
        yield Misfit(f"{name}_packed", said, f"its config.json says {[*shape]}, codes in I32")
    elif stated is None or (stated.type, stated.shape) != ("I64", (2,)):
        said = "missing" if stated is None else f"{[*stated.shape]} of type {stated.type}"
        yield Misfit(f"{name}_shape", said, "two numbers in I64 are needed")
    else:
        yield from _scaled(tensors, name)


def _scaled(tensors: HeadTensors, name: str) -> Iterator[Misfit]:
    """Yield a misfit if a quantised matrix has no scales, or scales of a type that is not read."""
    scales = tensors.entry(f"{name}_scale")
    if scales is None or TYPES.get(scales.type) not in PLAIN:
        found = "missing" if scales is None else f"of type {scales.type}"
        yield Misfit(f"{name}_scale", found, "scales in F32, BF16 or F16 are needed")


def check_tensors(head: Head) -> None:
    """Refuse a head whose tensors do not match its config, before anything is allocated."""
    for name, actual, needed in misfits(head):
        raise ModelError(f"{head.folder}: tensor {name!r} is {actual}, but {needed}.")


def drafted_ids(tensors: HeadTensors, head: Head) -> list[int] | None:
    """Return the target's id for each id that a head drafts; None if they are the same."""
    assert head.architecture is not None
    size, vocabulary = head.architecture.vocab_size, head.vocab_size
    if "d2t" not in tensors:
        if size != vocabulary:
            raise ModelError(
                f"{head.folder}: this head drafts {size} of {vocabulary} ids, but has no tensor "
                "'d2t' that says which; convert the checkpoint again."
            )
        return None
    offsets = tensors.raw("d2t")
    if offsets.shape != (size,) or offsets.dtype.kind not in "iu":
        raise ModelError(f"{head.folder}: tensor 'd2t' is no list of {size} whole numbers.")
    ids = np.arange(size) + offsets.astype(np.int64)
    if int(ids.min()) < 0 or int(ids.max()) >= vocabulary or len(np.unique(ids)) != size:
        raise ModelError(
            f"{head.folder}: tensor 'd2t' names ids twice, or outside the vocabulary of "
            f"{vocabulary}; it holds offsets, target id = draft id + d2t[draft id]."
        )
    if "t2d" in tensors:
        known = tensors.raw("t2d").astype(np.bool_)
        if known.shape != (vocabulary,) or not known[ids].all() or int(known.sum()) != size:
            raise ModelError(f"{head.folder}: tensors 'd2t' and 't2d' name different ids.")
    listed: list[int] = ids.tolist()
    return listed
