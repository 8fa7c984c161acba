"""A real ``vllm serve`` with the plugin: seeds, and what our reader makes of its ``/metrics``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.request import Request, urlopen

import pytest

from benchmarks import audits
from benchmarks.install import VLLM
from outrider.ops.metrics import Figures, Page, parse

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.ready, reason="vllm is not installed; run: make peers"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with audits.vllm(audits.SPECULATIVE["ngram"], plugin=True) as address:
        yield address


def ask(url: str, seed: int) -> str:
    body = {
        "model": json.load(urlopen(f"{url}/v1/models", timeout=60))["data"][0]["id"],
        "prompt": "def one():\n    return 1\n\ndef two():\n    return 2\n\ndef",
        "max_tokens": 64, "temperature": 0.5, "seed": seed,
    }  # fmt: skip
    head = {"Content-Type": "application/json"}
    request = Request(f"{url}/v1/completions", json.dumps(body).encode(), head)
    return str(json.load(urlopen(request, timeout=120))["choices"][0]["text"])


def page(url: str) -> Page:
    return parse(urlopen(f"{url}/metrics", timeout=60).read().decode())


def test_seeds_decide_and_the_page_is_read(url: str) -> None:
    before = page(url)
    texts = [ask(url, seed) for seed in (1, 2, 3, 1)]
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    seen = Figures.of(page(url), before, 1.0)
    assert seen is not None
    assert seen.engine == "vllm"
    assert all((seen.total(name) or 0) > 0 for name in ("drafts", "drafted", "generated"))
    assert seen.acceptance is not None
    assert (seen.acceptance_length or 0) > 1
    assert (seen.quantile("ttft", 0.5) or 0) > 0
