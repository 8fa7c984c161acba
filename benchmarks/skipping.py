"""Layerskip on a target of which some sublayers matter little: what its search finds and brings.

A seed draws 45 % of the sublayers between the first and the last layer, and all of their weights'
output is scaled by one factor, so that a draft without them agrees with the whole target at a share
that is asked for. The search is told nothing of that. Agreement is the share of drafts of one token
that the target accepts. Speeds are those of plain decoding and of the drafter as it comes, in
turns, once the search has ended.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.base.types import SamplingParams
from outrider.bench.intervals import shown
from outrider.bench.machine import machine
from outrider.bench.record import Pass, run_all
from outrider.cli.common import JsonFile, numbers, write_json
from outrider.drafters.base import DrafterContext, DrafterSpec
from outrider.drafters.layerskip import LayerskipDrafter, LayerskipSpec
from outrider.drafters.skips import MOST_SKIPPED, Search, Skips
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.models.native import NativeTransformer

from .common import Rounds, Seed, measured, ratio
from .peers.pairs import write_tokenizer

SIZES: dict[str, Any] = {
    "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16,
    "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 512,
    "initializer_range": 1.2 / 32,
}  # fmt: skip
LOW, HIGH = 1e-3, 1.0
"""Factors between which the one is searched that leaves the agreement asked for."""
CLOSE, TRIES = 0.008, 10
"""How near to the agreement asked for is near enough, and how often a factor is tried."""
PROMPT, TOGETHER = 12, 16
MOST_PASSES = 20
"""Passes over the prompts in which a search must come to its end."""


def useless(seed: int, layers: int) -> Skips:
    """Return the sublayers between the first and the last layer that a seed draws."""
    candidates = range(2, 2 * layers - 2)
    count = int(MOST_SKIPPED * len(candidates))
    return frozenset(random.Random(seed).sample(candidates, count))


def planted(seed: int, layers: int, factor: float, **sizes: Any) -> LlamaForCausalLM:
    """Return a random target whose ``useless`` sublayers say little, and whose laws are peaked."""
    torch.manual_seed(seed)
    target = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))
    little = useless(seed, layers)
    with torch.no_grad():
        for number, layer in enumerate(target.model.layers):
            for part, matrix in enumerate((layer.self_attn.o_proj, layer.mlp.down_proj)):
                if 2 * number + part in little:
                    matrix.weight.mul_(factor)
        target.lm_head.weight.mul_(2.0)
    return target


@dataclass(frozen=True)
class GivenSpec(LayerskipSpec):
    """The target without the sublayers in ``skips``, whatever a draft's confidence."""

    adaptive: bool = False
    skips: Skips = frozenset()

    def make(self, context: DrafterContext) -> LayerskipDrafter:
        assert isinstance(context.model, NativeTransformer)
        longest, nodes = context.config.max_draft_length, context.needs.max_nodes
        space, pages = context.needs.loaded, context.num_pages
        return LayerskipDrafter(context.model, space, self.skips, pages, 0.0, longest, nodes)


def opened(target: Path, drafter: str | DrafterSpec, **options: Any) -> LLM:
    """Return an engine without a prefix cache, so that each pass is like the one before."""
    return LLM(target, drafter, enable_prefix_caching=False, **options)


def texts(count: int, seed: int, vocabulary: int) -> list[list[int]]:
    """Return prompts of random ids."""
    rng = random.Random(seed)
    return [[rng.randrange(4, vocabulary) for _ in range(PROMPT)] for _ in range(count)]


def decode(llm: LLM, prompts: Sequence[list[int]], tokens: int, heat: float, size: int) -> Pass:
    """Return a pass over the prompts, ``size`` of them at a time."""
    params = SamplingParams(temperature=heat, max_tokens=tokens, seed=1, ignore_eos=True)
    return run_all(llm, prompts, [params] * len(prompts), size)


def agreement(
    target: Path, skips: Skips, prompts: Sequence[list[int]], tokens: int, heat: float
) -> float:
    """Return the share of tokens that the target draws alike without some sublayers."""
    llm = opened(target, GivenSpec(skips=skips), num_speculative_tokens=1, max_num_seqs=TOGETHER)
    counts = decode(llm, prompts, tokens, heat, TOGETHER).counts
    return counts.accepted / counts.drafted


