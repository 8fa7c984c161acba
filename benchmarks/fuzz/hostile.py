"""A client that means harm.

It goes through its attacks by turns until the time is over and tells what it was answered. An
attack may be refused in any way; a server's error other than 503, and a switch that a foreign
page can flip, are faults.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from .bodies import CHAT, COMPLETIONS
from .values import deep, dumps
from .wire import Answer, Connection, NoAnswer, request

SIZES = (300_000, 4 << 20)
"""Of large bodies; the server takes no larger one by default."""
ATTACK_SECONDS, HELD_SECONDS, PAUSE_SECONDS = 20.0, 2.0, 0.02
FOREIGN_PAGE = "a foreign page"
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


def small_bodies() -> list[tuple[str, bytes]]:
    """Return bodies of a few kilobytes that have ended or stopped servers."""
    tokens = (4096, 2**31, 2**32, 2**63, 10**19, -1)
    texts = ("<pad_extra>", "<|endoftext|>", "\ud800", "\x00")
    nested = [deep("object", depth) for depth in (65, 950, 100_000)]
    fields: dict[str, list[Any]] = {
        "top_k": [2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**32 + 3, 10**19, 10**3999],
        "prompt": [[token] for token in tokens],
        "stop_token_ids": [[token] for token in tokens],
        "allowed_token_ids": [[token] for token in tokens],
        "logit_bias": [{str(token): 1} for token in tokens],
        "min_tokens": list(tokens),
        "prediction": [{"type": "content", "content": text} for text in texts],
        "bad_words": [[text] for text in texts],
        "guided_json": nested,
        "structured_outputs": [{"json": value} for value in nested],
        "stop": [deep("list", depth) for depth in (65, 950, 100_000)],
        "guided_regex": ["a{1000000}", "(a|b|c){0,5000}", "(((a{100}){100}){100})"],
    }
    return [
        *(completion(**{name: value}) for name in fields for value in fields[name]),
        (CHAT, b'{"messages": ' + b"[" * 100_000),
    ]


def large_bodies() -> list[tuple[str, Callable[[int], bytes]]]:
    """Return makers of bodies of a size, almost all of which is one list, object or value."""
    makers: list[tuple[str, Callable[[int], bytes]]] = [
        (COMPLETIONS, lambda size: dumps(
            {"prompt": "x", "logit_bias": {str(i): 1 for i in range(size // 14)}}
        )),
        (COMPLETIONS, lambda size: b'{"prompt": "' + b"a" * (size - 14) + b'"}'),
        (COMPLETIONS, lambda size: b'{"prompt": ' + b"[" * (size - 11)),
        (COMPLETIONS, lambda size: b'{"prompt": "x", "max_tokens": ' + b"9" * (size - 31) + b"}"),
        (COMPLETIONS, lambda size: b'{"model": "' + b"a" * (size - 28) + b'", "prompt": "x"}'),
    ]  # fmt: skip
    user = '{"messages": [{"role": "user", "content": "a"}], "tools": ['
    call = '{"type":"function","function":{"name":"f","parameters":{}}}'
    contents = ('""', "[{}]", '[{"type":"text","text":"a"},{"type":"text","text":"b"}]')
    messages = [f'{{"role":"user","content":{content}}}' for content in contents]
    lists = [(CHAT, user, ["{}", call]), (CHAT, '{"messages": [', messages)]
    for field in ("prompt", "stop", "bad_words", "stop_token_ids", "guided_choice", "metadata"):
        start = '{"max_tokens": 1, "prompt": "x", ' if field != "prompt" else "{"
        members = ["{}", "1", "0.5", "null", '""', "[[[[1]]]]"]
        lists.append((COMPLETIONS, f'{start}"{field}": [', members))
    return makers + [
        (path, partial(filled, start, member, "]}"))
        for path, start, members in lists
        for member in members
    ]


@dataclass(frozen=True)
class Attack:
    """Bytes that are sent one piece after the other, of a random choice, over ``connections`` at
    once.

    After every piece there are ``pause`` seconds, or an answer is read; after ``limit`` seconds it
    is given up.
    """

    name: str
    pieces: Callable[[random.Random], Iterable[bytes]]
    pause: float = 0.0
    connections: int = 1
    limit: float = ATTACK_SECONDS


def attacks(host: str) -> list[Attack]:
    """Return all attacks on a server."""
    small, large = small_bodies(), large_bodies()
    post, bytewise = partial(request, host), int(HELD_SECONDS / PAUSE_SECONDS)
    stream = {"prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    first_calls = [
        post(*completion(priority=priority, n=2, max_tokens=32)) for priority in (-1, -(2**31))
    ]
    page, off = "evil.example", dumps({"enabled": False})
    endless = b"GET /health HTTP/1.1\r\nHost: a\r\nX: " + b"a" * 1000

    def small_posts(draw: random.Random) -> Iterator[bytes]:
        """Yield some bodies that ended engines."""
        return (post(path, body) for path, body in draw.sample(small, 8))

    def large_post(draw: random.Random) -> Iterator[bytes]:
        """Yield a body that costs much to check."""
        path, make = draw.choice(large)
        yield post(path, make(draw.choice(SIZES)))

    def byte_chunks(draw: random.Random) -> Iterator[bytes]:
        """Yield a body in chunks of a byte, for a path that takes one or none."""
        path = draw.choice(("/health", "/metrics", COMPLETIONS, CHAT))
        head = post(path, Transfer_Encoding="chunked")
        yield head + b"1\r\nx\r\n" * CHUNKS + b"0\r\n\r\n"

    def slow_body(draw: random.Random) -> Iterator[bytes]:
        """Yield a head, then single bytes of the body, of a POST or of a GET."""
        method, path = draw.choice((("POST", COMPLETIONS), ("GET", "/health")))
        yield post(path, method=method, Content_Length=100_000)
        yield from [b"x"] * bytewise

    def fixed(name: str, *pieces: bytes, **how: Any) -> Attack:
        return Attack(name, lambda _: pieces, **how)

    return [
        Attack("small bodies", small_posts), Attack("large bodies", large_post),
        Attack("chunks of a byte", byte_chunks),
        Attack("slow bodies", slow_body, PAUSE_SECONDS),
        fixed(
            "slow headers", *(endless[i : i + 1] for i in range(bytewise)), pause=PAUSE_SECONDS
        ),
        fixed("priority", *first_calls),
        fixed("an unread stream", post(COMPLETIONS, dumps(stream)), pause=HELD_SECONDS),
        fixed("pipelining", post("/health", method="GET") * PIPELINED),
        fixed(
            "halves of bodies", post(COMPLETIONS, b'{"prompt": "x"', Content_Length=1000),
            pause=PAUSE_SECONDS, connections=HALVES,
        ),
        fixed("idle connections", b"", pause=HELD_SECONDS, connections=IDLE),
        fixed(FOREIGN_PAGE, request(page, "/v1/speculation", off, Origin=f"http://{page}")),
        *(fixed("no HTTP", data, limit=HELD_SECONDS) for data in NO_HTTP),
    ]  # fmt: skip


class Hostile:
    """Attacks one server; the seed orders the attacks."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.draw = url, random.Random(seed)
        self.answers: Counter[str] = Counter()
        self.wrong: list[str] = []

    async def run(self, seconds: float) -> dict[str, Any]:
        """Attack so long, busily and patiently at once, and report the answers."""
        sides = attacks(urlsplit(self.url).netloc)
        until = time.monotonic() + seconds
        groups = ([a for a in sides if not a.pause], [a for a in sides if a.pause])
        rounds = await asyncio.gather(*(self.rounds(group, until) for group in groups))
        return {
            "rounds": rounds, "answers": dict(sorted(self.answers.items())), "wrong": self.wrong,
        }  # fmt: skip

    async def rounds(self, sides: list[Attack], until: float) -> int:
        """Go through some attacks in random orders; return how often each was made."""
        count = 0
        while time.monotonic() < until:
            for attack in self.draw.sample(sides, len(sides)):
                await asyncio.gather(*(self.make(attack) for _ in range(attack.connections)))
                await asyncio.sleep(PAUSE_SECONDS)
            count += 1
        return count

    async def make(self, attack: Attack) -> None:
        """Make one attack over a connection of its own; the server may hang up on it."""
        name = attack.name
        try:
            async with asyncio.timeout(attack.limit), Connection(self.url) as connection:
                for piece in attack.pieces(self.draw):
                    await connection.send(piece)
                    if attack.pause:
                        await asyncio.sleep(attack.pause)
                    else:
                        self.note(name, await connection.answer())
        except TimeoutError:
            self.answers[f"{name}: nothing in {attack.limit:g} s"] += 1
        except (NoAnswer, OSError):
            self.answers[f"{name}: hung up"] += 1

    def note(self, name: str, answer: Answer) -> None:
        """Count an answer, and note one that must not be."""
        self.answers[f"{name}: {answer.status}"] += 1
        if answer.status >= 500 and answer.status != 503:
            self.wrong.append(f"{name}: {answer.status} {bytes(answer.body[:300])!r}")
        if name == FOREIGN_PAGE and answer.status == 200:
            self.wrong.append("a page of another host flipped the speculation switch")


def attack(url: str, seconds: float, seed: int = 0) -> dict[str, Any]:
    """Attack a server for so long and report the answers; meant for a process of its own."""
    return asyncio.run(Hostile(url, seed).run(seconds))
