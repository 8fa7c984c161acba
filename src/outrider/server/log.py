"""The server's log on stderr: text for people or a JSON object a line, and never a prompt."""

import asyncio
import json
import logging
import re
import time
from typing import Any, Literal, get_args

from ..base.methods import TOGETHER
from ..base.types import Counts
from . import beliefs
from .metrics import Metrics
from .shown import plain, short

logger = logging.getLogger("outrider")

LogFormat = Literal["text", "json"]
FORMATS = get_args(LogFormat)
PLAIN = re.compile(r"[!#-~]*")
"""Values that are shown without quotes; others could look like another field or line."""
LEVELS = ("debug", "info", "warning", "error")
LONGEST_TEXT = 1 << 14


class _Formatter(logging.Formatter):
    """Time, level, message; as JSON also the fields of ``extra={"fields": {...}}``."""

    def __init__(self, form: LogFormat) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self.form = form

    def format(self, record: logging.LogRecord) -> str:
        """Return one line, followed by the traceback if there is one."""
        if self.form == "text":
            return short(super().format(record), LONGEST_TEXT)
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname.lower(),
            "message": short(record.getMessage(), LONGEST_TEXT),
            **plain(getattr(record, "fields", {})),
        }
        if record.exc_info:
            line["traceback"] = self.formatException(record.exc_info)[-LONGEST_TEXT:]
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(form: LogFormat, level: str) -> None:
    """Send Outrider's messages from ``level`` on, and warnings of libraries, to stderr."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter(form))
    logger.handlers[:] = logging.getLogger().handlers[:] = [handler]
    logger.setLevel(level.upper())
    logger.propagate = False
    if form == "json":
        logging.captureWarnings(True)


def announce(text: str) -> None:
    """Write a line whatever the level of the log."""
    logger.handle(logger.makeRecord(logger.name, logging.INFO, "", 0, text, (), None))


def log_call(fields: dict[str, Any]) -> None:
    """Log one call with its fields, as a warning from status 500 on."""
    shown = {name: plain(value, 1) for name, value in fields.items() if value is not None}
    level = logging.WARNING if fields["status"] >= 500 else logging.INFO
    words = " ".join(f"{name}={_word(value)}" for name, value in shown.items())
    logger.log(level, words, extra={"fields": shown})


def _word(value: Any) -> str:
    if isinstance(value, list):
        return ",".join(map(_word, value))
    text = f"{value:.4g}" if isinstance(value, float) else str(value)
    return text if PLAIN.fullmatch(text) else json.dumps(text)


def words(fields: dict[str, Any]) -> str:
    """Return an interval as a line for people; capitals say that nothing was drafted."""
    parts = [
        f"{fields['running']} running, {fields['waiting']} waiting",
        f"{fields['tokens_per_second']:.0f} tokens/s",
        f"cache {fields['cache_usage']:.0%}",
    ]
    drafter, chosen, length = fields["drafter"], fields["chosen"], fields["acceptance_length"]
    if fields["reason"]:
        parts.append(f"SPECULATION IS OFF: {fields['reason'].replace('_', ' ')}")
    elif length is not None:
        # If the engine chooses how to draft, show its current choices.
        who = f"K={fields['draft_length']} {drafter}"
        who = who if chosen is None else f"{drafter} ({', '.join(chosen) or 'now plain'})"
        rate, gain = fields["acceptance_rate"], fields["speedup"]
        gained = f", {gain:.2f}x" if gain else ""
        parts.append(f"{who}, acceptance {rate:.2f}, length {length:.2f}{gained}")
    elif chosen == []:
        parts.append(f"{drafter} chose plain decoding")
    elif fields.get("draftable", True):
        parts.append(f"NOTHING WAS DRAFTED by {drafter}")
    else:
        parts.append("no request wanted drafts")
    return " · ".join(parts)


async def log_intervals(metrics: Metrics, seconds: float) -> None:
    """Log the tokens and drafts of every interval of ``seconds`` that had tokens."""
    llm = metrics.llm
    start, tokens, draftable, counts = time.perf_counter(), 0, 0, Counts()
    while True:
        await asyncio.sleep(seconds)
        now, total, state, gauges = time.perf_counter(), metrics.total, llm.speculation, llm.gauges
        new = Counts(
            drafts=total.drafts - counts.drafts,
            drafted=total.drafted - counts.drafted,
            accepted=total.accepted - counts.accepted,
        )
        speed = (metrics.tokens - tokens) / (now - start)
        could = metrics.draftable - draftable
        start, tokens, draftable, counts = now, metrics.tokens, metrics.draftable, total
        if not speed or state is None:
            continue
        chosen, drafts = None, state.drafter
        if metrics.chosen is not None:
            choices = beliefs.in_use(metrics.chosen)
            chosen = list(dict.fromkeys(f"K={c['depth']} {c['method']}" for c in choices))
            drafts = TOGETHER.join(choices[0]["drafters"]) if choices else drafts
        fields = {
            "running": gauges.running,
            "waiting": gauges.waiting,
            "tokens_per_second": speed,
            "cache_usage": gauges.pages_used / max(1, gauges.pages),
            "drafter": state.drafter,
            "draftable": could,
            "draft_length": metrics.draft_length,
            "reason": metrics.off,
            "acceptance_rate": new.acceptance_rate,
            "acceptance_length": new.acceptance_length,
            "chosen": chosen,
            "speedup": gauges.speedups.get(drafts),
        }
        level = logging.WARNING if fields["reason"] else logging.INFO
        logger.log(level, words(fields), extra={"fields": fields})
