"""Every field of the API, streamed and not, by OpenAI's client and by raw HTTP, against ``LLM``."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.served import Served
from outrider import LLM, SamplingParams

PROMPT = "def greet(name):"
MESSAGES: Any = [{"role": "user", "content": [{"type": "text", "text": "for word"}]}]
PLAIN: Any = [{"role": "user", "content": "for word"}]
SCHEMA = {
    "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
    "additionalProperties": False, "x-guidance": {"whitespace_flexible": False},
}  # fmt: skip
FORM: dict[str, Any] = {"structured_outputs": {"json": SCHEMA}}
CHOICE: dict[str, Any] = {"structured_outputs": {"choice": ["fox jumps", "dog"]}}
REGEX: dict[str, Any] = {"structured_outputs": {"regex": "(fox|dog) [0-9]{3}"}}
GRAMMAR: dict[str, Any] = {"structured_outputs": {"grammar": 'start: "fox" | "dog"'}}
LONG = {"max_tokens": 40, "ignore_eos": True}

FIELDS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    # What is sent, and what it means to SamplingParams where that is not the same.
    ({"temperature": 0, **LONG}, None), ({"temperature": 1.3}, None),
    ({"top_p": 0.5, **LONG}, None),
    ({"top_k": 3, **LONG}, None), ({"min_p": 0.1, **LONG}, None), ({"n": 3, **LONG}, None),
    ({"presence_penalty": 1.5, **LONG}, None), ({"frequency_penalty": -1.5, **LONG}, None),
    ({"repetition_penalty": 1.4, **LONG}, None), ({"logit_bias": {"7": 50, "9": 49.5}}, None),
    ({"seed": 2**53 + 1}, None), ({"seed": str(2**64 - 1)}, {"seed": 2**64 - 1}),
    ({"stop": "e", **LONG}, None), ({"stop": ["qu", "zz", "\n"], **LONG}, None),
    ({"stop": "o", "include_stop_str_in_output": True, **LONG}, None),
    ({"stop_token_ids": list(range(20, 60)), **LONG}, None), ({"min_tokens": 12}, None),
    ({"bad_words": ["e", "the"], **LONG}, None), ({"max_tokens": 1}, None),
    ({"allowed_token_ids": [30, 31, 32], "max_tokens": 9}, None),
    ({"skip_special_tokens": False, **LONG}, None),
    ({"response_format": {"type": "json_schema",
                          "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}, FORM),
    ({"response_format": {"type": "text"}}, {}),
    ({"guided_json": SCHEMA}, FORM), ({"guided_json": json.dumps(SCHEMA)}, FORM),
    ({"guided_choice": ["fox jumps", "dog"]}, CHOICE),
    ({"guided_regex": "(fox|dog) [0-9]{3}"}, REGEX),
    ({"guided_grammar": 'start: "fox" | "dog"'}, GRAMMAR),
    ({"json_schema": SCHEMA}, FORM), ({"grammar": 'root ::= "fox" | "dog"'}, GRAMMAR),
    (FORM | {"guided_json": SCHEMA}, FORM),
    (FORM, None), (CHOICE, None), (REGEX, None), (GRAMMAR, None),
    ({"speculation": {"enabled": False}}, {}), ({"speculation": {"drafter": "ngram"}}, {}),
    ({"speculation": {"num_speculative_tokens": 1}, **LONG}, LONG),
    ({"prediction": {"type": "content", "content": "the lazy dog"}, **LONG}, LONG),
    ({"priority": 0}, {}), ({"cache_salt": "x"}, {}), ({"request_id": "mine"}, {}),
    ({"timeout": 100}, {}), ({"user": "me", "metadata": {"a": "b"}, "store": True}, {}),
]  # fmt: skip
NAMES = ["+".join(k for k in sent if k not in LONG or len(sent) == 1) for sent, _ in FIELDS]
OPENAI = {
    "temperature", "top_p", "n", "presence_penalty", "frequency_penalty", "logit_bias", "seed",
    "stop", "max_tokens", "user", "max_completion_tokens", "logprobs", "top_logprobs",
}  # fmt: skip
"""What the client's methods have as parameters; the rest goes in its ``extra_body``."""


@dataclass
class Choice:
    """One choice, whole or put together from a stream."""

    text: str = ""
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ids: list[int] = field(default_factory=list)


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, drafter=None, max_num_seqs=1)


