"""The functions of vLLM that are replaced, that call those, or that we call."""

from ..common.signatures import Surface
from ..common.start import VLLM_VARIABLE

SURFACE = Surface(
    "vLLM",
    "vllm",
    VLLM_VARIABLE,
    (
        "engine/arg_utils.py:EngineArgs.create_engine_config",
        "v1/engine/input_processor.py:InputProcessor.__init__",
        "v1/engine/input_processor.py:InputProcessor.assign_request_id",
        "v1/core/sched/scheduler.py:Scheduler.__init__",
        "v1/core/sched/scheduler.py:Scheduler.update_from_output",
        "v1/worker/worker_base.py:WorkerWrapperBase.init_device",
        "v1/worker/gpu_model_runner.py:GPUModelRunner._sample",
        "v1/sample/sampler.py:Sampler.sample",
        "v1/sample/ops/topk_topp_sampler.py:TopKTopPSampler.forward_native",
        "v1/sample/rejection_sampler.py:RejectionSampler.forward",
        "v1/sample/rejection_sampler.py:apply_sampling_constraints",
        "v1/sample/rejection_sampler.py:rejection_sample",
        "v1/spec_decode/custom_class_proposer.py:create_custom_proposer",
        "v1/spec_decode/llm_base_proposer.py:SpecDecodeBaseProposer._sample_draft_tokens",
        "v1/worker/gpu/model_runner.py:GPUModelRunner.load_model",
        "v1/worker/gpu/sample/sampler.py:Sampler.sample",
        "v1/worker/gpu/sample/gumbel.py:gumbel_sample",
        "v1/worker/gpu/sample/states.py:SamplingStates.apply_top_k_top_p",
        "v1/sample/ops/topk_topp_sampler.py:apply_top_k_top_p",
        "v1/sample/ops/topk_topp_sampler.py:flashinfer_sampler_supported",
        "v1/sample/ops/topk_topp_sampler.py:xpu_sampler_supported",
        "v1/worker/gpu/spec_decode/rejection_sampler_utils.py:rejection_sample",
        "v1/sample/rejection_sampler.py:apply_sampling_constraints()",
        "v1/sample/rejection_sampler.py:rejection_sample()",
        "v1/worker/gpu/sample/sampler.py:gumbel_sample()",
        "v1/worker/gpu/sample/sampler.py:apply_top_k_top_p()",
        "v1/worker/gpu/sample/sampler.py:flashinfer_sampler_supported()",
        "v1/worker/gpu/sample/states.py:apply_top_k_top_p()",
        "v1/worker/gpu/spec_decode/rejection_sampler.py:rejection_sample()",
    ),
)
