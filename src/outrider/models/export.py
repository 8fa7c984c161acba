"""Writes a quantised copy of a checkpoint, and counts the bits of a checkpoint's weights.

The copy has the "pack-quantized" layout of compressed-tensors (``compressors/pack_quantized`` in
that library). A matrix ``name.weight`` is stored as ``weight_packed``, int32 [out, words], low bits
first; ``weight_scale`` [out, groups]; ``weight_shape``, int64 [out, in]; and with zero points
``weight_zero_point``, int32 [words, groups], packed along the outputs. config.json holds the scheme
under ``quantization_config``.
"""

import json
import math
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tqdm import tqdm

from ..config import Recipe
from ..errors import ConfigError, ModelError
from ..gguf import is_gguf, open_gguf
from .families import read_architecture, read_config
from .formats.methods import find_format
from .formats.shared import Checkpoint
from .quantize import Quantized
from .weights import quantized

METHOD, FORMAT = "compressed-tensors", "pack-quantized"
WORD = 32
MAX_SHARD = 5 * 10**9
"""Bytes of a file."""
MATRIX = re.compile(r"model\.layers\.\d+\.(self_attn|mlp)\.(.+\.)?\w+_proj\.weight")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PARTS = (".weight_scale", ".weight_shape", ".weight_zero_point")
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".index.json")
"""Suffixes of weights and their indices, which are not copied from the source."""


def recipe_of(name: str, recipe: Recipe | None, tied: bool) -> Recipe | None:
    """Return the recipe for the tensor ``name``, as in ``Loader``; None leaves it as it is."""
    if recipe is None:
        return None
    if name == EMBEDDING or (name == HEAD and not tied):
        return recipe.head
    return recipe if MATRIX.fullmatch(name) else None


