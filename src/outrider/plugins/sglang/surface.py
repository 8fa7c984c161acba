"""The functions of SGLang that are replaced, that call those, or that we call."""

from ..common.signatures import Surface
from ..common.start import SGLANG_VARIABLE

SURFACE = Surface(
    "SGLang",
    "sglang",
    SGLANG_VARIABLE,
    (
        "srt/managers/scheduler.py:Scheduler.__init__",
        "srt/managers/tokenizer_manager.py:TokenizerManager.__init__",
        "srt/sampling/sampling_params.py:SamplingParams.verify",
        "srt/sampling/sampling_batch_info.py:SamplingBatchInfo.from_schedule_batch",
        "srt/layers/sampler.py:create_sampler",
        "srt/layers/sampler.py:Sampler.forward",
        "srt/layers/sampler.py:Sampler._preprocess_logits",
        "srt/layers/sampler.py:Sampler._sample_from_probs",
        "srt/speculative/eagle_utils.py:eagle_sample",
        "srt/speculative/eagle_utils.py:verify_tree_greedy_func",
        "kernels/ops/speculative/spec_tree.py:verify_tree_greedy_func",
        "srt/speculative/eagle_utils.py:verify_tree_greedy_func()",
        "srt/speculative/eagle_worker_common.py:eagle_sample()",
        "srt/speculative/ngram_worker.py:eagle_sample()",
        "srt/model_executor/model_runner.py:create_sampler()",
    ),
)
