"""Outrider: speculative decoding, exact, adaptive and in the open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from .llm import LLM, RequestOutput

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "StructuredOutputsParams", "__version__"]


def __getattr__(name: str) -> Any:
    # Torch comes with the engine, seconds later: whoever asks for help should not wait for it.
    if name in ("LLM", "RequestOutput"):
        from . import llm

        return getattr(llm, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
