"""Helpers of the exactness tests: a planted pair, engines, and ways to run them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.audit.adversary import AdversarySpec
from outrider.audit.sweep import unlike_before
from outrider.base.config import EngineConfig
from outrider.base.types import Event, Request, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.drafters.base import Drafter, DrafterSpec
from outrider.drafters.registry import find_drafter
from outrider.engine.build import build_engine
from outrider.engine.control.choices import PLAIN, Choice, Stream
from outrider.engine.control.costs import Costs
from outrider.engine.engine import Engine
from outrider.engine.measure import find_costs
from outrider.engine.setup import EngineSetup
from outrider.models.base import Model
from outrider.text.codec import TextCodec
from tests.support.on_disk import kept_on_disk
from tests.support.pages import check_engine

VOCABULARY = 211
END = 3
WINDOWS = {"sliding_window": 8, "layer_types": ["full_attention", "sliding_attention"]}
FAMILY_OPTIONS: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": 8},
    "gemma2": {**WINDOWS, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0},
    "gemma3_text": {**WINDOWS, "query_pre_attn_scalar": 16},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5, 1.0, 2.0],
            "long_factor": [2.0, 5.0, 2.0, 3.0],
            "original_max_position_embeddings": 30,
        },
    },
    "smollm3": {**WINDOWS, "use_sliding_window": True, "no_rope_layers": [1, 0]},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32},
    "lfm2": {"layer_types": ["full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    "qwen3_5_text": {
        "layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["full_attention", "linear_attention"], "num_local_experts": 0,
        "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
        "shared_intermediate_size": 96,
    },
    "falcon_h1": {
        "mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16,
        "ssm_out_multiplier": 0.8, "mlp_multipliers": [1.2, 0.9],
    },
    "nemotron_h": {
        "layers_block_type": ["full_attention", "linear_attention"], "mamba_num_heads": 4,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 16,
    },
    "starcoder2": {"sliding_window": 8},
    "qwen2_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "lfm2_moe": {
        "layer_types": ["full_attention", "conv"], "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "num_dense_layers": 0,
    },
    "gpt_oss": {**WINDOWS, "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_5_moe_text": {
        "layer_types": ["full_attention", "linear_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
        "num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
    },
}  # fmt: skip
"""What a family's config says beyond the sizes that all of them share."""
MIXTURES = ("qwen3_moe", "gpt_oss", "lfm2_moe")
"""Families with mixtures of experts that the native step runs, beside those of ``HYBRIDS``."""
HYBRIDS = (
    "lfm2", "qwen3_5_text", "granitemoehybrid", "falcon_h1", "nemotron_h", "qwen3_5_moe_text",
)  # fmt: skip
"""Families with layers that keep states, which go back behind what was accepted."""
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "on": {"type": "boolean"}},
    "required": ["a", "on"],
    "additionalProperties": False,
}
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "0.7": {"temperature": 0.7},
    "1.3": {"temperature": 1.3},
    "top_k": {"temperature": 1.0, "top_k": 5},
    "top_p": {"temperature": 1.0, "top_p": 0.8},
    "min_p": {"temperature": 0.9, "min_p": 0.05},
    "all": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "min_tokens": {"temperature": 1.0, "min_tokens": 12},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "greedy penalties": {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.5},
    "bias": {"logit_bias": {9: 4.0, 33: -100.0}, "bad_words": ["an", "re l", "x"]},
    "allowed": {"allowed_token_ids": [3, *range(40, 120)], "stop": ["a", "q"], "min_p": 0.001},
    "stops": {"stop_token_ids": [40, 41], "stop": ["e"], "include_stop_str_in_output": True},
    "n": {"temperature": 0.8, "n": 3},
    "logprobs": {"temperature": 0.8, "logprobs": 3, "prompt_logprobs": 2, "top_k": 30},
    "json": {"structured_outputs": {"json": SCHEMA}, "repetition_penalty": 1.1},
    "grammar": {"structured_outputs": {"grammar": 'root ::= ("ab" | "c" root)'}},
    "regex": {"structured_outputs": {"regex": "[a-d]+(-[a-d]+){2,}"}, "min_tokens": 5},
    "choice": {"structured_outputs": {"choice": ["tea and toast", "tea", "coffee"]}},
    "late": {
        "temperature": 1.0,
        "structured_outputs": {"regex": "[a-d]{2,9}", "after": "t"},
        "logit_bias": {87: 5.0},  # "t"
    },
    "processor": {"temperature": 0.9, "logits_processors": [unlike_before]},
}
"""Options of requests, by name."""


