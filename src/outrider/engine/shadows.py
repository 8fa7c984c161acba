"""Drafts that nobody verifies, scored by what was emitted later."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple

from ..base.types import Draft, SequenceState
from ..drafters.model import num_alike
from ..native.interface import MARGINS
from .control.controller import Controller
from .control.outlook import Stream

SHADOW_DEPTH = 4
"""Tokens of a draft that is scored without being verified."""


Peek = Callable[[str, SequenceState, int], Draft | None]
"""Returns a drafter's draft of a depth behind a sequence, see ``Drafter.peek``."""


class _Shadow(NamedTuple):
    """A draft behind the first ``base`` tokens of a sequence that nobody verifies."""

    method: str
    stream: Stream
    sequence: SequenceState
    base: int
    draft: Draft


class Shadows:
    """Lets methods that cost next to nothing draft beside the chosen one, and scores them later.

    Args:
        controller: whose survival learns from them.
    """

    def __init__(self, controller: Controller) -> None:
        self._controller = controller
        self._open: list[_Shadow] = []

    def cast(
        self, sequence: SequenceState, stream: Stream, taken: str, turn: int, peek: Peek
    ) -> None:
        """Let a method other than ``taken`` draft behind a sequence; methods take turns."""
        names = [n for n in stream.methods if n in self._controller.shadowed and n != taken]
        if not names or self._open or sequence.finish_reason is not None:
            return
        name = names[turn % len(names)]
        draft = peek(name, sequence, min(SHADOW_DEPTH, stream.bound))
        if draft is not None:
            self._open.append(_Shadow(name, stream, sequence, len(sequence.tokens), draft))

    def follow(self) -> None:
        """Score drafts whose fate is known by now."""
        left: list[_Shadow] = []
        for shadow in self._open:
            asked = min(SHADOW_DEPTH, shadow.stream.bound)
            emitted = shadow.sequence.tokens[shadow.base : shadow.base + asked]
            tokens = shadow.draft.tokens[0]
            accepted = num_alike(tokens, emitted)
            known = accepted < len(emitted) or len(emitted) == asked
            if not known and shadow.sequence.finish_reason is None:
                left.append(shadow)
                continue
            survival, judged = self._controller.survival, min(len(emitted), accepted + 1)
            key = shadow.method, shadow.stream.workload
            survival.observe(*key, shadow.stream.id, asked, accepted, judged)
            survival.observe_size(*key, [1] * len(tokens), asked, 1)
            margins = shadow.draft.margins[0] if shadow.draft.margins else ()
            for depth, margin in enumerate(margins[:judged]):
                bin = bisect_right(MARGINS, margin)
                survival.observe_node(*key, depth + 1, 0, bin, depth < accepted)
        self._open = left

    def release(self, id: str) -> None:
        """Forget the drafts for a sequence that ended."""
        self._open = [shadow for shadow in self._open if shadow.stream.id != id]
