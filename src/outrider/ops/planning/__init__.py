"""Planning: what speculation would bring before it is served. Nothing here imports torch."""

from .acceptance import Acceptance, of_counts, of_positions, of_rate, read_acceptance
from .advice import Advice, load_advice, read_advice
from .advise import advise
from .figure import Figure
from .roi import Plan, Roi, roi
from .situation import Situation

__all__ = [
    "Acceptance", "Advice", "Figure", "Plan", "Roi", "Situation", "advise",
    "load_advice", "of_counts", "of_positions", "of_rate",
    "read_acceptance", "read_advice", "roi",
]  # fmt: skip
