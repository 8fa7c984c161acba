"""Paths of other engines: token ids in and out, batches of chats, SageMaker's, the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from outrider.server.app import create_app
from outrider.server.settings import Settings
from outrider.text.reasoning import FORMS
from tests.support.echo import Echo, Scripted
from tests.support.forked import Served

GENERATE = "/inference/v1/generate"
HI: Any = [{"role": "user", "content": "for word"}]
SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 5, "max_tokens": 12}
FORM = {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}}}}


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> Iterator[TestClient]:
    app = create_app(Echo(tiny_llama, None), Settings(names=("tiny",)))
    with TestClient(app, "http://localhost") as front:
        yield front


def post(server: Served, path: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{path}", json=body).raise_for_status().json()


def told(text: str) -> list[dict[str, Any]]:
    """The chunks of a stream."""
    return [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]


@pytest.mark.parametrize("more", [{}, FORM])
def test_what_is_rendered_goes_on_as_the_call_would(more: dict[str, Any], server: Served) -> None:
    asks: dict[str, dict[str, Any]] = {
        "/v1/completions": {"prompt": "for word"}, "/v1/chat/completions": {"messages": HI},
    }  # fmt: skip
    for path, own in asks.items():
        ask = {**own, **SAMPLED, **more}
        whole = post(server, path, **ask, return_token_ids=True)
        prompts = post(server, f"{path}/render", **ask)
        prompt = prompts[0] if isinstance(prompts, list) else prompts
        assert prompt["sampling_params"].items() >= {"top_k": 40, "temperature": 0.8}.items()
        given = whole["choices"][0].get("prompt_token_ids") or whole["prompt_token_ids"]
        assert prompt["token_ids"] == given
        answer = post(server, GENERATE, **prompt)
        (choice,) = answer["choices"]
        assert choice["token_ids"] == whole["choices"][0]["token_ids"]
        assert choice["finish_reason"] == whole["choices"][0]["finish_reason"]
        assert answer["usage"]["completion_tokens"] == len(choice["token_ids"])
        stream = httpx.post(f"{server.url}{GENERATE}", json={**prompt, "stream": True})
        chunks = [each["choices"][0] for each in told(stream.text)]
        assert [id for each in chunks for id in each["token_ids"]] == choice["token_ids"]
        assert chunks[-1]["finish_reason"] == choice["finish_reason"]


def test_tokens_take_all_room_and_list_log_probabilities(server: Served) -> None:
    options = {"temperature": 0, "ignore_eos": True, "detokenize": False}
    free = post(server, GENERATE, token_ids=[5, 6], sampling_params=options)
    assert len(free["choices"][0]["token_ids"]) > 16
    for asked, listed in ((0, 1), (1, 1), (5, 5)):
        more = {**options, "max_tokens": 3, "logprobs": asked}
        (choice,) = post(server, GENERATE, token_ids=[5, 6], sampling_params=more)["choices"]
        tops = [len(each["top_logprobs"]) for each in choice["logprobs"]["content"]]
        assert tops == [listed] * 3
    assert choice["token_ids"] == free["choices"][0]["token_ids"][:3]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [1, 999]}, "out of vocabulary"),
        ({"token_ids": [-1]}, "out of vocabulary"),
        ({"token_ids": [1], "model": "other"}, "there is no model"),
        ({"token_ids": [1], "features": {"mm_hashes": {}}}, "features"),
        ({"token_ids": [1], "sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"token_ids": [1], "sampling_params": {"top_k": "x"}}, "top_k"),
        ({"token_ids": [1], "sampling_params": {"use_beam_search": True}}, "use_beam_search"),
        ({"token_ids": [1], "sampling_params": {"detokenize": False, "stop": ["x"]}}, "stop is"),
    ],
)
def test_wrong_tokens_are_refused(body: Any, reason: str, client: TestClient) -> None:
    answer = client.post(GENERATE, json=body)
    assert answer.status_code in (400, 404)
    assert reason in answer.json()["error"]["message"]


def test_a_prompt_is_rendered_without_a_place_in_the_queue(client: TestClient) -> None:
    queue = client.app.state.service.queue  # type: ignore[attr-defined]
    two = client.post("/v1/completions/render", json={"prompt": ["a", "b"]}).json()
    assert [each["request_id"].startswith("cmpl-") for each in two] == [True, True]
    usage = {"include_usage": True, "continuous_usage_stats": True}
    ask = {"messages": HI, "stream": True, "stream_options": usage}
    chat = client.post("/v1/chat/completions/render", json=ask).json()
    assert (chat["stream"], chat["stream_options"]) == (True, usage)
    wrong = client.post("/v1/chat/completions/render", json={"messages": HI, "top_p": 7})
    assert "top_p is 7" in wrong.json()["error"]["message"]
    assert (queue.sequences, queue.tokens) == (0, 0)


def test_each_conversation_of_a_batch_is_answered_as_alone(server: Served) -> None:
    talks = [HI, [{"role": "user", "content": "the quick fox"}], HI]
    batch = post(server, "/v1/chat/completions/batch", messages=talks, **SAMPLED)
    alone = [post(server, "/v1/chat/completions", messages=each, **SAMPLED) for each in talks]
    assert [each["index"] for each in batch["choices"]] == [0, 1, 2]
    for choice, other in zip(batch["choices"], alone, strict=True):
        assert choice == {**other["choices"][0], "index": choice["index"]}
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert batch["usage"][name] == sum(each["usage"][name] for each in alone)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"messages": HI}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": [[]]}, "messages"),
        ({"messages": [HI] * 129}, "messages"),
        ({"messages": [HI, [{"content": "x"}]]}, "conversation 1: messages[0] has no role"),
        ({"stream": True}, "a batch cannot be streamed"),
        ({"n": 2}, "n is 2"),
        ({"temperature": -1}, "temperature is -1"),
        ({"allowed_token_ids": [1] * 30000, "messages": [HI] * 50}, "repeat"),
        ({"logprobs": True, "top_logprobs": 20, "max_tokens": 150, "messages": [HI] * 99}, "list"),
    ],
)
def test_a_batch_is_refused_as_a_whole(more: Any, reason: str, client: TestClient) -> None:
    answer = client.post("/v1/chat/completions/batch", json={"messages": [HI], **more})
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    queue = client.app.state.service.queue  # type: ignore[attr-defined]
    assert (queue.sequences, queue.tokens) == (0, 0)


def test_sagemaker_finds_chats_and_completions(client: TestClient) -> None:
    for path, body in (("chat/completions", {"messages": HI}), ("completions", {"prompt": "x"})):
        ask = {**body, "seed": 1}
        answers = [client.post(place, json=ask) for place in ("/invocations", f"/v1/{path}")]
        assert answers[0].json()["choices"] == answers[1].json()["choices"]
        stream = client.post("/invocations", json={**ask, "stream": True})
        assert stream.text.endswith("data: [DONE]\n\n")
    wrong = client.post("/invocations", json={"input": "x"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "prompt")


def test_the_tokenizer_tells_of_itself(client: TestClient) -> None:
    info = client.get("/tokenizer_info").json()
    assert info["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert info["model_max_length"] == client.get("/v1/models").json()["data"][0]["max_model_len"]
    assert info["eos_token"]


def test_an_answer_tells_what_ended_it(client: TestClient, server: Served) -> None:
    calls: dict[str, Any] = {"chat/completions": {"messages": HI}, "completions": {"prompt": "x"}}
    for path, ask in calls.items():
        (choice,) = client.post(f"/v1/{path}", json=ask).json()["choices"]
        ended = choice["finish_reason"], choice["stop_reason"], choice["matched_stop"]
        assert ended == ("stop", None, 42)  # the script's last token stands for EOS
        more = {**ask, "temperature": 0, "max_tokens": 8, "ignore_eos": True}
        (choice,) = post(server, f"/v1/{path}", **more)["choices"]
        assert (choice["stop_reason"], choice["matched_stop"]) == (None, None)
        letter = (choice.get("text") or choice["message"]["content"]).strip()[2]
        (choice,) = post(server, f"/v1/{path}", **more, stop=letter)["choices"]
        assert (choice["stop_reason"], choice["matched_stop"]) == (letter, letter)


def test_sglang_generates(server: Served) -> None:
    options = {"temperature": 0.8, "top_k": 40, "sampling_seed": 5, "max_new_tokens": 12}
    text = post(server, "/generate", text="for word", sampling_params=options)
    known = post(server, "/v1/completions", prompt="for word", **SAMPLED, return_token_ids=True)
    (choice,) = known["choices"]
    assert (text["text"], text["output_ids"]) == (choice["text"], choice["token_ids"])
    meta = text["meta_info"]
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["reasoning_tokens"]) == (
        known["usage"]["prompt_tokens"], 12, 0,
    )  # fmt: skip
    ids = post(server, "/generate", input_ids=choice["prompt_token_ids"], sampling_params=options)
    assert ids["output_ids"] == text["output_ids"]
    ask = {"text": ["for word", "the fox"], "sampling_params": {**options, "n": 2}}
    assert len(post(server, "/generate", **ask)) == 4
    logged = post(server, "/generate", text="a", return_logprob=True, top_logprobs_num=2,
                  sampling_params={"max_new_tokens": 3})["meta_info"]  # fmt: skip
    assert [len(row) for row in logged["output_token_logprobs"]] == [3, 3, 3]
    stream = httpx.post(f"{server.url}/generate", json={**ask, "stream": True})
    chunks = told(stream.text)
    last = {chunk["index"]: chunk for chunk in chunks}
    assert last[0]["output_ids"] == text["output_ids"]
    assert all(chunk["meta_info"]["finish_reason"] for chunk in last.values())
    assert sorted(last) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({}, "give either text or input_ids"),
        ({"text": "a", "input_ids": [1]}, "give either text or input_ids"),
        ({"text": "a", "token_ids_logprob": [1]}, "token_ids_logprob"),
        ({"text": "a", "sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"text": "a", "sampling_params": {"temperature": -1}}, "temperature is -1"),
        ({"text": "a", "sampling_params": 7}, "sampling_params"),
        ({"input_ids": [999]}, "out of vocabulary"),
        ({"text": "a", "rid": "a b"}, "rid"),
        ({"text": ["a"] * 64, "stream": True, "sampling_params": {"max_new_tokens": 250}},
         "the stream may have 16000 tokens"),
    ],
)  # fmt: skip
def test_sglang_is_refused(body: Any, reason: str, client: TestClient) -> None:
    answer = client.post("/generate", json=body)
    assert answer.status_code == 400
    assert reason in answer.json()["error"]["message"]
    queue = client.app.state.service.queue  # type: ignore[attr-defined]
    assert (queue.sequences, queue.tokens) == (0, 0)


def test_thoughts_of_sglang_are_counted(tiny_llama: Path) -> None:
    engine = Scripted(tiny_llama, None)
    engine.script = "<think>the fox</think>so"
    app = create_app(engine, Settings(names=("tiny",), reasoning=FORMS["qwen3"]))
    with TestClient(app, "http://localhost") as front:
        meta = front.post("/generate", json={"text": "x"}).json()["meta_info"]
        info = front.get("/get_model_info").json()
    assert meta["reasoning_tokens"] == meta["completion_tokens"] - 3  # two letters, and the end
    assert info["model_path"] == front.get("/model_info").json()["model_path"]
