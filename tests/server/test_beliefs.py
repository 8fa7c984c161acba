"""What the engine believes: from the worker to /v1/speculation, the metrics and the log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider import LLM, SamplingParams
from outrider.base.types import Request
from outrider.engine.worker import worker as engine_worker
from outrider.engine.worker.messages import Beliefs, Message
from outrider.engine.worker.worker import Worker
from outrider.server import beliefs
from outrider.server.log import words
from tests.support.forked import Served

SALT = "salt-of-a-tenant"
CHOICES: list[dict[str, Any]] = [
    {"method": "none", "drafters": [], "depth": 0, "fixed": False, "sequences": 3},
    {"method": "model", "drafters": ["model"], "depth": 2, "fixed": False, "sequences": 1},
    {"method": "model", "drafters": ["model"], "depth": 5, "fixed": False, "sequences": 3},
    {
        "method": "model+suffix",
        "drafters": ["model", "suffix"],
        "depth": 6,
        "fixed": True,
        "sequences": 2,
    },
]
KNOWN: dict[str, Any] = {
    "choices": CHOICES,
    "paused": False,
    "draft_ms": {"model": 1.0, "suffix": 0.1, "model+suffix": 1.2},
    "survival": {"model": {"survival": [0.8, 0.5]}},
}


def test_figures_are_those_of_the_choices_in_use() -> None:
    assert beliefs.longest(KNOWN) == beliefs.longest(KNOWN, "suffix") == 6
    assert beliefs.longest(KNOWN, "ngram") == 0
    assert beliefs.depths(KNOWN) == {"model": (2 + 3 * 5) / 4, "suffix": 0, "model+suffix": 6}
    assert beliefs.survival(KNOWN) == {("model", "0"): 0.8, ("model", "1"): 0.5}
    paused = {**KNOWN, "paused": True}
    assert beliefs.depths(paused) == {"model": 0, "suffix": 0, "model+suffix": 6}
    paused["choices"] = CHOICES[:3]
    assert beliefs.longest(paused) == 0
    assert (beliefs.why_not(paused), beliefs.why_not(KNOWN)) == ("paused", "plain_is_faster")


@pytest.mark.parametrize(
    ("chosen", "length", "said"),
    [
        (None, 2.0, "K=4 auto, acceptance"),
        (None, None, "NOTHING WAS DRAFTED by auto"),
        (["K=6 model tree"], 2.0, "auto (K=6 model tree), acceptance"),
        ([], 2.0, "auto (now plain), acceptance"),
        ([], None, "auto chose plain decoding"),
        (["K=6 suffix"], None, "NOTHING WAS DRAFTED by auto"),
    ],
)
def test_the_log_says_what_was_chosen(
    chosen: list[str] | None, length: float | None, said: str
) -> None:
    rate = None if length is None else 0.5
    fields = {
        "running": 1, "waiting": 0, "tokens_per_second": 9.0, "cache_usage": 0.5, "drafter": "auto",
        "draft_length": 4, "chosen": chosen, "reason": None, "acceptance_rate": rate,
        "acceptance_length": length, "speedup": None,
    }  # fmt: skip
    assert said in words(fields | {"draftable": 5})
    if length is None:
        assert "NOTHING WAS" not in words(fields | {"draftable": 0})


class Sent:
    """An outlet that keeps what is sent."""

    def __init__(self) -> None:
        self.messages: list[Message] = []

    def send(self, message: Message) -> None:
        self.messages.append(message)

    @property
    def beliefs(self) -> list[dict[str, Any]]:
        return [m.summary for m in self.messages if isinstance(m, Beliefs)]


def worker(llm: LLM) -> tuple[Worker, Sent]:
    sent, nothing = Sent(), Any
    pulse: Any = type("Pulse", (), {"longest": 0.0})()
    return Worker(llm.engine, nothing, sent, pulse, 0), sent  # type: ignore[arg-type]


def add(llm: LLM, id: str, tokens: int = 12) -> None:
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    llm.engine.add(Request(id, (5, 6, 7, 5, 6), params, 0, cache_salt=SALT))


def test_the_worker_tells_once_a_second_and_when_it_falls_idle(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    llm = LLM(tiny_llama)
    told, sent = worker(llm)

    def step() -> int:
        told._step()
        told._tell()
        return len(sent.beliefs)

    add(llm, "a", 40)
    counts = [step() for _ in range(4)]
    assert counts[0] == counts[-1]  # however fast steps are
    now[0] += engine_worker.TOLD_SECONDS
    assert step() == step() == counts[0] + 1
    while llm.engine.has_work:
        last = step()
    assert last == counts[0] + 2
    told._tell()
    assert len(sent.beliefs) == last  # nothing new
    add(llm, "b")
    assert step() == step() == last
    told._abort("b", None)
    told._tell()
    assert len(sent.beliefs) == last + 1
    for each in sent.beliefs:
        assert json.loads(json.dumps(each)) == each
        assert SALT not in json.dumps(each)
    assert sent.beliefs[-1]["survival"]


def test_an_engine_that_is_told_how_to_draft_has_no_beliefs(tiny_llama: Path) -> None:
    llm = LLM(tiny_llama, "ngram", num_speculative_tokens=3)
    told, sent = worker(llm)
    add(llm, "a")
    while llm.engine.has_work:
        told._step()
        told._tell()
    assert llm.engine.beliefs is None
    assert sent.beliefs == []


@pytest.fixture(scope="module")
def chooses(tiny_llama: Path, tiny_drafter: Path) -> Iterator[Served]:
    """A server whose engine chooses among suffix and a model."""
    with Served(tiny_llama, "--drafter", f"auto+{tiny_drafter}") as found:
        yield found


def state(server: Served, **body: Any) -> dict[str, Any]:
    url = f"{server.url}/v1/speculation"
    return dict((httpx.post(url, json=body) if body else httpx.get(url)).json())


def generate(server: Served) -> None:
    body = {"prompt": "ab ab ab", "max_tokens": 80, "ignore_eos": True, "cache_salt": SALT}
    assert httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).status_code == 200


def settled(server: Served) -> dict[str, Any]:
    """The state once the engine, which goes by costs, has tried suffix and said so, idle."""
    deadline = time.monotonic() + 60
    while "suffix" not in state(server)["controller"]["survival"]:
        assert time.monotonic() < deadline
        generate(server)
    return state(server)


def figures(server: Served) -> dict[str, dict[tuple[str, ...], float]]:
    """The samples of each family of Outrider's own, by its own labels."""
    text = httpx.get(f"{server.url}/metrics").text
    common = ("engine", "model_name")
    return {
        family.name: {
            tuple(v for k, v in sorted(s.labels.items()) if k not in common): s.value
            for s in family.samples
        }
        for family in text_string_to_metric_families(text)
        if family.name.startswith("outrider_")
    }


