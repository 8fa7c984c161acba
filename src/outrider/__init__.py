"""Outrider: speculative decoding, exact, adaptive and in the open."""

from __future__ import annotations

from .llm import LLM, RequestOutput
from .types import SamplingParams

__version__ = "0.1.0"
__all__ = ["LLM", "RequestOutput", "SamplingParams", "__version__"]
