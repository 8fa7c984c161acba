"""Translates commands of ``llama-server`` that have removed options."""

from __future__ import annotations

from ..capabilities import schema
from ..engines import Launch, Value
from .rules import Changes, rules_of
from .shell import options

DRAFTERS = ("-md", "--model-draft", "--spec-draft-model", "-hfd", "--spec-draft-hf")
ON_GPU = (
    ("-ngl", "--gpu-layers", "--n-gpu-layers"),
    ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl"),
)
"""Names of the option for layers on the GPU: the target's and the drafter's."""


def serve(words: list[str]) -> tuple[Launch, Changes]:
    """Return the current launch, and what changed."""
    rules, known = rules_of("llamacpp"), schema("llamacpp")["options"]
    command = options(words, {n for n, kind in known.items() if kind in ("flag", "bool")})
    lookup = "ngram-mod" in (command.get("--spec-type") or "")
    chosen: dict[str, Value] = {}
    changes = Changes()
    for flag, value in command.options:
        if flag in rules:
            new = str(rules[flag].option)
            new = new.replace("draft-n", "ngram-mod-n") if lookup else new
            chosen[new] = value
            changes.add(f"{flag} {value}", f"{new} {value}", rules[flag].why)
        elif flag in known:
            chosen[flag] = value
        else:
            changes.note("no_llama_option", flag=flag)
    if command.has(*DRAFTERS):
        if not command.has("--spec-type"):
            chosen["--spec-type"] = "draft-simple"
            changes.note("no_type")
        for names in ON_GPU:
            if not command.has(*names):
                chosen[names[0]] = "all"
                changes.note("on_gpu", flag=names[0])
    return Launch(tuple(command.program), chosen, ("", "")), changes
