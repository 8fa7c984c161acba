"""Specs that cannot work, refused before anything is rendered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...base.methods import WITH_CHECKPOINT
from ...base.tables import told
from ...errors import ConfigError, shown
from .capabilities import EngineVersion, data
from .spec import Spec

USUAL_GPU_SHARE = 0.9


def check(spec: Spec, engine: EngineVersion) -> None:
    """Refuse a spec that contradicts itself or that this engine cannot serve."""
    values = _values(spec, engine)
    for problem in told(data("problems")["of_spec"], _problems(spec, engine), values):
        raise ConfigError(problem)


def unchecked(spec: Spec) -> list[str]:
    """Return what could not be checked because facts are missing, one sentence each."""
    target, drafter = spec.target, spec.drafter
    own = spec.drafts and drafter.method == "draft_model" and drafter.other_vocabulary is None
    lacking = {
        "heads": target.attention_heads is None and spec.parallel.tensor > 1,
        "memory": None in (target.weights_gib, spec.memory.gpu_gib),
        "vocabulary": own and None in (target.vocab_size, drafter.vocab_size),
    }
    return told(data("problems")["unchecked"], lacking)


def other_vocabulary(spec: Spec, engine: EngineVersion) -> bool:
    """Return whether the drafter's vocabulary is another one: as stated, else by its size.

    Padding makes sizes of one vocabulary differ; each engine accepts some difference or none.
    """
    drafter, target = spec.drafter, spec.target
    if drafter.other_vocabulary is not None or drafter.method != "draft_model":
        return bool(drafter.other_vocabulary)
    if drafter.vocab_size is None or target.vocab_size is None:
        return False
    return abs(drafter.vocab_size - target.vocab_size) > engine.padding


def _longest(spec: Spec) -> int:
    return max((length for _, _, length in spec.drafter.schedule), default=0)


def _problems(spec: Spec, engine: EngineVersion) -> dict[str, Any]:
    """Return whether each problem of ``data/problems.toml`` holds."""
    target, drafter, method = spec.target, spec.drafter, spec.drafter.method
    given, length, tensor = drafter.num_speculative_tokens, spec.draft_length, spec.parallel.tensor
    low, high = drafter.prompt_lookup_min, drafter.prompt_lookup_max
    room, heads = spec.limits.max_model_len, target.attention_heads
    own_heads = drafter.attention_heads if spec.drafts else None
    size, quantization = drafter.tensor_parallel_size, drafter.quantization
    needed, share = _weights(spec)
    return {
        "required": drafter.required and not spec.drafts,
        "length_alone": method == "none" and length,
        "no_checkpoint": method in WITH_CHECKPOINT and drafter.model is None,
        "checkpoint": method not in WITH_CHECKPOINT and drafter.model is not None,
        "cpus": drafter.cpus is not None and method != "draft_model",
        "lookup": (low or high) and method != "ngram",
        "lookup_order": low and high and low > high,
        "method": method != "none" and method not in engine.methods,
        "adaptive": drafter.adaptive and method not in engine.adaptive,
        "schedule": drafter.schedule and not engine.schedule and given is None,
        "schedule_adaptive": drafter.schedule and drafter.adaptive,
        "schedule_longer": given is not None and _longest(spec) > given,
        "no_length": length is None and method in engine.needs_length,
        "too_long": room is not None and (length or 0) >= room,
        "vocabulary": method not in engine.other_vocabulary and other_vocabulary(spec, engine),
        "parallel": spec.parallel.gpus > 1 and not engine.parallel,
        "heads": heads is not None and heads % tensor,
        "drafter_heads": own_heads is not None and own_heads % tensor,
        "stages": spec.drafts and spec.parallel.pipeline > 1 and method not in engine.with_pipeline,
        "drafter_size": size is not None and size != tensor,
        "target_dtype": target.dtype not in engine.dtypes,
        "target_quantization": target.quantization not in (None, *engine.quantizations),
        "no_drafter_quantization": quantization is not None and not engine.draft_quantization,
        "drafter_quantization": quantization not in (None, *engine.quantizations),
        "memory": spec.memory.gpu_gib is not None and needed >= spec.memory.gpu_gib * share,
    }


def _weights(spec: Spec) -> tuple[float, float]:
    """Return the GiB of weights per GPU (0 if unknown), and the engine's share of its memory."""
    drafter = (spec.drafter.weights_gib or 0) if spec.drafts else 0
    own = spec.drafter.tensor_parallel_size or spec.parallel.tensor
    weights = spec.target.weights_gib
    needed = 0.0 if weights is None else weights / spec.parallel.gpus + drafter / own
    return needed, spec.memory.gpu_share or USUAL_GPU_SHARE


def _values(spec: Spec, engine: EngineVersion) -> Mapping[str, Any]:
    target, drafter = spec.target, spec.drafter
    heads, (needed, share) = target.attention_heads or 1, _weights(spec)
    sizes, other = "", ", ".join(engine.other_vocabulary)
    if drafter.vocab_size and target.vocab_size:
        sizes = f" ({drafter.vocab_size:,} tokens, the target has {target.vocab_size:,})"
    off = "the draft length is 0 at every batch size"
    return {
        **dict(spec),
        "spec": spec,
        "name": f"{engine.title} {engine.version}",
        "off": "drafter.method is none" if drafter.method == "none" else off,
        "methods": ", ".join(engine.methods),
        "model": shown(drafter.model),
        "longest": _longest(spec),
        "adaptive": f"for {', '.join(engine.adaptive)} alone"
        if engine.adaptive
        else "for no method",
        "sizes": sizes,
        "able": f" It takes one for {other}." if other else "",
        "divisors": ", ".join(str(n) for n in range(1, min(heads, 64) + 1) if heads % n == 0),
        "with_pipeline": ", ".join(engine.with_pipeline) or "no method",
        "dtype": shown(target.dtype),
        "dtypes": ", ".join(engine.dtypes),
        "quantization": shown(target.quantization),
        "quantizations": ", ".join(engine.quantizations) or "none: the checkpoint says it",
        "drafter_quantization": shown(drafter.quantization),
        "needed": needed,
        "share": share,
        "room": (spec.memory.gpu_gib or 0) * share,
    }
