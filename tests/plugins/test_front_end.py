"""What the plugin does in vLLM's front end: seeds for requests."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from outrider.plugins.common.draws import seed_of
from outrider.plugins.vllm import seeds


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
