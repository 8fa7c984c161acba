"""Speed by the length of the context.

Plain decoding, ngram and the pair's drafter, each with every window asked for, by turns in one
process. A round takes another prompt of every length, the same for all sides, and all outputs must
be plain decoding's. Of plain decoding's steps the share that goes with the context is told too: a
line through the times of all lengths, whose value at length 0 is what weights and host take.

A target whose context is too short is given a longer one, in a copy of its config; the weights stay
what they are, and what they say beyond the length they were trained at is whatever they say.
"""

import gc
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import numpy as np
import typer

from outrider.base.config import PRESETS
from outrider.base.types import SamplingParams
from outrider.bench.intervals import median_interval, shown
from outrider.bench.machine import machine
from outrider.bench.offline import PLAIN
from outrider.bench.record import Pass, run_all, total
from outrider.checkpoints.families import read_config, read_shape
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli.common import Dtype, JsonFile, write_json
from outrider.errors import ConfigError, OutriderError
from outrider.llm import LLM

from .common import Length, Rounds, Tokens, measured, ratio, table
from .peers.pairs import Pair, find_pair, random_prompts

NO_WINDOW = "none"
Side = tuple[str, str]
"""A drafter and its window."""
COLUMNS = (
    "context", "drafter", "window", "tokens/s", "speedup", "length", "TTFT ms", "to plain's"
)  # fmt: skip


@contextmanager
def lengthened(folder: Path, context: int) -> Iterator[Path]:
    """Give a checkpoint's folder whose config allows ``context`` tokens: itself, or links to it."""
    if read_shape(read_config(folder), folder).context >= context:
        yield folder
        return
    with TemporaryDirectory() as place:
        for file in folder.iterdir():
            if file.name != "config.json" and file.is_file():
                (Path(place) / file.name).symlink_to(file.resolve())
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["max_position_embeddings"] = context
        (Path(place) / "config.json").write_text(json.dumps(config), encoding="utf-8")
        yield Path(place)


def cut_prompts(pair: Pair, text: Path | None, length: int, count: int) -> list[list[int]]:
    """Return ``count`` prompts of ``length`` tokens: from all over the text, or random.

    Raises:
        ConfigError: the text cannot be read, or is shorter than a prompt.
    """
    if text is None:
        vocabulary = read_shape(read_config(pair.target), pair.target).vocab_size
        return random_prompts(0, vocabulary, count, length)
    try:
        written = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        raise ConfigError(f"--text {text} cannot be read as UTF-8 text.") from None
    ids = read_codec(pair.target).backend.encode(written, add_special_tokens=False).ids
    spare = len(ids) - length
    if spare < 0:
        raise ConfigError(
            f"--text {text} has {len(ids)} tokens, but the longest context is {length}; give a "
            "longer text or shorter --contexts."
        )
    starts = (i * spare // max(1, count - 1) for i in range(count))
    return [ids[start : start + length] for start in starts]


def window_options(window: str) -> dict[str, Any]:
    """Return what ``LLM`` is given for a window: none, a preset's name, or tokens."""
    if window == NO_WINDOW:
        return {}
    if window in PRESETS:
        return {"preset": window}
    return {"drafter_window": positive((window,), "--windows")[0]}


def positive(parts: Sequence[str], option: str) -> list[int]:
    """Return numbers of tokens.

    Raises:
        ConfigError: one is none, or 0.
    """
    for part in parts:
        if not part.isdecimal() or not int(part):
            raise ConfigError(f"{option} has {part!r}; give tokens, 1 or more, with commas.")
    return [int(part) for part in parts]


def open_engines(
    pair: Pair, windows: Sequence[str], length: int, **options: Any
) -> dict[Side, LLM]:
    """Return plain decoding, and every drafter with every window, each in an engine of its own."""
    drafters = {PLAIN: PLAIN, "ngram": "ngram"}
    if pair.drafter is not None:
        drafters["model"] = str(pair.drafter)
    sides = [(d, w) for d in drafters for w in ([NO_WINDOW] if d == PLAIN else windows)]
    with lengthened(pair.target, length) as target:
        return {
            (d, w): LLM(target, drafters[d], max_num_seqs=1, max_model_len=length,
                        enable_prefix_caching=False, **options, **window_options(w))
            for d, w in sides
        }  # fmt: skip


def measure(
    engines: dict[Side, LLM], contexts: list[int], prompts: list[list[int]], tokens: int
) -> dict[int, dict[Side, list[Pass]]]:
    """Return what every engine did at every length, a round a prompt.

    Raises:
        OutriderError: an output is not the plain one.
    """
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, seed=0)

    def decode(llm: LLM, context: int, number: int) -> Pass:
        gc.collect()
        return run_all(llm, [prompts[number][:context]], [params])

    cells = {(c, side): partial(decode, engines[side], c) for c in contexts for side in engines}
    done = measured(cells, len(prompts))
    for (context, _), runs in done.items():
        if [r.outputs for r in runs] != [r.outputs for r in done[context, (PLAIN, NO_WINDOW)]]:
            raise OutriderError(f"outputs differ behind {context} tokens.")
    return {c: {side: done[c, side] for side in engines} for c in contexts}


