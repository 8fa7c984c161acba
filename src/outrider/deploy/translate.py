"""Old commands, Python calls and manifests as today's, with each change explained."""

from __future__ import annotations

import re

from ..errors import ConfigError
from .translation import llamacpp, manifest, python, trtllm, vllm
from .translation.rules import Translated
from .translation.words import commands

LONGEST = 2**20
PYTHON = re.compile(r"^\s*(from\s+\S+\s+import|import\s+\w)|\b(LLM|\w*EngineArgs)\s*\(", re.M)
MANIFEST = re.compile(r"^\s*(apiVersion|kind)\s*:", re.M)


def translate(text: str) -> Translated:
    """Return today's form of an old one: a command, Python that calls vLLM, or manifests.

    Raises:
        ConfigError: the form is unknown, or cannot be had any more.
    """
    if len(text) > LONGEST:
        raise ConfigError("The text is longer than 1 MiB; give the part that launches the engine.")
    try:
        return _translated(text)
    except RecursionError:
        raise ConfigError("The text is nested too deeply to be read.") from None


def _translated(text: str) -> Translated:
    if MANIFEST.search(text):
        return manifest.translate(text)
    if PYTHON.search(text):
        return Translated("code.py", *python.rewrite(text))
    return _shell(text)


def _shell(text: str) -> Translated:
    found = commands(text)
    builds = [line.words for line in found if trtllm.is_build(line.words)]
    if builds:
        launch, changes = trtllm.serve(builds)
        return Translated("run.sh", launch.command(), changes, launch.files)
    texts: list[str] = []
    changes = []
    for line in found:
        for known, serve in SERVERS:
            if known(line.words):
                launch, more = serve(line.words)
                texts.append(line.prefix() + launch.command())
                changes += more
                break
    if not texts:
        raise ConfigError(
            "No command of vLLM, TGI, llama.cpp or trtllm-build was found; give the command, the "
            "Python code or the manifest that launches the engine."
        )
    return Translated("run.sh", "\n".join(texts), changes)


SERVERS = (
    (vllm.is_tgi, vllm.tgi),
    (llamacpp.is_llama, llamacpp.serve),
    (vllm.is_vllm, vllm.serve),
)
