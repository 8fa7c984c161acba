"""The server over loopback: by OpenAI's own client, and by raw HTTP."""

import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionMessageFunctionToolCall
from transformers import AutoConfig, AutoTokenizer

from benchmarks.served import Served, metrics
from outrider import LLM, SamplingParams
from outrider.native import choice as native
from tests.support.heads import Eagle, make_head, save_head

PROMPT = "def greet(name):"
MESSAGES: Any = [{"role": "user", "content": "for word"}]


def post(server: Served, path: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{path}", json=body, timeout=60)


def test_models(client: openai.OpenAI, tiny_llama: Path) -> None:
    models = client.models.list().data
    assert [m.id for m in models] == ["tiny", "other"]
    assert models[0].model_extra is not None
    assert models[0].model_extra["max_model_len"] == 256
    assert models[0].model_extra["root"] == str(tiny_llama)


def test_max_completion_tokens_and_the_seed_that_was_used(server: Served) -> None:
    found = post(server, "/v1/chat/completions", messages=MESSAGES, max_completion_tokens=3)
    assert found.json()["usage"]["completion_tokens"] <= 3
    seed = found.json()["seed"]
    again = post(
        server, "/v1/chat/completions", messages=MESSAGES, max_completion_tokens=3, seed=seed
    )
    assert again.json()["choices"] == found.json()["choices"]
    large = post(server, "/v1/completions", prompt="a", seed=str(2**64 - 1), max_tokens=2).json()
    assert large["seed"] == str(2**64 - 1)


def test_speculation_is_shown_and_switched_by_request(server: Served) -> None:
    texts = set()
    for wanted in ({}, {"enabled": False}, {"drafter": "ngram"}, {"num_speculative_tokens": 1}):
        found = post(
            server, "/v1/completions", prompt=PROMPT, temperature=0, max_tokens=40,
            speculation=wanted,
        ).json()  # fmt: skip
        shown = found["metrics"]["speculative_decoding"]
        texts.add(found["choices"][0]["text"])
        if wanted == {"enabled": False}:
            assert shown["num_spec_steps"] == 0
            assert shown["draft_acceptance_rate"] is None
        if not wanted:
            assert shown["num_draft_tokens"] > 0
            assert sum(shown["acceptance_histogram"]) == shown["num_spec_steps"]
    assert len(texts) == 1
    assert found["metrics"]["time_to_first_token_ms"] > 0


def test_a_prediction_drafts(client: openai.OpenAI) -> None:
    options: dict[str, Any] = {"model": "tiny", "messages": MESSAGES, "temperature": 0}
    options["max_completion_tokens"] = 40
    text = client.chat.completions.create(**options).choices[0].message.content or ""
    prediction: Any = {"type": "content", "content": text}
    found = client.chat.completions.create(prediction=prediction, **options)
    assert found.choices[0].message.content == text
    assert found.usage is not None
    details = found.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) > 0


def test_tools(client: openai.OpenAI) -> None:
    parameters = {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"], "additionalProperties": False,
    }  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    named: Any = {"type": "function", "function": {"name": "weather"}}
    for choice in ("required", named):
        for stream in (False, True):
            options: dict[str, Any] = {
                "model": "tiny", "messages": MESSAGES, "tools": tools, "tool_choice": choice,
                "max_tokens": 200, "seed": 2, "parallel_tool_calls": False,
            }  # fmt: skip
            if stream:
                chunks = client.chat.completions.create(stream=True, **options)
                parts = [
                    part for c in chunks for p in c.choices for part in p.delta.tool_calls or []
                ]  # fmt: skip
                assert parts[0].id
                assert {part.index for part in parts} == {0}
                named_so = parts[0].function and parts[0].function.name
                arguments = "".join(p.function.arguments or "" for p in parts if p.function)
            else:
                message = client.chat.completions.create(**options).choices[0].message
                (call,) = message.tool_calls or []
                assert isinstance(call, ChatCompletionMessageFunctionToolCall)
                named_so, arguments = call.function.name, call.function.arguments
            assert named_so == "weather"
            assert json.loads(arguments)["city"] in ("Rome", "Oslo")


