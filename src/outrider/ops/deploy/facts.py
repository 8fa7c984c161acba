"""What a checkpoint's folder says of itself, where the spec does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from .spec import Drafter, Spec, Target

GIB = 2**30
Model = TypeVar("Model", Target, Drafter)


def filled(spec: Spec) -> Spec:
    """Return the spec with the facts of local checkpoints; what it states itself stays."""
    target, drafter = spec.target, spec.drafter
    target = _filled(target, target.model, "attention_heads", "num_attention_heads")
    target = _filled(target, target.model, "vocab_size", "vocab_size")
    if (folder := drafter.model) is not None:
        drafter = _filled(drafter, folder, "attention_heads", "num_attention_heads")
        drafter = _filled(drafter, folder, "vocab_size", "vocab_size")
    return replace(spec, target=target, drafter=drafter)


def _filled(model: Model, folder: str, fact: str, name: str) -> Model:
    changes: dict[str, Any] = {}
    value = _config(folder).get(name)
    if getattr(model, fact) is None and type(value) is int and value > 0:
        changes[fact] = value
    size = _bytes(folder)
    if model.weights_gib is None and size:
        changes["weights_gib"] = size / GIB
    return replace(model, **changes)


def _bytes(folder: str) -> int:
    """Return the size of a folder's weights, 0 where there are none or they cannot be seen."""
    try:
        files = [file for file in Path(folder).glob("*.safetensors") if file.is_file()]
        return sum(file.stat().st_size for file in files)
    except OSError:  # a hub name may be no path at all, such as one that is too long
        return 0


def _config(folder: str) -> dict[str, Any]:
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else config
