"""OpenVINO GenAI: its pipeline with a draft model or prompt lookup."""

import numpy as np
import openvino
import openvino_genai

from .serve import Ids, Spec, serve

CACHE_GB = 1
NGRAM = 3


class OpenVino:
    """One pipeline."""

    version = openvino_genai.__version__

    def __init__(self, spec: Spec) -> None:
        self.mode = spec["mode"]
        settings: Spec = {
            "INFERENCE_NUM_THREADS": spec["threads"],
            "INFERENCE_PRECISION_HINT": "bf16",
        }
        if spec["dtype"] == "float32":  # the default keeps keys and values in 8 bits
            settings |= {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        extra: Spec = {}
        if self.mode == "draft":
            extra["draft_model"] = openvino_genai.draft_model(spec["drafter"], "CPU", **settings)
        elif self.mode == "ngram":
            extra["prompt_lookup"] = True
        self.pipeline = openvino_genai.LLMPipeline(
            spec["target"], "CPU", scheduler_config=scheduler, **extra, **settings
        )

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = options["temperature"] > 0
        if config.do_sample:
            config.temperature = options["temperature"]
            config.rng_seed = options["seed"]
        if self.mode != "plain":
            config.num_assistant_tokens = options["k"]
        if self.mode == "ngram":
            config.max_ngram_size = NGRAM
        ids = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        return [[int(i) for i in row] for row in self.pipeline.generate(inputs, config).tokens]


if __name__ == "__main__":
    serve(OpenVino)
