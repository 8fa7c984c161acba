"""A number of any size is served or refused in a sentence: no signal, no 5xx, no hang."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.base.config import EngineConfig
from outrider.base.limits import REQUEST, SPECULATION
from outrider.base.types import Request, SamplingParams, Speculation
from outrider.errors import ConfigError
from outrider.params import SAMPLING
from outrider.server.protocol import (
    ChatRequest,
    CompletionRequest,
    SpeculationOptions,
)
from tests.support.boundaries import EDGES, EngineProcess, Field, of_body, of_dataclass, of_schema
from tests.support.forked import Served
from tests.support.tiny import PAD, padded_copy

LONGEST_SENTENCE = 400
OWNERS = (SamplingParams, Speculation, Request, EngineConfig)
FIELDS = [f for owner in OWNERS for f in of_dataclass(owner)]
BODIES: dict[str, tuple[Any, dict[str, Any]]] = {
    "/v1/completions": (CompletionRequest, {"prompt": "the quick", "max_tokens": 3}),
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "fox"}], "max_tokens": 3},
    ),
}
sanitized = pytest.mark.skipif(
    "libasan" in os.environ.get("LD_PRELOAD", ""), reason="a server loads libraries of its own"
)
many = pytest.mark.parametrize("examples", [60, pytest.param(5000, marks=pytest.mark.slow)])


def pairs(fields: list[Field]) -> st.SearchStrategy[list[tuple[Field, Any]]]:
    """Two fields with a number each."""
    every = [(field, value) for field in fields for value in field.values]
    one = st.sampled_from(every)
    return st.lists(one, min_size=2, max_size=2, unique_by=lambda pair: pair[0][:2])


@pytest.fixture(scope="module")
def padded(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer knows one id more than its model."""
    return padded_copy(tiny_llama, tmp_path_factory.mktemp("padded") / "model")


@pytest.fixture(scope="module")
def engine(padded: Path) -> Iterator[EngineProcess]:
    found = EngineProcess(padded)
    yield found
    found.close()


@pytest.fixture(scope="module")
def served(padded: Path, tiny_drafter: Path) -> Iterator[Served]:
    with Served(padded, "--drafter", tiny_drafter) as found:
        yield found


def check_engine(engine: EngineProcess, *given: tuple[Field, Any]) -> None:
    """Serve numbers in their fields, or refuse them in a sentence."""
    case: dict[str, dict[str, Any]] = {}
    for field, value in given:
        case.setdefault(field.owner, {})[field.name] = field.make(value)
    kind, said = engine.ask(case)
    assert kind in ("ok", "refused"), f"{case}: {said}"
    if kind == "refused":
        assert len(said) < LONGEST_SENTENCE, said
        assert said.endswith("."), said


def test_every_number_of_the_engine(engine: EngineProcess) -> None:
    assert {"top_k", "logit_bias", "num_speculative_tokens", "prediction", "priority"} <= {
        field.name for field in FIELDS
    }
    for field in FIELDS:
        for value in field.values:
            check_engine(engine, (field, value))


@many
def test_two_numbers_of_the_engine(engine: EngineProcess, examples: int) -> None:
    @settings(derandomize=True, deadline=None, database=None, max_examples=examples)
    @given(pairs(FIELDS))
    def check(pair: list[tuple[Field, Any]]) -> None:
        check_engine(engine, *pair)

    check()


def post(client: httpx.Client, path: str, body: dict[str, Any]) -> httpx.Response:
    """Send a body as JSON of Python, which knows NaN and Infinity."""
    headers = {"Content-Type": "application/json"}
    return client.post(path, content=json.dumps(body), headers=headers)


def check_server(client: httpx.Client, path: str, *given: tuple[Field, Any]) -> None:
    """The same over HTTP: an answer, or a 4xx in a sentence."""
    body = dict(BODIES[path][1])
    for field, value in given:
        body[field.name] = field.make(value)
    found = post(client, path, body)
    assert found.status_code == 200 or 400 <= found.status_code < 500, f"{body}: {found.text}"
    if found.status_code != 200:
        assert len(found.json()["error"]["message"]) < LONGEST_SENTENCE, found.text


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[httpx.Client]:
    """A client of the server, whose engine must be the same one at the end."""
    before = served.engine()
    with httpx.Client(base_url=served.url, timeout=120) as found:
        yield found
    assert served.engine() == before is not None


@sanitized
@pytest.mark.parametrize("path", BODIES)
def test_every_number_of_an_endpoint(client: httpx.Client, path: str) -> None:
    fields = of_body(BODIES[path][0])
    assert {"top_k", "logit_bias", "speculation", "priority"} <= {field.name for field in fields}
    first = next(iter(BODIES))
    # What the endpoints have in common meets every value at the first of them.
    met = set() if path == first else {field.name for field in of_body(BODIES[first][0])}
    for field in fields:
        for value in EDGES.get(field.name, (0, -1)) if field.name in met else field.values:
            check_server(client, path, (field, value))


