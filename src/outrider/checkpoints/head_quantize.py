"""Writes a quantised copy of a head, in the layout in which ``export`` writes models."""

from __future__ import annotations

import json
import math
from pathlib import Path

from ..base.config import Recipe
from .dtypes import Array
from .export import as_tensors, check_storable, config_of, copy_others, grid, scheme
from .files import new_folder, save_file
from .head_tensors import CODEBOOKS, QUANTIZATION, HeadTensors, check_tensors, expected_tensors
from .heads import Head
from .matrices import check_left

OUTPUT = "lm_head.weight"


def quantize_head(head: Head, out: Path, recipe: Recipe) -> float:
    """Write a head, quantised by ``recipe``, to the new folder ``out``.

    Matrices that multiply are quantised in the same way as when the head is loaded with that
    quantization, so it drafts the same. Embedding, norms, biases, lists of ids and other files stay
    as they are. Returns the mean bits of a weight.
    """
    check_storable(recipe)
    check_tensors(head)
    source = HeadTensors(head.files)
    check_left(source, recipe)
    expected = expected_tensors(head).items()
    tables = CODEBOOKS.get(head.kind, ())  # they are looked up, not multiplied
    matrices = {
        source.stored(n): (s[0], s[1]) for n, s in expected if len(s) == 2 and n not in tables
    }
    tensors, weights = dict[str, Array](), 0
    for name in source.stems:
        if name not in matrices:
            tensors[name] = source.whole(name)
            weights += tensors[name].size
            continue
        own = recipe.head if name == OUTPUT else recipe
        tensors |= as_tensors(name, grid(source, name, matrices[name], own))
        weights += math.prod(matrices[name])
    groups = [scheme(recipe, ["Linear"])]
    if OUTPUT in matrices:
        groups.append(scheme(recipe.head, [r"re:.*lm_head$"]))
    config = {**(head.files.config or {}), QUANTIZATION: config_of(groups, [r"re:.*embed_tokens$"])}
    with new_folder(out) as new:
        metadata = {"format": "pt", "quantization": str(recipe)}
        save_file(tensors, new / "model.safetensors", metadata)
        (new / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
        copy_others(head.folder, new)
    return 8 * sum(each.nbytes for each in tensors.values()) / weights
