"""The output that a request expects, as a draft: OpenAI's parameter ``prediction``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ..base.methods import PREDICTION
from ..base.trees import num_alike
from ..base.types import SequenceState
from .base import ChainDrafter, DrafterContext, DrafterSpec

TAIL_TOKENS = 8
"""Last tokens that are compared to find the way back into a prediction."""
MOST_PLACES = 64
"""Most places that are compared in a step."""


@dataclass
class _PredictionState:
    """The state of an output of ``seen`` tokens: ``at`` is the next token of its prediction.

    ``lost`` is true from the first token on that is not the prediction's.
    """

    at: int = 0
    seen: int = 0
    lost: bool = False


@dataclass(frozen=True)
class PredictionSpec(DrafterSpec):
    """The output that a request expects."""

    name = PREDICTION
    wants = "a request that says what output it expects"
    costs = "a lookup, microseconds"
    prior = 0.8
    suits = "outputs that are mostly known: a file with a few changes"

    def make(self, context: DrafterContext) -> PredictionDrafter:
        return PredictionDrafter(context.config.max_draft_length)


class PredictionDrafter(ChainDrafter):
    """Drafts what comes next in the prediction, and nothing while the output has left it.

    Then the output's last tokens are looked up in the prediction: the longest match counts, among
    equals the one nearest to where it left. One token is enough, since a wrong draft costs little
    and a right one is usually long.
    """

    name = PREDICTION

    def draft(self, sequence: SequenceState, length: int) -> list[int]:
        expected = sequence.request.speculation.prediction
        if not expected:
            return []
        state = self._states.setdefault(sequence.id, _PredictionState())
        _follow(state, expected, sequence.tokens[sequence.prompt_length :])
        return [] if state.lost else list(expected[state.at : state.at + length])


def _follow(state: _PredictionState, expected: Sequence[int], output: Sequence[int]) -> None:
    """Bring ``state`` up to date with the output."""
    for token in output[state.seen :]:
        state.lost = state.lost or state.at >= len(expected) or expected[state.at] != token
        state.at += not state.lost
    state.seen = len(output)
    if not state.lost:
        return
    places = [
        (_alike(expected, output, place), -abs(place - state.at), place)
        for place, _ in zip(
            _places(expected, output[-1], state.at), range(MOST_PLACES), strict=False
        )
    ]
    if places:
        state.at, state.lost = max(places)[2], False


def _places(expected: Sequence[int], token: int, start: int) -> Iterator[int]:
    """Yield the places after ``token`` in a prediction: from ``start`` on, then before it."""
    for begin, end in ((max(0, start - 1), len(expected)), (0, start - 1)):
        while begin < end:
            try:
                begin = expected.index(token, begin, end) + 1
            except ValueError:
                break
            yield begin


def _alike(expected: Sequence[int], output: Sequence[int], place: int) -> int:
    """Return how many last tokens of ``output`` stand before ``place``, at most ``TAIL_TOKENS``."""
    before = expected[max(0, place - TAIL_TOKENS) : place]
    return num_alike(reversed(before), reversed(output[-TAIL_TOKENS:]))
