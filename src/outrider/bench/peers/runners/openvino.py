"""OpenVINO GenAI: its pipeline with a draft model or prompt lookup."""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino
import openvino_genai

from .serve import Ids, Runner, Spec, serve

CACHE_GB = 1
NGRAM = 3


class OpenVino:
    """A pipeline; another thread count is another pipeline."""

    version = openvino_genai.__version__

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.pipeline: Any = None
        self.threads = 0
        self.k = 0

    def prepare(self, k: int, threads: int) -> None:
        self.k = k
        if threads == self.threads:
            return
        full = self.spec["dtype"] == "float32"
        given: Spec = {
            "INFERENCE_NUM_THREADS": threads,
            "INFERENCE_PRECISION_HINT": "f32" if full else "bf16",
        }
        if full:
            given["KV_CACHE_PRECISION"] = "f32"  # the default keeps keys and values in 8 bits
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.enable_prefix_caching = False
        extra: Spec = {}
        if self.spec["mode"] == "draft":
            extra["draft_model"] = openvino_genai.draft_model(self.spec["drafter"], "CPU", **given)
        elif self.spec["mode"] == "ngram":
            extra["prompt_lookup"] = True
        self.pipeline = None
        self.pipeline = openvino_genai.LLMPipeline(
            self.spec["target"], "CPU", scheduler_config=scheduler, **extra, **given
        )
        self.threads = threads

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = max_tokens
        config.ignore_eos = True
        config.do_sample = options["temperature"] > 0
        if config.do_sample:
            config.temperature = options["temperature"]
            config.rng_seed = options["seed"]
        if self.spec["mode"] != "plain":
            config.num_assistant_tokens = self.k
        if self.spec["mode"] == "ngram":
            config.max_ngram_size = NGRAM
        ids = np.zeros((len(prompts), max(map(len, prompts))), np.int64)
        mask = np.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, -len(prompt) :], mask[row, -len(prompt) :] = prompt, 1
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(mask))
        return [[int(i) for i in row] for row in self.pipeline.generate(inputs, config).tokens]


def make(spec: Spec) -> Runner:
    """The runner."""
    return OpenVino(spec)


if __name__ == "__main__":
    serve(make)
