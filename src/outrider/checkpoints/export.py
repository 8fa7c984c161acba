"""Writes a quantised copy of a checkpoint, and counts the bits of a checkpoint's weights.

The copy has the "pack-quantized" layout of compressed-tensors (``compressors/pack_quantized`` in
that library). A matrix ``name.weight`` is stored as ``weight_packed``, int32 [out, words], low bits
first; ``weight_scale`` [out, groups]; ``weight_shape``, int64 [out, in]; and with zero points
``weight_zero_point``, int32 [words, groups], packed along the outputs. config.json has the scheme
under ``quantization_config``.
"""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..base.config import Recipe
from ..errors import ConfigError, ModelError
from .architecture import Architecture
from .checkpoint import open_checkpoint
from .configs import ModelConfig, PlainConfig, config_json
from .dtypes import FLOAT16, FLOAT32, Array, cast
from .families import CLASSES
from .files import INDEX, Files, new_folder, save_file
from .formats.compressed import METHOD
from .formats.gguf_weights import GGUFTensors
from .formats.shared import Tensors, usual_name
from .matrices import ROUTERS, Source, check_left, is_experts, plain, quantized, stays
from .quantize import Codes, Quantized, quantize
from .tokenizers import has_tokenizer, save_tokenizer

FORMAT = "pack-quantized"
WORD = 32
MAX_SHARD = 5 * 10**9
"""Most bytes of a file."""
KEPT = {"Q8_0": Recipe(8, 32), "Q4_0": Recipe(4, 32)}
"""Recipes that describe kept codes, keyed by their type in a GGUF file."""
MATRIX = re.compile(
    r"model\.layers\.\d+\.(self_attn|mlp|shared_mlp|conv|linear_attn|block_sparse_moe|feed_forward|"
    r"mixer)\.(.+\.)?(\w+_(proj|linear|proj_qkv|proj_qkvz|proj_z)|w[123])\.weight"
)
NOT_QUANTISED = rf".*\.({ROUTERS}|linear_attn\.in_proj_(a|b|ba))$"
"""Linear modules that stay unquantised."""
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
SCALES = ("_scale", "_scale_inv")
"""Endings of names of tensors that belong to a dequantised matrix."""
PARTS = (".weight_scale", ".weight_shape", ".weight_zero_point")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Suffixes of weights and their indices, which are not copied from the source."""


def recipe_of(name: str, recipe: Recipe | None, tied: bool) -> Recipe | None:
    """Return the recipe for the tensor ``name``, as in ``Loader``; None keeps it as it is."""
    if recipe is None:
        return None
    if name == EMBEDDING or (name == HEAD and not tied):
        return recipe.head
    return recipe if MATRIX.fullmatch(name) else None


def check_storable(recipe: Recipe) -> None:
    """Refuse a recipe that also quantises activations: a checkpoint holds weights only."""
    if recipe.coarse:
        what = f"quantization is {str(recipe)!r}, but a checkpoint holds weights only"
        raise ConfigError(f"{what}; leave -a8 out.")


def export(folder: Path, out: Path, recipe: Recipe) -> float:
    """Write the checkpoint in ``folder``, quantised by ``recipe``, to the new folder ``out``.

    Other files are copied; a GGUF file's config and tokenizer become files. Matrices that keep
    their codes (``matrices.stays``) are written as they are. Codes that compressed-tensors cannot
    express are quantised by the recipe, and Mamba-2's projections stay; except for these, loading
    ``out`` gives the same bits as loading ``folder`` with that quantization. Returns the mean bits
    of a weight.
    """
    check_storable(recipe)
    files = Files(folder)
    checkpoint = open_checkpoint(files)
    config, architecture, source = checkpoint.config, checkpoint.architecture, checkpoint.tensors
    if architecture is None:
        raise ModelError(
            f"{folder}: a {config.model_type!r} model as configured has no native path, and only "
            "native models run with quantised weights."
        )
    if architecture.linear is not None and architecture.linear.tiled_heads:
        raise ModelError(
            f"{folder}: a GGUF file of a {config.model_type!r} model cannot be written as "
            "safetensors; give the checkpoint that it was made from."
        )
    _check_experts(folder, architecture, source)
    check_left(source, recipe)
    with new_folder(out) as new:
        bits = _write_weights(source, new, recipe, architecture)
        options = dict(files.config or written_config(config))
        options["quantization_config"] = quantization_config(recipe, source, architecture.tied)
        (new / "config.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
        if files.gguf is not None:
            if has_tokenizer(files):
                save_tokenizer(files, new)
            return bits
        copy_others(folder, new)
    return bits


def _check_experts(folder: Path, architecture: Architecture, source: Source) -> None:
    """Refuse experts that are not separate matrices: the copy's layout cannot express them."""
    if architecture.mixture is None:
        return
    of_file = isinstance(source, GGUFTensors)
    fused = any("_blocks" in name or is_experts(name, s) for name, s in source.shapes().items())
    if of_file or fused:
        what = "a GGUF file of a mixture of experts" if of_file else "experts that are one tensor"
        raise ModelError(
            f"{folder}: {what} cannot be written as a quantised checkpoint; quantise it at load "
            "with --quantization, which servers keep for later starts."
        )


