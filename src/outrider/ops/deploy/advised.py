"""Makes a spec from an advice of ``outrider ops advise --out``: models, GPUs, lengths, drafting."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ...base.tables import told
from ...errors import ConfigError, shown
from ..planning.advice import Advice, ServedModel
from ..planning.catalogue import data
from ..planning.rules import LEAVE
from .capabilities import EngineVersion, find
from .capabilities import data as texts

GGUF = "llamacpp"
"""The engine whose checkpoints are GGUF files."""
FLOATS = {"fp32": "float32", "bf16": "bfloat16"}
"""Dtypes of an advice that need no quantization, and their names in a spec."""


def document_of(advice: Advice, engine: str | None, version: str | None) -> dict[str, Any]:
    """Return the spec document that follows an advice.

    An engine gets the advice's draft lengths by batch size if it can follow them, else the longest
    as a limit if it chooses lengths itself, else the length at the median batch size.
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
    drafter = {"method": "none"} if advice.verdict == LEAVE else _drafter(advice, known)
    return {**document, "drafter": drafter}


def _elsewhere(advice: Advice, known: EngineVersion) -> bool:
    """Return whether the advice is about another kind of device than the engine runs on."""
    device = data("hardware")["device"].get(advice.deployment.hardware)
    return device is not None and (device["kind"] == "gpu") is not known.gpu


def _drafter(advice: Advice, known: EngineVersion) -> dict[str, Any]:
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
            del drafter["vocab_size"]  # a head's vocabulary is part of the target's
    if served.other_vocabulary:
        drafter["other_vocabulary"] = True
    rises = any(length > schedule[0][2] for _, _, length in schedule)
    if known.schedule and schedule and not (known.falling and rises):
        drafter["schedule"] = [list(each) for each in schedule]
    elif served.method in known.adaptive:
        longest = max((k for _, _, k in schedule), default=advice.k)
        drafter |= {"adaptive": True, "num_speculative_tokens": longest}
    else:
        drafter["num_speculative_tokens"] = advice.k
    return drafter


def _checkpoint(model: ServedModel) -> dict[str, Any]:
    return {
        "model": model.checkpoint or model.name,
        "attention_heads": model.attention_heads,
        "vocab_size": model.vocab_size,
        "weights_gib": model.weights_gib,
    }


def _weights(
    dtype: str, hardware: str | None, dtypes: tuple[str, ...], quantizations: tuple[str, ...]
) -> dict[str, str]:
    """Return the options that set a model's dtype; empty if its checkpoint must have that dtype."""
    device = data("hardware")["device"].get(hardware, {})
    name = device.get("half", "bfloat16") if dtype == "bf16" else FLOATS.get(dtype, dtype)
    if name in dtypes:
        return {"dtype": name}
    return {"quantization": dtype} if dtype in quantizations else {}


def _parts(
    document: Mapping[str, Any], advice: Advice
) -> Iterator[tuple[str, ServedModel, Mapping[str, Any]]]:
    """Yield target and drafter, if both name one: part, the advice's model, document's table."""
    for part, model in (
        ("target", advice.deployment.target),
        ("drafter", advice.deployment.drafter),
    ):
        own = document.get(part, {})
        if model is not None and isinstance(own, Mapping) and isinstance(own.get("model"), str):
            yield part, model, own


def check_names(document: Mapping[str, Any], advice: Advice, known: EngineVersion) -> None:
    """Refuse unknown checkpoints, and those whose weights are not those of the advice."""
    for part, model, own in _parts(document, advice):
        name = own["model"]
        usual = name == model.checkpoint and name.lower() != model.name.lower()
        holds = {
            "no_checkpoint": "/" not in name and not os.path.exists(name),
            "no_gguf": usual and known.engine == GGUF,
            "bf16": usual and model.dtype not in FLOATS and "quantization" not in own,
        }
        values = {"known": known, "model": model, "name": name, "part": part, "shown": shown(name)}
        for problem in told(texts("advised")["refused"], holds, values):
            raise ConfigError(problem)


def notes_of(document: Mapping[str, Any], advice: Advice, known: EngineVersion) -> list[str]:
    """Return notes that say where the values of the rendered files come from."""
    served, sentences = advice.deployment, texts("advised")["notes"]
    where = f"{served.tensor_parallel} x {served.hardware}" if served.hardware else "measured costs"
    holds = {
        "from": True,
        "elsewhere": _elsewhere(advice, known),
        "length": document.get("limits", {}).get("max_model_len") == served.max_model_len,
    }
    values = {"advice": advice, "where": where, "served": served, "known": known,
              "traffic": served.traffic, "devices": "GPUs" if known.gpu else "CPUs"}  # fmt: skip
    notes = told(sentences, holds, values)
    for _, model, own in _parts(document, advice):
        holds = {"dtype": model.dtype not in FLOATS and "quantization" not in own}
        notes += told(sentences, holds, {"name": own["model"], "model": model})
    return notes
