"""A client that means harm.

It goes through its attacks by turns until the time is over and tells what it was answered. An
attack may be refused in any way; a server's error other than 503, and a switch that a foreign
page can flip, are faults.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from .bodies import CHAT, COMPLETIONS
from .values import deep_list, deep_object, dumps
from .wire import Answer, Connection, NoAnswer

SIZES = (300_000, 4 << 20)
"""Of large bodies; the server takes no larger one by default."""
ATTACK_SECONDS, HELD_SECONDS, PAUSE_SECONDS = 20.0, 2.0, 0.02
PATIENT = ("slow headers", "slow bodies", "an unread stream", "idle connections")
"""Attacks that wait most of their time."""
CHUNKS, PIPELINED, IDLE, HALVES = 20_000, 200, 100, 20
NO_HTTP = (
    b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/9.9\r\n\r\n",
    b"GET\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"ffffffffffffffff1\r\n",
)  # fmt: skip
"""Bytes that are no request, or two at once."""


def filled(before: str, member: str, after: str, size: int) -> bytes:
    """Return a body with as many members as make it so many bytes."""
    count = (size - len(before) - len(after)) // (len(member) + 1)
    return (before + ",".join([member] * count) + after).encode()


def completion(**fields: Any) -> tuple[str, bytes]:
    """Return a small completion with these fields."""
    return COMPLETIONS, dumps({"prompt": "x", "max_tokens": 3, "temperature": 1, **fields})


def small_bodies() -> Iterator[tuple[str, bytes]]:
    """Yield bodies of a few kilobytes that have ended or stopped servers."""
    for top_k in (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 3, 10**19, 10**3999):
        yield completion(top_k=top_k)
    for token in (4096, 2**31, 2**32, 2**63, 10**19, -1):
        yield completion(prompt=[token])
        yield completion(stop_token_ids=[token])
        yield completion(allowed_token_ids=[token])
        yield completion(logit_bias={str(token): 1})
        yield completion(min_tokens=token)
    for text in ("<pad_extra>", "<|endoftext|>", "\ud800", "\x00"):
        yield completion(prediction={"type": "content", "content": text})
        yield completion(bad_words=[text])
    for depth in (65, 950, 100_000):
        yield completion(guided_json=deep_object(depth))
        yield completion(structured_outputs={"json": deep_object(depth)})
        yield completion(stop=deep_list(depth))
    for regex in ("a{1000000}", "(a|b|c){0,5000}", "(((a{100}){100}){100})"):
        yield completion(guided_regex=regex)
    yield CHAT, b'{"messages": ' + b"[" * 100_000


def keyed(size: int) -> bytes:
    """Return a body whose logit_bias has as many keys as make it so many bytes."""
    keys = ",".join(f'"{i}":1' for i in range(size // 12))
    return f'{{"prompt": "x", "logit_bias": {{{keys}}}}}'.encode()


def large_bodies() -> list[tuple[str, Callable[[int], bytes]]]:
    """Return makers of bodies of a size, almost all of which is one list, object or value."""
    found: list[tuple[str, Callable[[int], bytes]]] = [
        (COMPLETIONS, keyed),
        (COMPLETIONS, lambda size: b'{"prompt": "' + b"a" * (size - 14) + b'"}'),
        (COMPLETIONS, lambda size: b'{"prompt": ' + b"[" * (size - 11)),
        (COMPLETIONS, lambda size: b'{"prompt": "x", "max_tokens": ' + b"9" * (size - 31) + b"}"),
        (COMPLETIONS, lambda size: b'{"model": "' + b"a" * (size - 28) + b'", "prompt": "x"}'),
    ]
    for field in ("prompt", "stop", "bad_words", "stop_token_ids", "guided_choice", "metadata"):
        start = '{"max_tokens": 1, "prompt": "x", ' if field != "prompt" else "{"
        for member in ("{}", "1", "0.5", "null", '""', "[[[[1]]]]"):
            make = partial(filled, f'{start}"{field}": [', member, "]}")
            found.append((COMPLETIONS, make))
    for content in ('""', "[{}]", '[{"type":"text","text":"a"},{"type":"text","text":"b"}]'):
        member = f'{{"role":"user","content":{content}}}'
        found.append((CHAT, partial(filled, '{"messages": [', member, "]}")))
    for member in ("{}", '{"type":"function","function":{"name":"f","parameters":{}}}'):
        start = '{"messages": [{"role": "user", "content": "a"}], "tools": ['
        found.append((CHAT, partial(filled, start, member, "]}")))
    return found


class Hostile:
    """Attacks one server.

    Args:
        url: of the server.
        seed: of the order of attacks.
    """

    def __init__(self, url: str, seed: int) -> None:
        self.url = url
        self.draw = random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.small, self.large = list(small_bodies()), large_bodies()
        self.attacks: dict[str, Callable[[Connection], Awaitable[None]]] = {
            "small bodies": self.small_body, "large bodies": self.large_body,
            "chunks of a byte": self.byte_chunks, "slow headers": self.slow_headers,
            "slow bodies": self.slow_body, "priority": self.priority,
            "an unread stream": self.unread, "pipelining": self.pipelining,
            "halves of bodies": self.halves, "idle connections": self.idle,
            "a foreign page": self.rebinding, "no HTTP": self.no_http,
        }  # fmt: skip

    async def run(self, seconds: float) -> dict[str, Any]:
        """Attack so long, busily and patiently at once, and report the answers."""
        until = time.monotonic() + seconds
        busy = [name for name in self.attacks if name not in PATIENT]
        rounds = await asyncio.gather(self.rounds(busy, until), self.rounds(PATIENT, until))
        return {
            "rounds": rounds, "answers": dict(sorted(self.answers.items())), "wrong": self.wrong,
        }  # fmt: skip

    async def rounds(self, names: Sequence[str], until: float) -> int:
        """Go through some attacks in random orders; return how often each was made."""
        count = 0
        while time.monotonic() < until:
            for name in self.draw.sample(names, len(names)):
                await self.attempt(name, self.attacks[name], ATTACK_SECONDS)
                await asyncio.sleep(PAUSE_SECONDS)
            count += 1
        return count

    async def attempt(
        self, name: str, attack: Callable[[Connection], Awaitable[None]], limit: float
    ) -> None:
        """Make one attack over a connection of its own; the server may hang up on it."""
        try:
            async with asyncio.timeout(limit), Connection(self.url) as connection:
                await attack(connection)
        except TimeoutError:
            self.answers[f"{name}: nothing in {limit:g} s"] += 1
        except (NoAnswer, OSError):
            self.answers[f"{name}: hung up"] += 1

    def note(self, name: str, answer: Answer) -> None:
        """Count an answer."""
        self.answers[f"{name}: {answer.status}"] += 1
        if answer.status >= 500 and answer.status != 503:
            self.wrong.append(f"{name}: {answer.status} {bytes(answer.body[:300])!r}")

    async def small_body(self, connection: Connection) -> None:
        """Send some bodies that ended engines."""
        for path, body in self.draw.sample(self.small, 8):
            self.note("small bodies", await connection.post(path, body))

    async def large_body(self, connection: Connection) -> None:
        """Send a body that costs much to check."""
        path, make = self.draw.choice(self.large)
        answer = await connection.post(path, make(self.draw.choice(SIZES)))
        self.note("large bodies", answer)

    async def byte_chunks(self, connection: Connection) -> None:
        """Send a body in chunks of a byte, to a path that takes one or to one that takes none."""
        path = self.draw.choice(("/health", "/metrics", COMPLETIONS, CHAT))
        await connection.send_head("POST", path, {"Transfer-Encoding": "chunked"})
        for _ in range(CHUNKS // 100):
            await connection.send(b"1\r\nx\r\n" * 100)
        await connection.send(b"0\r\n\r\n")
        self.note("chunks of a byte", await connection.answer())

    async def slow_headers(self, connection: Connection) -> None:
        """Send a head byte by byte that never ends."""
        await trickle(connection, b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 1000)

    async def slow_body(self, connection: Connection) -> None:
        """Send a body byte by byte, of a POST or of a GET."""
        method, path = self.draw.choice((("POST", COMPLETIONS), ("GET", "/health")))
        await connection.send_head(method, path, {"Content-Length": 100_000})
        await trickle(connection, b"x" * 1000)

    async def priority(self, connection: Connection) -> None:
        """Make calls that want to be first."""
        for priority in (-1, -(2**31)):
            path, body = completion(priority=priority, n=2, max_tokens=32)
            self.note("priority", await connection.post(path, body))

    async def unread(self, connection: Connection) -> None:
        """Ask for a stream that nobody reads."""
        body = dumps({"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True})
        await connection.send_head("POST", COMPLETIONS, {"Content-Length": len(body)})
        await connection.send(body)
        await asyncio.sleep(HELD_SECONDS)

    async def pipelining(self, connection: Connection) -> None:
        """Send many requests in one piece, of whose answers few are read."""
        await connection.send_head("GET", "/health", {}, PIPELINED)
        self.note("pipelining", await connection.answer())

    async def halves(self, connection: Connection) -> None:
        """End connections in the middle of a body."""
        for _ in range(HALVES):
            await connection.send_head("POST", COMPLETIONS, {"Content-Length": 1000})
            await connection.send(b'{"prompt": "x"')
            connection.close()

    async def idle(self, connection: Connection) -> None:
        """Open connections that say nothing."""
        async with AsyncExitStack() as stack:
            for _ in range(IDLE):
                silent = await stack.enter_async_context(Connection(self.url))
                await silent.send(b"")
            await asyncio.sleep(HELD_SECONDS)

    async def rebinding(self, connection: Connection) -> None:
        """Flip the switch from a page of a name that was bound to this machine."""
        switch, page = "/v1/speculation", "evil.example"
        body = dumps({"enabled": False})
        answer = await connection.post(switch, body, Host=page, Origin=f"http://{page}")
        self.note("a foreign page", answer)
        if answer.status == 200:
            self.wrong.append("a page of another host flipped the speculation switch")
            await connection.post(switch, dumps({"enabled": True}))

    async def no_http(self, connection: Connection) -> None:
        """Send bytes that are no request, or two at once."""
        for data in NO_HTTP:

            async def send(connection: Connection, data: bytes = data) -> None:
                await connection.send(data)
                self.note("no HTTP", await connection.answer())

            await self.attempt("no HTTP", send, HELD_SECONDS)


async def trickle(connection: Connection, data: bytes) -> None:
    """Send single bytes for a while."""
    until = time.monotonic() + HELD_SECONDS
    for i in range(len(data)):
        if time.monotonic() > until:
            return
        await connection.send(data[i : i + 1])
        await asyncio.sleep(0.02)


def attack(url: str, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Attack a server for so long and report the answers; meant for a process of its own."""
    return asyncio.run(Hostile(url, seed).run(seconds))
