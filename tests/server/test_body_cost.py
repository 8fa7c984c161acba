"""A body costs the server no more than its size warrants, in time and in memory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi.exceptions import RequestValidationError
from httpx import ASGITransport

from outrider.checkpoints.tokenizers import read_codec
from outrider.params import SAMPLING
from outrider.server.admission import ALWAYS, BodyRoom, Held, Queue
from outrider.server.app import create_app
from outrider.server.bodies import MOST_BRACKETS, BodyRoute, parse, read
from outrider.server.build import build
from outrider.server.errors import LONGEST_SENTENCE, Refusal, error_body, sentence
from outrider.server.options import resolve
from outrider.server.protocol import ChatRequest, CompletionRequest
from tests.support.forked import Served
from tests.support.hostile.bodies import HOSTILE

MIB = 1 << 20
MOST_MEMORY = 200 * MIB
LONGEST_WAIT = 2.5
"""Ten times what a server promises, for a machine that does other things as well."""
JSON = {"Content-Type": "application/json"}


@pytest.fixture(scope="module")
def strict(tiny_llama: Path) -> Iterator[Served]:
    """A server that runs one sequence and has room for four more to wait."""
    with Served(
        tiny_llama, "--drafter", "ngram", "--max-num-seqs", "1", "--max-queued-requests", "4"
    ) as server:
        httpx.post(f"{server.url}/v1/completions", json={"prompt": "a"}, timeout=60)
        yield server


class Pulse:
    """Asks for /health again and again; ``longest`` is how long an answer took at most."""

    def __init__(self, url: str) -> None:
        self.longest = 0.0
        self._url = f"{url}/health"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _ask(self) -> None:
        with httpx.Client(timeout=60) as client:
            while not self._over.wait(0.01):
                begin = time.monotonic()
                assert client.get(self._url).status_code == 200
                self.longest = max(self.longest, time.monotonic() - begin)


def test_no_hostile_body_takes_much_time_or_memory(strict: Served) -> None:
    before, slow, wrong = strict.memory(), {}, {}
    with httpx.Client(timeout=60) as client:
        for name, (path, make) in HOSTILE.items():
            raw = make()
            assert len(raw) <= 4 * MIB, name
            for _ in range(3):  # a body that is slow is so again, a busy machine is not
                with Pulse(strict.url) as pulse:
                    found = client.post(strict.url + path, content=raw, headers=JSON)
                if pulse.longest <= LONGEST_WAIT:
                    break
            told = found.json().get("error", {})
            if found.status_code not in (400, 404) or len(told.get("message", "x" * 999)) > 300:
                wrong[name] = (found.status_code, found.text[:400])
            if pulse.longest > LONGEST_WAIT:
                slow[name] = pulse.longest
            assert strict.peak() - before < MOST_MEMORY, name
    assert not wrong
    assert not slow


async def codes_at_once(server: Served, body: bytes, count: int) -> list[int]:
    """The statuses of as many calls that come in at the same moment."""
    host, port = server.url.removeprefix("http://").split(":")
    head = f"Host: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    call = f"POST /v1/completions HTTP/1.1\r\n{head}Connection: close\r\n\r\n".encode() + body
    links = [await asyncio.open_connection(host, int(port)) for _ in range(count)]
    for _, writer in links:
        writer.write(call)
    answers = [reader.read() for reader, _ in links]
    found = [asyncio.ensure_future(answer) for answer in answers]
    deadline = time.monotonic() + 60
    while sum(one.done() for one in found) < count - 4 and time.monotonic() < deadline:
        await asyncio.sleep(0.05)
    engine = server.engine()
    assert engine is not None
    os.kill(engine, signal.SIGCONT)
    codes = [int((await one).split(b" ", 2)[1]) for one in found]
    for _, writer in links:
        writer.close()
    return codes


def test_a_full_queue_takes_exactly_what_fits(strict: Served) -> None:
    """Calls that come at once count before anything of them is computed."""
    engine, body = strict.engine(), b'{"prompt":"a","max_tokens":2}'
    assert engine is not None
    for _ in range(2):  # what was held is given back
        os.kill(engine, signal.SIGSTOP)  # nothing gets its first token
        try:
            codes = asyncio.run(codes_at_once(strict, body, 40))
        finally:
            os.kill(engine, signal.SIGCONT)
        assert (codes.count(200), codes.count(429)) == (4, 36)
    text = "the lazy dog " * 400  # does not fit, and gives its place back
    for prompt, code in [(text, 400)] * 8 + [("a", 200)]:
        found = httpx.post(f"{strict.url}/v1/completions", json={"prompt": prompt})
        assert found.status_code == code


def test_whatever_cannot_be_read_is_a_sentence(strict: Served) -> None:
    shapes: dict[str, bytes] = {
        "is empty": b"",
        "EOF while parsing": b'{"prompt":',
        "not UTF-8": b'{"prompt":"\xff"}',
        "expected value": b"\xef\xbb\xbf{}",
        "lone surrogates": b'{"prompt":"\\ud800"}',
        "too many digits": b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
        "nests too deeply": b'{"x":' + b"[" * 500 + b"]" * 500 + b',"prompt":"a"}',
        "not a JSON object": b"[1]",
        "not JSON: expected": b'{"prompt":"a","temperature":NaN}',
        "trailing": b'{"prompt":"a"} {}',
    }
    with httpx.Client() as client:
        for word, raw in shapes.items():
            found = client.post(f"{strict.url}/v1/completions", content=raw, headers=JSON)
            assert found.status_code == 400, word
            assert word in found.json()["error"]["message"]
        for kind in (None, "text/plain", "multipart/form-data; boundary=x", "nonsense"):
            headers = {} if kind is None else {"Content-Type": kind}
            url = f"{strict.url}/v1/completions"
            found = client.post(url, content=b'{"prompt":"a"}', headers=headers)
            assert found.status_code == 400
            assert "send it as application/json" in found.json()["error"]["message"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_wrong_body_has_few_errors(name: str) -> None:
    path, make = HOSTILE[name]
    model = ChatRequest if "chat" in path else CompletionRequest
    found: list[Any] = []
    try:
        read(model, make())
    except RequestValidationError as error:
        found = list(error.errors())
    except Refusal:
        pass
    assert len(found) <= 5


def test_a_long_field_of_any_body_has_few_errors(tiny_llama: Path) -> None:
    llm, settings = build(tiny_llama, "tiny", resolve({}, {}, None))
    routes = [each for each in create_app(llm, settings).routes if isinstance(each, BodyRoute)]
    models = {each.body_field.field_info.annotation for each in routes if each.body_field}
    assert len(models) >= 10
    many = []
    for model in models:
        for name in model.model_fields:
            for member in (1, "a", None, {"role": "user"}):
                for long in ([member] * 50, {str(i): member for i in range(50)}):
                    try:
                        read(model, json.dumps({name: long}).encode())
                    except RequestValidationError as error:
                        if len(error.errors()) > 10:
                            many.append((model.__name__, name, member))
                    except Refusal:
                        pass
    assert not many


def test_brackets_in_texts_are_not_counted() -> None:
    text = '{[:"\\' * MOST_BRACKETS
    assert parse(json.dumps({"prompt": text}).encode()) == {"prompt": text}
    with pytest.raises(Refusal, match="lists and objects"):
        parse(json.dumps({"prompt": text, "x": [[]] * MOST_BRACKETS}).encode())


def test_an_error_says_which_kind_was_meant_and_stays_short() -> None:
    def told(**fields: Any) -> tuple[str, str | None]:
        with pytest.raises(RequestValidationError) as caught:
            read(CompletionRequest, json.dumps({"prompt": "a", **fields}).encode())
        return sentence(caught.value.errors())

    assert told(prompt=[1, "a"])[0].startswith("prompt.1: input should be a valid integer")
    assert told(prompt=["a", 1]) == ("prompt.1: input should be a valid string.", "prompt")
    assert told(prompt=[[1], ["a"]])[0].startswith("prompt.1.0: input should be a valid integer")
    assert told(stop=[1])[0] == "stop.0: input should be a valid string."
    assert told(stop=5)[0] == "stop: input should be a valid string or list."
    assert told(stop=["a"] * 65)[0] == "stop: list should have at most 64 items, not 65."
    assert told(guided_json=5)[0] == "guided_json: input should be a valid string or dictionary."
    assert told(stream_options=5)[0] == "stream_options: input should be a valid dictionary."
    assert told(seed=1e308)[0] == "seed: the number is too large."
    long = error_body(Refusal(f"x is {'9' * 5000}; give less."))["error"]["message"]
    assert len(long) <= LONGEST_SENTENCE
    assert long.endswith("; give less.")


def test_a_queue_counts_what_enters_at_once() -> None:
    queue = Queue(4, 100)
    first = queue.enter(9)  # the queue is not full, so that it takes a whole call
    with pytest.raises(Refusal, match="9 sequences are already waiting, and the limit is 4"):
        queue.enter(1)
    first.give_back(7, 0)
    second = queue.enter(2)
    first.add_tokens(300)
    with pytest.raises(Refusal, match="300 prompt tokens"):
        second.add_tokens(1)
    first.close()
    first.give_back(5, 5)  # nothing is given back twice
    second.close()
    assert (queue.sequences, queue.tokens) == (0, 0)


def test_texts_have_a_place_in_the_queue(tiny_llama: Path) -> None:
    """Tokenising costs as much as a prompt, so that a full queue refuses it."""

    async def work() -> None:
        llm, settings = build(tiny_llama, "tiny", resolve({"max_queued_requests": 1}, {}, None))
        app = create_app(llm, settings)
        queue: Queue = app.state.service.queue
        transport = ASGITransport(app)
        calls = {"/tokenize": {"prompt": "ab"}, "/detokenize": {"tokens": [1, 2]}}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for path, body in calls.items():
                lease = queue.enter(1)
                assert (await client.post(path, json=body)).status_code == 429
                lease.close()
                for _ in range(2):  # a place is given back
                    assert (await client.post(path, json=body)).status_code == 200

    asyncio.run(work())


def test_bodies_wait_for_room() -> None:
    async def work() -> None:
        room = BodyRoom(10)
        first, second, short = Held(room), Held(room), Held(room)
        await first.add(12 + ALWAYS)  # alone a body may have more
        await short.add(ALWAYS)  # and a short one never waits
        short.close()
        waiting = asyncio.ensure_future(second.add(1 + ALWAYS))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        first.close()
        await asyncio.wait_for(waiting, 10)
        second.close()
        second.close()
        assert room.held == 0

    asyncio.run(work())


def test_tokens_of_a_long_text_are_counted_piece_by_piece(tiny_llama: Path) -> None:
    codec = read_codec(tiny_llama)
    for text in ("the quick brown fox " * 10_000, "a" * 100_000, "\n" * 70_000, "é" * 90_000):
        tokens = len(codec.encode(text))
        assert codec.exceeds(text, tokens - 1000)
        assert not codec.exceeds(text, tokens)


def test_an_answer_lists_no_more_than_it_may(strict: Served) -> None:
    body = {"prompt": "a", "max_tokens": 200, "n": 128, "logprobs": int(SAMPLING["logprobs"].most)}
    found = httpx.post(f"{strict.url}/v1/completions", json=body)
    assert found.status_code == 400
    assert "at most 262144 are listed" in found.json()["error"]["message"]
