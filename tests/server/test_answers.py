"""What answers say of their tokens: bytes, places, counts; and what is null in them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from benchmarks.served import Served
from tests.support import forked

TEXT = "é🙂日本 x👩‍🔬"
EMOJIS: dict[str, Any] = {
    "seed": 3, "max_tokens": 120, "structured_outputs": {"regex": f"({TEXT}[0-9]){{2}}"},
}  # fmt: skip
MESSAGES: Any = [{"role": "user", "content": "for word"}]
USAGE = {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}


def whole(server: Served, path: str, **body: Any) -> dict[str, Any]:
    found = httpx.post(f"{server.url}{path}", json=body, timeout=60)
    assert found.status_code == 200, found.text
    answer: dict[str, Any] = found.json()
    return answer


def streamed(server: Served, path: str, **body: Any) -> list[dict[str, Any]]:
    found = httpx.post(f"{server.url}{path}", json=body | {"stream": True}, timeout=60)
    assert found.status_code == 200, found.text
    return [json.loads(x[6:]) for x in found.text.split("\n\n") if x.startswith("data: {")]


@pytest.fixture(scope="module")
def spelled(tiny_llama: Path) -> dict[int, bytes]:
    """The bytes of every token, by GPT-2's table."""
    table = {letter: byte for byte, letter in bytes_to_unicode().items()}
    vocabulary = AutoTokenizer.from_pretrained(tiny_llama).get_vocab()
    return {
        id: token.encode() if token.startswith("<|") else bytes(table[letter] for letter in token)
        for token, id in vocabulary.items()
    }


@pytest.fixture(scope="module")
def masking(tiny_llama: Path) -> Iterator[Served]:
    """A server whose log probabilities are of what a request's options leave."""
    with forked.Served(tiny_llama, "--logprobs-mode", "processed_logprobs") as server:
        yield server


def offsets(parts: list[bytes], text: str) -> list[int]:
    """Where tokens begin in a text whose characters are all whole, which may end early."""
    begins = [b"".join(parts[:i]).decode(errors="ignore") for i in range(len(parts))]
    return [min(len(begin), len(text)) for begin in begins]


def test_bytes_of_a_part_of_a_character_are_its_own(
    server: Served, spelled: dict[int, bytes]
) -> None:
    body = EMOJIS | {"messages": MESSAGES, "logprobs": True, "top_logprobs": 5}
    (choice,) = whole(server, "/v1/chat/completions", **body, return_token_ids=True)["choices"]
    content = choice["logprobs"]["content"]
    assert choice["message"]["content"].count(TEXT) == 2
    parts = [spelled[id] for id in choice["token_ids"]]
    assert [bytes(token["bytes"]) for token in content] == parts
    assert any("\ufffd" in token["token"] for token in content)
    for token in content:
        for each in (token, *token["top_logprobs"]):
            own = bytes(each["bytes"])
            assert own in spelled.values()
            assert own.decode(errors="replace") == each["token"]
    chunks = streamed(server, "/v1/chat/completions", **body)
    found = [c["choices"][0]["logprobs"] for c in chunks]
    assert [token for one in found if one for token in one["content"]] == content


@pytest.mark.parametrize(
    "more",
    [
        {"echo": True}, {"n": 3}, {"stop": ["日", "x"]}, {"stop": ["本 x", "🙂日本 y"]},
        {"stop": ["\u200d🔬"], "include_stop_str_in_output": True}, {"stop": ["nothing", "👩‍🔬9"]},
        {"echo": True, "n": 2, "stop": ["本"], "prompt": ["the dog", "🙂 é"]},
    ],
)  # fmt: skip
def test_text_offset_is_the_place_in_the_text(
    server: Served, spelled: dict[int, bytes], more: dict[str, Any]
) -> None:
    body = {"prompt": "é def 👩‍🔬 greet", **EMOJIS, "logprobs": 2, "return_token_ids": True} | more
    choices = whole(server, "/v1/completions", **body)["choices"]
    chunks = streamed(server, "/v1/completions", **body)
    for choice in choices:
        listed, text = choice["logprobs"], choice["text"]
        prompt = choice["prompt_token_ids"] if "echo" in more else []
        parts = [spelled[id] for id in (*prompt, *choice["token_ids"])]
        assert listed["text_offset"] == offsets(parts, text)
        assert len(listed["text_offset"]) == len(listed["tokens"])
        whole_words = zip(listed["tokens"], listed["text_offset"], strict=True)
        if "stop" not in more and choice["finish_reason"] == "length":
            assert all(text.startswith(w, at) for w, at in whole_words if "\ufffd" not in w)
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == text
        for name, values in listed.items():
            assert [v for part in mine for v in part["logprobs"][name]] == values


