"""Pages of ``/metrics``, the names of each engine's figures, and a reader for all of them."""

from .figures import Figures, PageWindow, engine_of, names_of
from .page import Page, ask_page, of_mapping, parse

__all__ = [
    "Figures", "Page", "PageWindow", "ask_page", "engine_of", "names_of", "of_mapping", "parse",
]  # fmt: skip
