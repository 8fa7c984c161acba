"""Probabilities of labels behind prompts, by SGLang's path and by vLLM's."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.testclient import TestClient

from outrider.server.app import create_app
from outrider.server.build import build
from outrider.server.options import resolve
from outrider.server.score import Score, ScoreRequest, ScoringRequest

LABELS = [5, 40, 9]
ITEMS = [" fox", " dog", "?"]


@pytest.fixture(scope="module")
def client(tiny_llama: Path) -> Iterator[TestClient]:
    llm, settings = build(tiny_llama, "tiny", resolve({"drafter": "ngram"}, {}, None))
    with TestClient(create_app(llm, settings), "http://localhost") as front:
        yield front


def post(client: TestClient, path: str, **body: Any) -> Any:
    answer = client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def probabilities(client: TestClient, prompt: str | list[int]) -> list[float]:
    """What a completion says of the labels as its first token."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": -1, "return_tokens_as_token_ids": True}
    (choice,) = post(client, "/v1/completions", **body)["choices"]
    (top,) = choice["logprobs"]["top_logprobs"]
    return [math.exp(top[f"token_id:{label}"]) for label in LABELS]


def test_scores_are_the_target_s_probabilities(client: TestClient) -> None:
    ask = {"query": "the quick", "items": ITEMS, "label_token_ids": LABELS}
    scores = post(client, "/v1/score", **ask)
    expected = [probabilities(client, "the quick" + item) for item in ITEMS]
    assert scores["object"] == "scoring"
    for found, known in zip(scores["scores"], expected, strict=True):
        assert found == pytest.approx(known, rel=1e-4)
    shares = post(client, "/v1/score", **ask, apply_softmax=True)["scores"]
    for found, known in zip(shares, expected, strict=True):
        assert found == pytest.approx([each / sum(known) for each in known], rel=1e-4)
    first = post(client, "/v1/score", **ask, item_first=True)["scores"]
    assert first[0] == pytest.approx(probabilities(client, " foxthe quick"), rel=1e-4)
    ids = [post(client, "/tokenize", prompt="the quick" + each)["tokens"] for each in ITEMS]
    assert (
        post(client, "/v1/score", items=ids, label_token_ids=LABELS)["scores"] == scores["scores"]
    )
    assert scores["usage"]["prompt_tokens"] == sum(map(len, ids))


def test_vllm_is_told_the_first_label_s_share(client: TestClient) -> None:
    query, items = [7, 8, 9], [[20], [21, 22]]
    ask = {"query": query, "items": items, "label_token_ids": LABELS}
    shares = post(client, "/v1/score", **ask, apply_softmax=True)["scores"]
    found = post(client, "/generative_scoring", **ask)
    assert found["object"] == "list"
    assert found["data"] == [
        {"index": i, "object": "score", "score": own[0]} for i, own in enumerate(shares)
    ]
    whole = post(client, "/generative_scoring", **ask, apply_softmax=False)["data"]
    assert whole[0]["score"] == pytest.approx(probabilities(client, query + items[0])[0], rel=1e-4)


class _WithStart:
    """Tokenises to a start token, 1, and the characters' codes."""

    async def ids(self, prompt: str | list[int], special: bool = True) -> list[int]:
        return [1] * special + [*map(ord, prompt)] if isinstance(prompt, str) else prompt


@pytest.mark.parametrize("kind", [ScoreRequest, ScoringRequest])
@pytest.mark.parametrize("query", ["", "q"])
def test_a_prompt_has_one_start_token(kind: type[ScoreRequest], query: str) -> None:
    wanted = kind.model_validate({"query": query, "items": ["i"], "label_token_ids": LABELS})
    call = SimpleNamespace(wanted=wanted, service=SimpleNamespace(texts=_WithStart()))
    (pair,) = wanted.pairs()
    assert asyncio.run(Score._ids(call, *pair)) == [1, *map(ord, query + "i")]  # type: ignore[arg-type]


@pytest.mark.parametrize("path", ["/v1/score", "/generative_scoring"])
@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ({"items": []}, "items is empty"),
        ({"items": ["a", ""], "add_special_tokens": False}, "query and item 1 have no tokens"),
        ({"items": ["a"], "label_token_ids": []}, "label_token_ids"),
        ({"items": ["a"], "label_token_ids": [2**31]}, "out of vocabulary"),
        ({"items": ["a"], "label_token_ids": [-1]}, "out of vocabulary"),
        ({"items": [[999]]}, "out of vocabulary"),
        ({"items": [[1], "a"]}, "items"),
        ({"query": [1], "items": ["a"]}, "differ in type"),
        ({"query": "a", "items": [[1]]}, "differ in type"),
        ({"items": ["a"] * 100, "label_token_ids": LABELS * 4}, "all items have 1200 labels"),
        ({"items": ["a" * 5000]}, "context"),
        ({"items": ["a"], "model": "other"}, "other"),
        ({"items": ["a"], "priority": 2**70}, "priority"),
    ],
)
def test_what_cannot_be_scored_is_refused(
    client: TestClient, path: str, body: dict[str, Any], reason: str
) -> None:
    answer = client.post(path, json={"label_token_ids": LABELS, **body})
    assert answer.status_code in (400, 404)
    assert reason in answer.json()["error"]["message"]
    queue = client.app.state.service.queue  # type: ignore[attr-defined]
    assert (queue.sequences, queue.tokens) == (0, 0)
