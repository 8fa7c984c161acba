"""Alert rules: each fires on its case, and is silent when all is well, idle, new, or unknown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner, Result

from outrider.cli import app
from outrider.ops.alerts.rules import groups, render, source
from outrider.ops.planning import Situation, advise
from tests.support import REPOSITORY
from tests.support.alerts_section import alerts_section
from tests.support.promql import check, needs_promtool, promtool, series

DOCS = REPOSITORY / "docs" / "monitoring.md"
ON = 'job="llm",instance="a:1",model_name="m"'
SPEC = "vllm:spec_decode_num"
E2E = "vllm:e2e_request_latency_seconds"
OUTRIDER = {
    f"vllm:generation_tokens_total{{{ON}}}": "0+6000x60",
    f"{SPEC}_draft_tokens_total{{{ON}}}": "0+4000x60",
    f"{SPEC}_accepted_tokens_total{{{ON}}}": "0+2800x60",
    f'outrider_speedup{{{ON},drafter="model",speedup_promised="yes"}}': "2x60",
    f"outrider_draft_length{{{ON}}}": "4x60",
    f'{E2E}_bucket{{{ON},le="1"}}': "0+60x60",
    f'{E2E}_bucket{{{ON},le="4"}}': "0+60x60",
    f'{E2E}_bucket{{{ON},le="8"}}': "0+60x60",
    f'{E2E}_bucket{{{ON},le="+Inf"}}': "0+60x60",
    f"{E2E}_count{{{ON}}}": "0+60x60",
    f'vllm:request_success_total{{{ON},finished_reason="stop"}}': "0+60x60",
    f'outrider_request_errors_total{{{ON},code="500"}}': "0x60",
    f'outrider_request_errors_total{{{ON},code="400"}}': "0+600x60",
    f"vllm:kv_cache_usage_perc{{{ON}}}": "0.6x60",
    f"vllm:num_requests_running{{{ON}}}": "4x60",
    'outrider_guard_alert{job="guard",instance="g:1",alert="no_data"}': "0x60",
    'outrider_guard_standby_warm{job="guard",instance="g:1"}': "1x60",
    'outrider_guard_leader{job="guard",instance="g:1"}': "1x60",
}
"""A healthy server: a sample a minute for an hour."""
(TOKENS, DRAFTED, ACCEPTED, SPEEDUP, LENGTH, FAST, SLOW, SLOWEST, ALL, COUNT, DONE, FAILED, _, KV,
 RUNNING, GUARD, WARM, LEADS) = OUTRIDER  # fmt: skip
VLLM = {
    name: values for name, values in OUTRIDER.items()
    if name.startswith("vllm:")
} | {
    'http_requests_total{job="llm",instance="a:1",handler="/v1/completions",status="2xx"}':
        "0+60x60",
    'http_requests_total{job="llm",instance="a:1",handler="/v1/completions",status="5xx"}': "0x60",
    'http_requests_total{job="llm",instance="a:1",handler="/health",status="5xx"}': "0+60x60",
}  # fmt: skip
BROKEN = list(VLLM)[-2]
AT = 'job="exporter",instance="x:1",model_name="m"'


def observed(engine: str) -> dict[str, str]:
    """What an exporter of another engine says."""
    on = f'{AT},engine="{engine}"'
    return {
        f"outrider_observed_generation_tokens_total{{{on}}}": "0+6000x60",
        f"outrider_observed_draft_tokens_total{{{on}}}": "0+4000x60",
        f"outrider_observed_accepted_tokens_total{{{on}}}": "0+2800x60",
        f"outrider_observed_requests_total{{{on}}}": "0+60x60",
        f'outrider_observed_speedup{{{on},against="standby",speedup_promised="yes"}}': "1.8x60",
        f'outrider_observed_e2e_seconds{{{on},percentile="p99"}}': "0.9x60",
        f"outrider_observed_kv_usage{{{on}}}": "0.6x60",
        f"outrider_observed_standby_up{{{AT}}}": "1x60",
    }


OTHER = observed("llamacpp")
(O_TOKENS, O_DRAFTED, O_ACCEPTED, O_REQUESTS, O_SPEEDUP, O_P99, O_KV, O_STANDBY) = OTHER
SGLANG = {
    name: values for name, values in observed("sglang").items()
    if "draft_tokens" not in name and "accepted" not in name
} | {f'outrider_observed_acceptance{{{AT},engine="sglang"}}': "0.7x60"}  # fmt: skip
S_ACCEPTANCE = list(SGLANG)[-1]
S_SPEEDUP = next(name for name in SGLANG if "speedup" in name)

LOW, EVEN, LOOP, SLOWER, LATE, ERRORS, FULL, GPU, NONE, COLD, HINDERED, GONE = (
    f"Outrider{name}" for name in (
        "AcceptanceLow", "AcceptanceBelowBreakEven", "AcceptanceNearOne", "SpeedupBelowPromise",
        "LatencyHigh", "ErrorsHigh", "MemoryHigh", "GpuMemoryHigh", "NoDrafts",
        "StandbyNotWarm", "GuardHindered", "GuardGone",
    )
)  # fmt: skip
WARN, BOTH = {"warning"}, {"warning", "critical"}
IDLE = {name: f"{6000}x60" for name in OUTRIDER if "_total" in name or "_bucket" in name}


def restarted(values: str) -> str:
    """Counters that begin again at 0 after a quarter of an hour."""
    step = values.removeprefix("0+").removesuffix("x60")
    return f"0+{step}x14 {values}" if values.startswith("0+") else values


def gpu(used: str) -> dict[str, str]:
    """What an exporter beside the engine says of its GPUs, of 1e11 bytes each."""
    on = 'job="exporter",instance="x:1",gpu_name="H100"'
    return {
        f'outrider_observed_gpu_memory_used_bytes{{{on},gpu="0"}}': "0.5e11x60",
        f'outrider_observed_gpu_memory_total_bytes{{{on},gpu="0"}}': "1e11x60",
        f'outrider_observed_gpu_memory_used_bytes{{{on},gpu="1"}}': f"{used}x60",
        f'outrider_observed_gpu_memory_total_bytes{{{on},gpu="1"}}': "1e11x60",
    }


def dcgm(used: int, pod: str | None = None) -> dict[str, str]:
    """What NVIDIA's exporter says of a GPU, in MiB of 100; the pod is that which has the GPU."""
    on = 'job="dcgm",instance="d:9400",gpu="0",UUID="GPU-1",modelName="H100"'
    on += f',pod="dcgm-1",exported_pod="{pod}",exported_namespace="n"' if pod else ""
    return {
        f"DCGM_FI_DEV_FB_USED{{{on}}}": f"{used}x60",
        f"DCGM_FI_DEV_FB_FREE{{{on}}}": f"{100 - used}x60",
    }


