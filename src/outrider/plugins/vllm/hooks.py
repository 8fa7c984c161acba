"""Puts Outrider's functions into vLLM's modules as these are imported."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..common import patching
from ..common.patching import Patch, wrap
from ..common.start import stop
from .surface import SURFACE

STANDARD = "standard"
"""vLLM's one way to verify that changes no distribution, and that Outrider's rule replaces."""


def install() -> None:
    """Change vLLM, or end the process with a sentence where it is not one that was tested."""
    patching.install(SURFACE, PATCHES)


def _arguments(module: ModuleType) -> None:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def create_engine_config(self: Any, *args: Any, **named: Any) -> Any:
            config = original(self, *args, **named)
            check_config(config)
            return config

        return create_engine_config

    wrap(module.EngineArgs, "create_engine_config", wrapper)


def _worker(module: ModuleType) -> None:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def init_device(self: Any) -> Any:
            result = original(self)
            check_config(self.vllm_config)
            check_runner(self.worker)
            return result

        return init_device

    wrap(module.WorkerWrapperBase, "init_device", wrapper)


def _runner(module: ModuleType) -> None:
    from . import v1

    wrap(module.GPUModelRunner, "_sample", v1.sample)
    module.GPUModelRunner._sample.outrider = True


def _rejection_sampler(module: ModuleType) -> None:
    from . import v1

    wrap(module, "apply_sampling_constraints", v1.apply_sampling_constraints)
    wrap(module, "rejection_sample", v1.rejection_sample)


def _proposer(module: ModuleType) -> None:
    from . import v1

    wrap(module.SpecDecodeBaseProposer, "_sample_draft_tokens", v1.sample_draft_tokens)


def _scheduler(module: ModuleType) -> None:
    from . import scheduler

    wrap(module.Scheduler, "__init__", scheduler.scheduler_init)
    wrap(module.Scheduler, "update_from_output", scheduler.update_from_output)


def _input_processor(module: ModuleType) -> None:
    from . import seeds

    wrap(module.InputProcessor, "__init__", seeds.processor_init)
    wrap(module.InputProcessor, "assign_request_id", seeds.assign_request_id)


def _v2_sampler(module: ModuleType) -> None:
    from . import v2

    module.gumbel_sample = v2.gumbel_sample  # type: ignore[attr-defined]
    module.apply_top_k_top_p = v2.apply_top_k_top_p  # type: ignore[attr-defined]
    module.flashinfer_sampler_supported = v2.unsupported  # type: ignore[attr-defined]
    module.xpu_sampler_supported = v2.unsupported  # type: ignore[attr-defined]


def _v2_states(module: ModuleType) -> None:
    from . import v2

    module.apply_top_k_top_p = v2.apply_top_k_top_p  # type: ignore[attr-defined]


def _v2_speculator(module: ModuleType) -> None:
    from . import v2

    module.gumbel_sample = v2.gumbel_sample  # type: ignore[attr-defined]


def _v2_rejection_sampler(module: ModuleType) -> None:
    from . import v2

    module.rejection_sample = v2.rejection_sample  # type: ignore[attr-defined]


def _v2_runner(module: ModuleType) -> None:
    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_model(self: Any, *args: Any, **named: Any) -> Any:
            result = original(self, *args, **named)
            check_samplers(self)
            return result

        return load_model

    wrap(module.GPUModelRunner, "load_model", wrapper)


V2 = "vllm.v1.worker.gpu"
PATCHES: dict[str, Patch] = {
    "vllm.engine.arg_utils": _arguments,
    "vllm.v1.engine.input_processor": _input_processor,
    "vllm.v1.core.sched.scheduler": _scheduler,
    "vllm.v1.worker.worker_base": _worker,
    "vllm.v1.worker.gpu_model_runner": _runner,
    "vllm.v1.sample.rejection_sampler": _rejection_sampler,
    "vllm.v1.spec_decode.llm_base_proposer": _proposer,
    f"{V2}.model_runner": _v2_runner,
    f"{V2}.sample.sampler": _v2_sampler,
    f"{V2}.sample.states": _v2_states,
    f"{V2}.spec_decode.rejection_sampler": _v2_rejection_sampler,
    f"{V2}.spec_decode.speculator": _v2_speculator,
    f"{V2}.spec_decode.dspark.speculator": _v2_speculator,
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