def test_beliefs_are_shown_and_measured(chooses: Served) -> None:
    assert any(
        "drafter: auto, up to 8 tokens a step, chosen by the engine" in line
        for line in chooses.lines
    )
    assert state(chooses)["controller"]["choices"]  # from the first call on
    generate(chooses)
    shown = settled(chooses)
    known = shown["controller"]
    assert shown["num_speculative_tokens"] is None
    assert shown["max_num_speculative_tokens"] == 8
    assert shown["draft_length"] == beliefs.longest(known)
    assert (shown["reason"] is None) == (shown["draft_length"] > 0)
    for name, each in shown["drafters"].items():
        assert each["draft_length"] == beliefs.longest(known, name)
        assert (each["reason"] is None) == (each["draft_length"] > 0)
    assert SALT not in json.dumps(shown)
    found = figures(chooses)
    assert found["outrider_draft_length"] == {(): shown["draft_length"]}
    assert found["outrider_speculation_paused"] == {(): known["paused"]}
    assert found["outrider_expected_tokens_per_second"] == {
        ("chosen",): known["tokens_per_second"],
        ("plain",): known["plain_tokens_per_second"],
    }
    assert found["outrider_survival"] == beliefs.survival(known)
    methods = {"model", "model tree", "suffix", "prediction", "ngram"}
    methods |= {"suffix or model", "model+suffix"}
    assert {name for (name,) in found["outrider_choice_depth"]} <= methods


def test_the_switch_takes_the_choice_from_the_engine_and_gives_it_back(chooses: Served) -> None:
    told = state(chooses, drafter="suffix", num_speculative_tokens=3)
    assert told["draft_length"] == told["drafters"]["suffix"]["draft_length"] == 3
    assert told["drafters"]["model"]["reason"] == "not_chosen"
    assert told["controller"] is not None
    bounded = state(chooses, drafter="auto")
    assert bounded["num_speculative_tokens"] == 3
    generate(chooses)
    deadline = time.monotonic() + 60
    while state(chooses)["draft_length"] > 3:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    freed = state(chooses, num_speculative_tokens=None)
    assert (freed["drafter"], freed["num_speculative_tokens"]) == ("auto", None)
    alone = state(chooses, drafter="suffix")
    assert (alone["drafter"], alone["num_speculative_tokens"]) == ("suffix", None)
    assert alone["draft_length"] == beliefs.longest(alone["controller"])
    generate(chooses)
    off = state(chooses, enabled=False)
    assert off["num_speculative_tokens"] is None
    assert (off["draft_length"], off["reason"]) == (0, "switched_off")
    assert {each["draft_length"] for each in off["drafters"].values()} == {0}


def test_a_server_that_is_told_how_to_draft_has_no_beliefs(server: Served) -> None:
    assert state(server)["controller"] is None
    assert not {name for name in figures(server) if "expected" in name or "survival" in name}
