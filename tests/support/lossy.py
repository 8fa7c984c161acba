"""A made-up server with OpenAI's API whose laws are known, and which can be wrong on purpose.

Its model's law of the next word follows from the text before it. It "speculates": from the second
token on a draft is drawn from another law, and a right server takes it by the ratio rule.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

WORDS = [f" {word}" for word in ("red", "green", "blue", "grey", "pink", "black", "white", "gold")]
NAMED = 5
Body = dict[str, Any]


@dataclass
class Faults:
    """What is wrong with the server.

    Attributes:
        typical: a draft stands where its probability is above 0.1 (typical acceptance).
        greedy: a draft stands where it is among the two likeliest tokens, at any temperature.
        blind: penalties do not see drafted tokens: they end with the first token.
        crowded: a seed counts only while the server has one request.
        reseeds: seeds repeat their answers, and give others than those of a right server.
        certain: log probabilities are 0 from the second token on.
        ignored: fields without effect.
        refused: fields that are answered with 400.
        raw: an answer to every completion behind the first ``after``, with ``status``.
        tells: what else answers hold.
        parts: the first so many words are parts of characters: all have the text U+FFFD, and
            log probabilities name one by its bytes where another has that text.
    """

    typical: bool = False
    greedy: bool = False
    blind: bool = False
    crowded: bool = False
    stops_late: bool = False
    overshoots: bool = False
    copies: bool = False
    breaks_json: bool = False
    reseeds: bool = False
    certain: bool = False
    ignored: set[str] = field(default_factory=set)
    refused: set[str] = field(default_factory=set)
    raw: bytes | None = None
    status: int = 200
    after: int = 0
    tells: set[str] = field(default_factory=lambda: {"logprobs", "token_ids", "usage"})
    models: Any = field(default_factory=lambda: {"data": [{"id": "toy"}]})
    seen: int = 0
    switch: tuple[int, bytes] = (404, b"no such path")
    """The answer at Outrider's switch of speculation."""
    running: int = 0
    parts: int = 0


@functools.cache
def law(text: str, salt: str = "") -> np.ndarray[Any, np.dtype[np.float64]]:
    """Return the probabilities of the words behind a text."""
    digest = hashlib.sha256((salt + text).encode()).digest()
    rng = np.random.default_rng(int.from_bytes(digest[:8], "big"))
    logits = rng.normal(0, 1.3, len(WORDS))
    for i, word in enumerate(WORDS):
        logits[i] += 0.7 * text.endswith(word)  # words come again, so that penalties have an effect
    p: np.ndarray[Any, np.dtype[np.float64]] = np.exp(logits)
    return p / p.sum()


@functools.cache
def ranked(text: str) -> tuple[list[float], list[int]]:
    """Return the words' log probabilities, and the words by them."""
    p = law(text)
    return np.log(p).tolist(), np.argsort(-p).tolist()


SHAPING = ("temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty")


class Shaped:
    """A law of which tokens are drawn."""

    def __init__(self, p: Any) -> None:
        self.p = p
        total = p.cumsum()
        self.cumulative = total / total[-1]

    def draw(self, rng: Any) -> int:
        """What ``rng.choice(len(p), p=p)`` draws."""
        return int(self.cumulative.searchsorted(rng.random(), side="right"))


def shaped(text: str, salt: str, body: Body, before: list[int]) -> Shaped:
    bias = tuple((body.get("logit_bias") or {}).items())
    options = tuple((name, body[name]) for name in SHAPING if name in body)
    return _shaped(text, salt, options, bias, tuple(before) if "penalty" in str(options) else ())


@functools.cache
def _shaped(text: str, salt: str, options: Any, bias: Any, before: tuple[int, ...]) -> Shaped:
    return Shaped(processed(law(text, salt), dict(options), bias, before))


def processed(p: Any, body: Body, biases: Any, before: tuple[int, ...]) -> Any:
    """Return a law under the options of a request."""
    temperature = body.get("temperature", 1.0)
    z = np.log(p)
    for i in set(before):
        z[i] -= body.get("presence_penalty", 0.0)
        z[i] -= body.get("frequency_penalty", 0.0) * before.count(i)
    for key, bias in biases:
        z[int(key)] += bias
    if temperature == 0:
        return np.eye(len(z))[z.argmax()]
    q = np.exp((z - z.max()) / temperature)
    q /= q.sum()
    order = np.argsort(-q)
    keep = np.ones(len(q), bool)
    if body.get("top_k", -1) > 0:
        keep[order[body["top_k"] :]] = False
    keep[order[1:][q[order].cumsum()[:-1] >= body.get("top_p", 1.0)]] = False
    keep &= q >= body.get("min_p", 0.0) * q.max()
    q = q * keep
    return q / q.sum()


def tokens_of(text: str) -> list[str]:
    return re.findall(r"\s?\S+|\s+", text)


