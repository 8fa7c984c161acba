"""Puts Outrider's functions into vLLM's modules as these are imported."""

from collections.abc import Callable
from typing import Any

from ..common import patching
from ..common.patching import Patch, changing
from ..common.signatures import Surface
from ..common.start import VLLM_VARIABLE, stop

SURFACE = Surface("vLLM", "vllm", VLLM_VARIABLE)
STANDARD = "standard"  # vLLM's one way to verify that changes no distribution


def install() -> None:
    """Change vLLM, or end the process with a sentence where it is not one that was tested."""
    patching.install(SURFACE, PATCHES)


def _then(check: Callable[[Any, Any], None]) -> Callable[..., Any]:
    """Return a wrapper of methods after which ``check`` sees the object and the result."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **named: Any) -> Any:
            result = original(self, *args, **named)
            check(self, result)
            return result

        return method

    return wrapper


create_engine_config = _then(lambda _, config: check_config(config))
load_model = _then(lambda self, _: check_samplers(self))


def _check_worker(wrapper: Any, _: Any) -> None:
    check_config(wrapper.vllm_config)
    check_runner(wrapper.worker)


init_device = _then(_check_worker)


V2 = "vllm.v1.worker.gpu"
CHANGES = {
    "vllm.engine.arg_utils": {"EngineArgs.create_engine_config": "hooks:create_engine_config"},
    "vllm.v1.engine.input_processor": {
        "InputProcessor.__init__": "seeds:processor_init",
        "InputProcessor.assign_request_id": "seeds:assign_request_id",
    },
    "vllm.v1.core.sched.scheduler": {
        "Scheduler.__init__": "scheduler:scheduler_init",
        "Scheduler.update_from_output": "scheduler:update_from_output",
    },
    "vllm.v1.worker.worker_base": {"WorkerWrapperBase.init_device": "hooks:init_device"},
    "vllm.v1.worker.gpu_model_runner": {"GPUModelRunner._sample": "v1:sample"},
    "vllm.v1.sample.rejection_sampler": {
        "apply_sampling_constraints": "v1:apply_sampling_constraints",
        "rejection_sample": "v1:rejection_sample",
    },
    "vllm.v1.spec_decode.llm_base_proposer": {
        "SpecDecodeBaseProposer._sample_draft_tokens": "v1:sample_draft_tokens",
    },
    f"{V2}.model_runner": {"GPUModelRunner.load_model": "hooks:load_model"},
    f"{V2}.sample.sampler": {
        "gumbel_sample": "=v2:gumbel_sample",
        "apply_top_k_top_p": "=v2:apply_top_k_top_p",
        "flashinfer_sampler_supported": "=v2:unsupported",
        "xpu_sampler_supported": "=v2:unsupported",
    },
    f"{V2}.sample.states": {"apply_top_k_top_p": "=v2:apply_top_k_top_p"},
    f"{V2}.spec_decode.rejection_sampler": {"rejection_sample": "=v2:rejection_sample"},
    f"{V2}.spec_decode.speculator": {"gumbel_sample": "=v2:gumbel_sample"},
    f"{V2}.spec_decode.dspark.speculator": {"gumbel_sample": "=v2:gumbel_sample"},
}
"""By module of vLLM and its function: ours that wraps it, or with = replaces it."""
PATCHES: dict[str, Patch] = {
    name: changing(functions, __package__) for name, functions in CHANGES.items()
}


def check_config(config: Any) -> None:
    """End the process where vLLM's configuration would draw or accept by another rule."""
    speculative = config.speculative_config
    method = getattr(speculative, "rejection_sample_method", STANDARD)
    if speculative is not None and method != STANDARD:
        stop(
            f"rejection_sample_method is {method!r}, which Outrider's rule would replace; "
            f"give {STANDARD!r}, or unset OUTRIDER_VLLM."
        )
    if getattr(config, "watermark_config", None) is not None:
        stop(
            "a watermark draws tokens by another rule than Outrider's; "
            "turn watermarking off, or unset OUTRIDER_VLLM."
        )


def check_runner(worker: Any) -> None:
    """End the process where a worker's runner is not one that was changed."""
    runner = getattr(worker, "model_runner", None)
    if getattr(getattr(type(runner), "_sample", None), "outrider", False):
        return
    if type(runner).__module__ == f"{V2}.model_runner":
        return  # its samplers come with the model: see `check_samplers`
    stop(
        f"{type(runner).__module__}.{type(runner).__qualname__} draws tokens itself, and Outrider "
        "does not know how; use vLLM's own GPU or CPU worker, or unset OUTRIDER_VLLM."
    )


def check_samplers(runner: Any) -> None:
    """End the process where V2's runner has samplers that were not changed, a model's own."""
    for name, home in (("sampler", "sample"), ("rejection_sampler", "spec_decode")):
        sampler = getattr(runner, name, None)
        if sampler is not None and type(sampler).__module__ != f"{V2}.{home}.{name}":
            stop(
                f"this model draws tokens by {type(sampler).__module__}, and Outrider does not "
                "know how; serve it without Outrider's rule: unset OUTRIDER_VLLM."
            )
