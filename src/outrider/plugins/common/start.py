"""Starts a plugin inside another engine, or ends the process: the standard library alone.

vLLM and SGLang log and go on where a plugin's module fails to import, or raises an ``Exception``.
So entry points import this module and nothing else of ours, and what fails afterwards ends the
process: ``SystemExit`` is no ``Exception``.
"""

import os
import sys
from importlib import import_module
from typing import NoReturn

VLLM_VARIABLE = "OUTRIDER_VLLM"
SGLANG_VARIABLE = "OUTRIDER_SGLANG"  # the environment variables that turn the plugins on


def stop(sentence: str) -> NoReturn:
    """End the process with code 1 and a sentence on stderr."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def active(variable: str) -> bool:
    """Return True for 1, False for 0, an empty or no variable; end the process at anything else."""
    asked = os.environ.get(variable, "")
    if asked not in ("", "0", "1"):
        stop(f"{variable} is {asked!r}; give 1 for Outrider's rule, or 0 for the engine's own.")
    return asked == "1"


def start(engine: str, variable: str, hooks: str) -> None:
    """Run ``install`` of the module ``hooks`` where the variable says so, or end the process."""
    if not active(variable):
        return
    try:
        import_module(hooks).install()
    except Exception as error:
        stop(
            f"Outrider's rule cannot start inside {engine} ({type(error).__name__}: {error}); "
            f"repair that, or unset {variable}."
        )
