"""Every reader of outside data above the models: what it is given, and how it is called.

A reader is a function of a scratch folder that returns its cases, a strategy, and what to call with
each of them. The call may return, or raise an ``OutriderError`` that says one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from outrider.errors import ConfigError
from tests.support import DATA
from tests.support.hostile import inputs as made
from tests.support.hostile.inputs import damaged, jsons, texts, tomls, trees

Cases = SearchStrategy[Any]
Made = tuple[Cases, Callable[[Any], object]]
READERS: dict[str, Callable[[Path], Made]] = {}
PAGES = [file.read_bytes() for file in sorted((DATA / "expositions").glob("*.prom"))]
LARGE = [b"x" * 20_000, b'm{a="' + b"b" * 20_000 + b'"} 1\n', b"vllm:a{" * 5000]
STATUSES = st.sampled_from([200] * 6 + [404, 409, 500])
PAGE_PIECES = (*made.PIECES, *LARGE, b'{le="NaN"}', b'{le="-Inf"}', b"# HELP", b"# TYPE x bogus")


def reader(name: str) -> Callable[[Callable[[Path], Made]], Callable[[Path], Made]]:
    """Enter a reader in the table."""

    def enter(make: Callable[[Path], Made]) -> Callable[[Path], Made]:
        READERS[name] = make
        return make

    return enter


def misprint(text: str, most: int = 2000) -> str:
    """Return why a sentence must not be shown to people, "" for one line of bounded length."""
    if not text:
        return "says nothing"
    if len(text) > most:
        return f"has {len(text)} characters: {text[:200]!r}"
    return "" if text.isprintable() else f"is not printable: {text[:500]!r}"


def check_said(text: str, most: int = 2000) -> None:
    """Assert that a text, if there is any, may be shown to people."""
    assert not text or not misprint(text, most), misprint(text, most)


def in_file(folder: Path, name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    """A call that puts its case into a file first."""
    folder.mkdir(parents=True, exist_ok=True)

    def call(data: bytes) -> object:
        (folder / name).write_bytes(data)
        return read(folder / name)

    return call


@contextmanager
def answering(modules: list[Any], body: bytes, status: int = 200) -> Iterator[None]:
    """Have a server answer every call of some modules with a body."""
    from outrider.base.outside.http import Answer

    def call(*_: Any, take: Callable[[bytes], None] | None = None, **__: Any) -> Answer:
        if take is None or status != 200:
            return Answer(status, body)
        for start in range(0, len(body), 1 << 16):
            take(body[start : start + (1 << 16)])
        return Answer(status, b"")

    patches = [patch.object(module, "call", call) for module in modules]
    for each in patches:
        each.start()
    try:
        yield
    finally:
        for each in patches:
            each.stop()


@reader("metrics page")
def metrics_page(folder: Path) -> Made:
    from outrider.ops.diagnose.observation import facts_of
    from outrider.ops.metrics.page import Reader, parse

    before: list[Any] = [parse(PAGES[-1].decode())]

    def call(text: str) -> None:
        page = parse(text)
        parts, data = Reader(), text.encode("utf-8", "replace")
        size = 7 + len(data) // 300
        for at in range(0, len(data), size):
            parts.feed(data[at : at + size])
        assert parts.page().samples == page.samples
        facts_of(page)
        facts_of(page.since(before[0]))
        page.restarted(before[0])
        parse("\n".join(page.lines()))
        before[0] = page

    return texts(damaged(*PAGES, pieces=PAGE_PIECES)), call


@reader("observe exporter")
def exporter(folder: Path) -> Made:
    from prometheus_client import CollectorRegistry, generate_latest

    from outrider.base.outside.http import Answer
    from outrider.ops.alerts.exporter import Exporter, Watcher
    from outrider.ops.diagnose.endpoint import Endpoint
    from outrider.ops.metrics import page as pages

    models = trees({"data": [{"id": "m"}]}).map(made.as_json)

    def call(case: tuple[bytes, bytes]) -> None:
        page, model = case
        endpoint = Endpoint("http://e:1")
        endpoint.ask = lambda path, body=None: Answer(200, model)  # type: ignore[method-assign]
        with answering([pages], page):
            shown(endpoint)

    def shown(endpoint: Endpoint) -> None:
        watcher = Watcher(endpoint, 1.0, check_said)
        watcher.look()
        watcher.look()
        registry = CollectorRegistry()
        registry.register(Exporter(watcher, watcher, compatible=True))
        generate_latest(registry)

    return st.tuples(damaged(*PAGES, pieces=PAGE_PIECES), models), call


@reader("endpoint")
def endpoint(folder: Path) -> Made:
    from outrider.ops.diagnose import endpoint as planning

    sample = {"data": [{"id": "m"}], "choices": [{"text": "x"}]}

    def call(case: tuple[bytes, int]) -> None:
        with answering([planning], *case):
            own = planning.Endpoint("http://e:1")
            own.model()
            planning.differing(own, own)

    return st.tuples(jsons(sample), STATUSES), call


@reader("addresses")
def addresses(folder: Path) -> Made:
    from outrider.base.outside.http import address
    from outrider.base.outside.stamped import Client
    from outrider.ops.diagnose.endpoint import Endpoint

    def call(text: str) -> None:
        for read in (address, Endpoint, Client):
            try:
                read(text)
            except ConfigError as error:
                check_said(str(error))

    return texts(damaged("http://user:pw@host:8000/v1", "https://[::1]:443/x?a=b", "host:1")), call


def diagnosed(source: Any) -> None:
    """Diagnose a source as the command does."""
    from outrider.ops.diagnose.diagnose import judge, look, markdown
    from outrider.ops.diagnose.facts import check_thresholds

    seen = look(source)
    limits = check_thresholds({})
    problems = [each for run in seen for each in judge(run.facts, limits, run.where)]
    markdown(seen, problems)
    json.dumps([problem.to_json() for problem in problems] + [run.saved() for run in seen])


FACTS = {"acceptance": 0.5, "speedup": 1.2, "memory_used": 0.9, "temperature": 0.7}
SERVED = {
    "date": "20260101-000000", "backend": "vllm", "model_id": "m", "num_prompts": 100,
    "request_throughput": 1.5, "mean_tpot_ms": 20.0, "median_ttft_ms": 90.0, "p99_itl_ms": 30.0,
    "spec_decode_acceptance_rate": 55.0, "spec_decode_num_drafts": 100,
    "spec_decode_per_position_acceptance_rates": [0.8, 0.6, 0.4],
}  # fmt: skip
REPORT = {
    "machine": {"cpu": "x", "gpus": [{"name": "g"}], "cores": 8},
    "source": {"version": "1", "commit": "abc"},
    "runs": [
        {"drafter": "model", "batch_size": 8, "acceptance_by_position": [0.9, 0.7], "speedup": 1.4,
         "num_speculative_tokens": 2, "tpot": 0.02, "drafts": 100, "outputs": {"identical": 9}},
        {"drafter": "none", "batch_size": 8, "tpot": 0.03},
    ],
}  # fmt: skip
NAMED = {"vllm:spec_decode_num_drafts_total": 10, "vllm:spec_decode_num_draft_tokens_total": 40,
         "vllm:spec_decode_num_accepted_tokens_total": 20}  # fmt: skip
CASE = json.loads((DATA / "cases" / "healthy-vllm.json").read_text())


@reader("diagnose file")
def diagnose_file(folder: Path) -> Made:
    files = jsons(FACTS, SERVED, REPORT, NAMED, CASE, {"metrics": NAMED, "facts": FACTS})
    pages = damaged(*PAGES, pieces=PAGE_PIECES)
    return st.one_of(files, files, pages), in_file(folder, "seen.json", diagnosed)


@reader("diagnose dict")
def diagnose_dict(folder: Path) -> Made:
    return trees(FACTS, SERVED, REPORT, NAMED, CASE), diagnosed


@reader("diagnose facts and thresholds")
def diagnose_facts(folder: Path) -> Made:
    from outrider.ops.diagnose.facts import check_facts, check_thresholds

    def call(case: Any) -> None:
        if isinstance(case, dict):
            for check in (check_facts, check_thresholds):
                try:
                    check(case)
                except ConfigError as error:
                    check_said(str(error))

    return trees({**FACTS, "low_acceptance": 0.5, "high_memory": 0.9}), call


@reader("thresholds file")
def thresholds(folder: Path) -> Made:
    from outrider.cli.diagnose import read_thresholds
    from outrider.ops.diagnose.facts import check_thresholds

    sample = "low_acceptance = 0.5\nhigh_memory = 0.9\n"
    return tomls(sample), in_file(
        folder, "t.toml", lambda file: check_thresholds(read_thresholds(file))
    )


@reader("observe baseline")
def baseline(folder: Path) -> Made:
    from outrider.ops.alerts.exporter import read_baseline

    return jsons(SERVED, REPORT), in_file(folder, "base.json", read_baseline)


@reader("checklist state")
def checklist(folder: Path) -> Made:
    from outrider.ops.diagnose.checklist import markdown, read_state

    point = {"status": "yes", "by": "me", "evidence": "x", "date": "2026-01-01"}
    sample = {
        "checklist": 1,
        "points": {"baseline-load": point, "baseline-goals": {**point, "status": "no"}},
    }
    return jsons(sample), in_file(folder, "list.json", lambda file: markdown(read_state(file)))
