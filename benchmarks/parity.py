"""Greedy decoding of the native step beside transformers' fp32 forward of the same weights.

The reference has the weights that the ``gguf`` package dequantises and no code of the native step.
The native step writes ids with activations of 16 bits. One forward of the reference over a prompt
and these ids judges each: it must be the most likely one, or the reference's own choice must be
hardly more likely. What activations of 8 bits choose at the same places is counted apart.

How much rounding of activations explains is measured in the reference: with the inputs of all its
products rounded to as many bits, in blocks of ``BLOCK``, the difference of its two best logits
changes, and twice the largest change over every ``APART``-th prompt is the bound. A differing id
whose margin is within the bound is a tie.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from numpy.typing import NDArray
from tqdm import tqdm

from outrider import pocket
from outrider.audit.reference import transformers_model
from outrider.base.types import SamplingParams
from outrider.bench.machine import machine
from outrider.bench.workload import BUNDLED, CODE, Item, load_workload
from outrider.checkpoints.folders import find_folder
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli.common import Out, write, write_json
from outrider.errors import ConfigError, OutriderError
from outrider.llm import LLM
from outrider.models.native import NativeTransformer
from outrider.models.tensors import as_array
from outrider.text.codec import TextCodec

from .common import POCKET, Model, Tokens, table

FINE, COARSE = 16, 8
"""Bits of activations."""
BLOCK = 32
APART = 16
AT_ONCE = 16
PROMPT_TOKENS = 64
"""Of a prompt that is no chat; longer ones are cut."""

Logits = NDArray[np.float32]


@dataclass(frozen=True)
class Prompt:
    """A prompt's ids, and the workload that it is of."""

    workload: str
    ids: list[int]


@dataclass(frozen=True)
class Place:
    """Output token ``at`` of a prompt, to which the reference prefers another id by ``margin``."""

    prompt: int
    workload: str
    at: int
    engine: int
    reference: int
    margin: float


def prompts_of(codec: TextCodec, count: int) -> list[Prompt]:
    """Return prompts of all workloads in turns; of chat only where the model has a template."""
    items = {name: load_workload(name).items for name in BUNDLED}
    items[CODE] = tuple(Item(text) for text in pocket.prompts())
    turns = [
        (place, name, item)
        for name, each in items.items()
        for place, item in enumerate(each)
        if codec.chat_template or not item.messages
    ]
    if count > len(turns):
        raise ConfigError(f"--prompts is {count}, but there are {len(turns)}; give fewer.")
    first = sorted(turns, key=lambda turn: turn[0])[:count]
    return [
        Prompt(name, item.encode(codec)[: None if item.messages else PROMPT_TOKENS])
        for _, name, item in first
    ]


def opened(model: Path, bits: int, longest: int) -> LLM:
    """Return the model as the native step runs it, decoding plainly."""
    llm = LLM(
        model, None, dtype="float32", activations=str(bits), max_num_seqs=AT_ONCE,
        max_model_len=longest + 1,
    )  # fmt: skip
    if not isinstance(llm.engine.model, NativeTransformer):
        raise ConfigError(f"{model} runs without the native step, which this compares.")
    return llm


def written(llm: LLM, prompts: Sequence[Prompt], tokens: int) -> list[list[int]]:
    """Return the greedy ids behind each prompt."""
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    outputs = llm.generate([prompt.ids for prompt in prompts], params)
    return [list(output.outputs[0].token_ids) for output in outputs]


def chosen(llm: LLM, prompts: Sequence[Prompt], ids: Sequence[list[int]]) -> list[list[int]]:
    """Return what is most likely at the places of ``ids``, behind the same ids before."""
    whole = [prompt.ids + own for prompt, own in zip(prompts, ids, strict=True)]
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    found = []
    for output, own in zip(llm.generate(whole, params), ids, strict=True):
        ranked = (output.prompt_logprobs or [])[-len(own) :]
        found.append([min(each or (), key=lambda id: (each or {})[id].rank) for each in ranked])
    return found


