"""SGLang: ``sglang.launch_server`` and its ``--speculative-*`` flags."""

from __future__ import annotations

from typing import Any

from ..capabilities import Engine
from ..launch import Launch, Value, present
from ..spec import Spec
from ..yamls import dump

MAX_RUNNING_REQUESTS = 48
"""What speculation makes of ``max_running_requests`` where it is not given."""


def launch(spec: Spec, engine: Engine) -> Launch:
    """Return ``python3 -m sglang.launch_server`` with its options, and the same as YAML."""
    target, limits = spec.target, spec.limits
    options: dict[str, Value] = present(
        {
            "model-path": target.model,
            "revision": target.revision,
            "served-model-name": spec.service.model_name,
            "host": "0.0.0.0",
            "port": spec.service.port,
            "dtype": None if target.dtype == "auto" else target.dtype,
            "quantization": target.quantization,
            "tp-size": spec.parallel.tensor if spec.parallel.tensor > 1 else None,
            "pp-size": spec.parallel.pipeline if spec.parallel.pipeline > 1 else None,
            "mem-fraction-static": spec.memory.gpu_share,
            "context-length": limits.max_model_len,
            "max-running-requests": limits.max_num_seqs
            or (MAX_RUNNING_REQUESTS if spec.drafts else None),
            "chunked-prefill-size": limits.max_num_batched_tokens,
            "enable-metrics": True,
            **_speculation(spec, engine),
        }
    )
    return Launch(
        ("python3", "-m", "sglang.launch_server"),
        {f"--{name}": value for name, value in options.items()},
        ("sglang.yaml", dump(options)),
    )


def _speculation(spec: Spec, engine: Engine) -> dict[str, Any]:
    """Return the flags of the drafter.

    A chain of K tokens is K steps of one branch, verified as K + 1 rows.
    """
    drafter, length = spec.drafter, spec.draft_length
    if not spec.drafts:
        return {}
    options: dict[str, Any] = {
        "speculative-algorithm": engine.methods[drafter.method],
        "speculative-draft-model-path": drafter.model,
        "speculative-draft-model-quantization": drafter.quantization,
    }
    if drafter.method == "ngram":
        return options | {
            "speculative-num-draft-tokens": length and length + 1,
            "speculative-ngram-max-trie-depth": drafter.prompt_lookup_max,
        }
    return options | {
        "speculative-num-steps": length,
        "speculative-eagle-topk": 1,
        "speculative-num-draft-tokens": length and length + 1,
        "speculative-adaptive": drafter.adaptive,
    }
