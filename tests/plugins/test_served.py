"""A real ``vllm serve`` with the plugin: seeds, and the figures on its ``/metrics``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import Request, urlopen

import pytest
from prometheus_client.parser import text_string_to_metric_families

from benchmarks import audits
from benchmarks.install import VLLM

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not VLLM.ready, reason="vllm is not installed; run: make peers"),
]
OBSERVED = "outrider_observed_"


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


def page(url: str) -> dict[str, Any]:
    """The samples of ``/metrics`` by name; of a percentile the last."""
    text = urlopen(f"{url}/metrics", timeout=60).read().decode()
    families = text_string_to_metric_families(text)
    return {sample.name: sample.value for each in families for sample in each.samples}


def test_the_page_has_what_the_exporter_would_tell(url: str) -> None:
    before = page(url)
    texts = [ask(url, seed) for seed in (1, 2, 3, 1)]
    after = page(url)
    assert texts[0] == texts[3]
    assert len(set(texts)) == 3
    for ours, theirs in (
        ("draft_tokens_total", "vllm:spec_decode_num_draft_tokens_total"),
        ("accepted_tokens_total", "vllm:spec_decode_num_accepted_tokens_total"),
        ("drafts_total", "vllm:spec_decode_num_drafts_total"),
        ("generation_tokens_total", "vllm:generation_tokens_total"),
    ):
        assert after[OBSERVED + ours] == after[theirs] > before.get(OBSERVED + ours, 0)
    drafted, accepted = (
        after[OBSERVED + name] - before.get(OBSERVED + name, 0)
        for name in ("draft_tokens_total", "accepted_tokens_total")
    )
    assert after[OBSERVED + "acceptance"] == pytest.approx(accepted / drafted)
    assert after[OBSERVED + "acceptance_length"] > 1
    assert after[OBSERVED + "ttft_seconds"] > 0
    assert after[OBSERVED + "e2e_seconds"] > 0  # may lie below: vLLM's buckets for it are narrower