def whole(server: Served, path: str, body: dict[str, Any]) -> tuple[list[Choice], dict[str, Any]]:
    """The choices of a call that is not streamed, and its answer."""
    found = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert found.status_code == 200, found.text
    answer = found.json()
    choices = [
        Choice(
            c["message"]["content"] if "message" in c else c["text"], c["finish_reason"],
            c["stop_reason"], c["token_ids"],
        )
        for c in answer["choices"]
    ]  # fmt: skip
    assert [c["index"] for c in answer["choices"]] == list(range(len(choices)))
    return choices, answer


def streamed(
    server: Served, path: str, body: dict[str, Any], count: int
) -> tuple[list[Choice], dict[str, Any]]:
    """The choices of a stream, and its last chunk; every event is looked at."""
    choices = [Choice() for _ in range(count)]
    chunks: list[dict[str, Any]] = []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}{path}", json=body | options, timeout=60) as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = [line for line in stream.iter_lines() if line]
    assert lines.pop() == "data: [DONE]"
    for line in lines:
        assert line.startswith("data: {")
        chunks.append(json.loads(line.removeprefix("data: ")))
        assert "error" not in chunks[-1], line
    assert len({(c["id"], c["model"], c["object"], c["created"]) for c in chunks}) == 1
    assert all(c["usage"] is None for c in chunks[:-1])
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        found = choices[choice["index"]]
        assert found.finish_reason is None
        found.text += choice["delta"].get("content", "") if "delta" in choice else choice["text"]
        found.ids += choice.get("token_ids", [])
        found.finish_reason, found.stop_reason = choice["finish_reason"], choice["stop_reason"]
        assert found.finish_reason or found.stop_reason is None
    assert chunks[-1]["choices"] == []
    return choices, chunks[-1]


def by_client(call: Any, body: dict[str, Any], stream: bool, count: int) -> list[str]:
    """The texts that OpenAI's client puts together."""
    own = {name: value for name, value in body.items() if name in OPENAI}
    rest = {n: v for n, v in body.items() if n not in OPENAI and n not in ("prompt", "messages")}
    own |= {name: body[name] for name in ("prompt", "messages") if name in body}
    found = call(model="tiny", stream=stream, extra_body=rest, **own)
    texts = [""] * count
    for chunk in found if stream else [found]:
        for choice in chunk.choices:
            text = getattr(choice, "text", None)
            if text is None:
                text = (choice.delta if stream else choice.message).content
            texts[choice.index] += text or ""
    return texts


