"""Our plain decoding beside ``transformers`` generate: ``python -m outrider.bench.transformers``.

The same target, prompt, dtype and threads, greedy, in turns; decode speed (N-1)/(T(N)-T(1)) of
each, and the median over rounds of their ratio.
"""

from __future__ import annotations

import argparse
import json
import time
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from ..llm import LLM
from ..types import SamplingParams


def ours(llm: LLM, prompt: list[int], tokens: int) -> float:
    """Seconds that ``tokens`` greedy tokens take."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    start = time.perf_counter()
    llm.generate([prompt], params)
    return time.perf_counter() - start


def theirs(model: Any, prompt: list[int], tokens: int) -> float:
    """Seconds that ``tokens`` greedy tokens take."""
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
        do_sample=False, pad_token_id=0,
    )  # fmt: skip
    return time.perf_counter() - start


def main() -> None:
    """Print both speeds and their ratio as JSON."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.transformers")
    parser.add_argument("model", help="a checkpoint's folder")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    args = parser.parse_args()
    llm = LLM(args.model, drafter=None, dtype=args.dtype, enable_prefix_caching=False)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype))
    prompt = list(range(40, 40 + args.prompt_tokens))
    speeds: dict[str, list[float]] = {"outrider": [], "transformers": []}
    for number in range(args.rounds + 1):
        for name, seconds in (("outrider", ours), ("transformers", theirs)):
            side: Any = llm if name == "outrider" else model
            first, whole = seconds(side, prompt, 1), seconds(side, prompt, args.tokens)
            if number:  # the first round warms up
                speeds[name].append((args.tokens - 1) / (whole - first))
    pairs = zip(speeds["outrider"], speeds["transformers"], strict=True)
    print(
        json.dumps(
            {name: round(median(found), 1) for name, found in speeds.items()}
            | {"ratio": round(median(a / b for a, b in pairs), 2)}
            | {"threads": torch.get_num_threads(), "dtype": args.dtype, "rounds": args.rounds},
        )
    )


if __name__ == "__main__":
    main()
