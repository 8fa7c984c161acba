"""The server's log on stderr: text for people or a JSON object a line, and never a prompt."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from typing import Any, Literal

from ..types import Counts
from .metrics import Metrics
from .shown import plain, short

logger = logging.getLogger("outrider")

LogFormat = Literal["text", "json"]
FORMATS = ("text", "json")
PLAIN = re.compile(r"[!#-~]*")
"""What stands in a line as it is: whatever else a client sends could pretend to be another line."""
LEVELS = ("debug", "info", "warning", "error")
LONGEST_TEXT = 1 << 14


class _Formatter(logging.Formatter):
    """Time, level, message; ``extra={"fields": {...}}`` is for JSON's readers."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback if there is one."""
        if self.form == "text":
            return short(super().format(record), LONGEST_TEXT)
        found = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": short(record.getMessage(), LONGEST_TEXT),
            **plain(getattr(record, "fields", {})),
        }
        if record.exc_info:
            found["traceback"] = self.formatException(record.exc_info)[-LONGEST_TEXT:]
        return json.dumps(found, ensure_ascii=False, default=str)


def configure(form: LogFormat, level: str) -> None:
    """Have Outrider's messages from ``level`` on, and warnings of others, go to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    logger.handlers[:] = logging.getLogger().handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    if form == "json":
        logging.captureWarnings(True)


def announce(text: str) -> None:
    """Write a line at any level."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))


def log_call(fields: dict[str, Any]) -> None:
    """Log one call: who, its result, and its time."""
    shown = {name: plain(value, 1) for name, value in fields.items() if value is not None}
    level = logging.WARNING if fields["status"] >= 500 else logging.INFO
    words = " ".join(f"{name}={_word(value)}" for name, value in shown.items())
    logger.log(level, words, extra={"fields": shown})


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_word, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text)


class Interval:
    """Counts the tokens and drafts between two lines of the log."""

    def __init__(self, metrics: Metrics) -> None:
        self.tally = metrics.tally
        self.llm = self.tally.llm
        self.start, self.tokens, self.counts = time.perf_counter(), 0, Counts()

    def line(self) -> tuple[str, dict[str, Any]] | None:
        """Return the interval since the last line, in words and in fields; None for an idle one."""
        now, tally, state = time.perf_counter(), self.tally, self.llm.speculation
        seconds, tokens = now - self.start, tally.tokens - self.tokens
        total = tally.total
        new = Counts(
            drafts=total.drafts - self.counts.drafts,
            drafted=total.drafted - self.counts.drafted,
            accepted=total.accepted - self.counts.accepted,
        )
        self.start, self.tokens, self.counts = now, tally.tokens, total
        if not tokens or state is None:
            return None
        gauges = self.llm.gauges
        fields: dict[str, Any] = {
            "running": gauges.running,
            "waiting": gauges.waiting,
            "tokens_per_second": tokens / seconds,
            "cache_usage": gauges.pages_used / max(1, gauges.pages),
            "drafter": state.drafter,
            "draft_length": tally.draft_length,
            "reason": tally.off,
            "acceptance_rate": new.acceptance_rate,
            "acceptance_length": new.acceptance_length,
            "speedup": gauges.speedups.get(state.drafter),
        }
        return words(fields), fields


def words(fields: dict[str, Any]) -> str:
    """Return an interval as a sentence for people: loud where nothing is drafted."""
    parts = [
        f"{fields['running']} running, {fields['waiting']} waiting",
        f"{fields['tokens_per_second']:.0f} tokens/s",
        f"cache {fields['cache_usage']:.0%}",
    ]
    if fields["reason"]:
        parts.append(f"SPECULATION IS OFF: {fields['reason'].replace('_', ' ')}")
    elif fields["acceptance_length"] is None:
        parts.append(f"NOTHING WAS DRAFTED by {fields['drafter']}")
    else:
        gain = fields["speedup"]
        parts.append(
            f"K={fields['draft_length']} {fields['drafter']}, acceptance "
            f"{fields['acceptance_rate']:.2f}, length {fields['acceptance_length']:.2f}"
            + (f", {gain:.2f}x" if gain else "")
        )
    return " · ".join(parts)


async def log_intervals(metrics: Metrics, seconds: float) -> None:
    """Write a line every ``seconds``, as long as something happens."""
    interval = Interval(metrics)
    while True:
        await asyncio.sleep(seconds)
        found = interval.line()
        if found is not None:
            level = logging.WARNING if found[1]["reason"] else logging.INFO
            logger.log(level, found[0], extra={"fields": found[1]})
