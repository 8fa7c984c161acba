"""The entry point of ``vllm.general_plugins``."""

from ..common.start import VLLM_VARIABLE, start


def register() -> None:
    """Put Outrider's rule into this process's vLLM, or end the process with a sentence."""
    start("vLLM", VLLM_VARIABLE, f"{__package__}.hooks")
