"""Old commands, Python calls and manifests as today's, with each change explained."""

from __future__ import annotations

import re
from dataclasses import replace

from ...errors import ConfigError
from .translation import llamacpp, manifest, python, trtllm, vllm
from .translation.rules import Change, Changes, Translated
from .translation.shell import ASSIGNMENT, assignment, check, commands, plain, quoted

LONGEST = 2**18
"""Characters; the time that a text takes grows with its length."""
SHOWN = 100
"""Characters that are shown of a command that is left out."""
PYTHON = re.compile(
    r"^[^\S\n]*(from\s+\S+\s+import|import\s+\w)|\b(LLM|\w*EngineArgs)\s*\(|\bAsyncLLMEngine\b"
    r"|[\w)\]]\.metrics\b",
    re.M,
)
# Blanks at the start of a line stop at its end: the time grew with the square of empty lines.
MANIFEST = re.compile(r"""^[^\S\n]*(?:\{\s*)?["']?(apiVersion|kind)["']?\s*:""", re.M)


def translate(text: str) -> Translated:
    """Return today's form of an old one: a command, Python that calls vLLM, or manifests.

    Raises:
        ConfigError: the form is unknown, or cannot be had any more.
    """
    if len(text) > LONGEST:
        raise ConfigError(
            f"The text has more than {LONGEST >> 10} KiB; give the part that launches the engine."
        )
    check(text)
    try:
        today = _translated(text)
    except RecursionError:
        raise ConfigError("The text is nested too deeply to be read.") from None
    changes = [Change(plain(each.old), plain(each.new), each.why) for each in today.changes]
    return replace(today, changes=changes)


def _translated(text: str) -> Translated:
    if MANIFEST.search(text):
        return manifest.translate(text)
    if PYTHON.search(text):
        return Translated("code.py", *python.rewrite(text))
    return _shell(text)


def _shell(text: str) -> Translated:
    lines = commands(text)
    builds = [line.words for line in lines if trtllm.is_build(line.words)]
    if builds:
        launch, changes = trtllm.serve(builds)
        return Translated("run.sh", launch.command(quoted), changes, launch.files)
    texts: list[str] = []
    changes = Changes()
    launched = False
    for line in lines:
        serve = next((serve for known, serve in SERVERS if known(line.words)), None)
        if serve is not None:
            launch, more = serve(line.words)
            texts.append(line.prefix() + launch.command(quoted))
            changes += more
            launched = True
        elif not line.words:
            texts.append(line.prefix().rstrip())
        elif line.words[0] == "export":
            texts.append(" ".join(["export", *map(_exported, line.words[1:])]))
        else:
            changes.note("other_program", command=" ".join(line.words)[:SHOWN])
    if not launched:
        raise ConfigError(
            "No command of vLLM, TGI, llama.cpp or trtllm-build was found; give the command, the "
            "Python code or the manifest that launches the engine."
        )
    return Translated("run.sh", "\n".join(texts), changes)


def _exported(word: str) -> str:
    return assignment(word) if ASSIGNMENT.match(word) else quoted(word)


SERVERS = (
    (vllm.is_tgi, vllm.tgi), (llamacpp.is_llama, llamacpp.serve), (vllm.is_vllm, vllm.serve),
)  # fmt: skip
"""Whether a command launches an engine, and what translates it, by engine."""