def write_target(
    folder: Path, seed: int, layers: int, wanted: float, prompts: Sequence[list[int]], tokens: int,
    **sizes: Any,
) -> float:  # fmt: skip
    """Write a target whose drawn sublayers leave so much agreement at T = 0; return the factor.

    Raises:
        ConfigError: no factor does.
    """
    low, high, little = LOW, HIGH, useless(seed, layers)
    for _ in range(TRIES):
        factor = exp((log(low) + log(high)) / 2)
        planted(seed, layers, factor, **sizes).bfloat16().save_pretrained(folder)
        write_tokenizer(folder, sizes["vocab_size"])
        found = agreement(folder, little, prompts, tokens, 0.0)
        typer.echo(f"factor {factor:.4f}: agreement {found:.3f}", err=True)
        if abs(found - wanted) <= CLOSE:
            return factor
        low, high = (factor, high) if found > wanted else (low, factor)
    raise ConfigError(f"no factor leaves an agreement of {wanted}; give another --seed.")


def search_of(llm: LLM) -> Search:
    """Return the search that has been told of last."""
    drafter = llm.engine.speculator.drafters["layerskip"]
    assert isinstance(drafter, LayerskipDrafter)
    return next(reversed(drafter.searches.values()))


def compare(
    target: Path, little: Skips, prompts: Sequence[list[int]], tokens: int, heat: float, rounds: int
) -> dict[str, Any]:
    """Return what a search finds at a temperature, and how fast it decodes beside plain decoding.

    Raises:
        ConfigError: the search did not come to its end.
    """
    plain, own = (opened(target, name, max_num_seqs=1) for name in ("none", "layerskip"))
    begin, passes = time.perf_counter(), 0
    while not passes or search_of(own).wants is not None:
        if passes == MOST_PASSES:
            raise ConfigError(f"the search goes on after {passes} passes; give more --tokens.")
        passes += 1
        decode(own, prompts, tokens, heat, 1)
    seconds, search = time.perf_counter() - begin, search_of(own)
    cells = {
        name: partial(lambda llm, _: decode(llm, prompts, tokens, heat, 1), llm)
        for name, llm in (("plain", plain), ("layerskip", own))
    }
    runs = measured(cells, rounds)
    speeds = {name: [each.speed for each in found] for name, found in runs.items()}
    sides = {"drawn": little, "found": search.chosen}
    return {
        "temperature": heat,
        "agreement": {n: agreement(target, s, prompts, tokens, heat) for n, s in sides.items()},
        "found_of_drawn": f"{len(search.chosen & little)} of {len(little)}",
        "skipped": len(search.chosen),
        "evaluations": search.evaluations,
        "search_seconds": seconds,
        "tokens_per_second": {name: median(each) for name, each in speeds.items()},
        "speedup": ratio(speeds["layerskip"], speeds["plain"]),
        "same_tokens": all(
            each.outputs == runs["plain"][0].outputs for found in runs.values() for each in found
        ),
    }


def main(
    seed: Seed = 1,
    layers: Annotated[int, typer.Option(min=8, help="Of the target.")] = 24,
    agreement: Annotated[
        float, typer.Option(min=0.5, max=0.99, help="Without the drawn sublayers, at T = 0.")
    ] = 0.9,
    width: Annotated[int, typer.Option(min=64, help="Of the target; a multiple of 64.")] = 1024,
    tokens: Annotated[int, typer.Option(min=48, help="Output tokens of each prompt.")] = 96,
    prompts: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8,
    temperature: Annotated[str, typer.Option(help="Temperatures, with commas.")] = "0,0.8",
    rounds: Rounds = 7,
    folder: Annotated[
        Path | None, typer.Option(help="Where the target is written, or lies already.")
    ] = None,
    json_: JsonFile = None,
) -> None:
    """Plant a target, let layerskip search it, and measure agreement and speed."""
    sizes = {**SIZES, "hidden_size": width, "intermediate_size": 11 * width // 4}
    sizes |= {"num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 256)}
    sizes["initializer_range"] = 1.2 * width**-0.5
    asked = texts(prompts, seed, SIZES["vocab_size"])
    little = useless(seed, layers)
    report: dict[str, Any] = {"machine": machine(), "seed": seed, "layers": layers, "width": width}
    with TemporaryDirectory() as place:
        target = folder or Path(place)
        if not (target / "config.json").is_file():
            fresh = texts(2 * TOGETHER, seed + 1, SIZES["vocab_size"])
            write_target(target, seed, layers, agreement, fresh, tokens, **sizes)
        report["cells"] = [
            compare(target, little, asked, tokens, heat, rounds)
            for heat in numbers(temperature, float, "--temperature")
        ]
    for cell in report["cells"]:
        typer.echo(
            f"T = {cell['temperature']:g}: agreement {cell['agreement']['drawn']:.3f} without the "
            f"drawn sublayers, {cell['agreement']['found']:.3f} without those found "
            f"({cell['found_of_drawn']} drawn ones, {cell['evaluations']} evaluations); "
            f"{cell['speedup']['ratio']:.2f} {shown(cell['speedup']['interval'], '.2f')} times the "
            "speed of plain decoding"
        )
    write_json(report, json_)
