"""Translates old commands, Python calls and manifests, and explains each change."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from ...errors import ConfigError
from .engines import Launch
from .translation import llamacpp, manifest, python, trtllm, vllm
from .translation.rules import Change, Changes, Translated
from .translation.shell import ASSIGNMENT, assignment, commands, known, plain, quoted, starts

LONGEST_TEXT = 2**18
"""Most characters of a text; the time of a translation grows with its length."""
SHOWN_OF_COMMAND = 100
PYTHON = re.compile(
    r"^[^\S\n]*(from\s+\S+\s+import|import\s+\w)|\b(LLM|\w*EngineArgs)\s*\(|\bAsyncLLMEngine\b"
    r"|[\w)\]]\.metrics\b",
    re.M,
)
# Leading blanks do not match newlines: time would grow with the square of the empty lines.
MANIFEST = re.compile(r"""^[^\S\n]*(?:\{\s*)?["']?(apiVersion|kind)["']?\s*:""", re.M)


def translate(text: str) -> Translated:
    """Return the current form of an old command, of Python that calls vLLM, or of manifests.

    Raises ConfigError: the text has no known form, or it has no current equivalent.
    """
    if len(text) > LONGEST_TEXT:
        raise ConfigError(
            f"The text has more than {LONGEST_TEXT >> 10} KiB; give the part that launches the "
            "engine."
        )
    if not known(text):
        raise ConfigError("The text has characters from U+FDD0 to U+FDDF; remove them.")
    try:
        if MANIFEST.search(text):
            today = manifest.translate(text)
        elif PYTHON.search(text):
            today = Translated("code.py", *python.rewrite(text))
        else:
            today = _shell(text)
    except RecursionError:
        raise ConfigError("The text is nested too deeply to be read.") from None
    changes = [Change(plain(each.old), plain(each.new), each.why) for each in today.changes]
    return replace(today, changes=changes)


def _shell(text: str) -> Translated:
    lines = commands(text)
    builds = [line.words for line in lines if starts(line.words, "trtllm-build")]
    if builds:
        launch, changes = trtllm.serve(builds)
        return Translated("run.sh", launch.command(quoted), changes, launch.files)
    texts: list[str] = []
    changes = Changes()
    launched = False
    for line in lines:
        serve = _translator(line.words)
        if serve is not None:
            launch, more = serve(line.words)
            texts.append(line.prefix() + launch.command(quoted))
            changes += more
            launched = True
        elif not line.words:
            texts.append(line.prefix().rstrip())
        elif line.words[0] == "export":
            words = (assignment(w) if ASSIGNMENT.match(w) else quoted(w) for w in line.words[1:])
            texts.append(" ".join(["export", *words]))
        else:
            changes.note("other_program", command=" ".join(line.words)[:SHOWN_OF_COMMAND])
    if not launched:
        raise ConfigError(
            "No command of vLLM, TGI, llama.cpp or trtllm-build was found; give the command, the "
            "Python code or the manifest that launches the engine."
        )
    return Translated("run.sh", "\n".join(texts), changes)


def _translator(words: list[str]) -> Callable[[list[str]], tuple[Launch, Changes]] | None:
    """Return the function that translates a command; None if the command launches no engine."""
    if starts(words, "text-generation-launcher"):
        return vllm.tgi
    if starts(words, "llama-server", "server"):
        return llamacpp.serve
    return vllm.serve if vllm.is_vllm(words) else None
