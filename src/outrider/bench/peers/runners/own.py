"""Outrider by the peers' protocol."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider import LLM, SamplingParams, __version__

from .serve import Runner, Spec, Unsupported, serve

LONGEST = 8


class Own:
    """One ``LLM``; its draft length is changed between calls."""

    version = __version__

    def __init__(self, spec: Spec) -> None:
        if spec["dtype"] not in ("float32", "bfloat16"):
            raise Unsupported(f"Outrider has no {spec['dtype']} weights yet")
        drafter = {"plain": None, "ngram": "ngram", "draft": spec["drafter"]}[spec["mode"]]
        self.llm = LLM(
            spec["target"], drafter=drafter, dtype=spec["dtype"], num_speculative_tokens=LONGEST,
            max_num_seqs=1, max_model_len=spec["context"],
        )  # fmt: skip

    def prepare(self, k: int, threads: int) -> None:
        torch.set_num_threads(threads)
        if k:
            engine = self.llm.engine
            engine.config = replace(engine.config, num_speculative_tokens=k)

    def generate(self, prompt: list[int], max_tokens: int, options: Spec) -> list[int]:
        params = SamplingParams(
            temperature=options["temperature"], seed=options["seed"], max_tokens=max_tokens,
            ignore_eos=True,
        )  # fmt: skip
        return self.llm.generate([prompt], params)[0].outputs[0].token_ids


def make(spec: Spec) -> Runner:
    """The runner."""
    return Own(spec)


if __name__ == "__main__":
    serve(make)