@contextmanager
def rounded(model: Any, bits: int) -> Iterator[None]:
    """Round the inputs of the reference's products to ``bits``, each ``BLOCK`` by its largest."""
    most = (1 << (bits - 1)) - 1

    def round_(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> torch.Tensor:
        (x,) = inputs
        blocks = x.unflatten(-1, (-1, math.gcd(BLOCK, x.shape[-1])))
        step = blocks.abs().amax(-1, keepdim=True).clamp_min(1e-30) / most
        near: torch.Tensor = ((blocks / step).round() * step).flatten(-2)
        return near

    products = [part for part in model.modules() if isinstance(part, torch.nn.Linear)]
    hooks = [part.register_forward_pre_hook(round_) for part in products]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.inference_mode()
def judged(model: Any, prompt: Prompt, ids: Sequence[int]) -> Logits:
    """Return the reference's logits at the places of ``ids``: [ids, vocabulary]."""
    whole = torch.tensor([[*prompt.ids, *ids[:-1]]])
    return as_array(model(whole, use_cache=False, logits_to_keep=len(ids)).logits[0])


def differing(logits: Logits, ids: Sequence[int], number: int, workload: str) -> list[Place]:
    """Return the places where an id is not the reference's."""
    best = logits.argmax(-1).tolist()
    return [
        Place(number, workload, at, own, other, float(logits[at, other] - logits[at, own]))
        for at, (own, other) in enumerate(zip(ids, best, strict=True))
        if own != other
    ]


def change(exact: Logits, other: Logits) -> float:
    """Return the largest change of the difference between the two best of ``exact``."""
    best = np.argpartition(exact, -2)[:, -2:]
    first, second = (np.take_along_axis(each, best, -1) for each in (exact, other))
    return float(np.abs(np.diff(first - second)).max())


def parity(model: Path, count: int, tokens: int) -> dict[str, Any]:
    """Return the report on the model in a folder or GGUF file."""
    prompts = prompts_of(read_codec(model), count)
    longest = tokens + max(len(prompt.ids) for prompt in prompts)
    ids = written(opened(model, FINE, longest), prompts, tokens)
    choices = {FINE: ids, COARSE: chosen(opened(model, COARSE, longest), prompts, ids)}
    reference = transformers_model(model)
    places: dict[int, list[Place]] = {bits: [] for bits in choices}
    changes = dict.fromkeys(choices, 0.0)
    for number, prompt in enumerate(tqdm(prompts, leave=False, disable=None)):
        exact = judged(reference, prompt, ids[number])
        for bits, own in choices.items():
            places[bits] += differing(exact, own[number], number, prompt.workload)
            if number % APART == 0:
                with rounded(reference, bits):
                    other = judged(reference, prompt, ids[number])
                changes[bits] = max(changes[bits], change(exact, other))
    kinds = [prompt.workload for prompt in prompts]
    return {
        "model": model.name,
        "machine": machine(),
        "prompts": {kind: kinds.count(kind) for kind in dict.fromkeys(kinds)},
        "prompt_tokens": sum(len(prompt.ids) for prompt in prompts),
        "tokens": tokens,
        "runs": [run(bits, count * tokens, 2 * changes[bits], places[bits]) for bits in choices],
    }


def run(bits: int, tested: int, bound: float, places: Sequence[Place]) -> dict[str, Any]:
    """Return what the report says of activations of so many bits."""
    beyond = sum(place.margin > bound for place in places)
    return {
        "activations": bits,
        "places": tested,
        "bound": bound,
        "ties": len(places) - beyond,
        "beyond": beyond,
        "differing": [asdict(place) for place in places],
    }


def lines(report: dict[str, Any]) -> Iterator[str]:
    """Yield the report in Markdown."""
    columns = ("activations", "places", "differ", "ties", "bound", "median margin", "largest")
    rows = []
    for run in report["runs"]:
        margins = [place["margin"] for place in run["differing"]]
        shown = (np.median(margins), max(margins)) if margins else ()
        rows.append([
            f"{run['activations']} bits", run["places"], len(margins), run["ties"],
            f"{run['bound']:.2g}", *(f"{each:.2g}" for each in shown),
        ])  # fmt: skip
    yield from table(columns, rows)
    for place in report["runs"][0]["differing"]:
        yield (
            f"{place['workload']} prompt {place['prompt']}, token {place['at']}: engine "
            f"{place['engine']}, reference {place['reference']}, margin {place['margin']:.2g}"
        )


def main(
    model: Model = POCKET,
    prompts: Annotated[int, typer.Option("--prompts", min=1, help="Of all workloads.")] = 50,
    tokens: Tokens = 64,
    out: Out = None,
) -> None:
    """Compare greedy ids with transformers' fp32 forward of the same weights."""
    report = parity(find_folder(model), prompts, tokens)
    write_json(report, out)
    if out != "-":
        for line in lines(report):
            write(f"{line}\n")
    if beyond := report["runs"][0]["beyond"]:
        raise OutriderError(f"{beyond} ids differ by more than rounding of {FINE} bits explains.")
