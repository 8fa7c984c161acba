"""TensorRT-LLM: ``trtllm-serve`` with a YAML config."""

from __future__ import annotations

from typing import Any

from ....engine.control.schedules import tensorrt
from ....errors import ConfigError
from ..capabilities import Engine
from ..launch import Launch, present
from ..spec import Spec
from ..yamls import dump

CONFIG = "trtllm.yaml"


def speculative_config(spec: Spec, engine: Engine) -> dict[str, Any]:
    """Return ``speculative_config``, empty where nothing drafts."""
    drafter = spec.drafter
    if not spec.drafts:
        return {}
    ngram = drafter.prompt_lookup_max if drafter.method == "ngram" else None
    return present(
        {
            "decoding_type": engine.methods[drafter.method],
            "max_draft_len": drafter.schedule[0][2] if drafter.schedule else spec.draft_length,
            "speculative_model": drafter.model,
            "max_matching_ngram_size": ngram,
            "draft_len_schedule": _schedule(spec),
        }
    )


def _schedule(spec: Spec) -> dict[int, int]:
    """Return draft lengths by batch size."""
    ranges = spec.drafter.schedule
    if not ranges:
        return {}
    schedule = tensorrt(ranges)
    if schedule is None:
        raise ConfigError(
            "TensorRT-LLM drafts longest for the smallest batches, but drafter.schedule begins "
            f"with {ranges[0][2]} tokens; begin with its longest draft."
        )
    return schedule


def config(spec: Spec, engine: Engine) -> dict[str, Any]:
    """Return the YAML config's contents."""
    share = spec.memory.gpu_share
    return present(
        {
            "backend": "pytorch",
            "revision": spec.target.revision,
            "dtype": None if spec.target.dtype == "auto" else spec.target.dtype,
            "tensor_parallel_size": spec.parallel.tensor,
            "pipeline_parallel_size": spec.parallel.pipeline,
            "max_batch_size": spec.limits.max_num_seqs,
            "max_num_tokens": spec.limits.max_num_batched_tokens,
            "max_seq_len": spec.limits.max_model_len,
            "kv_cache_config": present({"free_gpu_memory_fraction": share}),
            "return_perf_metrics": True,
            "speculative_config": speculative_config(spec, engine),
        }
    )


def launch(spec: Spec, engine: Engine) -> Launch:
    """Return ``trtllm-serve MODEL --config``, with all but the address in the YAML file."""
    text = dump(config(spec, engine))
    service = spec.service
    options = present(
        {
            "--host": "0.0.0.0",
            "--port": service.port,
            "--served_model_name": service.model_name,
            "--config": CONFIG,
        }
    )
    return Launch(
        ("trtllm-serve", spec.target.model), options, (CONFIG, text), files={CONFIG: text}
    )
