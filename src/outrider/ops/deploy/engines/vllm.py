"""vLLM: ``vllm serve`` and its ``--speculative-config``."""

from __future__ import annotations

from typing import Any

from ..capabilities import Engine
from ..checks import other_vocabulary
from ..launch import Launch, present
from ..spec import Spec
from ..yamls import dump

DRAIN_SECONDS = 45
"""What streams get to end after SIGTERM, which else aborts them; with preStop below the grace."""


def speculative_config(spec: Spec, engine: Engine) -> dict[str, Any]:
    """Return the object of ``--speculative-config``, empty where nothing drafts.

    A checkpoint of ``speculators`` says method and length itself, so its name alone is given.
    """
    drafter = spec.drafter
    if not spec.drafts:
        return {}
    method = None if drafter.method == "speculators" else engine.methods[drafter.method]
    return present(
        {
            "method": method,
            "model": drafter.model,
            "num_speculative_tokens": spec.draft_length,
            "quantization": drafter.quantization,
            "prompt_lookup_min": drafter.prompt_lookup_min,
            "prompt_lookup_max": drafter.prompt_lookup_max,
            "num_speculative_tokens_per_batch_size": [list(each) for each in drafter.schedule]
            or None,
            "use_heterogeneous_vocab": other_vocabulary(spec, engine),
        }
    )


def engine_arguments(spec: Spec, engine: Engine) -> dict[str, Any]:
    """Return the engine's arguments by vLLM's names, with underscores, without the model."""
    target = spec.target
    return present(
        {
            "revision": target.revision,
            "served_model_name": spec.service.model_name,
            "dtype": None if target.dtype == "auto" else target.dtype,
            "quantization": target.quantization,
            "tensor_parallel_size": spec.parallel.tensor if spec.parallel.tensor > 1 else None,
            "pipeline_parallel_size": spec.parallel.pipeline
            if spec.parallel.pipeline > 1
            else None,
            "gpu_memory_utilization": spec.memory.gpu_share,
            "max_model_len": spec.limits.max_model_len,
            "max_num_seqs": spec.limits.max_num_seqs,
            "max_num_batched_tokens": spec.limits.max_num_batched_tokens,
            "speculative_config": speculative_config(spec, engine),
        }
    )


def launch(spec: Spec, engine: Engine) -> Launch:
    """Return ``vllm serve MODEL`` with its options, and the same as a YAML config."""
    arguments = {
        "host": "0.0.0.0",
        "port": spec.service.port,
        "shutdown_timeout": DRAIN_SECONDS,
        **engine_arguments(spec, engine),
    }
    options = {name.replace("_", "-"): value for name, value in arguments.items()}
    return Launch(
        ("vllm", "serve", spec.target.model),
        {f"--{name}": value for name, value in options.items()},
        ("vllm.yaml", dump({"model": spec.target.model, **options})),
    )