class Toy:
    """Answers requests."""

    def __init__(self, faults: Faults) -> None:
        self.faults = faults
        self.rng = np.random.default_rng(0)

    def generate(self, text: str, body: Body, rng: Any, length: int) -> list[int]:
        """Return the sampled words."""
        faults, out = self.faults, list[int]()
        while len(out) < length:
            seen = out[:1] if faults.blind else out
            before = text + "".join(WORDS[i] for i in out)
            target = shaped(before, "", body, seen)
            drafter = shaped(before, "drafter", body, seen)
            p, q = target.p, drafter.p
            if not out:
                out.append(target.draw(rng))
                continue
            draft = drafter.draw(rng)
            if faults.typical and body.get("temperature", 1.0) > 0:
                out.append(draft if p[draft] > 0.1 else target.draw(rng))
            elif rng.random() * q[draft] < p[draft] or (
                faults.greedy and draft in np.argsort(-law(before))[:2]
            ):
                out.append(draft)
            else:
                rest = np.maximum(p - q, 0)
                out.append(int(rng.choice(len(p), p=rest / rest.sum())))
        return out

    def word(self, i: int) -> str:
        return "\ufffd" if i < self.faults.parts else WORDS[i]

    def choice(self, index: int, body: Body) -> Body:
        faults, text = self.faults, body["prompt"]
        if isinstance(text, list):
            text = "".join(WORDS[i] for i in text)
        rng = self.rng
        seed = body.get("seed")
        if seed is not None and not (faults.crowded and faults.running > 1):
            rng = np.random.default_rng([seed + faults.reseeds, 0 if faults.copies else index])
        elif faults.copies:
            rng = np.random.default_rng(5)
        length = body["max_tokens"] + 2 * (faults.overshoots and body["max_tokens"] > 2)
        formed = "response_format" in body or "guided_regex" in body
        out = [] if formed else self.generate(text, body, rng, length)
        said, reason = "".join(map(self.word, out)), "length"
        for word in body.get("stop") or ():
            if word in said:
                said, reason = said[: said.index(word) + len(word) * faults.stops_late], "stop"
        if "response_format" in body:
            said, reason = json.dumps({"colour": "red", "warm": True}), "stop"
            if faults.breaks_json and rng.random() < 0.5:
                said = said.replace("red", "ultraviolet")
        if "guided_regex" in body:
            said, reason = "555-0199", "stop"
        found: Body = {"index": index, "text": said, "finish_reason": reason, "logprobs": None}
        if "token_ids" in faults.tells and body.get("return_token_ids"):
            found["token_ids"] = out
        if body.get("logprobs") is not None and "logprobs" in faults.tells:
            tops, own = [], []
            for at in range(len(out)):
                logs, best = ranked(text + "".join(WORDS[i] for i in out[:at]))
                top = dict[str, float]()
                for i in dict.fromkeys([out[at], *best[: body["logprobs"]]]):
                    word = self.word(i)
                    top[f"bytes:\\x{i:02x}" if word in top else word] = logs[i]
                tops.append(top)
                own.append(0.0 if faults.certain and at else logs[out[at]])
            words = [self.word(i) for i in out]
            found["logprobs"] = {"tokens": words, "top_logprobs": tops, "token_logprobs": own}
        return found | {"count": len(out)}

    def completion(self, body: Body) -> tuple[int, Any]:
        faults = self.faults
        faults.seen += 1
        if faults.raw is not None and faults.seen > faults.after:
            return faults.status, faults.raw
        if wrong := faults.refused & set(body):
            return 400, {"error": {"message": f"no such field: {min(wrong)}"}}
        body = {name: value for name, value in body.items() if name not in faults.ignored}
        choices = [self.choice(i, body) for i in range(body.get("n", 1))]
        counts = [choice.pop("count") for choice in choices]
        answer: Body = {"object": "text_completion", "choices": choices}
        if "usage" in faults.tells and isinstance(body["prompt"], str):
            count = len(tokens_of(body["prompt"]))
            answer["usage"] = {"prompt_tokens": count, "completion_tokens": sum(counts)}
        return 200, answer

    def answer(self, path: str, body: Body) -> tuple[int, Any]:
        if path == "/v1/models":
            return 200, self.faults.models
        if path == "/v1/completions":
            return self.completion(body)
        if path == "/v1/speculation":
            return self.faults.switch
        return 404, {"error": {"message": "no such path"}}

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                size = re.search(r"Content-Length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(size[1]))) if size else {}
                self.faults.running += 1
                if self.faults.crowded:
                    await asyncio.sleep(0.001)  # others come in meanwhile
                status, found = self.answer(head.split(" ")[1], body)
                self.faults.running -= 1
                data = found if isinstance(found, bytes) else json.dumps(found).encode()
                writer.write(
                    f"HTTP/1.1 {status} OK\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
                )
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@contextmanager
def toy(faults: Faults | None = None) -> Iterator[str]:
    """Serve on loopback, and yield the address."""
    up, address = threading.Event(), list[str]()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        serving = await asyncio.start_server(Toy(faults or Faults()).connection, "127.0.0.1", 0)
        address.append(f"http://127.0.0.1:{serving.sockets[0].getsockname()[1]}")
        up.set()
        await stop.wait()
        serving.close()
        connections = asyncio.all_tasks() - {asyncio.current_task()}
        for task in connections:
            task.cancel()
        await asyncio.gather(*connections, return_exceptions=True)
        await asyncio.sleep(0)  # transports close in the loop's next turn

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()), daemon=True)
    thread.start()
    assert up.wait(10)
    try:
        yield address[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
