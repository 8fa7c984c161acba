"""The facts that a checkpoint's folder states, where the spec does not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TypeVar

from .spec import Drafter, Spec, Target

GIB = 2**30
Model = TypeVar("Model", Target, Drafter)


def filled(spec: Spec) -> Spec:
    """Return the spec with the facts of local checkpoints; what it states itself stays."""
    target, drafter = _filled(spec.target), _filled(spec.drafter)
    return spec.model_copy(update={"target": target, "drafter": drafter})


def _filled(model: Model) -> Model:
    if model.model is None:
        return model
    config, size = _config(model.model), _bytes(model.model)
    names = {"attention_heads": "num_attention_heads", "vocab_size": "vocab_size"}
    facts: dict[str, Any] = {name: config.get(key) for name, key in names.items()}
    facts = {name: value for name, value in facts.items() if type(value) is int and value > 0}
    facts |= {"weights_gib": size / GIB} if size else {}
    unknown = {name: value for name, value in facts.items() if getattr(model, name) is None}
    return model.model_copy(update=unknown)


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