@kept_on_disk
def planted_pair(folder: Path, family: str = "llama", **sizes: int) -> Path:
    """Save a tiny target, and below it a drafter that is its first layer and often agrees.

    The second layer adds little to the first, and the head is peaked, so that laws are neither
    flat nor certain. ``sizes`` override the config's.
    """
    torch.manual_seed(7)

    def make(layers: int) -> Any:
        options = {**FAMILY_OPTIONS.get(family, {})}
        for name in {"layer_types", "layers_block_type", "no_rope_layers"} & options.keys():
            options[name] = options[name][:layers]
        options = {
            "vocab_size": VOCABULARY, "hidden_size": 64, "intermediate_size": 96,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 256, "initializer_range": 0.15,
            "tie_word_embeddings": False, "eos_token_id": END, "bos_token_id": None,
            "pad_token_id": None, **options, **sizes,
        }  # fmt: skip
        rope = options.get("rope_parameters")
        if rope is not None:  # a factor for each pair that turns
            pairs = int(options["head_dim"] * rope["partial_rotary_factor"] / 2)
            lists = {name: each for name, each in rope.items() if isinstance(each, list)}
            tiled = {name: (each * pairs)[:pairs] for name, each in lists.items()}
            options["rope_parameters"] = rope | tiled
        config = AutoConfig.for_model(family, num_hidden_layers=layers, **options)
        return AutoModelForCausalLM.from_config(config)

    target, drafter = make(2), make(1)
    with torch.no_grad():
        for name, weight in target.model.layers[1].named_parameters():
            if any(part in name for part in ("o_proj", "out_proj", "down_proj", "w2", "c_proj")):
                weight.mul_(0.3)
            elif "gemma" in family and "post_" in name:
                weight.sub_(0.7)  # norms weigh 1 + w
            elif family == "olmo2" and "post_" in name:
                weight.mul_(0.3)
        target.lm_head.weight.mul_(2.0)
    state = {k: v for k, v in target.state_dict().items() if ".layers.1." not in k}
    drafter.load_state_dict(state)
    target.save_pretrained(folder)
    drafter.save_pretrained(folder / "drafter")
    return folder


def tiny_tokenizer() -> Tokenizer:
    """Bytes and pairs of letters, so that words, bad words and grammars mean something."""
    names = ["<pad>", "<s>", "<unk>", "</s>", *map(chr, range(33, 127)), "\u0120", "\u010a"]
    vocabulary = {name: id for id, name in enumerate(names)}
    merges = []
    for pair in itertools.product("aeionrst", "aeilnorstudcmp"):
        if len(vocabulary) < VOCABULARY:
            merges.append(pair)
            vocabulary["".join(pair)] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(names[:4])
    return tokenizer


def make_engine(
    folder: Path, drafter: str | DrafterSpec, pages: int | None = None, **options: Any
) -> Engine:
    """An engine, fp32 and K = 4 unless said; ``pages`` limits its cache, null page included."""
    spec = find_drafter(drafter, folder)
    options = {
        "dtype": "float32",
        "page_size": 4,
        "seed": 0,
        "num_speculative_tokens": 4,
        **options,
    }
    config = EngineConfig(memory=2**24, **options)
    codec = TextCodec(tiny_tokenizer(), None, {}, None, folder)
    setup = EngineSetup(open_checkpoint(folder), spec, config, codec)
    with patch("outrider.engine.build.find_costs", known_costs):
        if pages is None:
            return build_engine(setup)
        weights = config.dtype, config.quantization, config.drafter_quantization
        kind = folder, spec.name, str(drafter), config.page_size, *weights
        if kind not in PAGE_BYTES:
            budget = build_engine(setup).budget
            PAGE_BYTES[kind] = (budget.target_bytes + budget.drafter_bytes) // budget.pages
        less = replace(config, memory=PAGE_BYTES[kind] * pages)
        engine = build_engine(replace(setup, config=less))
    assert engine.budget.pages == pages
    return engine