@pytest.mark.parametrize(("sent", "meant"), FIELDS, ids=NAMES)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_field_means_what_llm_means(
    server: Served, client: openai.OpenAI, llm: LLM, path: str, sent: dict[str, Any],
    meant: dict[str, Any] | None,
) -> None:  # fmt: skip
    usual: dict[str, Any] = {"seed": 11, "max_tokens": 24, "temperature": 0.9}
    meant = sent if meant is None else meant
    params = SamplingParams(**(usual | meant))
    chats = path.endswith("chat/completions")
    (expected,) = llm.chat(PLAIN, params) if chats else llm.generate(PROMPT, params)
    texts = [o.text for o in expected.outputs]
    body = usual | sent | {"return_token_ids": True}
    body |= {"messages": MESSAGES} if chats else {"prompt": PROMPT}
    once, answer = whole(server, path, body)
    parts, last = streamed(server, path, body, params.n)
    assert once == parts
    assert [c.text for c in once] == texts
    assert [c.ids for c in once] == [o.token_ids for o in expected.outputs]
    assert [c.finish_reason for c in once] == [o.finish_reason for o in expected.outputs]
    assert [c.stop_reason for c in once] == [o.stop_reason for o in expected.outputs]
    output = sum(len(o.token_ids) for o in expected.outputs)
    for told in (answer, last):
        used = told["usage"]
        assert (used["prompt_tokens"], used["completion_tokens"]) == (
            len(expected.prompt_token_ids), output,
        )  # fmt: skip
        assert used["total_tokens"] == used["prompt_tokens"] + output
        assert int(told["seed"]) == params.seed
        assert (told["metrics"]["speculative_decoding"] is None) == (params.n > 1)
        assert told["metrics"]["time_to_first_token_ms"] > 0
    call = (client.chat.completions if chats else client.completions).create
    for stream in (False, True):
        assert by_client(call, body, stream, params.n) == texts


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_without_usage_has_one_choice_a_chunk(server: Served, stream: bool) -> None:
    """Many clients read ``chunk.choices[0]`` of whatever comes."""
    body = {"messages": MESSAGES, "stream": True, "max_tokens": 9, "n": 2}
    if stream:
        body["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    found = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60)
    lines = [json.loads(x[6:]) for x in found.text.split("\n\n") if x.startswith("data: {")]
    if stream:
        counts = [chunk["usage"]["completion_tokens"] for chunk in lines]
        assert counts == sorted(counts)
        assert counts[0] < counts[-1]
        lines.pop()
    assert all(len(chunk["choices"]) == 1 for chunk in lines)
    begins = {"role": "assistant", "content": "", "reasoning_content": None}
    assert lines[0]["choices"][0]["delta"] == begins
    assert lines[-1]["metrics"]["time_to_first_token_ms"] > 0


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_logprobs(server: Served, llm: LLM, path: str) -> None:
    chats = path.endswith("chat/completions")
    params = SamplingParams(seed=3, max_tokens=12, logprobs=2, prompt_logprobs=1)
    (expected,) = llm.chat(PLAIN, params) if chats else llm.generate(PROMPT, params)
    (output,) = expected.outputs
    body: dict[str, Any] = {"seed": 3, "max_tokens": 12}
    body |= (
        {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}
        if chats else {"prompt": PROMPT, "logprobs": 2}
    )  # fmt: skip
    whole_body = body | {"prompt_logprobs": 1}
    answer = httpx.post(f"{server.url}{path}", json=whole_body, timeout=60).json()
    refused = httpx.post(f"{server.url}{path}", json=whole_body | {"stream": True}, timeout=60)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "prompt_logprobs"
    with httpx.stream("POST", f"{server.url}{path}", json=body | {"stream": True}) as stream:
        chunks = [json.loads(x[6:]) for x in stream.iter_lines() if x.startswith("data: {")]
    own = [
        found[id].logprob for found, id in zip(output.logprobs or [], output.token_ids, strict=True)
    ]
    parts = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["logprobs"]]
    shown = answer["choices"][0]["logprobs"]
    if chats:
        assert [t["logprob"] for t in shown["content"]] == pytest.approx(own)
        assert all(len(t["top_logprobs"]) == 2 for t in shown["content"])
        own_bytes = b"".join(bytes(t["bytes"]) for t in shown["content"])
        assert own_bytes.decode(errors="replace") == output.text
        assert [t for p in parts for t in p["content"]] == shown["content"]
        listed = answer["prompt_logprobs"]
    else:
        assert shown["token_logprobs"] == pytest.approx(own)
        assert "".join(shown["tokens"]) == output.text
        for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
            assert [x for p in parts for x in p[name]] == shown[name]
        listed = answer["choices"][0]["prompt_logprobs"]
    assert listed[0] is None
    assert len(listed) == len(expected.prompt_token_ids)
    for found, wanted in zip(listed[1:], (expected.prompt_logprobs or [])[1:], strict=True):
        assert wanted is not None
        assert {int(k): v["logprob"] for k, v in found.items()} == pytest.approx(
            {k: v.logprob for k, v in wanted.items()}
        )


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_token_ids_are_where_vllm_has_them(server: Served, llm: LLM, path: str) -> None:
    chats = path.endswith("chat/completions")
    params = SamplingParams(max_tokens=3)
    (expected,) = llm.chat(PLAIN, params) if chats else llm.generate(PROMPT, params)
    ids = expected.prompt_token_ids
    body: dict[str, Any] = {"max_tokens": 3, "n": 2, "return_token_ids": True}
    body |= {"messages": MESSAGES} if chats else {"prompt": PROMPT}
    answer = httpx.post(f"{server.url}{path}", json=body, timeout=60).json()
    with httpx.stream("POST", f"{server.url}{path}", json=body | {"stream": True}) as stream:
        chunks = [json.loads(x[6:]) for x in stream.iter_lines() if x.startswith("data: {")]
    choices = [c["choices"][0] for c in chunks]
    if chats:
        assert answer["prompt_token_ids"] == chunks[0]["prompt_token_ids"] == ids
        assert not any("prompt_token_ids" in c for c in [*chunks[1:], *choices, *answer["choices"]])
    else:
        assert [c["prompt_token_ids"] for c in answer["choices"]] == [ids, ids]
        told = [(c["index"], c["prompt_token_ids"]) for c in choices if "prompt_token_ids" in c]
        assert sorted(told) == [(0, ids), (1, ids)]
        assert not any("prompt_token_ids" in c for c in [*chunks, answer])


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("included", [False, True])
def test_the_reason_of_a_stop(server: Served, llm: LLM, path: str, included: bool) -> None:
    chats = path.endswith("chat/completions")
    usual: dict[str, Any] = {"temperature": 0, "max_tokens": 40, "ignore_eos": True}
    params = SamplingParams(**usual)
    (free,) = llm.chat(PLAIN, params) if chats else llm.generate(PROMPT, params)
    text, ids = free.outputs[0].text, free.outputs[0].token_ids
    word = text[3:6]
    body = usual | {"include_stop_str_in_output": included, "return_token_ids": True}
    body |= {"messages": MESSAGES} if chats else {"prompt": PROMPT}
    for ends, reason in (
        ({"stop": ["zzz", word[-1:] + "\ue000", word]}, word), ({"stop": [word, word[1:]]}, word),
        ({"stop_token_ids": [ids[4], 5]}, ids[4]), ({"max_tokens": 3}, None),
    ):  # fmt: skip
        (once,), _ = whole(server, path, body | ends)
        (parts,), _ = streamed(server, path, body | ends, 1)
        assert once == parts
        assert once.stop_reason == reason
        assert once.finish_reason == ("length" if reason is None else "stop")


