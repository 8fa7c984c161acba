"""The exporter: figures of every engine under one schema, and nothing that is not known."""

from __future__ import annotations

import json
import socket
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram, generate_latest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import ConfigError
from outrider.ops.alerts.exporter import Exporter, read_baseline
from outrider.ops.alerts.observed import SHARES
from outrider.ops.metrics import Figures, Page, parse
from tests.support.promql import EXPOSITIONS, needs_promtool
from tests.support.watching import Replay, fake_gpus

P = "outrider_observed_"
SPEC = "vllm:spec_decode_num"


def exported(exporter: Exporter) -> dict[str, float]:
    """What an exporter says, by the sample as a page has it."""
    registry = CollectorRegistry()
    registry.register(exporter)
    text = generate_latest(registry).decode()
    lines = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in lines}


def page(name: str) -> str:
    return (EXPOSITIONS / f"{name}.prom").read_text()


def test_vllm_is_republished() -> None:
    found = exported(Exporter(Replay(page("vllm"))))
    on = '{engine="vllm",model_name="pocket"}'
    assert found[f"{P}up"] == 1
    assert found[f"{P}draft_tokens_total{on}"] == 837
    assert found[f"{P}accepted_tokens_total{on}"] == 450
    assert found[f"{P}requests_total{on}"] == 12
    assert found[f"{P}acceptance{on}"] == 450 / 837
    assert found[f"{P}acceptance_length{on}"] == 1 + 450 / 279
    assert found[f"{P}accepted_throughput{on}"] == 45.0
    by_position = [found[f'{P}accepted_tokens_per_position_total{on[:-1]},position="{i}"}}']
                   for i in range(3)]  # fmt: skip
    assert by_position == [234, 111, 105]
    for latency in ("ttft", "itl", "e2e"):
        start = f"{P}{latency}_seconds{on[:-1]}"
        quantiles = [found[f'{start},percentile="p{100 * share:g}"}}'] for share in SHARES]
        assert 0 < quantiles[0] < quantiles[-1]
    assert not [name for name in found if "speedup" in name or "good" in name or "gpu" in name]
    assert not [name for name in found if not name.startswith(P)]


@pytest.mark.parametrize(
    ("name", "engine", "known", "unknown"),
    [
        ("sglang", "sglang", {"acceptance": 0.6, "acceptance_length": 3.2, "kv_usage": 0.3},
         ["draft_tokens_total", "accepted_throughput", "ttft_seconds"]),
        ("llamacpp", "llamacpp", {"acceptance": 0.6, "acceptance_length": 2.8,
                                   "accepted_throughput": 54.0},
         ["e2e_seconds", "kv_usage", "requests_total"]),
        ("trtllm", "trtllm", {"acceptance": 0.7, "acceptance_length": 2.9,
                                    "kv_usage": 0.5},
         ["e2e_seconds", "itl_seconds", "generation_tokens_total"]),
    ],
)  # fmt: skip
def test_each_engine_tells_what_it_knows(
    name: str, engine: str, known: dict[str, float], unknown: list[str]
) -> None:
    found = exported(Exporter(Replay(page(name))))
    model = "" if engine == "llamacpp" else "m"
    for figure, value in known.items():
        assert found[f'{P}{figure}{{engine="{engine}",model_name="{model}"}}'] == value
    assert not [each for each in found for figure in unknown if each.startswith(P + figure)]


