"""Pages of ``/metrics``, what each engine calls its figures, and the one reader of them."""

from .figures import Figures, PageWindow, engine_of, names_of
from .page import Page, ask_page, of_mapping, parse

__all__ = [
    "Figures", "Page", "PageWindow", "ask_page", "engine_of", "names_of", "of_mapping", "parse",
]  # fmt: skip