def export(folder: Path, out: Path, recipe: Recipe) -> float:
    """Write the checkpoint in ``folder``, quantised by ``recipe``, to the new folder ``out``.

    Other files of ``folder`` are copied. Loading ``out`` gives the same weights, bit for bit, as
    loading ``folder`` with that quantization.

    Returns:
        Mean bits of a weight over all tensors.

    Raises:
        ConfigError: ``out`` is not empty, the checkpoint is quantised already, or the recipe is of
            activations too.
        ModelError: the checkpoint cannot be read, or its family has no native path.
    """
    if recipe.coarse:
        raise ConfigError(
            f"quantization is {str(recipe)!r}, but a checkpoint holds weights only; leave -a8 out."
        )
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
    for tensors, weights in _tensors(source, recipe, architecture.tied):
        added = sum(t.nbytes for t in tensors.values())
        if shard and size + added > MAX_SHARD:
            files.append(_write(out, len(files), shard, recipe))
            shard, size = {}, 0
        shard |= tensors
        size, bits, count = size + added, bits + 8 * added, count + weights
    files.append(_write(out, len(files), shard, recipe))
    _name(out, files, bits // 8)
    options = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    options["quantization_config"] = quantization_config(recipe, architecture.tied)
    (out / "config.json").write_text(json.dumps(options, indent=2) + "\n", encoding="utf-8")
    for file in folder.iterdir():
        if file.is_file() and file.name != "config.json" and not file.name.endswith(WEIGHT_FILES):
            shutil.copyfile(file, out / file.name)
    return bits / count


def _tensors(
    source: Checkpoint, recipe: Recipe, tied: bool
) -> Iterator[tuple[dict[str, torch.Tensor], int]]:
    """Yield the tensors that each tensor of ``source`` becomes, and how many weights it holds."""
    names = [name for name in sorted(source.entries) if not (tied and name == HEAD)]
    for name in tqdm(names, "Quantising weights", disable=None, leave=False):
        tensor, own = source.raw(name), recipe_of(name, recipe, tied)
        if own is None:
            yield {name: tensor}, tensor.numel()
        else:
            rows, inputs = tensor.shape
            yield as_tensors(name, quantized(source, name, (rows, inputs), own)), tensor.numel()


def _write(
    out: Path, number: int, shard: dict[str, torch.Tensor], recipe: Recipe
) -> tuple[Path, list[str]]:
    """Write one file under a temporary name; return it and the names of its tensors."""
    file = out / f"part-{number}.safetensors"
    save_file(shard, file, metadata={"format": "pt", "quantization": str(recipe)})
    return file, sorted(shard)


def _name(out: Path, files: list[tuple[Path, list[str]]], size: int) -> None:
    """Give the files their final names, and an index if there are several."""
    if len(files) == 1:
        files[0][0].rename(out / "model.safetensors")
        return
    weight_map: dict[str, str] = {}
    for number, (file, names) in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors"
        file.rename(out / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(weight_map.items()))}
    (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def bits_per_weight(folder: Path, recipe: Recipe | None) -> float:
    """Return the mean stored bits of a weight in a checkpoint, or in its copy by ``recipe``.

    Scales, zero points and unquantised tensors count; a tied head counts once.

    Raises:
        ModelError: the checkpoint cannot be read.
    """
    if is_gguf(folder):
        tensors = open_gguf(folder).tensors.values()
        return 8 * sum(t.nbytes for t in tensors) / sum(math.prod(t.shape) for t in tensors)
    config = read_config(folder)
    architecture = read_architecture(config, folder)
    tied = architecture is not None and architecture.tied
    bits, count = 0.0, 0
    method = find_format(getattr(config, "quantization_config", None), folder)
    source = Checkpoint(folder, method)
    for name, entry in sorted(source.entries.items()):
        if tied and name == HEAD:
            continue
        size, own = math.prod(entry.shape), recipe_of(name, recipe, tied)
        bits += 8 * entry.nbytes if own is None else size * own.bits_per_weight(entry.shape[-1])
        if name.endswith("_shape"):
            count += math.prod(source.raw(name).tolist())
        elif not name.endswith((*PARTS, "_packed")):
            count += size
    return bits / count


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Return codes uint8 [rows, n] of 4 or 8 bits as int32 [rows, ceil(n * bits / 32)]."""
    octets = F.pad(codes, (0, -codes.shape[1] % (WORD // bits)))
    if bits == 4:
        octets = octets[:, ::2] | octets[:, 1::2] << 4
    return octets.flatten().view(torch.int32).view(len(codes), -1)


def as_tensors(name: str, matrix: Quantized) -> dict[str, torch.Tensor]:
    """Return the tensors that store ``matrix``, by name; ``name`` ends in ".weight"."""
    halves = matrix.scales.half()
    exact = torch.equal(halves.float(), matrix.scales)
    tensors = {
        f"{name}_packed": pack(matrix.codes, matrix.bits),
        f"{name}_scale": halves if exact else matrix.scales,
        f"{name}_shape": torch.tensor(matrix.shape),
    }
    if matrix.zeros is not None:
        zeros = pack(matrix.zeros.T.contiguous(), matrix.bits)
        tensors[f"{name}_zero_point"] = zeros.T.contiguous()
    return tensors


def scheme(recipe: Recipe, targets: str) -> dict[str, Any]:
    """Return one group of ``quantization_config``: modules ``targets`` quantised by ``recipe``."""
    weights = {
        "num_bits": recipe.bits,
        "type": "int",
        "symmetric": not recipe.zeros,
        "strategy": "channel" if recipe.group is None else "group",
        "group_size": recipe.group,
        "dynamic": False,
    }
    return {"targets": [targets], "weights": weights, "format": FORMAT}


def quantization_config(recipe: Recipe, tied: bool) -> dict[str, Any]:
    """Return the ``quantization_config`` of a checkpoint quantised by ``recipe``."""
    head = "re:.*embed_tokens$" if tied else "re:.*(embed_tokens|lm_head)$"
    return {
        "quant_method": METHOD,
        "format": FORMAT,
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": scheme(recipe, "Linear"),
            "group_1": scheme(recipe.head, head),
        },
        "ignore": ["re:.*mlp\\.gate$"],
    }
