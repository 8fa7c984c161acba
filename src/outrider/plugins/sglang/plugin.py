"""The entry point of ``sglang.srt.plugins``."""

from ..common.start import SGLANG_VARIABLE, start


def register() -> None:
    """Put Outrider's rule into this process's SGLang, or end the process with a sentence."""
    start("SGLang", SGLANG_VARIABLE, f"{__package__}.hooks")