def pods(values: dict[str, str], pod: str) -> dict[str, str]:
    """Series as those of a pod."""
    return {name.replace("{", f'{{namespace="n",pod="{pod}",'): each
            for name, each in values.items()}  # fmt: skip


Case = tuple[dict[str, str], dict[str, str], dict[str, set[str]]]
CASES: dict[str, Case] = {
    # name: (series, other values of some, alerts with their severities)
    "healthy": (OUTRIDER, {}, {}),
    "healthy vLLM": (VLLM, {}, {}),
    "healthy llama.cpp": (OTHER, {}, {}),
    "healthy SGLang": (SGLANG, {}, {}),
    "no data": ({}, {}, {}),
    "idle": (
        OUTRIDER,
        {**IDLE, COUNT: "60x60", SPEEDUP: "0.5x60", KV: "0x60", RUNNING: "0x60"}, {},
    ),
    "idle from the start": (
        OUTRIDER, {name: "0x60" for name in OUTRIDER if name not in (WARM, LEADS)}, {},
    ),
    "restarted": (OUTRIDER, {name: restarted(each) for name, each in OUTRIDER.items()}, {}),
    "just started, all bad": (
        OUTRIDER,
        {name: f"_x22 {values}" for name, values in OUTRIDER.items()}
        | {ACCEPTED: "_x22 0+100x60", SPEEDUP: "_x22 0.5x60", FAST: "_x22 0x60", KV: "_x22 1x60"},
        {},
    ),
    "gone": (OUTRIDER, dict.fromkeys(OUTRIDER, "1x12"), {GONE: WARN}),
    "engine gone": (OUTRIDER, {n: "1x12" for n in OUTRIDER if "guard" not in n}, {}),
    "low, but faster": (OUTRIDER, {ACCEPTED: "0+1600x60"}, {}),
    "low": (OUTRIDER, {ACCEPTED: "0+2120x60", SPEEDUP: "0.9x60"}, {LOW: WARN, SLOWER: WARN}),
    "very low": (OUTRIDER, {ACCEPTED: "0+1600x60", SPEEDUP: "0.9x60"}, {LOW: BOTH, SLOWER: WARN}),
    "low, hardly anything drafted": (
        OUTRIDER,
        {DRAFTED: "0+200x60", ACCEPTED: "0+20x60", SPEEDUP: "0.9x60"}, {SLOWER: WARN},
    ),
    "low on vLLM, speedup unknown": (VLLM, {ACCEPTED: "0+1600x60"}, {LOW: BOTH}),
    "a little low on vLLM": (VLLM, {ACCEPTED: "0+2120x60"}, {LOW: WARN}),
    "hardly anything drafted on vLLM": (VLLM, {DRAFTED: "0+200x60", ACCEPTED: "0+20x60"}, {}),
    "low on vLLM, an exporter knows better": (
        VLLM | {f'outrider_observed_speedup{{{AT},engine="vllm"}}': "1.8x60"},
        {ACCEPTED: "0+1600x60"}, {},
    ),
    "low on vLLM, an exporter knows worse": (
        VLLM | {f'outrider_observed_speedup{{{AT},engine="vllm"}}': "0.8x60"},
        {ACCEPTED: "0+1600x60"}, {LOW: BOTH},
    ),
    "low on SGLang, speedup unknown": (
        {name: values for name, values in SGLANG.items() if name != S_SPEEDUP},
        {S_ACCEPTANCE: "0.52x60"}, {LOW: WARN},
    ),
    "low, by an exporter": (
        OTHER, {O_ACCEPTED: "0+1600x60", O_SPEEDUP: "0.9x60"}, {LOW: BOTH, SLOWER: WARN},
    ),
    "low on SGLang": (
        SGLANG, {S_ACCEPTANCE: "0.4x60", S_SPEEDUP: "0.9x60"}, {LOW: BOTH, SLOWER: WARN},
    ),
    "loop": (OUTRIDER, {ACCEPTED: "0+3990x60"}, {LOOP: WARN}),
    "less than promised": (OUTRIDER, {SPEEDUP: "1.4x60"}, {SLOWER: WARN}),
    "nothing promised": (
        {name.replace(',speedup_promised="yes"', ""): each for name, each in OUTRIDER.items()},
        {SPEEDUP.replace(',speedup_promised="yes"', ""): "1.4x60"}, {},
    ),
    "late": (OUTRIDER, {FAST: "0+6x60"}, {LATE: WARN}),
    "very late": (OUTRIDER, {FAST: "0+6x60", SLOW: "0+6x60"}, {LATE: BOTH}),
    "late, of few requests": (
        OUTRIDER,
        {FAST: "0x60", SLOW: "0x60", SLOWEST: "0+1x60", ALL: "0+1x60", COUNT: "0+1x60"}, {},
    ),
    "late, by an exporter": (OTHER, {O_P99: "6x60"}, {LATE: BOTH}),
    "late, by an exporter that is idle": (OTHER, {O_P99: "6x60", O_REQUESTS: "9x60"}, {}),
    "errors": (OUTRIDER, {FAILED: "0+2x60"}, {ERRORS: WARN}),
    "many errors": (OUTRIDER, {FAILED: "0+6x60"}, {ERRORS: BOTH}),
    "nothing but errors": (OUTRIDER, {FAILED: "0+60x60", DONE: "0x60"}, {ERRORS: BOTH}),
    "errors, of few requests": (OUTRIDER, {FAILED: "0+0.2x60", DONE: "0+0.4x60"}, {}),
    "errors of vLLM": (VLLM, {BROKEN: "0+6x60"}, {ERRORS: BOTH}),
    "memory": (OUTRIDER, {KV: "0.95x60"}, {FULL: WARN}),
    "no memory": (OUTRIDER, {KV: "0.98x60"}, {FULL: BOTH}),
    "no memory, by an exporter": (OTHER, {O_KV: "0.98x60"}, {FULL: BOTH}),
    "GPU memory": (OTHER | gpu("0.95e11"), {}, {GPU: WARN}),
    "no GPU memory": (VLLM | gpu("0.98e11"), {}, {GPU: BOTH}),
    "GPU memory is there": (OTHER | gpu("0.9e11"), {}, {}),
    "GPU memory by DCGM": (VLLM | dcgm(96), {}, {GPU: WARN}),
    "GPU memory of another's pod, by DCGM": (pods(VLLM, "mine") | dcgm(99, "other"), {}, {}),
    "GPU memory of its pod, by DCGM": (pods(VLLM, "mine") | dcgm(99, "mine"), {}, {GPU: BOTH}),
    "full for a moment": (OUTRIDER, {KV: "0.6x20 0.99x40"}, {}),
    "no drafts": (OUTRIDER, {DRAFTED: "0x60", ACCEPTED: "0x60"}, {NONE: WARN}),
    "no drafts by choice": (
        OUTRIDER, {DRAFTED: "0x60", ACCEPTED: "0x60", LENGTH: "0x60"}, {},
    ),
    "no drafts on vLLM": (VLLM, {DRAFTED: "0x60", ACCEPTED: "0x60"}, {NONE: WARN}),
    "vLLM without speculation": (
        {name: values for name, values in VLLM.items() if SPEC not in name}, {}, {},
    ),
    "never a draft, by an exporter": (OTHER, {O_DRAFTED: "0x60", O_ACCEPTED: "0x60"}, {}),
    "no drafts, by an exporter": (OTHER, {O_DRAFTED: "9x60", O_ACCEPTED: "9x60"}, {NONE: WARN}),
    "guard without data": (OUTRIDER, {GUARD: "1x60"}, {HINDERED: WARN}),
    "guard gone": (OUTRIDER, {LEADS: "1x18 stale"}, {GONE: WARN}),
    "guard gone a moment ago": (OUTRIDER, {LEADS: "1x22 stale"}, {}),
    "guard started again": (OUTRIDER, {LEADS: "1x18 stale _x1 1x40"}, {}),
    "guard replaced by another": (
        OUTRIDER | {LEADS.replace("g:1", "g:2"): "_x19 1x40"}, {LEADS: "1x18 stale"}, {},
    ),
    "no guard leads": (OUTRIDER, {LEADS: "0x60"}, {GONE: WARN}),
    "one of two guards leads": (
        OUTRIDER | {LEADS.replace("g:1", "g:2"): "0x60"}, {}, {},
    ),
    "standby cold": (OUTRIDER, {WARM: "0x60"}, {COLD: WARN}),
    "standby down, by an exporter": (OTHER, {O_STANDBY: "0x60"}, {COLD: WARN}),
}  # fmt: skip
EVEN_CASES: dict[str, Case] = {
    "above break-even": (OUTRIDER, {}, {}),
    "low, but above break-even": (OUTRIDER, {ACCEPTED: "0+2120x60", SPEEDUP: "1.6x60"}, {}),
    "below break-even": (VLLM, {ACCEPTED: "0+1600x60"}, {EVEN: WARN, LOW: BOTH}),
    "above break-even, speedup unknown": (VLLM, {ACCEPTED: "0+1900x60"}, {LOW: BOTH}),
}


