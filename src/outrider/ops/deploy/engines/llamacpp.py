"""llama.cpp: ``llama-server``, with target and drafter on the GPU."""

from __future__ import annotations

import re
import shlex
from typing import Any

from ..capabilities import Engine, schema
from ..launch import Launch, Value, present, text
from ..spec import Spec

ALL_LAYERS = "all"
PLAIN = re.compile(r"[\w./:@,+=%-]+")
"""Values that docker, compose, systemd and a shell read alike from an env file."""
NGRAM = "--spec-ngram-simple-size-"


def launch(spec: Spec, engine: Engine) -> Launch:
    """Return ``llama-server`` with its options, and those with a variable as an env file."""
    limits = spec.limits
    context = limits.max_model_len and limits.max_model_len * (limits.max_num_seqs or 1)
    options: dict[str, Value] = present(
        {
            **_model(spec.target.model, "--model", "--hf-repo"),
            "--alias": spec.service.model_name,
            "--host": "0.0.0.0",
            "--port": spec.service.port,
            "--n-gpu-layers": ALL_LAYERS,
            "--split-mode": _split(spec),
            "--ctx-size": context,
            "--parallel": limits.max_num_seqs,
            "--batch-size": limits.max_num_batched_tokens,
            "--metrics": True,
            **_speculation(spec, engine),
        }
    )
    return Launch(("llama-server",), options, ("llamacpp.env", _environment(options)))


def _model(name: str, file: str, hub: str) -> dict[str, str]:
    return {file if name.endswith(".gguf") else hub: name}


def _split(spec: Spec) -> str | None:
    if spec.parallel.tensor > 1:
        return "row"
    return "layer" if spec.parallel.pipeline > 1 else None


def _speculation(spec: Spec, engine: Engine) -> dict[str, Any]:
    drafter, length = spec.drafter, spec.draft_length
    if not spec.drafts:
        return {}
    options: dict[str, Any] = {"--spec-type": engine.methods[drafter.method]}
    if drafter.method == "ngram":
        sizes = {f"{NGRAM}n": drafter.prompt_lookup_max, f"{NGRAM}m": length}
        return options | sizes
    if drafter.method == "suffix":
        return options | {"--spec-ngram-mod-n-max": length}
    if drafter.model is not None:
        options |= _model(drafter.model, "--spec-draft-model", "--spec-draft-hf")
        options["--spec-draft-ngl"] = ALL_LAYERS
    return options | {"--spec-draft-n-max": length}


def _environment(options: dict[str, Value]) -> str:
    """Return the options as variables of an env file.

    Those that have none, or whose value readers of such files read differently, stay flags in a
    comment.
    """
    variables = schema("llamacpp")["nested"]["environment"]
    lines, flags = [], []
    for flag, value in options.items():
        said = "1" if value is True else text(value)
        if flag in variables and PLAIN.fullmatch(said):
            lines.append(f"{variables[flag]}={said}")
        else:
            flags.append(flag if value is True else f"{flag} {shlex.quote(said)}")
    if flags:
        lines.append("# No variable can hold these: add them to the command.")
        lines += [f"# {flag}" for flag in flags]
    return "\n".join(lines) + "\n"
