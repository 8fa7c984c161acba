"""The pocket pair: a small target and its drafter, bundled so that everything works offline."""

import json
from pathlib import Path

from ..base.config import BUNDLED as PATH
from ..errors import ModelError

__all__ = ["PATH", "held_out", "prompts"]


def held_out() -> list[str]:
    """Return modules of this interpreter's standard library that the pair was not trained on."""
    from .corpus import standard_library

    return [module.text for module in standard_library() if module.held_out]


def prompts() -> list[str]:
    """Return beginnings of code that the pair was not trained on.

    Raises ModelError: the package's data is missing.
    """
    file = Path(__file__).parent / "prompts.json"
    try:
        texts: list[str] = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ModelError("the bundled prompts are missing; install Outrider again.") from None
    return texts
