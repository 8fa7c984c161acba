"""Pages of ``/metrics``: their samples, and what each engine calls its figures."""

from .engines import counts_drafts, engine_of, names_of, positions_of, source_of
from .page import Page, Reader, of_mapping, parse

__all__ = [
    "Page", "Reader", "counts_drafts", "engine_of", "names_of", "of_mapping", "parse",
    "positions_of", "source_of",
]  # fmt: skip
