"""The torch path on a device: equality over drafters, and plain decoding beside its bandwidth."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from outrider.audit.ties import Difference, compare
from outrider.base.config import EngineConfig
from outrider.base.types import Counts, SamplingParams
from outrider.bench.record import run_all
from outrider.checkpoints.checkpoint import Checkpoint
from outrider.checkpoints.dtypes import BFLOAT16, DTYPES
from outrider.drafters.base import NoSpec
from outrider.engine.build import build_engine
from outrider.engine.setup import EngineSetup, set_up
from outrider.llm import LLM
from outrider.models.transformer import Transformer
from tests.support.exactness import planted_pair

from ..hybrids import RandomTensors, architecture_of
from .checks import Part
from .draws import microseconds

FAMILIES = ("llama", "qwen2", "qwen3")
DRAFTERS = ("ngram", "suffix", "model")
TEMPERATURES = (0.0, 0.8)
SIZES: dict[str, dict[str, int]] = {
    "cuda": {
        "hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "head_dim": 64
    },
    "cpu": {},
}  # fmt: skip
"""Sizes of pairs other than those of ``planted_pair``; few ids, so that lookups find something."""
TOKENS = {"cuda": 64, "cpu": 16}
LENGTH = 4
COPIED_BYTES = {"cuda": 2 << 30, "cpu": 16 << 20}
_LLAMA = {
    "model_type": "llama", "head_dim": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-6,
    "max_position_embeddings": 1024, "rope_parameters": {"rope_theta": 1e4},
}  # fmt: skip
DECODED: dict[str, dict[str, dict[str, Any]]] = {
    "cuda": {
        "300m": _LLAMA | {
            "vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2816,
            "num_hidden_layers": 26, "num_attention_heads": 16, "num_key_value_heads": 4,
        },
        "1.2b (Llama 3.2)": _LLAMA | {
            "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 8192,
            "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        },
    },
    "cpu": {
        "1m": _LLAMA | {
            "vocab_size": 512, "hidden_size": 128, "intermediate_size": 256,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
        },
    },
}  # fmt: skip
"""Configs of the random models that are decoded."""


def opened(
    folder: Path, drafter: str | None, dtype: str, device: str, model: Transformer | None = None
) -> LLM:
    """Return an engine whose target, ``model`` where it is given, runs in torch on the device."""
    options = {
        "dtype": dtype, "num_speculative_tokens": LENGTH, "enable_prefix_caching": False,
        "max_num_seqs": 4,
    }  # fmt: skip
    setup = set_up(folder, drafter, options)
    model = model or in_torch(setup, device)
    return LLM.from_engine(setup, build_engine(setup, model=model))


def in_torch(setup: EngineSetup, device: str) -> Transformer:
    """Return the target of a setup, run by torch on the device."""
    length = setup.config.model_length(setup.checkpoint.shape.context)
    return Transformer(setup.checkpoint, DTYPES[setup.config.dtype], device, length)


class Repeated(RandomTensors):
    """Random weights, of which a million are drawn, over and over: drawing all takes long."""

    def __init__(self) -> None:
        super().__init__(codes=False)
        self._drawn = np.random.default_rng(0).standard_normal(1_048_573, np.float32)

    def matrix(
        self, name: str, shape: tuple[int, int], dtype: np.dtype[Any] | None
    ) -> NDArray[Any]:
        scaled = (self._drawn * shape[1] ** -0.5).astype(dtype or BFLOAT16)
        return np.resize(scaled, shape)


def random_model(config: dict[str, Any], device: str) -> LLM:
    """Return an engine of a model with random weights in bfloat16, which are read from no disk."""
    checkpoint = Checkpoint(Path("random"), *architecture_of(config), Repeated())  # type: ignore[arg-type]
    options = EngineConfig(dtype="bfloat16", max_num_seqs=1, enable_prefix_caching=False)
    setup = EngineSetup(checkpoint, NoSpec(), options, None)
    return LLM.from_engine(setup, build_engine(setup, model=in_torch(setup, device)))


def prompts(vocabulary: int) -> list[list[int]]:
    """Return prompts that repeat themselves, so that lookups find something."""
    generator = torch.Generator().manual_seed(1)
    words = torch.randint(4, vocabulary, (4, 9), generator=generator).tolist()
    return [word * (2 + number) for number, word in enumerate(words)]


def _params(count: int, temperature: float, tokens: int) -> list[SamplingParams]:
    return [
        SamplingParams(temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True)
        for seed in range(count)
    ]


def equality(device: str) -> Iterator[Part]:
    """Yield whether every drafter leaves the outputs of plain decoding as they are, up to ties."""
    for dtype, family in product(DTYPES, FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            pair = planted_pair(Path(folder) / "pair", family, **SIZES[device])
            yield _equal(f"{family}, {dtype}", pair, dtype, device)


def _equal(name: str, pair: Path, dtype: str, device: str) -> Part:
    """Return the part of one pair in one dtype."""
    plain = opened(pair, None, dtype, device)
    model = plain.engine.model
    assert isinstance(model, Transformer)
    asked = prompts(model.shape.vocab_size)
    parted: list[Difference] = []
    counts, outputs = {drafter: Counts() for drafter in DRAFTERS}, 0
    params = {heat: _params(len(asked), heat, TOKENS[device]) for heat in TEMPERATURES}
    expected = {heat: run_all(plain, asked, params[heat], 4).outputs for heat in TEMPERATURES}
    for drafter in DRAFTERS:
        llm = opened(pair, drafter, dtype, device, model)
        for heat in TEMPERATURES:
            got = run_all(llm, asked, params[heat], 4)
            counts[drafter].add(got.counts)
            outputs += len(got.outputs)
            parted += _differences(plain, asked, params[heat], expected[heat], got.outputs)
    return judged(name, outputs, parted, counts)


def _differences(
    plain: LLM,
    asked: Sequence[list[int]],
    params: Sequence[SamplingParams],
    expected: Sequence[list[int]],
    got: Sequence[list[int]],
) -> list[Difference]:
    found = [
        compare(plain, *each, seed=seed)
        for seed, each in enumerate(zip(asked, params, expected, got, strict=True))
    ]
    return [each for each in found if each is not None]


def judged(
    name: str, outputs: int, parted: Sequence[Difference], counts: dict[str, Counts]
) -> Part:
    """Return the part of outputs that were compared: a tie is counted, another difference wrong.

    A tie is a gap between the two tokens' scores that is not larger than what other counts of rows
    move (``audit.ties``). Where nothing drafted was accepted, equality shows nothing.
    """
    ties = [each for each in parted if each.is_tie]
    figures: dict[str, Any] = {"outputs": outputs, "ties": len(ties)}
    figures |= {name: f"{each.accepted} of {each.drafted}" for name, each in counts.items()}
    if ties:
        figures["widest_tie"] = max(each.gap for each in ties)
        figures["rounding"] = max(each.measured for each in ties)
    wrong = [each for each in parted if not each.is_tie]
    if wrong:
        first = wrong[0]
        why = (
            f"{len(wrong)} of {outputs} outputs differ, the first at position {first.position}, "
            f"tokens {first.tokens}, where scores are {first.gap:.3g} apart and rounding moves "
            f"{first.measured:.3g}"
        )
        return Part(name, figures, why)
    nothing = not any(each.accepted for each in counts.values())
    return Part(name, figures, "no draft was accepted" if nothing else None)


def bandwidth(device: str) -> float:
    """Return the bytes a second that a copy within the device's memory reads and writes."""
    source = torch.empty(COPIED_BYTES[device], dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2e6 * source.numel() / microseconds(lambda: target.copy_(source), device)


def read_bytes(model: Transformer) -> int:
    """Return the bytes of weights that a token's forward reads."""
    products = [weight for layer in model.weights.layers for weight in layer.products()]
    return sum(each.numel() * each.element_size() for each in (*products, model.weights.head))


def decode(device: str) -> Iterator[Part]:
    """Yield plain decoding's share of the bandwidth that a copy has in the same run."""
    copied = bandwidth(device)
    yield Part("a copy", {"gb_per_s": round(copied / 1e9, 1)})
    for name, config in DECODED[device].items():
        llm = random_model(config, device)
        model = llm.engine.model
        assert isinstance(model, Transformer)
        read, asked = read_bytes(model), prompts(config["vocab_size"])[:1]
        run_all(llm, asked, _params(1, 0.0, 4))  # kernels are chosen, and memory is taken
        speed = run_all(llm, asked, _params(1, 0.0, TOKENS[device])).speed
        figures = {
            "weights_mb": round(read / 1e6), "tokens_per_s": round(speed, 1),
            "gb_per_s": round(speed * read / 1e9, 1),
            "share_of_copy": round(speed * read / copied, 4),
        }  # fmt: skip
        yield Part(name, figures, None if speed * read <= copied else "faster than a copy is")