def copy_others(folder: Path, out: Path) -> None:
    """Copy the files of a checkpoint besides config.json and weights."""
    for file in folder.iterdir():
        copied = file.name != "config.json" and not file.name.endswith(WEIGHT_FILES)
        if file.is_file() and copied:
            shutil.copyfile(file, out / file.name)


def written_config(config: ModelConfig) -> dict[str, Any]:
    """Return the content of a config.json for a native model, such as a GGUF file's."""
    assert isinstance(config, PlainConfig)
    name = CLASSES.get(config.model_type, config.model_type.capitalize())
    return {**config_json(config), "architectures": [f"{name}ForCausalLM"]}


def _write_weights(source: Source, out: Path, recipe: Recipe, architecture: Architecture) -> float:
    """Write the safetensors files of the copy, and return the mean bits per weight."""
    parts: list[list[str]] = []
    size = bits = count = 0
    shard: dict[str, Array] = {}

    def write() -> None:
        file = out / f"part-{len(parts)}.safetensors"
        save_file(shard, file, metadata={"format": "pt", "quantization": str(recipe)})
        parts.append(sorted(shard))
        shard.clear()

    own_names = [(own, usual) for usual, own in architecture.layout.names]
    for made, weights in _tensors(source, recipe, architecture.tied):
        tensors = {usual_name(name, own_names): tensor for name, tensor in made.items()}
        added = sum(t.nbytes for t in tensors.values())
        if shard and size + added > MAX_SHARD:
            write()
            size = 0
        shard |= tensors
        size, bits, count = size + added, bits + 8 * added, count + weights
    write()
    _name(out, parts, bits // 8)
    return bits / count


def _tensors(source: Source, recipe: Recipe, tied: bool) -> Iterator[tuple[dict[str, Array], int]]:
    """Yield the tensors that each tensor of ``source`` becomes, and how many weights it holds."""
    shapes = source.shapes()
    names = [n for n in sorted(shapes) if not (tied and n == HEAD) and not n.endswith(SCALES)]
    for name in tqdm(names, "Quantising weights", disable=None, leave=False):
        own, size = recipe_of(name, recipe, tied), math.prod(shapes[name])
        match shapes[name]:
            case (rows, inputs) if own is not None:
                yield as_tensors(name, grid(source, name, (rows, inputs), own)), size
            case (rows, inputs):
                yield {name: plain(source.matrix(name, (rows, inputs), None), FLOAT32)}, size
            case shape:
                yield {name: source.get(name, shape)}, size


def grid(source: Source, name: str, shape: tuple[int, int], recipe: Recipe) -> Quantized:
    """Return a matrix as the copy has it: with codes that the format can express, or by recipe."""
    matrix = quantized(source, name, shape, recipe)
    if isinstance(matrix, Quantized):
        return matrix
    own = source.grid(name, shape) if isinstance(source, GGUFTensors) else None
    return quantize(matrix.dequantized(FLOAT32), recipe) if own is None else own


def _name(out: Path, parts: list[list[str]], size: int) -> None:
    """Give the files their final names, and an index if there are several."""
    weight_map: dict[str, str] = {}
    for number, tensors in enumerate(parts):
        name = f"model-{number + 1:05}-of-{len(parts):05}" if len(parts) > 1 else "model"
        (out / f"part-{number}.safetensors").rename(out / f"{name}.safetensors")
        weight_map |= dict.fromkeys(tensors, f"{name}.safetensors")
    if len(parts) > 1:
        index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
        (out / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def bits_per_weight(folder: Path, recipe: Recipe | None) -> float:
    """Return the mean stored bits of a weight in a checkpoint, or in its copy by ``recipe``.

    Scales, zero points and unquantised tensors count; a tied head counts once.
    """
    checkpoint = open_checkpoint(folder)
    source, architecture = checkpoint.tensors, checkpoint.architecture
    tied = architecture is not None and architecture.tied
    bits, count = 0.0, 0
    for name, shape in sorted(source.shapes().items()):
        if tied and name == HEAD:
            continue
        own = None if stays(source, name) else recipe_of(name, recipe, tied)
        own = recipe if is_experts(name, shape) and not stays(source, name) else own
        size = math.prod(shape)
        bits += 8 * source.nbytes(name) if own is None else size * own.bits_per_weight(shape[-1])
        if name.endswith("_shape") and isinstance(source, Tensors):
            count += math.prod(source.raw(name).tolist())
        elif not name.endswith((*PARTS, "_packed")):
            count += size
    return bits / count


def pack(codes: Codes, bits: int) -> NDArray[np.int32]:
    """Return codes uint8 [rows, n] of 4 or 8 bits as int32 [rows, ceil(n * bits / 32)]."""
    octets = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (WORD // bits))))
    if bits == 4:
        octets = octets[:, ::2] | octets[:, 1::2] << np.uint8(4)
    return np.ascontiguousarray(octets).view(np.int32)


def as_tensors(name: str, matrix: Quantized) -> dict[str, Array]:
    """Return the tensors that store ``matrix``, by name; ``name`` ends in ".weight"."""
    halves = cast(matrix.scales, FLOAT16)
    exact = np.array_equal(halves.astype(np.float32), matrix.scales)
    tensors = {
        f"{name}_packed": pack(matrix.codes, matrix.bits),
        f"{name}_scale": halves if exact else matrix.scales,
        f"{name}_shape": np.array(matrix.shape, np.int64),
    }
    if matrix.zeros is not None:
        zeros = pack(matrix.zeros.T, matrix.bits)
        tensors[f"{name}_zero_point"] = np.ascontiguousarray(zeros.T)
    return tensors


def scheme(recipe: Recipe, targets: list[str]) -> dict[str, Any]:
    """Return one group of ``quantization_config``: modules ``targets`` quantised by ``recipe``."""
    weights = {
        "num_bits": recipe.bits,
        "type": "int",
        "symmetric": not recipe.zeros,
        "strategy": "channel" if recipe.group is None else "group",
        "group_size": recipe.group,
        "dynamic": False,
    }
    return {"targets": targets, "weights": weights, "format": FORMAT}


def quantization_config(recipe: Recipe, source: Source, tied: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of a copy of ``source`` made by ``recipe``."""
    head = "re:.*embed_tokens$" if tied else "re:.*(embed_tokens|lm_head)$"
    kept: dict[Recipe, list[str]] = {}
    for name in source.shapes():
        kind = stays(source, name)
        if kind in KEPT:
            kept.setdefault(KEPT[kind], []).append(name.removesuffix(".weight"))
    groups = [scheme(recipe, ["Linear"]), scheme(recipe.head, [head])]
    groups += [scheme(own, names) for own, names in kept.items()]
    return config_of(groups, [f"re:{NOT_QUANTISED}"])


def config_of(groups: list[dict[str, Any]], ignored: list[str]) -> dict[str, Any]:
    """Return a ``quantization_config`` of schemes, and of modules without a scheme."""
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {f"group_{number}": group for number, group in enumerate(groups)},
        "ignore": ignored,
    }
