"""The entry point of ``vllm.general_plugins``.

vLLM logs and goes on where a plugin's module fails to import. So this module imports the standard
library alone, and what ``register`` meets afterwards ends the process: ``SystemExit`` is no
``Exception``, which is all that vLLM catches.
"""

import os
import sys
from typing import NoReturn

VARIABLE = "OUTRIDER_VLLM"
"""1 turns the plugin on; unset, empty or 0 leaves vLLM as it is."""


def stop(sentence: str) -> NoReturn:
    """End the process with code 1 and a sentence on stderr."""
    print(f"error: {sentence}", file=sys.stderr, flush=True)
    raise SystemExit(1)


def active() -> bool:
    """Return whether the plugin is turned on; end the process where that is unclear."""
    asked = os.environ.get(VARIABLE, "")
    if asked not in ("", "0", "1"):
        stop(f"{VARIABLE} is {asked!r}; give 1 for Outrider's rule, or 0 for vLLM's own.")
    return asked == "1"


def register() -> None:
    """Put Outrider's rule into this process's vLLM, or end the process with a sentence."""
    if not active():
        return
    try:
        from .hooks import install

        install()
    except Exception as error:
        stop(
            f"Outrider's rule cannot start inside vLLM ({type(error).__name__}: {error}); "
            f"repair that, or unset {VARIABLE}."
        )
