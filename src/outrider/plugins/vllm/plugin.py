"""The entry point of ``vllm.general_plugins``."""

from ..common.start import VLLM_VARIABLE, start


def _install() -> None:
    from .hooks import install

    install()


def register() -> None:
    """Put Outrider's rule into this process's vLLM, or end the process with a sentence."""
    start("vLLM", VLLM_VARIABLE, _install)