def firing(values: dict[str, str], expected: dict[str, set[str]]) -> dict[str, Any]:
    """promtool's test that these alerts fire after 24 minutes, and no others."""
    return {
        "input_series": series(values),
        "promql_expr_test": [{
            "expr": 'count by (alertname, severity) (ALERTS{alertstate="firing"})',
            "eval_time": "24m",
            "exp_samples": [
                {"labels": f'{{alertname="{name}", severity="{severity}"}}', "value": 1}
                for name, severities in expected.items() for severity in severities
            ],
        }],
    }  # fmt: skip


@needs_promtool
@pytest.mark.parametrize(
    ("cases", "break_even"), [(CASES, None), (EVEN_CASES, 0.45)], ids=["usual", "break-even"]
)
def test_alerts_fire_on_their_case_only(
    cases: dict[str, Case], break_even: float | None, tmp_path: Path
) -> None:
    """All cases in one process, which names those that fail."""
    assert all(others.keys() <= values.keys() for values, others, _ in cases.values())
    rules = render("prometheus", break_even=break_even)
    check(tmp_path, rules, [
        {"name": name, **firing({**values, **others}, expected)}
        for name, (values, others, expected) in cases.items()
    ])  # fmt: skip


def test_every_alert_has_a_case_that_fires() -> None:
    fired = {(name, severity) for _, _, expected in (*CASES.values(), *EVEN_CASES.values())
             for name, severities in expected.items() for severity in severities}  # fmt: skip
    assert fired == {
        (alert["name"], severity) for alert in source()["alert"] for severity in alert["severities"]
    }


