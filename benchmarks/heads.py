"""Distils an EAGLE-3 head for the pocket target, and measures what it brings and heads cost."""

from __future__ import annotations

import json
import tempfile
import time
from array import array
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import torch
import typer
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from outrider import LLM, SamplingParams
from outrider.base.types import Request, SequenceState
from outrider.bench.intervals import shown
from outrider.bench.machine import machine
from outrider.bench.record import run_all
from outrider.checkpoints.files import find_tensors
from outrider.checkpoints.heads import read_head
from outrider.cli.common import JsonFile, write_json
from outrider.drafters.states import StateRing
from outrider.models.decide import DraftInput
from outrider.models.load import load_model
from outrider.models.native import NativeTransformer
from outrider.models.native_head import NativeHead
from outrider.models.native_medusa import NativeMedusa
from outrider.models.rows import Segment
from outrider.native.interface import DraftLimits
from outrider.native.library import Library
from outrider.native.native_sampling import NativeNoise, NativePipeline
from outrider.sampling.pipeline import RequestPipeline
from outrider.text.detokenize import Detokenizer
from outrider.training.corpus import encode, standard_library, windows
from outrider.training.eagle import EagleHead, EaglePlan, distil

from .common import measured, ratio

PAGE = 16
POCKET = Path(__file__).parents[1] / "src/outrider/pocket"
TARGET = POCKET / "model"
TOKENS, PROMPT = 128, 1024


def batches(plan: EaglePlan) -> Iterator[torch.Tensor]:
    """Yield batches of the standard library's text, without the held-out modules."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TARGET)
    corpus = encode(tokenizer, list(standard_library()))
    epoch = 0
    while True:
        cut = torch.from_numpy(windows(corpus.train, plan.length, seed=epoch))
        for first in range(0, len(cut) - plan.rows + 1, plan.rows):
            yield cut[first : first + plan.rows]
        epoch += 1


def train(out: Path, minutes: float, length: int) -> int:
    """Write a head that was trained for some minutes; return the number of steps."""
    plan = EaglePlan(layers=(3, 6, 9))
    target = LlamaForCausalLM.from_pretrained(TARGET).eval()  # in bf16
    head = EagleHead(target, plan.layers)

    def told(step: int, loss: float) -> None:
        if step % 20 == 1:
            typer.echo(f"step {step}: {loss:.3f}", err=True)

    steps = distil(head, target, batches(plan), plan, 60 * minutes, told)
    head.save(out, length, str(TARGET))
    return steps


def acceptance_length(head: Path, length: int, temperature: float) -> float:
    """Return tokens a step on held-out code with a head that drafts in every step."""
    llm = LLM(TARGET, str(head), num_speculative_tokens=length, max_num_seqs=1)
    prompts = json.loads((POCKET / "prompts.json").read_text())
    params = SamplingParams(temperature=temperature, max_tokens=TOKENS, seed=1, ignore_eos=True)
    llm.generate(prompts, params)
    found = llm.engine.counts.acceptance_length
    assert found is not None
    return found


def first_token(head: Path, rounds: int = 41) -> dict[str, Any]:
    """Return the time to the first token with a head over that without, of a long prompt."""
    texts = " ".join(json.loads((POCKET / "prompts.json").read_text()))
    params = SamplingParams(temperature=0, max_tokens=8, seed=1, ignore_eos=True)
    cells = {}
    for name, drafter in (("head", str(head)), ("none", "none")):
        llm = LLM(TARGET, drafter, max_num_seqs=1, enable_prefix_caching=False)
        assert llm.inputs.outputs.tokenizer is not None
        prompt = (llm.inputs.outputs.tokenizer.encode(texts).ids * 8)[:PROMPT]
        cells[name] = partial(lambda llm, ids, _: run_all(llm, [ids], [params]).ttft, llm, prompt)
    found = measured(cells, rounds)
    milliseconds = {name: 1e3 * median(each) for name, each in found.items()}
    return {"prompt": PROMPT, "ms": milliseconds, **ratio(found["head"], found["none"])}


def shifted(ring: StateRing, sequence: str, start: int, count: int) -> array[int]:
    """Return where to write states so that each is read for the token behind its own."""
    return array("i", [(row + 1) % ring.room for row in APPEND(ring, sequence, start, count)])


APPEND = StateRing.append


def bandwidth(library: Library) -> float:
    """Return the bytes a second that the step's threads read."""
    memory = np.ones(1 << 29, np.uint8)
    library.read(memory)
    took = []
    for _ in range(7):
        begin = time.perf_counter()
        library.read(memory)
        took.append(time.perf_counter() - begin)
    return memory.nbytes / median(took)


