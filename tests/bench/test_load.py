"""The load test's figures against a stub whose schedule is known, and its load shapes."""

from __future__ import annotations

import asyncio
import json
import math
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.stub import Schedule, port_of
from benchmarks.stub import serve as serve_stub
from outrider.base.outside import stamped as client
from outrider.base.outside.stamped import StampedAnswer
from outrider.bench.load import measure, paired
from outrider.bench.load.arrivals import Closed, Open, Trace, check, load_trace
from outrider.bench.load.datasets import load_prompts
from outrider.bench.load.drive import Driver, Load, LoadLimits, warm_up
from outrider.bench.load.figures import LATENCIES, figures, parse_slos, percentile
from outrider.bench.load.measure import LoadOptions, report_of
from outrider.bench.load.page import page
from outrider.bench.load.stream import Record, events, read
from outrider.bench.load.watch import bottleneck
from outrider.bench.workload import Workload
from outrider.cli.common import write_json
from outrider.cli.load import extra, save, shapes, show
from outrider.errors import ConfigError, EndpointError
from outrider.ops.metrics import parse
from outrider.ops.metrics.acceptance import acceptance

DEEP = b"[" * 100_000 + b"]" * 100_000
PROMPTS = Workload.of_prompts("three", ["one", "two", "three"])
RESULTS = {
    "date", "endpoint_type", "backend", "label", "model_id", "tokenizer_id", "num_prompts",
    "request_rate", "burstiness", "max_concurrency", "duration", "completed", "failed",
    "total_input_tokens", "total_output_tokens", "request_throughput", "request_goodput",
    "output_throughput", "total_token_throughput", "max_output_tokens_per_s",
    "max_concurrent_requests",
    *(f"{kind}_{name}_ms" for name in LATENCIES for kind in ("mean", "median", "std", "p99")),
}  # fmt: skip
"""Keys of a file that ``vllm bench serve --save-result`` of vLLM 0.32 writes."""


@asynccontextmanager
async def stub(schedule: Schedule) -> Any:
    server = await serve_stub(schedule)
    try:
        yield f"http://127.0.0.1:{port_of(server)}"
    finally:
        server.close()
        await asyncio.sleep(0.02)  # its connections see their ends


def load(schedule: Schedule, *shapes: Any, **options: Any) -> dict[str, Any]:
    async def main() -> dict[str, Any]:
        async with stub(schedule) as url:
            test = LoadOptions(url, PROMPTS, shapes or (Closed(2),), **{"requests": 6, **options})
            return report_of(await measure._measure(test, lambda *_: None), [test])

    return asyncio.run(main())


def record(times: list[float], tokens: list[float]) -> Record:
    return Record(0.0, 0.0, 0, times, tokens, 8, int(sum(tokens)), end=times[-1])


def test_latencies_are_those_of_the_definitions() -> None:
    # 2 tokens at 1 s, 4 at 3 s, 1 at 3.5 s.
    one = record([1.0, 3.0, 3.5], [2.0, 4.0, 1.0])
    found = figures(Load(0.0, 7.0, [one]), {})
    assert found["median_ttft_ms"] == 1000
    assert found["median_e2el_ms"] == 3500
    assert found["median_tpot_ms"] == pytest.approx(2500 / 6)
    assert found["mean_itl_ms"] == found["median_itl_ms"] == 500
    assert found["mean_chunk_gap_ms"] == 1250
    assert found["output_throughput"] == 1
    assert found["request_throughput"] == pytest.approx(1 / 7)
    assert found["max_output_tokens_per_s"] == 5


def test_itl_counts_each_token_of_a_chunk() -> None:
    found = figures(Load(0.0, 5.0, [record([0.0, 4.0, 5.0], [1.0, 1.0, 3.0])]), {})
    # Gaps by token: 4, 1/3, 1/3, 1/3.
    assert found["mean_itl_ms"] == pytest.approx(1000 * 5 / 4)
    assert found["median_itl_ms"] == pytest.approx(1000 / 3)


