"""Outrider itself: ``outrider serve``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..capabilities import Engine
from ..checks import other_vocabulary
from ..launch import Launch, Value, present
from ..spec import Spec


def launch(spec: Spec, engine: Engine) -> Launch:
    """Return ``outrider serve MODEL`` with its options, and the same as a TOML config."""
    limits = spec.limits
    options: dict[str, Value] = present(
        {
            "host": "0.0.0.0",
            "port": spec.service.port,
            "served-model-name": spec.service.model_name,
            "dtype": None if spec.target.dtype == "auto" else spec.target.dtype,
            "quantization": spec.target.quantization,
            "max-model-len": limits.max_model_len,
            "max-num-seqs": limits.max_num_seqs,
            "max-num-batched-tokens": limits.max_num_batched_tokens,
            "memory": spec.memory.gpu_share,
            **_speculation(spec, engine),
        }
    )
    lines = [f"{name.replace('-', '_')} = {_toml(value)}" for name, value in options.items()]
    return Launch(
        ("outrider", "serve", spec.target.model),
        {f"--{name}": value for name, value in options.items()},
        ("outrider.toml", "\n".join([f"model = {_toml(spec.target.model)}", *lines]) + "\n"),
    )


def _speculation(spec: Spec, engine: Engine) -> dict[str, Any]:
    drafter = spec.drafter
    if not spec.drafts:
        return {"drafter": "none"}
    name = drafter.model or drafter.method
    if other_vocabulary(spec, engine):
        name = f"retokenize:{name}"
    elif drafter.adaptive:
        # What auto chooses among by itself need not be named.
        known = ("suffix", str(Path(spec.target.model) / "drafter"))
        name = "auto" if name in known else f"auto+{name}"
    return {
        "drafter": name,
        "num-speculative-tokens": spec.draft_length,
        "drafter-quantization": drafter.quantization,
        "prompt-lookup-min": drafter.prompt_lookup_min,
        "prompt-lookup-max": drafter.prompt_lookup_max,
    }


def _toml(value: Value) -> str:
    """Return a value in TOML; a text on one line is written as in JSON."""
    return json.dumps(value, ensure_ascii=False)
