"""Seeds for requests that come without one, where vLLM's front end takes them in."""

from collections.abc import Callable
from typing import Any

from ..common.draws import seed_of

engine_seed = 0  # the engine's ``--seed``, as of the last input processor that was made


def processor_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``InputProcessor.__init__`` that keeps the engine's seed."""

    def __init__(self: Any, vllm_config: Any, *args: Any, **named: Any) -> None:
        global engine_seed
        engine_seed = vllm_config.model_config.seed
        original(self, vllm_config, *args, **named)

    return __init__


def assign_request_id(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``InputProcessor.assign_request_id`` that gives a seed where there is none."""

    def assign_request_id(request: Any) -> None:
        original(request)
        params = request.sampling_params
        if params is not None and params.seed is None:
            params.seed = seed_of(request.external_req_id, None, engine_seed)

    return staticmethod(assign_request_id)
