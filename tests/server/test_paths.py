"""Paths and headers that other servers have: aliases, probes, pages of other origins."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from outrider.errors import ConfigError
from outrider.server.app import create_app
from outrider.server.build import read_origins, read_root
from outrider.server.settings import Settings
from tests.support.echo import Echo
from tests.support.forked import Served

PAGE = "https://app.example.com"
HI: Any = {"messages": [{"role": "user", "content": "hi"}]}


def front(folder: Path, **settings: Any) -> TestClient:
    app = create_app(Echo(folder, None), Settings(names=("tiny",), **settings))
    return TestClient(app, "http://localhost")


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> TestClient:
    return front(tiny_llama).__enter__()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/chat/completions", HI), ("/completions", {"prompt": "x"}), ("/models", None),
        ("/models/tiny", None), ("/responses", {"input": "x"}), ("/speculation", None),
        ("/messages", {**HI, "max_tokens": 3}), ("/messages/count_tokens", HI),
    ],
)  # fmt: skip
def test_paths_need_no_v1(path: str, body: Any, client: TestClient) -> None:
    answers = [
        client.get(place) if body is None else client.post(place, json={**body, "seed": 1})
        for place in (path, f"/v1{path}")
    ]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert answers[0].json().keys() == answers[1].json().keys()
    assert client.get(f"/v1/v1{path}").status_code == 404


def test_probes_of_others(client: TestClient) -> None:
    assert client.get("/ping").status_code == client.post("/ping").status_code == 200
    assert client.get("/load").json() == {"server_load": 0}
    for place in ("/v1/embeddings", "/embeddings"):
        answer = client.post(place, json={"input": "x"})
        assert answer.status_code == 404
        assert "no embeddings" in answer.json()["error"]["message"]


def test_probes_may_end_in_a_slash(tiny_llama: Path) -> None:
    with front(tiny_llama, api_keys=("k",)) as closed:
        for path in ("/health", "/ping", "/metrics"):
            assert closed.get(f"{path}/").status_code == 200
        assert closed.get("/v1/models/").status_code == 401
        key = {"Authorization": "Bearer k"}
        assert closed.get("/v1/models/", headers=key).status_code == 200


def test_dashboards_of_vllm_find_their_metrics(client: TestClient) -> None:
    client.post("/v1/completions", json={"prompt": "x", "max_tokens": 7, "n": 2}).raise_for_status()
    text = client.get("/metrics").text
    for line in (
        'vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 0.0',
        'vllm:request_params_n_sum{engine="0",model_name="tiny"}',
        'vllm:request_params_max_tokens_sum{engine="0",model_name="tiny"}',
    ):
        assert line in text


def test_the_size_of_the_cache_needs_no_request(tiny_llama: Path) -> None:
    with front(tiny_llama) as fresh:
        (line,) = re.findall("^vllm:cache_config_info.*$", fresh.get("/metrics").text, re.M)
    assert 'block_size="16"' in line
    assert int(line.partition('num_gpu_blocks="')[2].partition('"')[0]) > 0


def test_pages_of_other_origins(tiny_llama: Path, client: TestClient) -> None:
    asks = {"Origin": PAGE, "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type,authorization"}  # fmt: skip
    assert "access-control-allow-origin" not in client.get("/health", headers=asks).headers
    assert client.post("/v1/completions", json={"prompt": "x"}, headers=asks).status_code == 403
    for allowed, theirs in (((PAGE,), True), (("*",), True), (("https://b.example",), False)):
        with front(tiny_llama, allowed_origins=allowed) as page:
            before = page.options("/v1/completions", headers=asks)
            answer = page.post("/v1/completions", json={"prompt": "x"}, headers=asks)
        assert (before.status_code == 200) is theirs
        assert (answer.status_code == 200) is theirs
        told = answer.headers.get("access-control-allow-origin")
        assert told == ((PAGE if allowed != ("*",) else "*") if theirs else None)
        assert answer.headers.get("access-control-allow-credentials") is None
    with front(tiny_llama, allowed_origins=(PAGE,), api_keys=("k",)) as page:
        assert page.options("/v1/completions", headers=asks).status_code == 200
        assert page.post("/v1/completions", json={"prompt": "x"}, headers=asks).status_code == 401


def test_below_a_path_of_a_proxy(tiny_llama: Path) -> None:
    with front(tiny_llama, root_path="/llm") as page:
        assert page.get("/openapi.json").json()["servers"] == [{"url": "/llm"}]
        assert page.get("/v1/models").status_code == page.get("/llm/v1/models").status_code == 200
        assert page.get("/models").status_code == page.get("/llm/models").status_code == 200
        for name in ("app.js", "style.css"):
            files = [page.get(f"{root}/playground/{name}") for root in ("", "/llm")]
            assert [file.status_code for file in files] == [200, 200]
        moved = page.get("/llm", follow_redirects=False)
        assert (moved.status_code, moved.headers["location"]) == (307, "/llm/")
        assert page.get("/llm/").status_code == 200
    with front(tiny_llama, root_path="/v1") as page:
        for path in ("/v1/models", "/models", "/v1/v1/models", "/v1/playground/app.js"):
            assert page.get(path).status_code == 200


@pytest.mark.parametrize("method", ["GET", "OPTIONS", "POST"])
def test_a_path_that_is_none_is_no_server_error(method: str, tiny_llama: Path) -> None:
    app, sent = front(tiny_llama).app, list[Any]()

    async def heard() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def told(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": method, "path": "*", "raw_path": b"*", "headers": [],
             "query_string": b"", "server": ("localhost", 80), "client": ("127.0.0.1", 1),
             "scheme": "http", "http_version": "1.1"}  # fmt: skip
    asyncio.run(app(scope, heard, told))  # type: ignore[arg-type, call-arg, func-returns-value]
    assert sent[0]["status"] in (404, 405)


def test_origins_and_roots_are_checked() -> None:
    assert read_origins(None) == ()
    assert read_origins("https://a.b, http://c:80/") == ("https://a.b", "http://c:80")
    assert read_origins('["*"]') == ("*",)
    assert (read_root(None), read_root("/a/b/")) == ("", "/a/b")
    for wrong in ("a.b", "https://a.b/c", "[1", "https://a b", "null"):
        with pytest.raises(ConfigError, match="allowed_origins"):
            read_origins(wrong)
    assert read_origins("https://App.Example.com") == ("https://app.example.com",)
    for wrong in ("llm", "/", "/a b", "//x", "/a?b", "/chat", "/models/x"):
        with pytest.raises(ConfigError, match="root_path"):
            read_root(wrong)


def test_tokens_by_their_ids(client: TestClient) -> None:
    more = {"return_tokens_as_token_ids": True}
    ask = {"prompt": "x", "logprobs": 1, "echo": True, **more}
    listed = client.post("/v1/completions", json=ask).json()["choices"][0]["logprobs"]
    assert listed["tokens"][-1] == "token_id:42"
    assert list(listed["top_logprobs"][-1]) == ["token_id:42"]
    chat = client.post("/v1/chat/completions", json={**HI, **more, "logprobs": True}).json()
    assert chat["choices"][0]["logprobs"]["content"][0]["token"] == "token_id:40"


def test_log_probabilities_of_the_whole_vocabulary(server: Served) -> None:
    size = 320
    ask = {"prompt": "for word", "max_tokens": 2, "temperature": 0, "logprobs": -1}
    choice = httpx.post(f"{server.url}/v1/completions", json=ask).json()["choices"][0]
    assert [len(each) for each in choice["logprobs"]["top_logprobs"]] == [size] * 2
    chat = {"messages": [{"role": "user", "content": "for word"}], "max_tokens": 2,
            "logprobs": True, "top_logprobs": -1}  # fmt: skip
    listed = httpx.post(f"{server.url}/v1/chat/completions", json=chat).json()["choices"][0]
    assert [len(each["top_logprobs"]) for each in listed["logprobs"]["content"]] == [size] * 2
    many = httpx.post(f"{server.url}/v1/completions", json={**ask, "max_tokens": 250, "n": 8})
    assert many.status_code == 400
    assert "at most 262144 are listed" in many.json()["error"]["message"]


TALK: Any = {"messages": [{"role": "user", "content": "for word"}], "max_tokens": 24}
CALLS: dict[str, Any] = {
    "chat/completions": TALK, "messages": TALK,
    "responses": {"input": "for word", "max_output_tokens": 24},
}  # fmt: skip


def text_of(path: str, answer: httpx.Response, stream: bool) -> str:
    """The text of an answer, whole or streamed, of any API."""
    if not stream:
        found = answer.json()
        if path == "messages":
            return "".join(block["text"] for block in found["content"])
        if path == "responses":
            return "".join(part["text"] for item in found["output"] for part in item["content"])
        return str(found["choices"][0]["message"]["content"])
    events = [line[6:] for line in answer.text.splitlines() if line.startswith("data: {")]
    text = ""
    for event in map(json.loads, events):
        if path == "messages":
            text += event.get("delta", {}).get("text", "")
        elif path == "responses":
            text += event["delta"] if event["type"] == "response.output_text.delta" else ""
        else:
            text += event["choices"][0]["delta"].get("content", "") if event["choices"] else ""
    return text


@pytest.mark.parametrize("options", [{"temperature": 0}, {"temperature": 0.8, "top_k": 40}])
def test_one_seed_gives_one_text_by_every_api(options: dict[str, Any], server: Served) -> None:
    """Streamed or not, drafted or not."""
    texts = {}
    for path, own in CALLS.items():
        for stream in (False, True):
            for enabled in (False, True):
                ask = {**own, **options, "seed": 11, "ignore_eos": True,
                       "stream": stream, "speculation": {"enabled": enabled}}  # fmt: skip
                answer = httpx.post(f"{server.url}/v1/{path}", json=ask)
                answer.raise_for_status()
                texts[path, stream, enabled] = text_of(path, answer, stream)
    assert len({*texts.values()}) == 1, texts
    assert next(iter(texts.values()))
