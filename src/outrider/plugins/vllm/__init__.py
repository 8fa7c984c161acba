"""Outrider's rule inside vLLM: see docs/vllm.md. Nothing here imports vLLM."""

from importlib import import_module
from typing import Any

PROPOSERS = ("Proposer", "NgramProposer", "SuffixProposer")
"""For ``speculative_config``: ``"model": "outrider.plugins.vllm.Proposer"``."""


def __getattr__(name: str) -> Any:
    # vLLM loads the plugin's module in every process; torch must not come with it.
    if name in PROPOSERS:
        return getattr(import_module(".proposer", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