def test_one_token_has_no_time_per_token_and_failures_have_no_latency() -> None:
    bad = Record(0.0, 0.0, error="HTTP 500", end=9.0)
    found = figures(Load(0.0, 2.0, [record([1.0], [1.0]), bad]), {})
    assert (found["completed"], found["failed"]) == (1, 1)
    assert found["median_tpot_ms"] is None
    assert found["median_itl_ms"] is None
    assert found["median_e2el_ms"] == 1000


def test_goodput_counts_requests_that_meet_all_limits() -> None:
    fast, late = record([0.1, 0.2], [1.0, 1.0]), record([0.5, 0.6], [1.0, 1.0])
    slow = record([0.1, 0.9], [1.0, 1.0])
    slos = parse_slos(["ttft:200", "tpot:150"])
    found = figures(Load(0.0, 2.0, [fast, late, slow]), slos)
    assert found["request_goodput"] == pytest.approx(1 / 2)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 5)), min_size=1, max_size=20),
    st.floats(0, 100),
)
def test_weighted_percentiles_are_those_of_repeated_values(
    pairs: list[tuple[float, int]], percent: float
) -> None:
    values, weights = np.array(pairs, dtype=float).T
    expected = np.percentile(np.repeat(values, weights.astype(int)), percent)
    assert percentile(values, weights, percent) == pytest.approx(expected, abs=1e-9)


def test_a_real_stream_gives_its_schedule() -> None:
    schedule = Schedule(chunks=5, tokens=3, first=0.05, interval=0.02)
    (run,) = load(schedule, Closed(2), requests=8, detailed=True)["runs"]
    assert (run["completed"], run["failed"], run["total_output_tokens"]) == (8, 0, 8 * 15)
    # A stub can be late, never early.
    assert run["median_ttft_ms"] >= 50
    assert run["median_e2el_ms"] >= 130
    assert min(run["ttfts"]) >= 0.05
    assert run["chunk_tokens"] == [[3.0] * 5] * 8
    assert run["mean_tpot_ms"] * 14 == pytest.approx(run["mean_chunk_gap_ms"] * 4)
    assert run["tokens_per_chunk"] == 3


def test_results_have_the_keys_of_vllm() -> None:
    (run,) = load(Schedule())["runs"]
    assert run.keys() >= RESULTS
    assert json.loads(json.dumps(run)) == run
    assert run["request_rate"] == "inf"


def test_tokens_of_uncounted_chunks_are_shares_and_the_report_says_so() -> None:
    report = load(Schedule(chunks=4, tokens=3, counts=False), detailed=True)
    (run,) = report["runs"]
    assert run["total_output_tokens"] == 6 * 12
    assert run["chunk_tokens"][0] == pytest.approx([3.0] * 4)
    assert any("estimate" in text for text in report["warnings"])


@given(st.integers(1, 7), st.sampled_from(["\n", "\r\n"]))
def test_events_are_found_however_a_stream_is_cut(size: int, end: str) -> None:
    lines = [": hello", "", "data: one", "", "data:two", "data: three", "", "data: [DONE]", "", ""]
    text = end.join(lines).encode()
    pieces = [(float(i), text[i : i + size]) for i in range(0, len(text), size)]
    found = list(events(pieces))
    assert [data for _, data in found] == [b"one", b"two\nthree", b"[DONE]"]
    assert [time for time, _ in found] == sorted(time for time, _ in found)


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([], "without output"),
        ([b"data: {oops\n\n"], "none of OpenAI's"),
        ([b"data: [1]\n\n"], "none of OpenAI's"),
        ([b'data: {"choices": [7]}\n\n'], "none of OpenAI's"),
        ([b'data: {"usage": {"completion_tokens": Infinity}}\n\n'], "none of OpenAI's"),
        ([b'data: {"usage": {"completion_tokens": 1%s}}\n\n' % (b"0" * 400)], "none of OpenAI's"),
        ([b'data: {"usage": {"completion_tokens": -5}}\n\n'], "none of OpenAI's"),
        ([b'data: {"choices": [], "x": ' + DEEP + b"}\n\n"], "none of OpenAI's"),
        ([b'data: {"error": {"message": "a\\ud800b"}}\n\n'], "the stream says: 'a?b'"),
        ([b'data: {"error": {"message": "out of pages"}}\n\n'], "out of pages"),
        ([b"<html>\x1b[31m</html>"], "without output: '<html>?[31m</html>'"),
    ],
)
def test_a_strange_stream_is_one_sentence(pieces: list[bytes], said: str) -> None:
    one = Record(0.0, 0.0)
    read(StampedAnswer(200, [(1.0, piece) for piece in pieces]), one)
    assert said in one.error
    assert "\n" not in one.error


