"""What the plugin does in vLLM's front end: seeds for requests, and figures on ``/metrics``."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from outrider.plugins.common.draws import seed_of
from outrider.plugins.vllm import seeds, stats


def request_of(name: str, seed: int | None) -> Any:
    return SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(seed=seed))


def test_requests_without_a_seed_get_one_from_the_id_that_the_client_knows() -> None:
    calls = []

    def original(request: Any) -> None:
        calls.append(request)
        request.external_req_id = request.request_id
        request.request_id += "-random"

    seeds.processor_init(lambda self, config, **named: None)(
        None, SimpleNamespace(model_config=SimpleNamespace(seed=9)), renderer=None
    )
    wrapped: Any = seeds.assign_request_id(original)
    assign = wrapped.__func__
    made = []
    for name, seed in (("cmpl-1", None), ("cmpl-1", None), ("cmpl-2", None), ("cmpl-1", 5)):
        made.append(request_of(name, seed))
        assign(made[-1])
    drawn = [each.sampling_params.seed for each in made]
    assert drawn[0] == drawn[1] == seed_of("cmpl-1", None, 9)
    assert drawn[2] not in drawn[:2]
    assert drawn[3] == 5
    pooling = SimpleNamespace(request_id="a", sampling_params=None)
    assign(pooling)
    assert len(calls) == 5


def test_vllm_s_own_page_has_what_the_exporter_would_tell(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    registry = CollectorRegistry()
    labels, model = ("model_name", "engine"), ("tiny", "0")
    names = {
        name: Counter(f"vllm:{name}", "As vLLM counts.", labels, registry=registry)
        for name in (
            "spec_decode_num_drafts", "spec_decode_num_draft_tokens",
            "spec_decode_num_accepted_tokens", "generation_tokens",
        )
    }  # fmt: skip
    Gauge("vllm:num_requests_running", "Now.", labels, registry=registry).labels(*model).set(2)
    observed = stats.Observed(registry, "unnamed")
    registry.register(observed)
    clock = iter((100.0, 110.0, 120.0))
    monkeypatch.setattr("outrider.plugins.vllm.stats.time.monotonic", lambda: next(clock))
    for name in names.values():
        name.labels(*model).inc(0)
    observed.look()
    for name, count in zip(names.values(), (10, 40, 30, 45), strict=True):
        name.labels(*model).inc(count)
    page = generate_latest(registry).decode()
    for line in (
        "draft_tokens_total", "accepted_tokens_total", "drafts_total", "generation_tokens_total",
    ):  # fmt: skip
        assert f'outrider_observed_{line}{{engine="vllm",model_name="tiny"}}' in page
    for line, value in (
        ("acceptance", 0.75), ("acceptance_length", 4.0), ("requests_running", 2.0),
        ("drafted_throughput", 4.0), ("accepted_throughput", 3.0),
    ):  # fmt: skip
        assert f'outrider_observed_{line}{{engine="vllm",model_name="tiny"}} {value}' in page
    assert "vllm:spec_decode_num_drafts_total" in page


def test_a_page_without_vllm_s_metrics_gets_none() -> None:
    registry = CollectorRegistry()
    registry.register(stats.Observed(registry, "unnamed"))
    assert b"outrider_observed" not in generate_latest(registry)


def test_the_stat_logger_joins_those_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    class StatLoggerBase: ...

    looks = []
    observed = SimpleNamespace(look=lambda: looks.append(1))
    monkeypatch.setattr(stats, "observe", lambda model: observed)
    seen: list[Any] = []

    def original(
        self: Any, vllm_config: Any, engine_idxs: Any = None, custom_stat_loggers: Any = None,
        enable_default_loggers: bool = True,
    ) -> None:  # fmt: skip
        seen.append((engine_idxs, custom_stat_loggers, enable_default_loggers))

    made = stats.manager_init(StatLoggerBase)(original)
    config = SimpleNamespace(model_config=SimpleNamespace(served_model_name="tiny"))
    made(None, vllm_config=config, engine_idxs=[0], custom_stat_loggers=["theirs"])
    made(None, config, None, None, enable_default_loggers=False)
    ((first, (theirs, ours), default), (second, (alone,), last)) = seen
    assert (first, second, theirs, default, last) == ([0], None, "theirs", True, False)
    assert ours is not None
    for kind in (ours, alone):
        assert issubclass(kind, StatLoggerBase)
        logger = kind(config, 0)
        logger.record(None, None, mm_cache_stats=None, engine_idx=0)
        logger.log_engine_initialized()
        logger.log()
    assert len(looks) == 2
