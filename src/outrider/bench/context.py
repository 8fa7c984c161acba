"""Speed by the length of the context: ``python -m outrider.bench.context PAIR [--text FILE]``.

Plain decoding, ngram and the pair's drafter, each with every window asked for, by turns in one
process. A round takes another prompt of every length, the same for all sides, and all outputs must
be plain decoding's. Of plain decoding's steps the share that goes with the context is told too: a
line through the times of all lengths, whose value at length 0 is what weights and host take.

A target whose context is too short is given a longer one, in a copy of its config; the weights stay
what they are, and what they say beyond the length they were trained at is whatever they say.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from ..config import PRESETS
from ..errors import ConfigError, OutriderError
from ..llm import LLM
from ..models.families import read_config, read_shape
from ..text.codec import TextCodec
from ..types import Counts, SamplingParams
from .intervals import median_interval, shown
from .offline import PLAIN, available_cores
from .peers.pairs import Pair, find_pair
from .record import run
from .report import cpu_name

LEAST_ID = 8
"""Random prompts have ids from here on: lower ones may be special tokens."""
NO_WINDOW = "none"


@dataclass
class Side:
    """One way to decode, and by length of context what it did: a value a round."""

    drafter: str
    window: str
    llm: LLM
    speeds: dict[int, list[float]] = field(default_factory=dict)
    ttfts: dict[int, list[float]] = field(default_factory=dict)
    counts: dict[int, Counts] = field(default_factory=dict)

    def measure(self, prompt: Sequence[int], tokens: int, context: int | None) -> list[int]:
        """Continue ``prompt`` greedily and note how it went, unless ``context`` is None."""
        params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=0)
        gc.collect()
        batch = run(self.llm, [prompt], [params])
        sample = batch.samples[0]
        if context is not None:
            speed = batch.decode_tokens / batch.decode_seconds
            self.speeds.setdefault(context, []).append(speed)
            self.ttfts.setdefault(context, []).append(sample.first - batch.start)
            self.counts.setdefault(context, Counts()).add(sample.counts)
        return sample.token_ids


def lengthened(folder: Path, context: int, stack: ExitStack) -> Path:
    """A checkpoint's folder whose config allows ``context`` tokens: itself, or links to it."""
    if read_shape(read_config(folder), folder).context >= context:
        return folder
    made = Path(stack.enter_context(TemporaryDirectory()))
    for file in folder.iterdir():
        if file.name != "config.json" and file.is_file():
            (made / file.name).symlink_to(file.resolve())
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["max_position_embeddings"] = context
    (made / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return made


def read_prompts(pair: Pair, text: str | None, length: int, count: int) -> list[list[int]]:
    """``count`` prompts of ``length`` tokens: from all over the text, or random.

    Raises:
        ConfigError: the text cannot be read, or is shorter than a prompt.
    """
    if text is None:
        vocabulary = read_shape(read_config(pair.target), pair.target).vocab_size
        draw = np.random.Generator(np.random.Philox(0))
        found: list[list[int]] = draw.integers(LEAST_ID, vocabulary, (count, length)).tolist()
        return found
    try:
        written = Path(text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--text {text} cannot be read as UTF-8 text.") from None
    ids = TextCodec(pair.target).backend.encode(written, add_special_tokens=False).ids
    spare = len(ids) - length
    if spare < 0:
        raise ConfigError(
            f"--text {text} has {len(ids)} tokens, but the longest context is {length}; give a "
            "longer text or shorter --contexts."
        )
    starts = [i * spare // max(1, count - 1) for i in range(count)]
    return [ids[start : start + length] for start in starts]


def _number(option: str, text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise ConfigError(f"{option} has {text!r}; give tokens, 1 or more, with commas between.")
    return int(text)


def open_sides(pair: Pair, windows: Sequence[str], length: int, args: Any) -> list[Side]:
    """Plain decoding, and every drafter with every window, each in an engine of its own."""
    given: dict[str, Any] = {
        "dtype": args.dtype, "num_speculative_tokens": args.num_speculative_tokens,
        "max_num_seqs": 1, "max_model_len": length, "enable_prefix_caching": False,
    }  # fmt: skip
    drafters: dict[str, str | Path] = {"ngram": "ngram"}
    if pair.drafter is not None:
        drafters["model"] = pair.drafter
    sides = [(PLAIN, NO_WINDOW), *((d, w) for d in drafters for w in windows)]
    made = []
    with ExitStack() as stack:
        target = lengthened(pair.target, length, stack)
        for drafter, window in sides:
            extra: dict[str, Any] = {}
            if window in PRESETS:
                extra = {"preset": window}
            elif window != NO_WINDOW:
                extra = {"drafter_window": _number("--windows", window)}
            llm = LLM(target, drafter=drafters.get(drafter), **given, **extra)
            made.append(Side(drafter, window, llm))
    return made


def figures(side: Side, plain: Side, context: int) -> dict[str, Any]:
    """A side at one length; medians over rounds, ratios to plain decoding in the same round.

    ``tokens_per_second`` is decode speed, (N-1)/(T(N)-T(1)); ``ttft_ratio`` what a prompt takes
    to its first token, to plain decoding's.
    """
    speeds, ttfts = side.speeds[context], side.ttfts[context]
    ratios = [a / b for a, b in zip(speeds, plain.speeds[context], strict=True)]
    waits = [a / b for a, b in zip(ttfts, plain.ttfts[context], strict=True)]
    return {
        "context": context, "drafter": side.drafter, "window": side.window,
        "tokens_per_second": median(speeds), "tokens_per_second_interval": median_interval(speeds),
        "speedup": median(ratios), "speedup_interval": median_interval(ratios),
        "acceptance_length": side.counts[context].acceptance_length,
        "ttft_ms": 1000 * median(ttfts), "ttft_ratio": median(waits),
        "ttft_ratio_interval": median_interval(waits),
    }  # fmt: skip


def attention(plain: Side, tokens: int) -> dict[str, Any]:
    """What plain steps take, by context: a line through the medians, and how far they are off it.

    ``base_ms`` is the line's value at length 0, ``share`` of a step's time what lies above it.
    """
    lengths = sorted(plain.speeds)
    places = [context + tokens / 2 for context in lengths]
    steps = [1000 / median(plain.speeds[context]) for context in lengths]
    slope, base = (float(v) for v in np.polyfit(places, steps, 1))
    off = [abs(s / (base + slope * x) - 1) for s, x in zip(steps, places, strict=True)]
    return {
        "base_ms": base, "ms_per_1000_tokens": 1000 * slope, "largest_deviation": max(off),
        "steps": [
            {"context": c, "step_ms": s, "share": max(0.0, 1 - base / s)}
            for c, s in zip(lengths, steps, strict=True)
        ],
    }  # fmt: skip


def _run(sides: list[Side], contexts: list[int], prompts: list[list[int]], args: Any) -> None:
    """Warm up, then all rounds; the sides' order turns on by one place a round."""
    for number in tqdm(range(-1, args.rounds), leave=False, disable=None):
        for context in contexts if number >= 0 else contexts[:1]:  # the first is to warm up
            outputs = []
            for i in range(len(sides)):
                side = sides[(i + number) % len(sides)]
                noted = context if number >= 0 else None
                outputs.append(side.measure(prompts[number][:context], args.tokens, noted))
            if any(output != outputs[0] for output in outputs):
                raise OutriderError(f"outputs differ behind {context} tokens, in round {number}.")


def measure(args: Any) -> dict[str, Any]:
    """The whole report.

    Raises:
        OutriderError: a pair, text or option cannot be used, or an output is not the plain one.
    """
    contexts = [_number("--contexts", c) for c in args.contexts.split(",")]
    windows = [w for w in args.windows.split(",") if w]
    pair, longest = find_pair(args.pair), max(contexts)
    prompts = read_prompts(pair, args.text, longest, args.rounds)
    sides = open_sides(pair, windows, longest + args.tokens, args)
    plain = sides[0]
    gc.collect()
    gc.freeze()
    try:
        _run(sides, contexts, prompts, args)
    finally:
        gc.unfreeze()
    return {
        "machine": {
            "cpu": cpu_name(), "cores": available_cores(), "torch": torch.__version__,
            "dtype": str(plain.llm.engine.model.dtype).removeprefix("torch."),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "pair": pair.name, "text": args.text and Path(args.text).name, "rounds": args.rounds,
        "tokens": args.tokens, "num_speculative_tokens": args.num_speculative_tokens,
        "preset": PRESETS,
        "runs": [figures(side, plain, c) for c in contexts for side in sides],
        "attention": attention(plain, args.tokens) if len(contexts) > 1 else None,
    }  # fmt: skip


def show(report: dict[str, Any]) -> None:
    """Print the tables, in Markdown."""
    print("| context | drafter | window | tokens/s | speedup | length | TTFT ms | to plain's |")
    print("|---|---|---|---|---|---|---|---|")
    for r in report["runs"]:
        line = f"| {r['context']} | {r['drafter']} | {r['window']} | {r['tokens_per_second']:.0f} |"
        if r["drafter"] == PLAIN:
            print(f"{line} 1 | | {r['ttft_ms']:.0f} | 1 |")
            continue
        print(
            f"{line} {r['speedup']:.2f} {shown(r['speedup_interval'], '.2f')} | "
            f"{r['acceptance_length'] or 1:.2f} | {r['ttft_ms']:.0f} | "
            f"{r['ttft_ratio']:.2f} {shown(r['ttft_ratio_interval'], '.2f')} |"
        )
    found = report["attention"]
    if found is None:
        return
    print("\n| context | plain step ms | of it by the context |\n|---|---|---|")
    for step in found["steps"]:
        print(f"| {step['context']} | {step['step_ms']:.2f} | {step['share']:.0%} |")
    print(
        f"\nThe line: {found['base_ms']:.2f} ms + {found['ms_per_1000_tokens']:.3f} ms for 1,000 "
        f"tokens; no length is further off it than {found['largest_deviation']:.1%}."
    )


def main() -> None:
    """Measure, print, and write the JSON report."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.context")
    parser.add_argument("pair", help="pocket, planted, 1b, or a checkpoint's folder")
    parser.add_argument("--text", help="prompts are cut from this file; random ids unless given")
    parser.add_argument("--contexts", default="64,256,1024,2048,4096,8192")
    parser.add_argument(
        "--windows",
        default="none,long-context",
        help="none, a preset's name or tokens, with commas; empty for plain decoding alone",
    )
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", help="write the report here")
    args = parser.parse_args()
    try:
        report = measure(args)
    except OutriderError as error:
        parser.error(str(error))
    show(report)
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