@pytest.mark.parametrize(
    ("schedule", "said"),
    [
        (Schedule(models=b"<html>hello</html>"), "lists no model"),
        (Schedule(models=b'{"data": []}'), "lists no model"),
        (Schedule(models=b'{"data": ' + DEEP + b"}"), "lists no model"),
        (Schedule(status=400, body=DEEP), r"HTTP 400: '\[\["),
        (Schedule(status=404, body=b'{"detail": "Not Found"}'), "HTTP 404: .*Not Found"),
        (Schedule(body=b'{"choices": []}'), "without output"),
        (Schedule(status=401, body=b'{"error": {"message": "wrong key"}}'), "wrong key"),
    ],
)
def test_a_bad_endpoint_is_one_sentence(schedule: Schedule, said: str) -> None:
    with pytest.raises(EndpointError, match=said) as caught:
        load(schedule)
    assert "\n" not in str(caught.value)


def test_a_long_event_in_small_parts_takes_time_by_its_length() -> None:
    text = b"data: " + b"x" * 200_000 + b"\n\n"
    pieces = [(0.0, text[i : i + 1]) for i in range(len(text))]
    assert [len(data) for _, data in events(pieces)] == [200_000]


def test_an_answer_may_be_as_long_as_its_tokens_and_no_longer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "MOST_BYTES", 4096)
    assert load(Schedule(chunks=200), max_tokens=200)["runs"][0]["completed"] == 6
    with pytest.raises(EndpointError, match=r"has more than 0\.00781 MiB"):
        load(Schedule(body=b"x" * 100_000), max_tokens=1)


