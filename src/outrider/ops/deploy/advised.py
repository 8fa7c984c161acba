"""Makes a spec of an advice of ``outrider ops advise --out``: models, GPUs, lengths, drafting."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from ...errors import ConfigError, shown
from ..planning.advice import Advice
from ..planning.catalogue import data
from ..planning.deployment import Model
from ..planning.rules import LEAVE
from .capabilities import Engine, find

GGUF = "llamacpp"
"""The engine whose checkpoints are GGUF files."""
FLOATS = {"fp32": "float32", "bf16": "bfloat16"}
"""Dtypes of an advice that need no quantization, and their names in a spec."""


def document_of(advice: Advice, engine: str | None, version: str | None) -> dict[str, Any]:
    """Return the document of a spec that follows an advice.

    Where the engine knows draft lengths by batch size they are the advice's; where it chooses them
    itself, it may, up to the longest of these; else the length is that of the traffic's median, as
    it is where an engine wants the longest draft first and the advice has a longer one later.
    """
    known, served = find(engine, version), advice.deployment
    here = known.gpu and not _elsewhere(advice, known)
    document: dict[str, Any] = {
        "target": {
            **_checkpoint(served.target),
            **_weights(served.target.dtype, served.hardware, known.dtypes, known.quantizations),
        },
        "parallel": {"tensor": served.tensor_parallel},
        "limits": {"max_model_len": served.max_model_len},
        "service": {"replicas": served.replicas},
    }
    if served.max_num_seqs is not None and here:
        document["limits"]["max_num_seqs"] = served.max_num_seqs
    if served.memory_gib is not None and here:
        document["memory"] = {"gpu_gib": served.memory_gib}
    drafts = advice.verdict != LEAVE
    return {**document, "drafter": _drafter(advice, known) if drafts else {"method": "none"}}


def _elsewhere(advice: Advice, known: Engine) -> bool:
    """Return whether the advice is about another kind of device than the engine runs on."""
    device = data("hardware")["device"].get(advice.deployment.hardware)
    return device is not None and (device["kind"] == "gpu") is not known.gpu


def _drafter(advice: Advice, known: Engine) -> dict[str, Any]:
    served, schedule = advice.deployment, advice.schedule
    if served.placement != "same":
        raise ConfigError(
            f"The advice places the drafter elsewhere ({served.placement}), for which "
            f"{known.title} has no option here; ask outrider ops advise with --placement same."
        )
    drafter: dict[str, Any] = {"method": served.method}
    if served.drafter is not None:
        drafter |= _checkpoint(served.drafter)
        quantized = known.quantizations if known.draft_quantization else ()
        drafter |= _weights(served.drafter.dtype, None, (), quantized)
        if served.method != "draft_model":
            del drafter["vocab_size"]  # a head's is a part of the target's
    if served.other_vocabulary:
        drafter["other_vocabulary"] = True
    if known.schedule and schedule and not (known.falling and _rises(schedule)):
        drafter["schedule"] = [list(each) for each in schedule]
    elif served.method in known.adaptive:
        longest = max((k for _, _, k in schedule), default=advice.k)
        drafter |= {"adaptive": True, "num_speculative_tokens": longest}
    else:
        drafter["num_speculative_tokens"] = advice.k
    return drafter


def _rises(schedule: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether a later draft is longer than the first."""
    return any(length > schedule[0][2] for _, _, length in schedule)


def _checkpoint(model: Model) -> dict[str, Any]:
    return {
        "model": model.checkpoint or model.name,
        "attention_heads": model.attention_heads,
        "vocab_size": model.vocab_size,
        "weights_gib": model.weights_gib,
    }


def _weights(
    dtype: str, hardware: str | None, dtypes: tuple[str, ...], quantizations: tuple[str, ...]
) -> dict[str, str]:
    """Return the options that give a model a dtype; none if its checkpoint must hold that dtype."""
    device = data("hardware")["device"].get(hardware, {})
    name = device.get("half", "bfloat16") if dtype == "bf16" else FLOATS.get(dtype, dtype)
    if name in dtypes:
        return {"dtype": name}
    return {"quantization": dtype} if dtype in quantizations else {}


def check_names(document: Mapping[str, Any], advice: Advice, known: Engine) -> None:
    """Refuse unknown checkpoints, and those that do not hold the weights of the advice."""
    served = advice.deployment
    for part, model in (("target", served.target), ("drafter", served.drafter)):
        own = document.get(part, {})
        name = own.get("model") if isinstance(own, Mapping) else None
        if not isinstance(name, str) or model is None:
            continue
        if "/" not in name and not os.path.exists(name):
            raise ConfigError(
                f"The advice is about {shown(name)}, which names no checkpoint; give a folder or a "
                f"hub name with --{part}."
            )
        usual = name == model.checkpoint and name.lower() != model.name.lower()
        if usual and known.engine == GGUF:
            raise ConfigError(
                f"{known.title} loads GGUF files, and {name} holds none; name a file or a "
                f"repository that does with --{part}."
            )
        if usual and model.dtype not in FLOATS and "quantization" not in own:
            raise ConfigError(
                f"The advice is for {model.dtype} weights, which {known.title} must read from a "
                f"checkpoint, and {name} holds bf16; name another with --{part}, or ask outrider "
                "advise for another dtype."
            )


def notes_of(document: Mapping[str, Any], advice: Advice, known: Engine) -> list[str]:
    """Return notes that say where the values of the rendered files come from."""
    served, traffic = advice.deployment, advice.deployment.traffic
    where = f"{served.tensor_parallel} x {served.hardware}" if served.hardware else "measured costs"
    lines = [
        f"From the advice about {advice.target} with {advice.drafter} on {where}: {advice.verdict}."
    ]
    if _elsewhere(advice, known):
        lines.append(
            f"not checked: the advice's figures are those of {served.hardware}, and {known.title} "
            f"runs on {'GPUs' if known.gpu else 'CPUs'} here; "
            "ask outrider ops advise for the device."
        )
    if document.get("limits", {}).get("max_model_len") == served.max_model_len:
        lines.append(
            f"max_model_len is the advice's {traffic.input_tokens} input and "
            f"{traffic.output_tokens} output tokens; longer requests are refused: raise it with "
            "--max-model-len, and memory holds fewer of them at once."
        )
    for part, model in (("target", served.target), ("drafter", served.drafter)):
        own = document.get(part, {})
        named = model is not None and "model" in own
        if model is not None and named and model.dtype not in FLOATS and "quantization" not in own:
            lines.append(f"not checked: {own['model']} must hold {model.dtype} weights.")
    return lines