def cost(model: NativeHead | NativeMedusa, state: torch.Tensor, count: int, depth: int) -> float:
    """Return the median seconds of a draft of ``depth`` tokens for so many sequences."""
    wide, device = model.head.vocab_size, torch.device("cpu")
    noise = NativeNoise(wide, device, model.library)
    store = model.new_store(64 + count, PAGE)
    inputs, segments = [], []
    for number in range(count):
        request = Request(f"{number}", (5,) * 8, SamplingParams(temperature=0), number)
        pipeline = RequestPipeline(request, wide, device)
        native = NativePipeline(pipeline, 0, model.library)
        tokens = [5] * 8
        sequence = SequenceState(request.id, request, 0, Detokenizer(None, (), ()), native, tokens)
        inputs.append(DraftInput(sequence, DraftLimits(depth, depth)))
        if isinstance(model, NativeMedusa):
            segments.append(model.segment(state, request.id))
        else:
            pages = array("i", [1 + number])
            segments.append(Segment([5], 7, pages, 1, 8, key=request.id, first=7, states=state))
    took = []
    for _ in range(30):
        begin = time.perf_counter()
        model.draft(segments, store, inputs, noise)
        took.append(time.perf_counter() - begin)
    return median(took[5:])


def bytes_of_pass(folder: Path, each: int) -> int:
    """Return the bytes of the matrices that a drafting pass reads, of ``each`` a weight."""
    tensors = find_tensors(folder)
    read = [t for name, t in tensors.items() if len(t.shape) == 2 and not name.startswith("fc.")]
    return sum(prod(t.shape) * each for t in read)


def costs(folder: Path, quantization: str) -> list[dict[str, Any]]:
    """Return what a drafting pass of random heads takes, beside reading their weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16384, hidden_size=1536, intermediate_size=4096, num_hidden_layers=2,
        num_attention_heads=12, num_key_value_heads=4, head_dim=128, max_position_embeddings=512,
    )  # fmt: skip
    target = LlamaForCausalLM(config).bfloat16().eval()
    target.save_pretrained(folder / "target")
    EagleHead(target.float(), (-1, 0, 1)).save(folder / "eagle3", 4, "target")
    heads = {}
    for place in range(3):
        heads[f"{place}.0.linear.weight"] = torch.randn(1536, 1536, dtype=torch.bfloat16) / 40
        heads[f"{place}.0.linear.bias"] = torch.zeros(1536, dtype=torch.bfloat16)
        heads[f"{place}.1.weight"] = torch.randn(16384, 1536, dtype=torch.bfloat16) / 40
    (folder / "medusa").mkdir(exist_ok=True)
    save_file(heads, folder / "medusa" / "model.safetensors")
    (folder / "medusa" / "config.json").write_text(
        '{"medusa_num_heads": 3, "medusa_num_layers": 1}'
    )
    native = load_model(folder / "target", "bfloat16", torch.device("cpu"), 512)
    assert isinstance(native, NativeTransformer)
    speed, found = bandwidth(native.library), []
    for name in ("eagle3", "medusa"):
        head = read_head(folder / name)
        assert head is not None
        model: NativeHead | NativeMedusa = (
            NativeMedusa(head, native, quantization)
            if name == "medusa"
            else NativeHead(head, native, 512, quantization)
        )
        state = torch.randn(1, 1536)
        for count in (1, 8):
            passed = cost(model, state, count, 3)
            if name == "eagle3":
                passed = (cost(model, state, count, 5) - cost(model, state, count, 1)) / 4
            size = bytes_of_pass(folder / name, 2 if quantization == "none" else 1)
            least = size / speed
            found.append(
                {
                    "head": name, "sequences": count, "bytes": size,
                    "ms": 1e3 * passed, "least_ms": 1e3 * least, "ratio": passed / least,
                }
            )  # fmt: skip
    return found


def main(
    out: Annotated[Path, typer.Argument(help="The folder of the head.")] = Path("build/eagle"),
    minutes: Annotated[float, typer.Option(help="Of training; 0 measures what is there.")] = 20.0,
    length: Annotated[int, typer.Option(help="Draft length K.")] = 4,
    json_: JsonFile = None,
) -> None:
    """Train a head on text that is not held out, then measure tokens a step on what is.

    Then measure what passes of larger random heads take, beside reading their weights once.
    """
    report: dict[str, Any] = {"machine": machine(), "minutes": minutes, "K": length}
    if minutes:
        report["steps"] = train(out, minutes, length)
    found: dict[str, Any] = {}
    for temperature in (0.0, 0.7, 1.0):
        found[f"T={temperature:g}"] = acceptance_length(out, length, temperature)
    with patch.object(StateRing, "append", shifted):
        found["T=0, states shifted by one"] = acceptance_length(out, length, 0.0)
    for name, value in found.items():
        typer.echo(f"{name}: {value:.2f} tokens a step")
    report["acceptance_length"] = found
    first = report["ttft"] = first_token(out)
    typer.echo(
        f"time to the first token of a prompt of {PROMPT} tokens: {first['ratio']:.3f} "
        f"{shown(first['interval'], '.3f')} of that without the head"
    )
    report["costs"] = {}
    for quantization in ("none", "int8", "int8-a8"):
        with tempfile.TemporaryDirectory() as folder:
            rows = report["costs"][quantization] = costs(Path(folder), quantization)
        for row in rows:
            typer.echo(
                f"{row['head']}, {quantization}, {row['sequences']} sequences: {row['ms']:.2f} ms, "
                f"{row['ratio']:.2f} of reading {row['bytes'] / 2**20:.0f} MiB"
            )
    write_json(report, json_)
