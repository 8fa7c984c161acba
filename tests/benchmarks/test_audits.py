"""The audit of real servers of other engines, where they are installed: what docs/audit.md says."""

from __future__ import annotations

import pytest

from benchmarks import install
from benchmarks.audits import SERVERS, audited
from outrider.audit.endpoint import Status

pytestmark = pytest.mark.slow

SAMPLES, SEED = 512, 0
BATCHED = {"seed, among others"}
"""May fail where the arithmetic depends on the batch."""


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("llama.cpp-plain", set()),
        ("llama.cpp-draft", {"logprobs"}),
        ("llama.cpp-ngram", {"logprobs"}),
        ("vllm-draft", {"law", "seed, alone"}),
    ],
)
def test_what_is_published_of_a_server_is_found_again(name: str, wrong: set[str]) -> None:
    peer = SERVERS[name][0]
    if why := install.missing(peer):
        pytest.skip(why)
    report = audited(name, [], SAMPLES, SEED)
    failed = {result.name for result in report.having(Status.FAILED)}
    assert wrong <= failed <= wrong | BATCHED
    greedy = next(result for result in report.results if result.name == "greedy")
    assert greedy.status is Status.PASSED
    drafted = report.speculation.get("spec_decode_draft_tokens", 0)
    assert (drafted > 0) == (not name.endswith("-plain"))
