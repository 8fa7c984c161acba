"""Outrider: speculative decoding, exact, adaptive and in the open."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .params import SamplingParams, StructuredOutputsParams
from .types import Speculation

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .llm import LLM
    from .outputs import RequestOutput

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "RequestOutput", "SamplingParams", "Speculation", "StructuredOutputsParams",
    "__version__",
]  # fmt: skip
HOMES = {"LLM": "llm", "AsyncLLM": "async_llm", "RequestOutput": "outputs"}


def __getattr__(name: str) -> Any:
    # Torch comes with the engine, seconds later: whoever asks for help should not wait for it.
    if name in HOMES:
        return getattr(import_module(f".{HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