def test_a_model_of_any_name_leaves_a_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lone surrogate is no UTF-8, and an escape or U+2028 forges lines."""
    name = b'"a\\ud800\\u001b[31m\\u2028[bold]b"'
    report = load(Schedule(models=b'{"data": [{"id": ' + name + b"}]}"))
    assert report["runs"][0]["completed"] == 6
    save(report, str(tmp_path / "page.html"), tmp_path / "runs")
    write_json(report, str(tmp_path / "report.json"))
    show(report, on_stderr=False)
    shown = r"a\ud800\x1b[31m [bold]b"
    assert json.loads((tmp_path / "report.json").read_text())["runs"][0]["model_id"] == shown
    assert shown in capsys.readouterr().out
    assert shown in (tmp_path / "page.html").read_text()
    assert len([*(tmp_path / "runs").iterdir()]) == 1


def test_deep_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    for name, read_file, said in (
        ("a.json", load_prompts, "nested too deeply"),
        ("a.jsonl", load_prompts, "line 1: not JSON .nested too deeply"),
        ("t.jsonl", load_trace, "line 1: give seconds"),
    ):
        (tmp_path / name).write_bytes(DEEP)
        with pytest.raises(ConfigError, match=said):
            read_file(str(tmp_path / name))
    with pytest.raises(ConfigError, match=r"--extra-body .*nested too deeply"):
        extra(DEEP.decode())


def test_nobody_there_is_one_sentence() -> None:
    async def free() -> int:
        server = await serve_stub(Schedule())
        server.close()
        return port_of(server) if server.sockets else 1

    with pytest.raises(EndpointError, match="cannot be reached"):
        measure.measure_load(LoadOptions(f"127.0.0.1:{asyncio.run(free())}", PROMPTS, (Closed(1),)))


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_and_spread_of_their_gamma_law(burstiness: float) -> None:
    times = list(Open(50.0, burstiness).times(seed=1, count=20_000))
    gaps = [after - before for before, after in pairwise(times)]
    assert times == sorted(times)
    assert mean(gaps) == pytest.approx(1 / 50, rel=0.1)
    assert pstdev(gaps) / mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)


def test_a_limit_of_concurrency_alone_is_a_closed_loop_of_that_many() -> None:
    assert shapes(None, None, None, 1.0, None, 4) == (Closed(4),)
    assert shapes(None, None, None, 1.0, None) == (Closed(1),)
    assert shapes("2", None, None, 1.0, None, 4) == (Closed(2),)
    assert shapes(None, "3", None, 1.0, None, 4) == (Open(3.0),)


def test_a_seed_decides_arrivals() -> None:
    shape = Open(5.0)
    assert list(shape.times(3, 50)) == list(shape.times(3, 50)) != list(shape.times(4, 50))


def test_infinite_burstiness_is_even_and_an_infinite_rate_is_at_once() -> None:
    assert list(Open(4.0, math.inf).times(0, 4)) == [0, 0.25, 0.5, 0.75]
    assert list(Open(math.inf).times(0, 3)) == [0, 0, 0]


@pytest.mark.parametrize("exponential", [False, True])
def test_a_ramp_goes_from_its_first_rate_to_its_last(exponential: bool) -> None:
    times = list(Open(1.0, math.inf, 4.0, exponential).times(0, 101))
    gaps = [after - before for before, after in pairwise(times)]
    assert gaps[0] == 1
    assert gaps[50] == pytest.approx(1 / 2 if exponential else 1 / 2.5)
    assert gaps[-1] == pytest.approx(1 / 4, rel=0.05)


@pytest.mark.parametrize(
    "shape",
    [
        Closed(0),
        Closed(1, -1),
        Open(0),
        Open(-1),
        Open(math.nan),
        Open(1, 0),
        Open(1, 1, 0),
        Open(math.inf, 1, 2),
    ],
)
def test_impossible_shapes_are_refused(shape: Any) -> None:
    with pytest.raises(ConfigError):
        check(shape)


def test_a_trace_is_seconds_or_milliseconds(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text('{"timestamp": 3000}\n1\n\n2.5\n')
    assert load_trace(str(file)).due == (0, 1.5, 2)
    file.write_text('1\n"soon"\n')
    with pytest.raises(ConfigError, match="line 2"):
        load_trace(str(file))


def test_a_closed_loop_holds_its_concurrency_and_an_open_one_its_limit() -> None:
    schedule = Schedule(first=0.01)
    runs = load(schedule, Closed(3), Open(math.inf), Trace("t", (0.0,) * 6), requests=6)["runs"]
    assert [run["max_concurrent_requests"] for run in runs] == [3, 6, 6]
    (run,) = load(schedule, Open(math.inf), max_concurrency=2)["runs"]
    assert run["max_concurrent_requests"] == 2
    assert run["p99_send_lag_ms"] >= 10


def test_every_load_asks_the_same_in_the_same_order() -> None:
    schedule = Schedule(keeps_prompts=True)
    load(schedule, Closed(1), Closed(1), requests=6, warm_up=0)
    asked = schedule.prompts[1:]  # the first is the check
    assert asked[:6] == asked[6:]
    assert sorted(asked[:3]) == ["one", "three", "two"]


def test_a_duration_ends_a_load_and_what_runs_is_not_counted() -> None:
    report = load(Schedule(chunks=2, interval=0.05), Closed(2), requests=10_000, seconds=0.4)
    (run,) = report["runs"]
    assert 0 < run["completed"] < 10_000
    assert run["cut"] == 2
    assert run["failed"] == 0
    assert run["duration"] >= 0.4


def test_an_interrupt_keeps_what_was_measured() -> None:
    async def main() -> list[dict[str, Any]]:
        async with stub(Schedule(chunks=2, interval=0.01)) as url:
            test = LoadOptions(url, PROMPTS, (Closed(2), Closed(3)), requests=100_000)
            done = asyncio.Event()
            work = asyncio.create_task(
                measure._measure(test, lambda _, ended, *__: done.set() if ended > 5 else None)
            )
            await done.wait()
            work.cancel()
            return await work

    (run,) = asyncio.run(main())
    assert run["interrupted"]
    assert run["completed"] > 5
    assert run["failed"] == 0


def test_acceptance_is_that_of_the_load_alone() -> None:
    (run,) = load(Schedule(acceptance=(4, 12, 6)), warm_up=3)["runs"]
    assert run["spec_decode_num_drafts"] == 6 * 4
    assert run["spec_decode_acceptance_rate"] == 50
    assert run["spec_decode_acceptance_length"] == 2.5


NAMES = ("vllm:spec_decode_", "llamacpp:spec_decode_")


@pytest.mark.parametrize("prefix", NAMES)
def test_counters_of_engines_are_read(prefix: str) -> None:
    def text(n: int) -> str:
        return "\n".join([
            "# HELP something", f'{prefix}num_drafts_total{{engine="0"}} {n}',
            f'{prefix}num_draft_tokens_total{{engine="0"}} {n}',
            f'{prefix}num_draft_tokens_total{{engine="1"}} {2 * n}',
            f"{prefix}num_accepted_tokens_total {1.5 * n} 1763942400000",
            f'{prefix}num_accepted_tokens_per_pos_total{{engine="0",position="1"}} {0.5 * n}',
            f'{prefix}num_accepted_tokens_per_pos_total{{engine="0",position="0"}} {n}',
            "broken {", f"{prefix}num_drafts_created nan",
        ])  # fmt: skip

    found = acceptance(parse(text(10)), parse(text(30)))
    assert found["spec_decode_acceptance_rate"] == 50
    assert found["spec_decode_acceptance_length"] == 2.5
    assert found["spec_decode_per_position_acceptance_rates"] == [1.0, 0.5]


def test_tensorrt_and_sglang_are_read() -> None:
    start = "trtllm_spec_decode_num"
    after = f"{start}_draft_tokens_total 8\n{start}_accepted_tokens_total 6\n"
    after += "trtllm_spec_decode_acceptance_length 2.2\n"
    found = acceptance(parse(""), parse(after))
    assert found["spec_decode_acceptance_rate"] == 75
    assert found["spec_decode_acceptance_length"] == 2.2
    after = "sglang:spec_accept_length 3.1\nsglang:spec_accept_rate 0.7\n"
    found = acceptance(parse(""), parse(after))
    assert found["spec_decode_acceptance_length"] == 3.1
    assert "gauges" in found["spec_decode_source"]


def test_missing_acceptance_says_why() -> None:
    idle = parse("vllm:spec_decode_num_draft_tokens_total 5")
    for before, after, said in (
        (None, None, "no /metrics"), (parse(""), parse(""), "nothing of speculation"),
        (idle, idle, "NOT ACTIVE"),
        (idle, parse("vllm:spec_decode_num_draft_tokens_total 1"), "restart"),
    ):  # fmt: skip
        found = acceptance(before, after)
        assert said in found["spec_decode_source"]
        assert found.keys() == {"spec_decode_source"}


def test_data_sets(tmp_path: Path) -> None:
    file = tmp_path / "share.json"
    human = {"from": "human", "value": "hello"}
    talks = [[human, {"from": "gpt", "value": "hi"}], [{"from": "gpt", "value": "no"}], []]
    file.write_text(json.dumps([{"conversations": turns} for turns in talks]))
    assert [item.prompt for item in load_prompts(str(file)).items] == ["hello"]
    file.write_text(json.dumps([{"conversations": []}]))
    with pytest.raises(ConfigError, match="no conversation"):
        load_prompts(str(file))
    made = load_prompts("synthetic:7", 1)
    assert {len(item.prompt.split()) for item in made.items} == {7}
    assert made == load_prompts("synthetic:7", 1) != load_prompts("synthetic:7", 2)
    for bad in ("synthetic:0", "synthetic:x", "synthetic:-1"):
        with pytest.raises(ConfigError):
            load_prompts(bad)


def test_synthetic_prompts_warn_loudly() -> None:
    test = LoadOptions("http://x", load_prompts("synthetic"), (Closed(1),))
    (warning,) = report_of([], [test])["warnings"]
    assert "NOTHING" in warning


def test_sides_take_turns_and_have_an_interval() -> None:
    async def main() -> list[dict[str, Any]]:
        slow, fast = Schedule(first=0.08), Schedule(first=0.01)
        async with stub(slow) as one, stub(fast) as two:
            test = LoadOptions(one, PROMPTS, (Closed(1),), requests=3, warm_up=0)
            return await paired._pair(test, two, 6, lambda *_: None)

    runs = asyncio.run(main())
    assert [run["side"] for run in runs] == ["A", "B", "B", "A"] * 3
    found = paired.comparison("concurrency 1", runs, ("A", "B"))
    assert found["median_ttft_ms"]["rounds"] == 6
    low, high = found["median_ttft_ms"]["interval"]
    assert low <= found["median_ttft_ms"]["ratio"] <= high
    assert found["median_ttft_ms"]["ratio"] < 1 < found["output_throughput"]["ratio"]


def test_a_server_without_a_switch_is_refused() -> None:
    async def main() -> None:
        async with stub(Schedule(status=404, body=b"{}")) as url:
            server = measure.LoadedServer(LoadOptions(url, PROMPTS, (Closed(1),)))
            try:
                await paired.switch(server, False)
            finally:
                await server.client.close()

    with pytest.raises(EndpointError, match="cannot switch"):
        asyncio.run(main())


def run_of(size: int, tpot: float, machine: dict[str, Any]) -> dict[str, Any]:
    return {
        "max_concurrent_requests": size, "median_tpot_ms": tpot, "output_throughput": size / tpot,
        "label": f"concurrency {size}", "machine": machine,
    }  # fmt: skip


def test_the_limit_follows_from_the_figures() -> None:
    busy: dict[str, Any] = {"cpu_percent": {"mean": 97.0}}

    def limit(*runs: dict[str, Any]) -> str:
        return bottleneck(list(runs))["points_to"]

    assert limit(run_of(1, 10, busy), run_of(8, 11, busy)) == "memory bandwidth"
    assert limit(run_of(1, 10, busy), run_of(8, 80, busy)) == "compute"
    assert limit(run_of(1, 10, busy)) == "unclear"
    assert limit(run_of(1, 10, {"cpu_percent": {"mean": 20.0}})) == "host"
    gpu = {"gpu_percent": {"mean": 99.0}, "gpu_memory_percent": {"mean": 70.0}}
    assert limit(run_of(1, 10, gpu)) == "memory bandwidth"
    assert limit(run_of(1, 10, gpu | {"gpu_percent": {"mean": 20.0}})) == "host"


def test_the_page_needs_nothing_else() -> None:
    report = load(Schedule(), Closed(1), Closed(2))
    report["runs"][0]["model_id"] = "<script>"
    text = page(report)
    assert "<svg" in text
    assert "<script" not in text
    assert "http" not in text.replace(report["runs"][0]["endpoint"], "")
    assert all(f"<dt>{name}</dt>" in text for name in report["definitions"])


def test_bad_options_are_refused() -> None:
    good = LoadOptions("http://x", PROMPTS, (Closed(1),))
    for change in (
        {"requests": 0}, {"seconds": 0.0}, {"seconds": math.nan}, {"timeout": -1.0},
        {"max_concurrency": 0}, {"warm_up": -1}, {"max_tokens": 0}, {"shapes": (Closed(0),)},
    ):  # fmt: skip
        with pytest.raises(ConfigError):
            replace(good, **change)
    for text in ("ttft", "ttft:x", "speed:3", "ttft:-1", "ttft:nan"):
        with pytest.raises(ConfigError, match="milliseconds"):
            parse_slos([text])


def test_an_interrupt_ends_the_warm_up_and_what_would_follow() -> None:
    class Endless:
        async def send(self, body: bytes) -> StampedAnswer:
            await asyncio.sleep(60)
            raise AssertionError

    async def interrupted() -> None:
        client: Any = Endless()
        driver = Driver(client, [b""], LoadLimits(1), lambda *_: None)
        warming = asyncio.create_task(warm_up(driver, 1, 1))
        await asyncio.sleep(0.01)
        warming.cancel()
        with pytest.raises(asyncio.CancelledError):
            await warming

    asyncio.run(interrupted())
