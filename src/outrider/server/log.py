"""One line an interval: what the engine does, and loudly when nothing is drafted."""

from __future__ import annotations

import asyncio
import logging
import time

from ..async_llm import AsyncLLM
from ..engine.worker import Stepped
from ..types import Origin

logger = logging.getLogger("outrider")


class Interval:
    """Counts steps between two lines."""

    def __init__(self, llm: AsyncLLM) -> None:
        self.llm = llm
        self.start = time.perf_counter()
        self._clear()
        llm.observers.append(self.observe)

    def _clear(self) -> None:
        self.tokens = self.drafts = self.drafted = self.accepted = 0

    def observe(self, step: Stepped) -> None:
        """Count one step."""
        for event in step.events:
            self.tokens += event.token_id is not None
            self.accepted += event.origin is Origin.ACCEPTED
            if event.drafted is not None:
                self.drafts += 1
                self.drafted += event.drafted.depth

    def line(self) -> str | None:
        """What happened since the last line; None for nothing."""
        now, gauges, state = time.perf_counter(), self.llm.gauges, self.llm.speculation
        seconds, self.start = now - self.start, now
        if not self.tokens or state is None:
            return None
        parts = [
            f"{gauges.running} running, {gauges.waiting} waiting",
            f"{self.tokens / seconds:.0f} tokens/s",
            f"cache {gauges.pages_used / max(1, gauges.pages):.0%}",
        ]
        if not state.enabled:
            parts.append("SPECULATION IS OFF: it was switched off")
        elif not self.drafts:
            parts.append(f"NOTHING WAS DRAFTED by {state.drafter}")
        else:
            parts.append(
                f"K={state.num_speculative_tokens} {state.drafter}, acceptance "
                f"{self.accepted / self.drafted:.2f}, length {1 + self.accepted / self.drafts:.2f}"
                + (f", {gauges.speedup:.2f}x" if gauges.speedup else "")
            )
        self._clear()
        return " · ".join(parts)


async def log_intervals(llm: AsyncLLM, seconds: float) -> None:
    """Write a line every ``seconds``, as long as something happens."""
    interval = Interval(llm)
    while True:
        await asyncio.sleep(seconds)
        line = interval.line()
        if line is not None:
            logger.info(line)