def test_tokens_and_back(server: Served, tiny_llama: Path) -> None:
    text = f"{PROMPT} é🙂"
    found = post(server, "/tokenize", prompt=text, return_token_strs=True).json()
    assert found["count"] == len(found["tokens"])
    own = AutoTokenizer.from_pretrained(tiny_llama)
    assert found["token_strs"] == own.convert_ids_to_tokens(found["tokens"])
    assert any("Ġ" in piece for piece in found["token_strs"])
    found = post(server, "/tokenize", prompt=PROMPT).json()
    assert found["token_strs"] is None
    assert post(server, "/detokenize", tokens=found["tokens"]).json() == {"prompt": PROMPT}
    assert post(server, "/tokenize", messages=MESSAGES).json()["count"] > 1


def test_every_wrong_bias_is_named(server: Served) -> None:
    wrong = {"320": 1, "-1": 1, "bad1": 50.0, "bad2": 2, "5": "hot", "6": 101, "7": None}
    for path, asks in (
        ("completions", {"prompt": "a"}),
        ("chat/completions", {"messages": MESSAGES}),
    ):
        found = post(server, f"/v1/{path}", logit_bias={"3": 1} | wrong, **asks)
        error = found.json()["error"]
        assert (found.status_code, error["param"]) == (400, "logit_bias")
        assert all(f"'{key}': " in error["message"] for key in wrong)
        assert "'3'" not in error["message"]
        assert "320" in error["message"]


