"""Specs of deployments: every engine with every method that it has."""

from __future__ import annotations

from typing import Any

from outrider.base.methods import NAMES, WITH_CHECKPOINT
from outrider.ops.deploy import capabilities

SCHEDULE = [[1, 16, 5], [17, 64, 2], [65, 512, 0]]


def document(engine: str, method: str = "none", **changes: Any) -> dict[str, Any]:
    drafter: dict[str, Any] = {"method": method}
    if method in WITH_CHECKPOINT:
        drafter["model"] = "org/drafter"
    if method not in ("none", "speculators"):
        drafter["num_speculative_tokens"] = 5
    return {
        "engine": engine,
        "target": {"model": "org/target"},
        "drafter": {**drafter, **changes.pop("drafter", {})},
        **changes,
    }


def pairs() -> list[tuple[str, str]]:
    """Every engine with every method that it has."""
    found = []
    for engine in capabilities.ENGINES:
        methods = capabilities.find(engine).methods
        found += [(engine, method) for method in NAMES if method in methods or method == "none"]
    return found


def rich(engine: str, method: str) -> dict[str, Any]:
    """A spec that sets all that the engine takes."""
    has = capabilities.find(engine)
    made = document(engine, method)
    made["target"] |= {"revision": "main", "dtype": has.dtypes[-1]}
    if has.quantizations:
        made["target"]["quantization"] = has.quantizations[0]
    if has.parallel:
        made["parallel"] = {"tensor": 4}
    made["limits"] = {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 2048}
    made["memory"] = {"gpu_share": 0.9}
    made["service"] = {"model_name": "llama", "port": 8001}
    if method == "ngram":
        made["drafter"] |= {"prompt_lookup_min": 2, "prompt_lookup_max": 4}
    if has.schedule and method not in ("none", "speculators"):
        made["drafter"]["schedule"] = SCHEDULE
    if has.draft_quantization and method in WITH_CHECKPOINT:
        made["drafter"]["quantization"] = "int8" if engine == "outrider" else "fp8"
    if has.parallel and method in WITH_CHECKPOINT:
        made["drafter"]["tensor_parallel_size"] = 4
    return made
