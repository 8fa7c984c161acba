"""A server that streams made-up tokens by a fixed schedule, as an oracle and as a sink of load.

``python -m benchmarks.stub CHUNKS TOKENS FIRST INTERVAL`` serves in a process of its own and prints
its port.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from dataclasses import dataclass, field

HEAD = b"HTTP/1.1 %d OK\r\nContent-Type: %s\r\n"

TICK = 0.001


@dataclass
class Schedule:
    """The form of each answer: ``chunks`` with ``tokens`` tokens each.

    The first chunk comes after ``first`` seconds, each other one after ``interval``. ``counts``
    says whether each chunk tells how many tokens there are so far. Every completion has the
    ``status``; not 200 answers an error, with ``body``, which else stands instead of the stream.
    ``models`` is what /v1/models says, ``acceptance`` drafts, drafted and accepted tokens of a
    request for /metrics, None being 404. ``requests`` counts what was streamed; ``prompts`` has
    theirs, where ``keeps_prompts``.
    """

    chunks: int = 4
    tokens: int = 1
    first: float = 0.0
    interval: float = 0.0
    counts: bool = True
    status: int = 200
    body: bytes = b""
    models: bytes = b'{"object": "list", "data": [{"id": "stub"}]}'
    acceptance: tuple[int, int, int] | None = None
    requests: int = 0
    prompts: list[object] = field(default_factory=list)
    keeps_prompts: bool = False

    def events(self) -> list[bytes]:
        """Return the parts of an answer, as HTTP chunks."""
        whole = self.chunks * self.tokens
        parts = []
        for i in range(1, self.chunks + 1):
            usage = {"prompt_tokens": 8, "completion_tokens": i * self.tokens}
            choice = {"index": 0, "text": "word " * self.tokens, "logprobs": None,
                      "finish_reason": None if i < self.chunks else "length"}  # fmt: skip
            choice["delta"] = {"content": choice["text"]}  # clients of chats read this one
            event = {"id": "cmpl-0123456789abcdef0123456789abcdef", "object": "text_completion",
                     "created": 1763942400, "model": "stub", "choices": [choice]}  # fmt: skip
            parts.append(event | ({"usage": usage} if self.counts else {}))
        last = {"prompt_tokens": 8, "completion_tokens": whole, "total_tokens": 8 + whole}
        lines = [f"data: {json.dumps(part)}\n\n" for part in parts]
        lines.append(f"data: {json.dumps({'choices': [], 'usage': last})}\n\ndata: [DONE]\n\n")
        return [b"%x\r\n%s\r\n" % (len(line), line.encode()) for line in lines]

    def exposition(self) -> bytes | None:
        """Return /metrics; None where the stub has none."""
        if self.acceptance is None:
            return None
        names = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
        lines = [
            f'vllm:spec_decode_{name}_total{{engine="0"}} {float(value * self.requests)}'
            for name, value in zip(names, self.acceptance, strict=True)
        ]
        return ("# TYPE x counter\n" + "\n".join(lines) + "\n").encode()


class Clock:
    """Sends what is due, once a millisecond: a timer for each part would cost more than sending it.

    Parts wait as long as each other, first ones and later ones, so that two queues are in order.
    """

    def __init__(self) -> None:
        self.queues: tuple[deque[Waiting], deque[Waiting]] = (deque(), deque())
        self.runs = False

    def add(self, due: float, stub: Stub, i: int) -> None:
        """Have ``stub`` send part ``i`` at ``due``."""
        self.queues[i > 0].append((due, stub, i))
        if not self.runs:
            self.runs = True
            asyncio.get_running_loop().call_soon(self.tick)

    def tick(self) -> None:
        """Send everything that is due."""
        loop = asyncio.get_running_loop()
        now = loop.time()
        for queue in self.queues:
            while queue and queue[0][0] <= now:
                due, stub, i = queue.popleft()
                stub.part(due, i)
        self.runs = any(self.queues)
        if self.runs:
            loop.call_later(TICK, self.tick)


class Stub(asyncio.Protocol):
    """A connection of the stub."""

    def __init__(self, schedule: Schedule, parts: list[bytes], clock: Clock) -> None:
        self.schedule, self.parts, self.clock = schedule, parts, clock
        self.rest = b""
        self.transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        self.rest += data
        head, found, body = self.rest.partition(b"\r\n\r\n")
        if not found:
            return
        _, has_length, after = head.partition(b"Content-Length: ")
        length = int(after.split(b"\r\n")[0]) if has_length else 0
        if len(body) < length:
            return
        self.rest = body[length:]
        self.answer(head.split(b" ")[1], body[:length])

    def answer(self, path: bytes, body: bytes) -> None:
        """Answer one request."""
        assert self.transport is not None
        schedule = self.schedule
        if path == b"/v1/models":
            self.whole(200, schedule.models)
        elif path == b"/metrics":
            said = schedule.exposition()
            self.whole(404 if said is None else 200, said or b"")
        elif schedule.status != 200 or schedule.body:
            self.whole(schedule.status, schedule.body)
        else:
            schedule.requests += 1
            if schedule.keeps_prompts:
                schedule.prompts.append(json.loads(body).get("prompt"))
            self.transport.write(
                HEAD % (200, b"text/event-stream") + b"Transfer-Encoding: chunked\r\n\r\n"
            )
            self.clock.add(asyncio.get_running_loop().time() + schedule.first, self, 0)

    def part(self, due: float, i: int) -> None:
        """Send part ``i``, and have the next one sent."""
        assert self.transport is not None
        if self.transport.is_closing():
            return
        if i + 1 == self.schedule.chunks:
            self.transport.write(b"".join(self.parts[i:]) + b"0\r\n\r\n")
            return
        self.transport.write(self.parts[i])
        self.clock.add(due + self.schedule.interval, self, i + 1)

    def whole(self, status: int, body: bytes) -> None:
        """Send an answer of a known length."""
        assert self.transport is not None
        length = b"Content-Length: %d\r\n\r\n" % len(body)
        self.transport.write(HEAD % (status, b"application/json") + length + body)


async def serve(schedule: Schedule, port: int = 0) -> asyncio.Server:
    """Return a running stub on a free port of loopback."""
    loop = asyncio.get_running_loop()
    parts, clock = schedule.events(), Clock()
    return await loop.create_server(
        lambda: Stub(schedule, parts, clock), "127.0.0.1", port, backlog=4096
    )


def port_of(server: asyncio.Server) -> int:
    """Return the port that a stub listens on."""
    return int(server.sockets[0].getsockname()[1])


async def _main(schedule: Schedule) -> None:
    server = await serve(schedule)
    print(port_of(server), flush=True)
    await server.serve_forever()


Waiting = tuple[float, Stub, int]


if __name__ == "__main__":
    chunks, tokens, first, interval = sys.argv[1:]
    asyncio.run(_main(Schedule(int(chunks), int(tokens), float(first), float(interval))))