def figures(side: Side, runs: list[Pass], plain: list[Pass], context: int) -> dict[str, Any]:
    """Return a side's figures at one length: medians over rounds, ratios to plain decoding's.

    ``tokens_per_second`` is decode speed, (N-1)/(T(N)-T(1)); ``ttft_ratio`` the time of a prompt
    to its first token over plain decoding's. Ratios are within a round.
    """
    speeds, plain_speeds = ([run.speed for run in each] for each in (runs, plain))
    waits, plain_waits = ([run.ttft for run in each] for each in (runs, plain))
    speedup, wait = ratio(speeds, plain_speeds), ratio(waits, plain_waits)
    return {
        "context": context, "drafter": side[0], "window": side[1],
        "tokens_per_second": median(speeds), "tokens_per_second_interval": median_interval(speeds),
        "speedup": speedup["ratio"], "speedup_interval": speedup["interval"],
        "acceptance_length": total(run.counts for run in runs).acceptance_length,
        "ttft_ms": 1000 * median(waits), "ttft_ratio": wait["ratio"],
        "ttft_ratio_interval": wait["interval"],
    }  # fmt: skip


def attention(plain: dict[int, list[Pass]], tokens: int) -> dict[str, Any]:
    """Return the time of plain steps by context: a line through the medians, and its deviation.

    ``base_ms`` is the line's value at length 0, ``share`` of a step's time what lies above it.
    """
    steps = {c: 1000 / median(run.speed for run in runs) for c, runs in sorted(plain.items())}
    times, places = np.array(list(steps.values())), np.array(list(steps)) + tokens / 2
    slope, base = (float(v) for v in np.polyfit(places, times, 1))
    return {
        "base_ms": base, "ms_per_1000_tokens": 1000 * slope,
        "largest_deviation": float(np.abs(times / (base + slope * places) - 1).max()),
        "steps": [
            {"context": c, "step_ms": s, "share": max(0.0, 1 - base / s)} for c, s in steps.items()
        ],
    }  # fmt: skip


def cells(run: dict[str, Any]) -> list[Any]:
    """Return a row of the table of speeds."""
    start = [run["context"], run["drafter"], run["window"], f"{run['tokens_per_second']:.0f}"]
    wait = f"{run['ttft_ms']:.0f}"
    if run["drafter"] == PLAIN:
        return [*start, 1, "", wait, 1]
    return [
        *start, f"{run['speedup']:.2f} {shown(run['speedup_interval'], '.2f')}",
        f"{run['acceptance_length'] or 1:.2f}", wait,
        f"{run['ttft_ratio']:.2f} {shown(run['ttft_ratio_interval'], '.2f')}",
    ]  # fmt: skip


def main(
    pair: Annotated[str, typer.Argument(help="pocket, planted, 1b, or a checkpoint's folder.")],
    text: Annotated[
        Path | None, typer.Option(help="Cut prompts from this file; random ids unless given.")
    ] = None,
    contexts: Annotated[
        str, typer.Option(help="Lengths in tokens, with commas.")
    ] = "64,256,1024,2048,4096,8192",
    windows: Annotated[
        str,
        typer.Option(help="none, a preset's name or tokens, with commas; empty for plain alone."),
    ] = "none,long-context",
    num_speculative_tokens: Length = 4,
    tokens: Tokens = 64,
    rounds: Rounds = 7,
    dtype: Dtype = "auto",
    json_: JsonFile = None,
) -> None:
    """Measure speed by the length of the context."""
    lengths = positive(contexts.split(","), "--contexts")
    chosen = find_pair(pair)
    prompts = cut_prompts(chosen, text, max(lengths), rounds)
    engines = open_engines(
        chosen, [w for w in windows.split(",") if w], max(lengths) + tokens, dtype=dtype,
        num_speculative_tokens=num_speculative_tokens,
    )  # fmt: skip
    plain = PLAIN, NO_WINDOW
    gc.collect()
    gc.freeze()
    runs = measure(engines, lengths, prompts, tokens)
    dtype = str(engines[plain].engine.model.dtype).removeprefix("torch.")
    report: dict[str, Any] = {
        "machine": machine() | {"dtype": dtype},
        "pair": chosen.name, "text": text and text.name, "rounds": rounds,
        "tokens": tokens, "num_speculative_tokens": num_speculative_tokens,
        "preset": dict(PRESETS["long-context"].windows),
        "runs": [
            figures(side, runs[c][side], runs[c][plain], c) for c in lengths for side in engines
        ],
        "attention": None,
    }  # fmt: skip
    if len(lengths) > 1:
        report["attention"] = attention({c: runs[c][plain] for c in lengths}, tokens)
    write_json(report, json_)
    if json_ != "-":
        print("\n".join(table(COLUMNS, map(cells, report["runs"]))))
    if json_ != "-" and (line := report["attention"]):
        rows = [(s["context"], f"{s['step_ms']:.2f}", f"{s['share']:.0%}") for s in line["steps"]]
        print("", *table(("context", "plain step ms", "of it by the context"), rows), sep="\n")
        print(
            f"\nThe line: {line['base_ms']:.2f} ms + {line['ms_per_1000_tokens']:.3f} ms for 1,000 "
            f"tokens; no length is further off it than {line['largest_deviation']:.1%}."
        )
