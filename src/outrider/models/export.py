"""A checkpoint made few-bit once and for all, and the bits that its weights take."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from ..config import Recipe
from ..errors import ConfigError, ModelError
from ..gguf import is_gguf, open_gguf
from .families import read_architecture, read_config
from .packed import as_tensors, quantization_config
from .weights import Checkpoint, quantized

SHARD = 5 * 10**9
"""Bytes of a file at most."""
MATRIX = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(.+\.)?\w+_proj\.weight")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PARTS = (".weight_scale", ".weight_shape", ".weight_zero_point")
LEFT = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Files of weights end so, and their indices: those of the source are not copied."""


def recipe_of(name: str, recipe: Recipe | None, tied: bool) -> Recipe | None:
    """What ``recipe`` makes the tensor ``name`` to, as ``Loader`` does at load; None leaves it."""
    if recipe is None:
        return None
    if name == EMBEDDING or (name == HEAD and not tied):
        return recipe.head
    return recipe if MATRIX.fullmatch(name) else None


def export(folder: Path, out: Path, recipe: Recipe) -> float:
    """Write the checkpoint in ``folder``, quantised by ``recipe``, to the new folder ``out``.

    All else that lies in ``folder`` itself is copied. Loading ``out`` gives the same weights, bit
    for bit, as loading ``folder`` with that quantization.

    Returns:
        Bits of a weight, over all tensors.

    Raises:
        ConfigError: ``out`` holds something already, or the checkpoint is quantised.
        ModelError: it cannot be read, or is of a family without a native path.
    """
    config = read_config(folder)
    architecture = read_architecture(config, folder)
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"{folder} is quantised already; give the checkpoint it was made from.")
    if architecture is None:
        raise ModelError(
            f"{folder}: a {config.model_type!r} model as configured has no native path, and only "
            "native models run with quantised weights."
        )
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} is there already and is not empty; give a new folder.")
    out.mkdir(parents=True, exist_ok=True)
    source = Checkpoint(folder)
    files: list[tuple[Path, list[str]]] = []
    size = bits = count = 0
    shard: dict[str, torch.Tensor] = {}
    for made, weights in _tensors(source, recipe, architecture.tied):
        grown = sum(t.nbytes for t in made.values())
        if shard and size + grown > SHARD:
            files.append(_write(out, len(files), shard, recipe))
            shard, size = {}, 0
        shard |= made
        size, bits, count = size + grown, bits + 8 * grown, count + weights
    files.append(_write(out, len(files), shard, recipe))
    _name(out, files, bits // 8)
    described = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    described["quantization_config"] = quantization_config(recipe, architecture.tied)
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n", encoding="utf-8")
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(LEFT):
            shutil.copyfile(file, out / file.name)
    return bits / count


def _tensors(
    source: Checkpoint, recipe: Recipe, tied: bool
) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """What each tensor of ``source`` is stored as, and how many weights it holds."""
    names = [name for name in source.names() if not (tied and name == HEAD)]
    for name in tqdm(names, "Quantising weights", disable=None, leave=False):
        tensor, made = source.raw(name), recipe_of(name, recipe, tied)
        if made is None:
            yield {name: tensor}, tensor.numel()
        else:
            rows, inputs = tensor.shape
            yield as_tensors(name, quantized(source, name, (rows, inputs), made)), tensor.numel()


def _write(
    out: Path, number: int, shard: dict[str, torch.Tensor], recipe: Recipe
) -> tuple[Path, list[str]]:
    """Write one file under a passing name; returns it and the names of its tensors."""
    file = out / f"part-{number}.safetensors"
    save_file(shard, file, metadata={"format": "pt", "quantization": str(recipe)})
    return file, sorted(shard)


def _name(out: Path, files: list[tuple[Path, list[str]]], size: int) -> None:
    """Give the files their names, and several of them an index."""
    if len(files) == 1:
        files[0][0].rename(out / "model.safetensors")
        return
    where: dict[str, str] = {}
    for number, (file, names) in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        file.rename(out / name)
        where |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(where.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def bits_per_weight(folder: Path, recipe: Recipe | None) -> float:
    """Bits of a weight as stored, over all tensors, of a checkpoint or what ``recipe`` makes of it.

    Scales, zero points and what stays as it was count in; a tied head counts once.

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    if is_gguf(folder):
        stored = open_gguf(folder).tensors.values()
        return 8 * sum(t.nbytes for t in stored) / sum(math.prod(t.shape) for t in stored)
    config = read_config(folder)
    architecture = read_architecture(config, folder)
    tied = architecture is not None and architecture.tied
    bits, count = 0.0, 0
    source = Checkpoint(folder)
    for name in source.names():
        if tied and name == HEAD:
            continue
        shape, width = source.described(name)
        size, made = math.prod(shape), recipe_of(name, recipe, tied)
        bits += size * (width if made is None else made.bits_per_weight(shape[-1]))
        if name.endswith("_shape"):
            count += math.prod(source.raw(name).tolist())
        elif not name.endswith((*PARTS, "_packed")):
            count += size
    return bits / count