BAD: list[tuple[str, dict[str, Any], int, str | None]] = [
    ("completions", {}, 400, "prompt"),
    ("completions", {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    ("completions", {"prompt": "a", "temperature": -1}, 400, "temperature"),
    ("completions", {"prompt": "a", "n": 0}, 400, "n"),
    ("completions", {"prompt": "a", "n": 10**6}, 400, "n"),
    ("completions", {"prompt": ["a"] * 999}, 400, "prompt"),
    ("completions", {"prompt": []}, 400, "prompt"),
    ("completions", {"prompt": [999]}, 400, None),
    ("completions", {"prompt": "a" * 5000}, 400, "prompt"),
    ("completions", {"prompt": "a", "seed": -2}, 400, "seed"),
    ("completions", {"prompt": "a", "logit_bias": {"1": 1000}}, 400, "logit_bias"),
    ("completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(2000)}}, 400, None),
    ("completions", {"prompt": "a", "stop": ["x"] * 99}, 400, "stop"),
    ("completions", {"prompt": "a", "guided_regex": "(x"}, 400, None),
    ("completions", {"prompt": "a", "guided_json": {"type": 5}}, 400, None),
    ("completions", {"prompt": "a", "speculation": {"drafter": "x"}}, 400, None),
    ("completions", {"prompt": "a", "guided_choice": ["a"], "bad_words": ["a"]}, 400, None),
    ("completions", {"prompt": "a", "model": "gpt-9"}, 404, "model"),
    ("completions", {"prompt": "a", "seed": "9" * 5000}, 400, "seed"),
    ("completions", {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, 400, "logit_bias"),
    ("completions", {"prompt": "a", "bad_words": ["a" * 5000]}, 400, "bad_words"),
    ("completions", {"prompt": ["a"] * 100, "n": 100}, 400, "n"),
    ("completions", {"prompt": "a", "request_id": "a\n2030-01-01 forged"}, 400, "request_id"),
    ("completions", {"prompt": "a", "max_tokens": 0}, 400, "max_tokens"),
    ("chat/completions", {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens"),
    ("chat/completions", {"messages": MESSAGES, "chat_template_kwargs": {"self": 1}}, 400,
     "chat_template_kwargs"),
    ("chat/completions", {"messages": []}, 400, "messages"),
    ("chat/completions", {"messages": [{"content": "x"}]}, 400, "messages"),
    ("chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, None),
    ("chat/completions", {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice"),
    ("chat/completions", {"messages": MESSAGES, "response_format": {"type": "x"}}, 400,
     "response_format"),
    ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400,
     "messages"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "status", "param"), BAD)
@pytest.mark.parametrize("stream", [False, True])
def test_bad_requests_get_a_sentence(
    server: Served, path: str, body: dict[str, Any], status: int, param: str | None, stream: bool
) -> None:
    found = post(server, f"/v1/{path}", stream=stream, **body)
    assert found.status_code == status, found.text
    error = found.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert param is None or error["param"] == param
    assert "pydantic" not in error["message"]
    assert error["message"].endswith(".")


def test_paths_and_methods_that_are_not_there(server: Served) -> None:
    for found, status in (
        (httpx.get(f"{server.url}/v1/nothing"), 404),
        (httpx.get(f"{server.url}/v1/completions"), 405),
        (httpx.post(f"{server.url}/v1/completions", content=b"{"), 400),
        (httpx.post(f"{server.url}/v1/completions", content=b"x" * (5 << 20)), 413),
    ):
        assert found.status_code == status
        assert set(found.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "user", "content": "\ud800"}, {"role": "\ud800", "content": "x"},
        {"role": "user", "content": "x", "deep": json.loads("[" * 900 + "]" * 900)},
        {"role": "assistant", "content": "x", "tool_calls": [
            {"function": {"name": "f", "arguments": "[" * 100_000}}]},
    ],
)  # fmt: skip
def test_messages_of_nonsense_are_nobodys_500(server: Served, message: dict[str, Any]) -> None:
    for path, body in (("/v1/chat/completions", {"max_tokens": 2}), ("/tokenize", {})):
        text = json.dumps({"messages": [*MESSAGES, message], **body})
        found = httpx.post(f"{server.url}{path}", content=text.encode())
        assert found.status_code in (200, 400), found.text


def test_null_is_not_given(server: Served) -> None:
    nulls = dict.fromkeys(
        ("n", "stream", "echo", "logprobs", "ignore_eos", "min_tokens", "priority", "stop", "seed",
         "skip_special_tokens", "return_token_ids", "stream_options", "max_tokens", "user")
    )  # fmt: skip
    found = post(server, "/v1/completions", prompt="a", **nulls)
    assert found.status_code == 200, found.text
    nulls |= dict.fromkeys(("parallel_tool_calls", "add_generation_prompt", "tools"))
    body = {"messages": MESSAGES, **nulls, "max_completion_tokens": 3}
    assert post(server, "/v1/chat/completions", **body).status_code == 200


def test_an_echo_alone_generates_nothing(server: Served) -> None:
    found = post(
        server, "/v1/completions", prompt=PROMPT, echo=True, max_tokens=0, logprobs=1
    ).json()
    (choice,) = found["choices"]
    assert choice["text"] == PROMPT
    assert len(choice["logprobs"]["tokens"]) == found["usage"]["prompt_tokens"]
    assert found["usage"]["completion_tokens"] == 0


def test_a_prompt_is_cached_once_however_many_samples(server: Served) -> None:
    body = {"prompt": "jumps over the lazy dog " * 4, "max_tokens": 2, "n": 4}
    for _ in range(2):
        used = post(server, "/v1/completions", **body).json()["usage"]
        assert used["prompt_tokens_details"]["cached_tokens"] <= used["prompt_tokens"]
    assert used["prompt_tokens_details"]["cached_tokens"] > 16


def test_only_predictions_count_as_predictions(server: Served) -> None:
    body = {
        "prompt": "the lazy dog the lazy dog the lazy", "max_tokens": 30, "temperature": 0,
        "prediction": {"content": "zzz"}, "speculation": {"drafter": "ngram"},
    }  # fmt: skip
    found = post(server, "/v1/completions", **body).json()
    assert found["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 0


def test_events_are_single_lines_to_every_client(server: Served) -> None:
    body = {"prompt": "a\u2028b\x85c\u2029", "echo": True, "stream": True, "max_tokens": 1}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body) as stream:
        lines = [line for line in stream.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert json.loads(lines[0][6:])["choices"][0]["text"].startswith(body["prompt"])


def test_one_model_by_its_name(client: openai.OpenAI, server: Served) -> None:
    assert client.models.retrieve("other").id == "other"
    assert httpx.get(f"{server.url}/v1/models/none").status_code == 404
    assert httpx.head(f"{server.url}/health").status_code == 200


def test_the_switch(server: Served) -> None:
    post(server, "/v1/completions", prompt=PROMPT, max_tokens=30, ignore_eos=True)
    before = httpx.get(f"{server.url}/v1/speculation").json()
    assert before["enabled"]
    assert before["drafter"] == "model"
    assert set(before["drafters"]) == {"model", "ngram", "suffix", "prediction"}
    mine = before["drafters"]["model"]
    assert mine["draft_length"] == before["draft_length"] == 4
    assert mine["reason"] is before["reason"] is None
    assert len(mine["acceptance_by_position"]) == 4
    assert mine["accepted"] <= mine["drafted"]
    assert before["drafters"]["ngram"]["reason"] == "not_chosen"
    after = post(server, "/v1/speculation", enabled=False).json()
    assert after["reason"] == after["drafters"]["model"]["reason"] == "switched_off"
    assert after["draft_length"] == 0
    found = post(server, "/v1/completions", prompt=PROMPT, max_tokens=30).json()
    assert found["metrics"]["speculative_decoding"]["num_spec_steps"] == 0
    assert post(server, "/v1/speculation", drafter="eagle").status_code == 400
    assert post(server, "/v1/speculation", num_speculative_tokens=99).status_code == 400
    again = post(server, "/v1/speculation", enabled=True).json()
    assert {k: again[k] for k in before if k != "drafters"} == {
        k: before[k] for k in before if k != "drafters"
    }


def test_a_client_that_leaves_frees_the_pages(server: Served) -> None:
    body = {"prompt": "a", "max_tokens": 250, "ignore_eos": True, "stream": True, "n": 128}
    before = finished(server)
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        lines = stream.iter_lines()
        next(lines)
        assert running(server) > 0
    deadline = time.monotonic() + 60
    while running(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    assert finished(server) < before + 128
    assert metrics(server.url).get("vllm:kv_cache_usage_perc") == 0


def finished(server: Served) -> float:
    return metrics(server.url)["vllm:request_success_total"]


def running(server: Served) -> float:
    values = metrics(server.url)
    return values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]


@pytest.fixture(scope="module")
def headed(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of a head alone, which names its target; that says how to sample."""
    folder = tmp_path_factory.mktemp("headed")
    target = folder / "head" / "target"
    shutil.copytree(tiny_llama, target)
    config = target / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | SAID), encoding="utf-8")
    head = save_head(make_head(Eagle(), AutoConfig.from_pretrained(target)), folder / "head")
    about = json.loads((head / "config.json").read_text())
    about["speculators_config"]["verifier"]["name_or_path"] = "target"
    (head / "config.json").write_text(json.dumps(about))
    with Served(head if native.library() else target) as found:
        yield found


SAID = {"temperature": 0.0, "frequency_penalty": 1.5, "max_new_tokens": 9}


@pytest.fixture(scope="module")
def plain(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, drafter=None, max_num_seqs=1)


def test_the_checkpoint_says_how_to_sample_where_a_call_does_not(
    headed: Served, plain: LLM
) -> None:
    body = {"prompt": PROMPT, "max_tokens": 40, "seed": 3, "ignore_eos": True}
    assert any("temperature 0.0, frequency_penalty 1.5" in line for line in headed.lines)
    for more in ({}, {"temperature": 1.1}, {"frequency_penalty": 0, "max_tokens": 4}):
        answer = post(headed, "/v1/completions", **{**body, **more}).json()["choices"][0]
        wanted: Any = {**body, **SAID, **more}
        wanted["max_tokens"] = min(9, wanted["max_tokens"])
        del wanted["prompt"], wanted["max_new_tokens"]
        assert answer["text"] == plain.generate(PROMPT, SamplingParams(**wanted))[0].outputs[0].text


@pytest.mark.skipif(native.library() is None, reason="the native step is off")
def test_a_head_is_served_with_the_target_and_length_that_it_names(
    headed: Served, plain: LLM
) -> None:
    found = httpx.get(f"{headed.url}/v1/speculation").json()
    assert found["num_speculative_tokens"] == 5
    assert "eagle3" in found["drafters"]
    body = {"prompt": PROMPT, "max_tokens": 9, "temperature": 0.8, "frequency_penalty": 0.0}
    answer = post(
        headed, "/v1/completions", **body, seed=4, ignore_eos=True,
        speculation={"drafter": "eagle3", "num_speculative_tokens": 5},
    ).json()  # fmt: skip
    del body["prompt"]
    params = SamplingParams(**body, seed=4, ignore_eos=True)
    assert answer["choices"][0]["text"] == plain.generate(PROMPT, params)[0].outputs[0].text
    shown = answer["metrics"]["speculative_decoding"]
    assert shown["num_draft_tokens"] >= 5


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux has this file")
def test_the_front_process_holds_no_torch(headed: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    body = {
        "messages": [{"role": "user", "content": "fox"}], "max_tokens": 4, "logprobs": True,
        "tools": [{"type": "function", "function": {"name": "f", "parameters": schema}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}},
    }  # fmt: skip
    for fields in (body, {k: v for k, v in body.items() if k != "response_format"}):
        answer = httpx.post(f"{headed.url}/v1/chat/completions", json=fields, timeout=60)
        assert answer.status_code in (200, 400), answer.text
    assert httpx.get(f"{headed.url}/v1/speculation").status_code == 200
    assert httpx.get(f"{headed.url}/metrics").status_code == 200
    assert "torch" not in Path(f"/proc/{headed.process.pid}/maps").read_text()
