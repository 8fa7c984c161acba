"""The tokens of a streamed answer: when they arrived, and how many together."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ...base.outside.stamped import Piece, StampedAnswer

TEXTS = ("text", "content", "reasoning_content", "reasoning")
"""Fields of a choice, or of its delta, that hold output."""
MOST_TOKENS = 1 << 40  # largest token count of a server; sums of larger ones would lose precision
END_BYTES = 2  # kept of earlier parts, since an event's end may be split between parts
SHOWN_CHARACTERS = 200  # most characters of a server's message that ours quote


@dataclass
class Record:
    """One request as the client saw it, in seconds on ``time.perf_counter``.

    ``due`` is when it should be sent, ``sent`` when it was; ``times`` are those of chunks with
    output, ``tokens`` the tokens in each, estimated unless ``counted``; ``error`` says why it
    failed.
    """

    due: float
    sent: float
    prompt: int = 0
    times: list[float] = field(default_factory=list)
    tokens: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    output_tokens: int = 0
    counted: bool = True
    error: str = ""
    end: float = 0.0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def e2e(self) -> float:
        return self.times[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for an output of one token."""
        if self.output_tokens < 2:
            return None
        return (self.times[-1] - self.times[0]) / (self.output_tokens - 1)

    @property
    def gaps(self) -> list[float]:
        """Seconds between chunks, however many tokens they hold."""
        return [after - before for before, after in pairwise(self.times)]

    @property
    def itls(self) -> list[tuple[float, float]]:
        """Seconds per token of each chunk after the first, and how many tokens it holds."""
        return [(gap / n, n) for gap, n in zip(self.gaps, self.tokens[1:], strict=True) if n > 0]


def events(pieces: Sequence[Piece]) -> Iterator[tuple[float, bytes]]:
    """Yield the data of server-sent events, each with the time at which it was complete."""
    parts: list[bytes] = []
    tail = b""
    for time, piece in pieces:
        parts.append(piece)
        tail = near = tail[-END_BYTES:] + piece
        if b"\n\n" not in near and b"\n\r\n" not in near:
            continue  # joining a long event's parts each time would take quadratic time
        block = b"".join(parts)
        if b"\r" in block:
            # A final "\r" may be half of a line's end.
            held = b"\r" if block.endswith(b"\r") else b""
            block = block.removesuffix(b"\r").replace(b"\r\n", b"\n") + held
        whole = block.split(b"\n\n")
        tail = whole.pop()
        parts = [tail]
        for event in whole:
            lines = event.split(b"\n") if b"\n" in event else [event]
            data = [line[5:].lstrip(b" ") for line in lines if line.startswith(b"data:")]
            if data:
                yield time, data[0] if len(data) == 1 else b"\n".join(data)


def read(answer: StampedAnswer, record: Record) -> None:
    """Fill a record from its answer: chunks, token counts, or the error."""
    if not answer.ok:
        record.error = f"HTTP {answer.status}: {message(answer.body)}"
        return
    texts: list[int] = []
    running: list[int] = []
    usage: dict[str, Any] = {}
    for time, data in events(answer.pieces):
        if data == b"[DONE]":
            break
        try:
            event = json.loads(data)
            if error := event.get("error"):
                record.error = f"the stream says: {message(json.dumps({'error': error}).encode())}"
                return
            length = sum(map(_length, event.get("choices") or ()))
            usage = event.get("usage") or usage
            record.prompt_tokens = _whole(usage.get("prompt_tokens"))
            record.output_tokens = _whole(usage.get("completion_tokens"))
            total = record.output_tokens if event.get("usage") else 0
        except (ValueError, AttributeError, TypeError, OverflowError, RecursionError):
            record.error = f"the stream has an event that is none of OpenAI's: {_cut(data)}"
            return
        if not event.get("choices"):
            continue
        if length or total > (running[-1] if running else 0):
            record.times.append(time)
            texts.append(length)
            running.append(total)
    if not record.times:
        record.error = f"an answer without output: {_cut(answer.body)}"
        return
    _count(record, texts, running)


def _whole(value: Any) -> int:
    """Return a token count, 0 for None. Raises ValueError: it is out of range."""
    count = int(value or 0)
    if not 0 <= count <= MOST_TOKENS:
        raise ValueError("it is not a token count")
    return count


def _count(record: Record, texts: list[int], running: list[int]) -> None:
    """Set the tokens of each chunk: the server's running count, else shares of the total."""
    steps = [after - before for before, after in pairwise([0, *running])]
    if running[-1] and running[-1] == record.output_tokens and min(steps) >= 0:
        record.tokens = [float(step) for step in steps]
        return
    record.counted = len(texts) == record.output_tokens
    if not record.output_tokens:  # no usage: assume a token for each chunk
        record.output_tokens, record.counted = len(texts), False
    whole = sum(texts)
    share = record.output_tokens / (whole or len(texts))
    if record.counted or len(texts) > record.output_tokens:
        record.tokens = [record.output_tokens / len(texts)] * len(texts)
    else:
        record.tokens = [share * (n if whole else 1) for n in texts]


def _length(choice: dict[str, Any]) -> int:
    """Return how many characters of output a chunk's choice has, including tool calls."""
    part = choice.get("delta")
    part = choice if part is None else part
    if calls := part.get("tool_calls"):
        return sum(len((call.get("function") or {}).get("arguments") or "") or 1 for call in calls)
    return sum(len(part.get(name) or "") for name in TEXTS)


def message(body: bytes) -> str:
    """Return the server's message in an error's body, as one line."""
    try:
        error = json.loads(body)
        error = error.get("error", error)
        text = error.get("message") or json.dumps(error) if isinstance(error, dict) else str(error)
    except (ValueError, AttributeError, RecursionError):
        return _cut(body)
    return _cut(str(text).encode(errors="replace"))


def _cut(data: bytes) -> str:
    text = " ".join(data.decode("utf-8", "replace").split())
    text = "".join(c if c.isprintable() else "?" for c in text)
    rest = "…" if len(text) > SHOWN_CHARACTERS else ""
    return repr(text[:SHOWN_CHARACTERS] + rest) if text else "nothing"
