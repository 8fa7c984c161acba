"""Pages of ``/metrics``, what each engine calls its figures, and the one reader of them."""

from .engines import engine_of, names_of
from .figures import Figures, Window
from .page import Page, Reader, of_mapping, parse

__all__ = [
    "Figures", "Page", "Reader", "Window", "engine_of", "names_of", "of_mapping", "parse",
]  # fmt: skip