@given(st.lists(st.floats(0.001, 100), min_size=1, max_size=60), st.sampled_from(SHARES))
def test_quantiles_lie_in_the_bucket_of_the_true_ones(times: list[float], share: float) -> None:
    registry = CollectorRegistry()
    histogram = Histogram("x", "", registry=registry)
    for each in times:
        histogram.observe(each)
    found = parse(generate_latest(registry).decode()).quantile("x", share)
    true = sorted(times)[max(0, -int(-share * len(times) // 1) - 1)]
    bounds = [0.0, *Histogram.DEFAULT_BUCKETS[:-1]]
    if true > bounds[-1]:
        assert found == bounds[-1]
    else:
        upper = next(i for i, bound in enumerate(bounds) if true <= bound)
        assert bounds[upper - 1] <= found <= bounds[upper]


def test_an_empty_histogram_has_no_quantile() -> None:
    assert parse('x_bucket{le="1"} 0\nx_bucket{le="+Inf"} 0\n').quantile("x", 0.5) is None
    assert parse('x_bucket{le="+Inf"} 3\n').quantile("x", 0.5) is None
    assert parse('x_bucket{le="?"} 3\n').quantile("x", 0.5) is None


def test_speedup_needs_something_to_compare_with() -> None:
    fast, slow = (Replay(f"llamacpp:tokens_predicted_total 100\n"
                          f"llamacpp:tokens_predicted_seconds_total {seconds}\n")
                  for seconds in (2, 5))  # fmt: skip
    silent = Replay("llamacpp:tokens_predicted_total 0\nllamacpp:requests_processing 0\n")

    def speedups(exporter: Exporter) -> dict[str, float]:
        return {name.split('"')[1]: value for name, value in exported(exporter).items()
                if "speedup" in name}  # fmt: skip

    assert speedups(Exporter(fast)) == {}
    assert speedups(Exporter(fast, slow)) == {"standby": pytest.approx(2.5)}
    assert speedups(Exporter(fast, silent)) == {}
    assert speedups(Exporter(silent, slow, 0.06)) == {}
    both = speedups(Exporter(fast, slow, 0.06))
    assert both == {"standby": pytest.approx(2.5), "baseline": pytest.approx(3.0)}


def test_goodput_is_of_engines_that_judge_each_request() -> None:
    ours = ("outrider_draft_length 4\nvllm:generation_tokens_total 900\n"
            "outrider_good_requests_total 20\noutrider_good_tokens_total 800\n")  # fmt: skip
    found = exported(Exporter(Replay(ours), compatible=True))
    on = '{engine="outrider",model_name=""}'
    assert found[f"{P}goodput{on}"] == 2.0
    assert found[f"vllm_goodput_tokens_per_second{on}"] == 80.0


def test_older_names_are_added_on_request() -> None:
    names = {"vllm_speculative_acceptance_rate", "spec_decode_acceptance_rate",
             "vllm_latency_p50_seconds"}  # fmt: skip
    plain, more = (exported(Exporter(Replay(page("vllm")), compatible=on)) for on in (False, True))
    on = '{engine="vllm",model_name="pocket"}'
    assert more.keys() - plain.keys() == {name + on for name in names}
    assert more["spec_decode_acceptance_rate" + on] == 450 / 837


def test_gauges_of_an_idle_engine_are_not_news() -> None:
    text = page("sglang")
    idle = Replay(text, text)
    for _ in range(6):  # until the window begins after the last token
        idle.see(text)
    assert idle.window.acceptance is None
    assert idle.window.acceptance_length is None


def test_a_restart_begins_a_new_window() -> None:
    def counts(drafted: int, accepted: int) -> str:
        return (f"{SPEC}_drafts_total {drafted}\n{SPEC}_draft_tokens_total {drafted}\n"
                f"{SPEC}_accepted_tokens_total {accepted}\n")  # fmt: skip

    seen = Replay(counts(100, 50), counts(40, 40))
    assert seen.window.acceptance is None
    seen.see(counts(140, 65))
    assert seen.window.acceptance == 0.25


def test_the_window_is_a_minute() -> None:
    pages = [f"{SPEC}_draft_tokens_total {12 * i}\n{SPEC}_accepted_tokens_total {i * i / 2}\n"
             for i in range(1, 12)]  # fmt: skip
    seen = Replay(*pages)  # the last is of second 110, the window began at 50
    assert seen.window.acceptance == pytest.approx((121 - 25) / 72 / 2)
    assert seen.window.rate("drafted") == pytest.approx(1.2)


@given(st.text(max_size=300))
def test_any_page_is_survived(text: str) -> None:
    for seen in (Figures.of(parse(text + "\nvllm:x 1"), Page(()), 1.0),
                 Figures.of(parse("sglang:" + text), parse(text), 1.0)):  # fmt: skip
        assert seen is None or seen.acceptance is None or seen.acceptance <= 1
        assert seen is None or isinstance([seen.survival(), seen.token_seconds], list)


def test_labels_of_nonsense_are_left_out() -> None:
    labels = ("0", "1", "9" * 5000, "-1", "x", "1.5", "1000", "²")
    text = "".join(f'{SPEC}_accepted_tokens_per_pos_total{{position="{i}"}} 3\n' for i in labels)
    seen = Figures.of(parse(text))
    assert seen is not None
    assert seen.positions() == {0: 3.0, 1: 3.0}


@needs_promtool
@pytest.mark.parametrize("name", ["vllm", "sglang", "llamacpp", "trtllm"])
def test_prometheus_reads_what_is_exported(name: str) -> None:
    registry = CollectorRegistry()
    registry.register(Exporter(Replay(page(name)), None, None, fake_gpus, compatible=True))
    done = subprocess.run(["promtool", "check", "metrics"], input=generate_latest(registry),
                          capture_output=True, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def test_baselines_are_recordings_of_one_run(tmp_path: Path) -> None:
    file = tmp_path / "plain.json"
    file.write_text(json.dumps({"mean_tpot_ms": 40.0, "completed": 100}))
    assert read_baseline(file) == 0.04
    vllm = tmp_path / "vllm.prom"
    vllm.write_text(page("vllm"))
    assert read_baseline(vllm) == pytest.approx(0.11393830496610648 / 12)
    file.write_text(json.dumps({"completed": 100}))
    with pytest.raises(ConfigError, match="0 runs with a time per output token"):
        read_baseline(file)


def test_bad_usage_is_one_sentence(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, words in (
            (("http://",), "is not an address"), (("x", "--interval", "3d"), "is not a time from"),
            (("x", "--interval", "0s"), "is not a time from"),
            (("x", "--standby", "ftp://x"), "is not an address"),
            (("x", "--baseline", str(tmp_path / "none.json")), "cannot be read"),
            (("x", "--port", port), "cannot listen on"),
            (("x", "--host", "nowhere.invalid"), "cannot listen on"),
            (("x", "--api-key", "a\nb"), "the API key has characters"),
        ):  # fmt: skip
            done = CliRunner().invoke(app, ["ops", "alerts", "exporter", *options])
            assert done.exit_code == 2, options
            assert words in " ".join(done.stderr.split()), done.stderr
            assert "Traceback" not in done.stderr
