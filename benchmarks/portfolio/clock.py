"""The decode speed of an engine whose sequences all run for as long as is measured."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from outrider.base.types import Event, Origin, SamplingParams, grouped_by
from outrider.errors import NumericalError
from outrider.llm import LLM

Asked = tuple[list[int], SamplingParams]


class Decoded(NamedTuple):
    """Decoded tokens a second, the outputs, the drafts of all steps, and what was accepted."""

    speed: float
    outputs: list[list[int]]
    drafts: int
    accepted: int


@dataclass
class _Slot:
    """One sequence; of its tokens ``counted`` count, and they ``took`` so many seconds."""

    asked: Asked
    tokens: list[int] = field(default_factory=list)
    first: int = 0
    counted: int = 0
    took: float | None = None
    drafts: int = 0
    accepted: int = 0

    def take(self, events: Sequence[Event], wanted: int, before: float, now: float) -> None:
        """Take in a step that lasted from ``before`` to ``now``, seconds on the slot's clock."""
        known = len(self.tokens)
        for event in events:
            if event.error is not None or event.token_id is None:
                raise NumericalError(f"a prompt failed: {event.error}")
            self.tokens.append(event.token_id)
            self.drafts += event.drafted is not None
            self.accepted += event.origin is Origin.ACCEPTED
        if self.took is not None:
            return
        goal, fresh = self.first + wanted, len(self.tokens) - known
        if now > 0 and len(self.tokens) >= goal:
            self.counted, self.took = wanted, before + (goal - known) / fresh * (now - before)
        elif events[-1].finish_reason is not None:
            self.counted, self.took = len(self.tokens) - self.first, now


def speed(llm: LLM, asked: Sequence[Asked], concurrency: int, wanted: int) -> Decoded:
    """Return how fast sequences decode, and what.

    Clocks start when all sequences that run together have a first token. Each one's ends with its
    own ``wanted`` more, or with its end. One that is done goes on, uncounted, until all are, so
    that concurrency stays full; the speed is concurrency times tokens over the sum of times, that
    of a server whose sequences are followed by others like them. Where a step emits several tokens
    of a sequence, its time is shared out evenly among them.
    """
    slots: list[_Slot] = []
    for first in range(0, len(asked), concurrency):
        slots += _together(llm, asked[first : first + concurrency], wanted)
    seconds = sum(slot.took or 0.0 for slot in slots)
    outputs = [slot.tokens[: slot.first + slot.counted] for slot in slots]
    return Decoded(
        concurrency * sum(slot.counted for slot in slots) / seconds, outputs,
        sum(slot.drafts for slot in slots), sum(slot.accepted for slot in slots),
    )  # fmt: skip


def _together(llm: LLM, asked: Sequence[Asked], wanted: int) -> list[_Slot]:
    """Return sequences that ran together, all of them done."""
    slots = [_Slot(each) for each in asked]
    running: dict[str, _Slot] = {}
    begin, before = 0.0, 0.0

    def start(slot: _Slot) -> None:
        (state,) = llm.start([slot.asked[0]], slot.asked[1])
        running[state.request.id] = slot

    try:
        for slot in slots:
            start(slot)
        while any(slot.took is None for slot in slots):
            events = llm.engine.step()
            clock = time.perf_counter()
            now = clock - begin if begin else 0.0
            for id, group in grouped_by(events, lambda event: event.request_id).items():
                running[id].take(group, wanted, before, now)
                if group[-1].finish_reason is not None:
                    start(_Slot(running.pop(id).asked, took=0.0))  # keeps the others company
            before = now
            if not begin and all(slot.tokens for slot in slots):
                begin = clock
                for slot in slots:
                    slot.first = len(slot.tokens)
    finally:
        for id in running:
            llm.engine.abort(id)
    return slots
