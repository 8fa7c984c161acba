"""The fuzzer and the hostile client: their bodies, their rules, and a short run of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fuzz import hostile, values
from benchmarks.fuzz.bodies import CHAT, COMPLETIONS, KNOWN, Bodies, Case
from benchmarks.fuzz.hostile import SIZES, Hostile, large_bodies, small_bodies
from benchmarks.fuzz.judge import faults
from benchmarks.fuzz.run import OPTIONS, Fuzzer, Seen, published
from benchmarks.fuzz.wire import Answer, Connection
from outrider.server.protocol import ChatRequest, CompletionRequest
from tests.support.forked import Served

BODIES, CONNECTIONS, SEED = 600, 8, 5


@pytest.fixture(scope="module")
def fuzzed(
    tiny_llama: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """A server whose template knows every role, so that conversations are answered."""
    template = tmp_path_factory.mktemp("template") / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.role }}: {{ m.content }};{% endfor %}")
    with Served(
        tiny_llama, "--drafter", tiny_drafter, "--chat-template", template, *OPTIONS
    ) as server:
        yield server


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """A published schema of the two endpoints and /tokenize, as the server would give it."""
    from fastapi import FastAPI

    from outrider.server.protocol import TokenizeRequest

    bodies = {COMPLETIONS: CompletionRequest, CHAT: ChatRequest, "/tokenize": TokenizeRequest}
    app = FastAPI()
    for path, model in bodies.items():

        def route(body: Any) -> None:
            pass

        route.__annotations__["body"] = model
        app.post(path)(route)
    return app.openapi()


def test_a_body_depends_on_schema_seed_and_index_alone(document: dict[str, Any]) -> None:
    once = [Bodies(document, 1).case(i) for i in range(300)]
    again = Bodies(json.loads(json.dumps(document)), 1)
    assert [again.case(i) for i in reversed(range(300))] == once[::-1]
    assert [Bodies(document, 2).case(i) for i in range(300)] != once
    assert len({case.raw for case in once}) > 250


def test_bodies_cover_every_field_of_the_schema(document: dict[str, Any]) -> None:
    bodies = Bodies(document, 0)
    sent: dict[str, set[str]] = {path: set() for path in bodies.paths}
    for i in range(3000):
        case = bodies.case(i)
        try:
            found = json.loads(case.raw)
        except (ValueError, RecursionError):
            continue
        sent[case.path].update(found if isinstance(found, dict) else ())
    for path, model in ((COMPLETIONS, CompletionRequest), (CHAT, ChatRequest)):
        names = {field.alias or name for name, field in model.model_fields.items()}
        assert names <= set(bodies.fields(path))
        assert names | set(KNOWN) <= sent[path]
    assert {"prompt", "messages"} <= sent["/tokenize"]


def test_bodies_are_of_every_kind_and_reach_what_python_cannot_write(
    document: dict[str, Any],
) -> None:
    bodies = Bodies(document, 0)
    cases = [bodies.case(i) for i in range(3000)]
    assert {case.kind for case in cases} == set(bodies.kinds)
    assert {None, 0} < {case.leaves for case in cases}
    whole = b"".join(case.raw for case in cases)
    for token in (b"NaN", b"1e999", b"9" * 4000, b"[" * 900, b"2147483648", b'"stream": true'):
        assert token in whole
    assert values.dumps({"a": values.raw("1e999"), "b": values.deep("object", 2)}) == (
        b'{"a": 1e999, "b": {"a":{"a":1}}}'
    )


def answered(status: int, body: Any, kind: str = "application/json") -> Answer:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return Answer(status, {"content-type": kind}, bytearray(raw), whole=True)


def error(message: Any = "n is 0; give 1 or more.", **other: Any) -> dict[str, Any]:
    fields = {"message": message, "type": "invalid_request_error", "param": "n", "code": 400}
    return {"error": fields | other}


GOOD = {"choices": [{"index": 0, "text": "a", "finish_reason": "length"}]}
STREAM = "text/event-stream; charset=utf-8"


@pytest.mark.parametrize(
    ("answer", "fault"),
    [
        (answered(200, GOOD), None),
        (answered(400, error()), None),
        (answered(200, b'data: {"choices": []}\n\ndata: [DONE]\n\n', STREAM), None),
        (answered(500, error()), "500"),
        (answered(503, error()), "503"),
        (answered(302, error()), "the status is 302"),
        (answered(400, {"detail": "no"}), "no error of the API's form"),
        (answered(400, error("a" * 401)), "the message has 401 characters"),
        (answered(400, error("")), "no message"),
        (answered(400, error("ValueError: x")), "shows an exception"),
        (answered(400, error(param=5)), "param is 5"),
        (answered(400, error(code=None)), "code None"),
        (answered(408, error()), "408 after 0.100 s of 2 s"),
        (answered(200, b'{"choices": [NaN]}'), "no JSON"),
        (answered(200, {"choices": []}), "no choices"),
        (answered(200, {"choices": [{"index": 0}]}), "no finish_reason"),
        (answered(200, b'data: {"choices": []}\n\n', STREAM), "does not end in"),
        (answered(200, b"data: {NaN\n\ndata: [DONE]\n\n", STREAM), "an event is no JSON"),
        (
            answered(
                200,
                f"data: {json.dumps(error(type='server_error'))}\n\ndata: [DONE]\n\n".encode(),
                STREAM,
            ),
            "the stream ended with",
        ),
    ],
)
def test_every_fault_of_an_answer_is_found(answer: Answer, fault: str | None) -> None:
    case = Case(0, "valid", COMPLETIONS, b'{"prompt": "a", "timeout": 2}')
    found = faults(case, answer, 0.1, 5.0)
    assert (not found) if fault is None else any(fault in one for one in found), found


def test_faults_are_kept_by_their_class() -> None:
    seen = Seen()
    for index, value in enumerate(("'a'", "'b'", "['c']")):
        seen.note(Case(index, "valid", COMPLETIONS, b"x" * 5000), f"the field is {value}")
    seen.general.append("the engine ended")
    assert seen.wrong == 4
    assert seen.classes == {"the field is ": [0, 1, 2]}
    assert len(seen.kept[0]["body"]) < 4100


def test_hostile_bodies_are_what_they_say() -> None:
    assert any(b"2147483648" in body for _, body in small_bodies())
    assert {path for path, _ in large_bodies()} == {COMPLETIONS, CHAT}
    for size in SIZES:
        sizes = [len(make(size)) for _, make in large_bodies()]
        assert max(sizes) <= size
        assert min(sizes) > 0.7 * size


def test_random_bodies_do_no_harm(fuzzed: Served) -> None:
    async def run() -> dict[str, Any]:
        bodies = Bodies(published(fuzzed.url), SEED)
        return await Fuzzer(fuzzed.url, fuzzed, bodies).run(BODIES, CONNECTIONS)

    report = asyncio.run(run())
    assert report["wrong_count"] == 0, json.dumps(report["classes"] | {"": report["general"]})
    assert report["codes"]["200"] > BODIES / 5
    assert report["codes"]["400"] > BODIES / 5
    assert report["health"]["failed"] == 0
    assert "Traceback" not in "\n".join(fuzzed.lines)


def test_one_body_can_be_sent_again(fuzzed: Served) -> None:
    async def run() -> dict[str, Any]:
        bodies = Bodies(published(fuzzed.url), SEED)
        return await Fuzzer(fuzzed.url, fuzzed, bodies).only(3)

    found = asyncio.run(run())
    assert found["index"] == 3
    assert found["wrong"] == []


def test_bodies_that_ended_engines_do_no_more(fuzzed: Served) -> None:
    async def run() -> Seen:
        fuzzer = Fuzzer(fuzzed.url, fuzzed, Bodies({"paths": {}}, 0))
        async with Connection(fuzzed.url) as connection:
            for index, (path, body) in enumerate(small_bodies()):
                await fuzzer.send(connection, Case(index, "killing", path, body))
        return fuzzer.seen

    engine = fuzzed.engine()
    seen = asyncio.run(run())
    assert seen.wrong == 0, json.dumps(seen.kept)
    assert seen.codes["400"] > 20
    assert fuzzed.engine() == engine


def test_a_hostile_client_does_no_harm(fuzzed: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hostile, "HELD_SECONDS", 0.2)
    monkeypatch.setattr(hostile, "CHUNKS", 2000)
    engine = fuzzed.engine()
    attacker = Hostile(fuzzed.url, SEED)

    async def run() -> str | None:
        assert min((await attacker.run(0.1))["rounds"]) >= 1
        return await Fuzzer(fuzzed.url, fuzzed, Bodies({"paths": {}}, 0)).reference()

    assert asyncio.run(run())
    assert attacker.wrong == []
    assert fuzzed.engine() == engine
    assert fuzzed.process.poll() is None
