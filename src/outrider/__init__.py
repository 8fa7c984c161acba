"""Exact speculative decoding on CPUs."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .base.types import Event, Origin, Speculation
from .errors import (
    ConfigError,
    EndpointError,
    GenerationError,
    MemoryBudgetError,
    ModelError,
    NumericalError,
    OutriderError,
    RequestError,
    TrainingError,
    WorkerError,
)
from .params import SamplingParams, StructuredOutputsParams

if TYPE_CHECKING:
    from .async_llm import AsyncLLM
    from .frontend.outputs import CompletionOutput, RequestOutput
    from .llm import LLM

__version__ = "0.1.0"
__all__ = [
    "LLM", "AsyncLLM", "CompletionOutput", "ConfigError", "EndpointError", "Event",
    "GenerationError", "MemoryBudgetError", "ModelError", "NumericalError", "Origin",
    "OutriderError", "RequestError", "RequestOutput", "SamplingParams", "Speculation",
    "StructuredOutputsParams", "TrainingError", "WorkerError", "__version__",
]  # fmt: skip
HOMES = {
    "LLM": "llm",
    "AsyncLLM": "async_llm",
    "CompletionOutput": "frontend.outputs",
    "RequestOutput": "frontend.outputs",
}


def __getattr__(name: str) -> Any:
    # Importing torch takes seconds, which `outrider --help` should not wait for.
    if name in HOMES:
        return getattr(import_module(f".{HOMES[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