PAGE_BYTES: dict[tuple[Any, ...], int] = {}
"""What a page takes, by what it is of."""
COSTS: dict[tuple[Any, ...], tuple[Costs, None]] = {}
"""What steps cost; no output depends on it, so the first measurement is good for all engines."""


def known_costs(model: Model, drafters: Mapping[str, Drafter], *more: Any) -> tuple[Costs, None]:
    """Return what ``find_costs`` does, measured once for the same drafters."""
    key = *drafters, *more[0]
    if key not in COSTS:
        COSTS[key] = find_costs(model, drafters, *more)[0], None
    return deepcopy(COSTS[key])


def make_fickle(engine: Engine, rng: random.Random) -> None:
    """Let an engine with a controller draft in another way at each step, at random."""
    controller = engine.controller
    assert controller is not None

    def decide(streams: Seq[Stream]) -> list[Choice]:
        return [s.fixed or rng.choice(options(s)) for s in streams]

    def options(stream: Stream) -> list[Choice]:
        methods = [(name, controller.methods[name].max_depth) for name in stream.methods]
        return [PLAIN, *(Choice(n, rng.randint(1, min(k, stream.max_depth))) for n, k in methods)]

    controller.decide = decide  # type: ignore[method-assign]
    controller.steady = lambda count: False  # type: ignore[method-assign]


def requests(prompts: Seq[Seq[int]], params: SamplingParams) -> list[Request]:
    """One request a prompt, each with a seed of its own that any engine gives alike."""
    return [
        Request(f"r{i}", tuple(p), params, 1000 + i, frozenset([END]))
        for i, p in enumerate(prompts)
    ]


def run(
    engine: Engine,
    queued: Seq[Request],
    steps: int = 10_000,
    arrival: random.Random | None = None,
) -> dict[str, list[Any]]:
    """Drive ``engine`` until all is done; the ids of each sample by "request/sample".

    Log probabilities, where asked for, stand beside them by "request/sample logprobs", the text and
    how it ended by "request/sample text". With ``arrival`` requests come a few at a time.
    """
    coming = list(queued)
    ids: dict[str, list[Any]] = {f"{r.id}/{i}": [] for r in queued for i in range(r.params.n)}
    while coming or engine.has_work:
        steps -= 1
        assert steps > 0, "the engine does not come to an end"
        now = len(coming) if arrival is None else arrival.randint(0, 3)
        for request in coming[:now]:
            engine.add(request)
        del coming[:now]
        for event in engine.step():
            collect(ids, event)
    engine.settle()
    check_engine(engine)
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_usable
    return ids


def in_batches(engine: Engine, queued: Seq[Request], batch: int) -> dict[str, list[Any]]:
    """What ``run`` returns of all requests, so many at a time."""
    outputs: dict[str, list[Any]] = {}
    for first in range(0, len(queued), batch):
        outputs |= run(engine, queued[first : first + batch])
    return outputs


def alone(folder: Path, queued: Seq[Request], **options: Any) -> dict[str, list[Any]]:
    """What plain decoding says, one request at a time: what everything else must equal."""
    return in_batches(make_engine(folder, "none", **options), queued, 1)


def adversary(
    kind: str, queued: Seq[Request], expected: Mapping[str, Seq[int]], seed: int
) -> str | AdversarySpec:
    """Return the drafter of this name; "wrong", "right" and "ragged" know what is ``expected``."""
    if kind not in ("wrong", "right", "ragged"):
        return kind
    answers = {
        (request.seed, sample): expected[f"{request.id}/{sample}"]
        for request in queued
        for sample in range(request.params.n)
    }
    return AdversarySpec(kind, answers, random.Random(seed))


def collect(ids: dict[str, list[Any]], event: Event) -> None:
    """Append an event's token where it belongs."""
    assert event.error is None, event.error
    name = f"{event.request_id}/{event.sample_index}"
    if event.token_id is not None:
        ids[name].append(event.token_id)
    ids.setdefault(f"{name} text", []).append((event.text, event.finish_reason))
    for found in (event.logprobs, event.prompt_logprobs):
        if found is not None:
            ids.setdefault(f"{name} logprobs", []).append(found)