def test_a_seed_of_minus_one_is_no_seed(server: Served) -> None:
    for seed in (-1, "-1"):
        body = {"prompt": PROMPT, "seed": seed, "max_tokens": 20, "ignore_eos": True}
        found = [httpx.post(f"{server.url}/v1/completions", json=body).json() for _ in range(2)]
        assert len({answer["seed"] for answer in found}) == 2
        again = httpx.post(f"{server.url}/v1/completions", json=body | {"seed": found[0]["seed"]})
        assert again.json()["choices"] == found[0]["choices"]


def test_the_last_message_goes_on(server: Served) -> None:
    begun = [*MESSAGES, {"role": "model", "content": [{"type": "text", "text": "the quick "}]}]
    usual = {"temperature": 0, "max_tokens": 20}
    text = "<|user|>for word<|model|>the quick "
    prompt = httpx.post(f"{server.url}/tokenize", json={"prompt": text}).json()["tokens"]
    expected = httpx.post(f"{server.url}/v1/completions", json=usual | {"prompt": prompt}).json()
    goes_on: dict[str, Any] = {"messages": begun, "continue_final_message": True}
    for more in ({}, {"add_generation_prompt": False}):
        assert httpx.post(f"{server.url}/tokenize", json=goes_on | more).json()["tokens"] == prompt
        (choice,), _ = whole(
            server, "/v1/chat/completions", usual | goes_on | more | {"return_token_ids": True}
        )
        assert choice.text == expected["choices"][0]["text"]
    for path in ("/v1/chat/completions", "/tokenize"):
        body = goes_on | {"add_generation_prompt": True}
        found = httpx.post(f"{server.url}{path}", json=body)
        assert found.status_code == 400
        assert found.json()["error"]["param"] == "continue_final_message"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_prompt_is_cut_as_asked(server: Served, path: str) -> None:
    chats = path.endswith("chat/completions")
    body: dict[str, Any] = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    body |= {"messages": MESSAGES} if chats else {"prompt": PROMPT, "echo": True}

    def prompt(**more: Any) -> list[int]:
        found = httpx.post(f"{server.url}{path}", json=body | more, timeout=60).json()
        place = found if chats else found["choices"][0]
        assert found["usage"]["prompt_tokens"] == len(place["prompt_token_ids"])
        ids: list[int] = place["prompt_token_ids"]
        if not chats:
            text = httpx.post(f"{server.url}/detokenize", json={"tokens": ids}).json()["prompt"]
            assert place["text"].startswith(text)
        return ids

    ids = prompt()
    assert prompt(truncate_prompt_tokens=3) == ids[-3:]
    assert prompt(truncate_prompt_tokens=3, truncation_side="right") == ids[:3]
    assert prompt(truncate_prompt_tokens=200) == prompt(truncate_prompt_tokens=-1) == ids
    body |= (
        {"messages": [{"role": "user", "content": "the lazy dog " * 200}]}
        if chats else {"prompt": "the lazy dog " * 200}
    )  # fmt: skip
    assert len(prompt(truncate_prompt_tokens=-1)) == 256 - 8
    for wrong in (0, -2, 257, 2**63, "x"):
        more = {"truncate_prompt_tokens": wrong}
        found = httpx.post(f"{server.url}{path}", json=body | more)
        assert found.status_code == 400, found.text
        assert found.json()["error"]["param"] == "truncate_prompt_tokens"


