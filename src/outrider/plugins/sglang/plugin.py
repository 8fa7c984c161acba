"""The entry point of ``sglang.srt.plugins``."""

from ..common.start import SGLANG_VARIABLE, start


def _install() -> None:
    from .hooks import install

    install()


def register() -> None:
    """Put Outrider's rule into this process's SGLang, or end the process with a sentence."""
    start("SGLang", SGLANG_VARIABLE, _install)