@needs_promtool
def test_ttft_can_be_watched_instead(tmp_path: Path) -> None:
    slow = {name.replace(E2E, "vllm:time_to_first_token_seconds"): values
            for name, values in {**OUTRIDER, FAST: "0+6x60"}.items()}  # fmt: skip
    check(tmp_path, render("prometheus", "ttft"), [firing(slow, {LATE: WARN})])
    check(tmp_path, render("prometheus", "e2e"), [firing(slow, {})])


@needs_promtool
def test_summaries_are_filled_in(tmp_path: Path) -> None:
    [rule] = [rule for rule in groups()[0]["rules"] if rule.get("alert") == FULL
              and rule["labels"] == {"severity": "critical"}]  # fmt: skip
    check(tmp_path, render("prometheus"), [{
        "input_series": series({**OUTRIDER, KV: "0.98x60"}),
        "alert_rule_test": [{
            "alertname": FULL, "eval_time": "24m",
            "exp_alerts": [{
                "exp_labels": {"severity": severity, "job": "llm", "instance": "a:1",
                               "model_name": "m"},
                "exp_annotations": {**rule["annotations"],
                                    "summary": "a:1 uses 98% of its KV cache."},
            } for severity in BOTH],
        }],
    }])  # fmt: skip


def outrider(*args: object) -> Result:
    return CliRunner().invoke(app, ["ops", "alerts", "rules", *map(str, args)])


