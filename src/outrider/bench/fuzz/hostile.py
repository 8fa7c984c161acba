"""A client that means harm, in a process of its own: ``python -m outrider.bench.fuzz.hostile URL``.

It goes through its attacks by turns until the time is over and prints what it was answered. An
attack may be refused in any way; a server's error other than 503, and a switch that a foreign
page can flip, are faults.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any

from .bodies import CHAT, COMPLETIONS
from .values import deep_list, deep_object, dumps
from .wire import Answer, Connection, NoAnswer

MIB = 1 << 20
SIZES = (300_000, 4 * MIB)
"""Of large bodies; the server takes no larger one by default."""
ATTACK_SECONDS, HELD_SECONDS, PAUSE_SECONDS = 20.0, 2.0, 0.02
PATIENT = ("slow headers", "slow bodies", "an unread stream", "idle connections")
"""Attacks that wait most of their time."""
CHUNKS, PIPELINED, IDLE, HALVES = 20_000, 200, 100, 20


def filled(before: str, member: str, after: str, size: int) -> bytes:
    """A body with as many members as make it so many bytes."""
    count = (size - len(before) - len(after)) // (len(member) + 1)
    return (before + ",".join([member] * count) + after).encode()


def completion(**fields: Any) -> tuple[str, bytes]:
    """A small completion with these fields."""
    return COMPLETIONS, dumps({"prompt": "x", "max_tokens": 3, "temperature": 1, **fields})


def small_bodies() -> Iterator[tuple[str, bytes]]:
    """Bodies of a few kilobytes that have ended or stopped servers."""
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
    """A body whose logit_bias has as many keys as make it so many bytes."""
    keys = ",".join(f'"{i}":1' for i in range(size // 12))
    return f'{{"prompt": "x", "logit_bias": {{{keys}}}}}'.encode()


def large_bodies() -> list[tuple[str, Callable[[int], bytes]]]:
    """Makers of bodies of a size, almost all of which is one list, object or value."""
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
        self.attacks: dict[str, Callable[[], Awaitable[None]]] = {
            "small bodies": self.small_body, "large bodies": self.large_body,
            "chunks of a byte": self.byte_chunks, "slow headers": self.slow_headers,
            "slow bodies": self.slow_body, "priority": self.priority,
            "an unread stream": self.unread, "pipelining": self.pipelining,
            "halves of bodies": self.halves, "idle connections": self.idle,
            "a foreign page": self.rebinding, "no HTTP": self.no_http,
        }  # fmt: skip

    async def run(self, seconds: float) -> dict[str, Any]:
        """Attack so long, busily and patiently at once; what came of it."""
        until = time.monotonic() + seconds
        busy = [name for name in self.attacks if name not in PATIENT]
        rounds = await asyncio.gather(self.rounds(busy, until), self.rounds(PATIENT, until))
        return {
            "rounds": rounds, "answers": dict(sorted(self.answers.items())), "wrong": self.wrong,
        }  # fmt: skip

    async def rounds(self, names: Sequence[str], until: float) -> int:
        """Go through some attacks in random orders; how often each was made."""
        count = 0
        while time.monotonic() < until:
            for name in self.draw.sample(names, len(names)):
                await self.attempt(name)
                await asyncio.sleep(PAUSE_SECONDS)
            count += 1
        return count

    async def attempt(self, name: str) -> None:
        """Run one attack; the server may hang up on it."""
        try:
            async with asyncio.timeout(ATTACK_SECONDS):
                await self.attacks[name]()
        except TimeoutError:
            self.answers[f"{name}: nothing in {ATTACK_SECONDS:g} s"] += 1
        except (NoAnswer, OSError):
            self.answers[f"{name}: hung up"] += 1

    def note(self, name: str, answer: Answer) -> None:
        """Count an answer."""
        self.answers[f"{name}: {answer.status}"] += 1
        if answer.status >= 500 and answer.status != 503:
            self.wrong.append(f"{name}: {answer.status} {bytes(answer.body[:300])!r}")

    async def small_body(self) -> None:
        """Some bodies that ended engines."""
        async with Connection(self.url) as connection:
            for path, body in self.draw.sample(self.small, 8):
                self.note("small bodies", await connection.post(path, body))

    async def large_body(self) -> None:
        """A body that costs much to check."""
        async with Connection(self.url) as connection:
            path, make = self.draw.choice(self.large)
            body = make(self.draw.choice(SIZES))
            self.note("large bodies", await connection.post(path, body))

    async def byte_chunks(self) -> None:
        """A body in chunks of one byte each, to a path that takes one or to one that takes none."""
        async with Connection(self.url) as connection:
            path = self.draw.choice(("/health", "/metrics", COMPLETIONS, CHAT))
            await connection.send(connection.head("POST", path, {"Transfer-Encoding": "chunked"}))
            for _ in range(CHUNKS // 100):
                await connection.send(b"1\r\nx\r\n" * 100)
            await connection.send(b"0\r\n\r\n")
            self.note("chunks of a byte", await connection.answer())

    async def slow_headers(self) -> None:
        """A head that comes in byte by byte, and never ends."""
        async with Connection(self.url) as connection:
            await self.trickle(connection, b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 1000)

    async def slow_body(self) -> None:
        """A body that comes in byte by byte, of a POST or of a GET."""
        async with Connection(self.url) as connection:
            method, path = self.draw.choice((("POST", COMPLETIONS), ("GET", "/health")))
            await connection.send(connection.head(method, path, {"Content-Length": "100000"}))
            await self.trickle(connection, b"x" * 1000)

    async def trickle(self, connection: Connection, data: bytes) -> None:
        """Send single bytes for a while."""
        until = time.monotonic() + HELD_SECONDS
        for i in range(len(data)):
            if time.monotonic() > until:
                return
            await connection.send(data[i : i + 1])
            await asyncio.sleep(0.02)

    async def priority(self) -> None:
        """A call that wants to be first."""
        async with Connection(self.url) as connection:
            for priority in (-1, -(2**31)):
                path, body = completion(priority=priority, n=2, max_tokens=32)
                self.note("priority", await connection.post(path, body))

    async def unread(self) -> None:
        """A stream that nobody reads."""
        async with Connection(self.url) as connection:
            body = dumps({"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True})
            head = connection.head("POST", COMPLETIONS, {"Content-Length": str(len(body))})
            await connection.send(head + body)
            await asyncio.sleep(HELD_SECONDS)

    async def pipelining(self) -> None:
        """Many requests in one piece, of whose answers few are read."""
        async with Connection(self.url) as connection:
            await connection.send(connection.head("GET", "/health") * PIPELINED)
            self.note("pipelining", await connection.answer())

    async def halves(self) -> None:
        """Connections that end in the middle of a body."""
        for _ in range(HALVES):
            async with Connection(self.url) as connection:
                head = connection.head("POST", COMPLETIONS, {"Content-Length": "1000"})
                await connection.send(head + b'{"prompt": "x"')

    async def idle(self) -> None:
        """Connections that say nothing."""
        connections = [Connection(self.url) for _ in range(IDLE)]
        try:
            for connection in connections:
                await connection.send(b"")
            await asyncio.sleep(HELD_SECONDS)
        finally:
            for connection in connections:
                connection.close()

    async def rebinding(self) -> None:
        """The switch, flipped by a page of a name that was bound to this machine."""
        headers = {"Host": "evil.example", "Origin": "http://evil.example"}
        async with Connection(self.url) as connection:
            answer = await self.switch(connection, {"enabled": False}, headers)
            self.note("a foreign page", answer)
            if answer.status == 200:
                self.wrong.append("a page of another host flipped the speculation switch")
                await self.switch(connection, {"enabled": True}, {})

    async def switch(
        self, connection: Connection, state: dict[str, bool], headers: dict[str, str]
    ) -> Answer:
        """Post to the speculation switch."""
        body = dumps(state)
        given = {**headers, "Content-Length": str(len(body))}
        await connection.send(connection.head("POST", "/v1/speculation", given) + body)
        return await connection.answer()

    async def no_http(self) -> None:
        """Bytes that are no request, or two at once."""
        for data in (
            b"\x00" * 100, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", b"GET / HTTP/9.9\r\n\r\n",
            b"GET\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: a\r\n" + b"X: a\r\n" * 20_000 + b"\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 4\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET / HTTP/1.1\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -1\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
            b"ffffffffffffffff1\r\n",
        ):  # fmt: skip
            async with Connection(self.url) as connection:
                await connection.send(data)
                try:
                    async with asyncio.timeout(HELD_SECONDS):
                        self.note("no HTTP", await connection.answer())
                except (TimeoutError, NoAnswer, OSError):
                    self.answers["no HTTP: hung up"] += 1


def main() -> None:
    """Parse, attack, print JSON."""
    parser = argparse.ArgumentParser(
        prog="python -m outrider.bench.fuzz.hostile", description=__doc__
    )
    parser.add_argument("url")
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(json.dumps(asyncio.run(Hostile(args.url, args.seed).run(args.seconds))))


if __name__ == "__main__":
    main()
