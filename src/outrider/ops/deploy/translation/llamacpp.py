"""Commands of ``llama-server`` with options that are removed."""

from __future__ import annotations

from ..capabilities import schema
from ..launch import Launch, Value
from .rules import Change, table
from .words import options

DRAFTERS = ("-md", "--model-draft", "--spec-draft-model", "-hfd", "--spec-draft-hf")
LAYERS = ("-ngl", "--gpu-layers", "--n-gpu-layers")
DRAFT_LAYERS = ("-ngld", "--gpu-layers-draft", "--n-gpu-layers-draft", "--spec-draft-ngl")


def is_llama(words: list[str]) -> bool:
    """Return whether words start llama.cpp's server."""
    return bool(words) and words[0].rpartition("/")[2] in ("llama-server", "server")


def serve(words: list[str]) -> tuple[Launch, list[Change]]:
    """Return today's launch, and what changed."""
    rules, known = table("llamacpp").rules, schema("llamacpp")["options"]
    command = options(words, {n for n, kind in known.items() if kind in ("flag", "bool")})
    lookup = "ngram-mod" in (command.get("--spec-type") or "")
    chosen: dict[str, Value] = {}
    changes: list[Change] = []
    for flag, value in command.options:
        if flag in rules:
            rule = rules[flag]
            new = str(rule.option)
            new = new.replace("draft-n", "ngram-mod-n") if lookup else new
            chosen[new] = value
            changes.append(Change(f"{flag} {value}", f"{new} {value}", rule.why))
        elif flag in known:
            chosen[flag] = value
        else:
            changes.append(Change(flag, "nothing", "llama-server has no such option"))
    if command.has(*DRAFTERS):
        if not command.has("--spec-type"):
            chosen["--spec-type"] = "draft-simple"
            why = "the kind of drafter is named, since there are several"
            changes.append(Change("(no --spec-type)", "--spec-type draft-simple", why))
        for names, flag in ((LAYERS, "-ngl"), (DRAFT_LAYERS, "-ngld")):
            if not command.has(*names):
                chosen[flag] = "all"
                why = "both models on the GPU: a drafter on the CPU slows the target"
                changes.append(Change(f"(no {flag})", f"{flag} all", why))
    return Launch(tuple(command.program), chosen, ("", "")), changes