@sanitized
@many
@pytest.mark.parametrize("path", BODIES)
def test_two_numbers_of_an_endpoint(client: httpx.Client, path: str, examples: int) -> None:
    @settings(derandomize=True, deadline=None, database=None, max_examples=examples)
    @given(pairs(of_body(BODIES[path][0])))
    def check(pair: list[tuple[Field, Any]]) -> None:
        check_server(client, path, *pair)

    check()


# The cases that killed an engine, and their like.


@sanitized
@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"top_k": 2**31, "temperature": 1}, "top_k"),
        ({"top_k": 2**32 + 5}, "top_k"),
        ({"top_k": int("9" * 4000)}, "top_k"),
        ({"min_tokens": 2**31}, "min_tokens"),
        ({"priority": -1}, "priority"),
        ({"max_tokens": 257}, "max_tokens"),
        ({"max_tokens": 2**40}, "max_tokens"),
        ({"n": True}, "n"),
        ({"temperature": False}, "temperature"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids"),
        ({"logit_bias": {"320": 1}}, "logit_bias"),
        ({"prompt": f"fox {PAD}"}, None),
    ],
)
def test_what_no_engine_can_do_is_a_400(
    client: httpx.Client, more: dict[str, Any], param: str | None
) -> None:
    found = post(client, "/v1/completions", {"prompt": "x", "max_tokens": 3, **more})
    assert found.status_code == 400, found.text
    assert found.json()["error"]["param"] == param
    assert len(found.json()["error"]["message"]) < LONGEST_SENTENCE


@sanitized
@pytest.mark.parametrize(
    "more",
    [
        {"prediction": {"type": "content", "content": f"fox {PAD} the {PAD}"}},
        {"bad_words": [PAD, f"a {PAD}"]},
        {"stop_token_ids": [320, 4096]},
        {"top_k": 2**31 - 1},
    ],
)
def test_what_a_model_lacks_changes_nothing(client: httpx.Client, more: dict[str, Any]) -> None:
    body = {"prompt": "the quick", "max_tokens": 12, "temperature": 1, "seed": 3}
    plain, found = (post(client, "/v1/completions", {**body, **also}) for also in ({}, more))
    assert found.status_code == 200, found.text
    assert found.json()["choices"][0]["text"] == plain.json()["choices"][0]["text"]


@sanitized
def test_an_omitted_max_tokens_is_16_or_the_context(client: httpx.Client) -> None:
    def tokens(path: str, **more: Any) -> tuple[int, int]:
        body = {**BODIES[path][1], "ignore_eos": True, **more}
        if not more:
            del body["max_tokens"]
        usage = post(client, path, body).json()["usage"]
        return usage["completion_tokens"], usage["total_tokens"]

    assert tokens("/v1/completions")[0] == 16
    assert tokens("/v1/completions", max_tokens=256)[1] == 256
    assert tokens("/v1/chat/completions")[1] == 256


# The published schema.


@pytest.mark.parametrize("name", SAMPLING)
def test_the_schema_publishes_the_range_that_is_checked(name: str) -> None:
    published = CompletionRequest.model_json_schema()["properties"][name]
    number, least = SAMPLING[name], 0 if name == "max_tokens" else SAMPLING[name].least
    assert published["maximum"] == number.most
    assert published["exclusiveMinimum" if number.above else "minimum"] == least
    options = {"max_tokens": None} if name == "min_tokens" else {}
    SamplingParams(**{**options, name: number.most})
    for value in (number.most * 2 + 1, number.least - 1):
        with pytest.raises(ConfigError, match=f"SamplingParams: {name} is "):
            SamplingParams(**{**options, name: value})


def test_the_schema_publishes_a_range_for_every_number() -> None:
    priority = CompletionRequest.model_json_schema()["properties"]["priority"]
    assert (priority["minimum"], priority["maximum"]) == REQUEST["priority"][:2]
    (length,) = (
        part
        for part in SpeculationOptions.model_json_schema()["properties"]["num_speculative_tokens"][
            "anyOf"
        ]
        if part["type"] == "integer"
    )
    assert (length["minimum"], length["maximum"]) == SPECULATION["num_speculative_tokens"][:2]
    for model, _ in BODIES.values():
        schema = model.model_json_schema()
        for name, part in schema["properties"].items():
            if any(True for _ in of_schema(part, schema["$defs"])) and "$ref" not in str(part):
                assert "aximum" in json.dumps(part), name