def test_alternatives_with_one_text_are_all_listed(server: Served) -> None:
    """Parts of characters look alike; they are told apart by their bytes."""
    body = EMOJIS | {"prompt": "a", "logprobs": 5}
    listed = whole(server, "/v1/completions", **body)["choices"][0]["logprobs"]
    assert any(key.startswith("bytes:\\x") for top in listed["top_logprobs"] for key in top)
    for token, value, top in zip(
        listed["tokens"], listed["token_logprobs"], listed["top_logprobs"], strict=True
    ):
        assert len(top) in (5, 6)
        assert top[token] == value


@pytest.mark.parametrize("n", [1, 3])
def test_running_usage_counts_the_tokens_that_were_sent(server: Served, n: int) -> None:
    body = {"max_tokens": 24, "ignore_eos": True, "n": n, "return_token_ids": True, **USAGE}
    chat = streamed(server, "/v1/chat/completions", messages=MESSAGES, **body)
    roles = [chunk for chunk in chat if "role" in (chunk["choices"] or [{"delta": {}}])[0]["delta"]]
    assert roles == chat[:n]
    assert [chunk["usage"]["completion_tokens"] for chunk in roles] == [0] * n
    more = {"prompt": ["the dog", "fox"]}
    for chunks in (chat, streamed(server, "/v1/completions", **more, **body)):
        sent = 0
        for chunk in chunks:
            sent += sum(len(choice.get("token_ids") or ()) for choice in chunk["choices"])
            used = chunk["usage"]
            assert used["completion_tokens"] == sent
            assert used["total_tokens"] == used["prompt_tokens"] + sent
        assert sent == 24 * n * (1 if chunks is chat else 2)


def test_what_there_is_none_of_is_null_where_vllm_sends_it(server: Served) -> None:
    chat = whole(server, "/v1/chat/completions", messages=MESSAGES, max_tokens=2)
    text = whole(server, "/v1/completions", prompt="a", max_tokens=2)
    every = ("service_tier", "kv_transfer_params", "ec_transfer_params")
    for part, names in (
        (chat, (*every, "prompt_logprobs", "prompt_token_ids", "prompt_text")), (text, every),
        (chat["choices"][0], ("logprobs", "stop_reason", "token_ids", "routed_experts")),
        (chat["choices"][0]["message"],
         ("refusal", "annotations", "audio", "function_call", "reasoning")),
        (text["choices"][0], ("logprobs", "stop_reason", "token_ids", "prompt_token_ids",
                              "prompt_logprobs", "routed_experts")),
    ):  # fmt: skip
        assert {name: part[name] for name in names} == dict.fromkeys(names)
    assert "tool_calls" not in chat["choices"][0]["message"]
    asks = {"return_token_ids": True, "prompt_logprobs": 0, "max_tokens": 2}
    chat = whole(server, "/v1/chat/completions", messages=MESSAGES, **asks)
    text = whole(server, "/v1/completions", prompt="a b", **asks)["choices"][0]
    for one in (chat, text):
        assert len(one["prompt_token_ids"]) == len(one["prompt_logprobs"])
    assert len(chat["choices"][0]["token_ids"]) == len(text["token_ids"]) == 2


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_masked_token_has_a_number_that_json_can_have(masking: Served, path: str) -> None:
    asked: dict[str, Any] = {"top_k": 1, "temperature": 1, "max_tokens": 2}
    if "chat" in path:
        asked |= {"messages": MESSAGES, "logprobs": True, "top_logprobs": 3}
    else:
        asked |= {"prompt": "a", "logprobs": 3}
    shown = whole(masking, path, **asked)["choices"][0]["logprobs"]
    parts = [each["choices"][0].get("logprobs") for each in streamed(masking, path, **asked)]
    for logprobs in (shown, *filter(None, parts)):
        if "chat" in path:
            values = [
                [top["logprob"] for top in each["top_logprobs"]] for each in logprobs["content"]
            ]
        else:
            values = [[*each.values()] for each in logprobs["top_logprobs"]]
        assert values == [[0, -9999, -9999]] * len(values)
    assert any(parts)