def test_json_object_is_an_object(server: Served) -> None:
    body = {
        "messages": MESSAGES, "response_format": {"type": "json_object"}, "max_tokens": 200,
        "seed": 4, "logit_bias": {"2": 5},
    }  # fmt: skip
    choice = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    content, reason = (choice["choices"][0][k] for k in ("message", "finish_reason"))
    assert content["content"].lstrip().startswith("{")
    if reason == "stop":
        assert isinstance(json.loads(content["content"]), dict)


@pytest.mark.parametrize("stream", [False, True])
def test_echo_and_several_prompts(server: Served, llm: LLM, stream: bool) -> None:
    prompts = ["the lazy", "dog"]
    params = SamplingParams(seed=5, n=2, max_tokens=6)
    body: dict[str, Any] = {
        "prompt": prompts, "echo": True, "n": 2, "seed": 5, "max_tokens": 6,
        "return_token_ids": True,
    }  # fmt: skip
    found, _ = (
        streamed(server, "/v1/completions", body, 4)
        if stream else whole(server, "/v1/completions", body)
    )  # fmt: skip
    expected = [
        prompt + output.text
        for prompt, out in zip(prompts, llm.generate(prompts, params), strict=True)
        for output in out.outputs
    ]
    assert [c.text for c in found] == expected
    ids = [llm.generate(p, params)[0].prompt_token_ids for p in prompts]
    by_ids, _ = whole(server, "/v1/completions", body | {"prompt": ids})
    assert [c.text for c in by_ids] == expected


def test_tool_choices(server: Served) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}},
                  "required": ["city"], "additionalProperties": False}  # fmt: skip
    tools = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    named = {"type": "function", "function": {"name": "weather"}}
    for choice in ("none", "auto", "required", named, None):
        body: dict[str, Any] = {
            "messages": MESSAGES, "tools": tools, "tool_choice": choice, "seed": 2,
            "max_tokens": 250, "parallel_tool_calls": False,
        }  # fmt: skip
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
        with httpx.stream(
            "POST", f"{server.url}/v1/chat/completions", json=body | {"stream": True}, timeout=60
        ) as stream:
            chunks = [json.loads(x[6:]) for x in stream.iter_lines() if x.startswith("data: {")]
        choices = [c["choices"][0] for c in chunks]
        message = answer["choices"][0]["message"]
        content = "".join(c["delta"].get("content", "") for c in choices)
        parts = [call for c in choices for call in c["delta"].get("tool_calls", [])]
        assert content == (message["content"] or "")
        assert choices[-1]["finish_reason"] == answer["choices"][0]["finish_reason"]
        if choice in ("none", "auto", None):
            assert message["content"]
            assert "tool_calls" not in message
            assert not parts
            continue
        (call,) = message["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")
        assert "".join(p["function"]["arguments"] for p in parts) == call["function"]["arguments"]
        assert parts[0]["function"]["name"] == call["function"]["name"] == "weather"
        assert len(parts) > 1
        reason = answer["choices"][0]["finish_reason"]
        assert reason == ("stop" if choice == named else "tool_calls")


def test_a_conversation_with_calls_and_their_results_is_read(server: Served) -> None:
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [{
            "id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'},
        }]},
        {"role": "tool", "tool_call_id": "1", "content": "2"},
    ]  # fmt: skip
    found = httpx.post(
        f"{server.url}/v1/chat/completions", json={"messages": messages, "max_tokens": 4}
    )
    assert found.status_code in (200, 400)
    if found.status_code == 400:  # the template knows no such role
        assert "chat template" in found.json()["error"]["message"]