@needs_promtool
@pytest.mark.parametrize("options", [(), ("--latency", "ttft"), ("--set", "latency_warning=0.5")])
def test_rules_pass_the_check(options: tuple[str, ...], tmp_path: Path) -> None:
    file = tmp_path / "rules.yaml"
    file.write_text(outrider(*options).stdout)
    done = promtool("check", "rules", "--lint-fatal", file)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_manifest_has_the_same_rules() -> None:
    plain = yaml.safe_load(outrider().stdout)
    manifest = yaml.safe_load(outrider("--format", "kubernetes").stdout)
    assert manifest["kind"] == "PrometheusRule"
    assert manifest["spec"] == plain


def test_thresholds_and_advice_reach_the_rules(tmp_path: Path) -> None:
    advice = advise(Situation("llama-3.1-8b", "eagle3", "h100"))
    even = advice.break_even.value
    file = tmp_path / "advice.json"
    file.write_text(json.dumps(advice.to_json()))
    done = outrider("--advice", file, "--set", "memory_critical=0.96")
    text = done.stdout
    assert f"outrider:acceptance:ratio5m < {even:.4g}" in text
    assert "outrider:kv_usage > 0.96" in text
    limits = [rule["expr"].split()[2] for rule in yaml.safe_load(text)["groups"][0]["rules"]
              if rule.get("alert") == LOW]  # fmt: skip
    assert limits == ["0.55", "0.5"]
    assert "OutriderAcceptanceLow still fires below 0.55 and 0.5" in done.stderr
    assert outrider().stderr == ""


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "cannot be read as JSON"), ("[1]", "not an advice"), ("{}", "not an advice"),
        ('{"break_even": {"value": "x"}}', "not an advice"),
    ],
)  # fmt: skip
def test_bad_advice_is_one_sentence(content: str, words: str, tmp_path: Path) -> None:
    file = tmp_path / "advice.json"
    file.write_text(content)
    done = outrider("--advice", file)
    assert done.exit_code == 2
    assert done.stderr.startswith("error: ")
    assert words in done.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--set", "memory=1"), "did you mean 'memory_"),
        (("--set", "memory_critical=x"), "give a number"),
        (("--set", "acceptance_warning=55"), "a share from 0 to 1"),
        (("--set", "memory_critical"), "give NAME=VALUE"), (("--format", "x"), "prometheus or"),
        (("--latency", "itl"), "e2e or ttft"), (("--advice", "none.json"), "cannot be read"),
    ],
)  # fmt: skip
def test_bad_options_are_refused(options: tuple[str, ...], words: str) -> None:
    done = outrider(*options)
    assert done.exit_code == 2
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def test_the_docs_have_every_alert() -> None:
    assert "\n".join(alerts_section()) in DOCS.read_text(encoding="utf-8")
