"""Specs that cannot work, refused before anything is rendered."""

from __future__ import annotations

from collections.abc import Iterator

from ...base.methods import WITH_CHECKPOINT
from ...errors import ConfigError, shown
from .capabilities import Engine
from .spec import Spec

USUAL_SHARE = 0.9
"""Share of a GPU's memory that engines take by default."""


def check(spec: Spec, engine: Engine) -> None:
    """Refuse a spec that contradicts itself or that this engine cannot serve."""
    own, of_engine = (
        _contradictions(spec),
        _missing(spec, engine, f"{engine.title} {engine.version}"),
    )
    for problem in (*own, *of_engine):
        raise ConfigError(problem)


def unchecked(spec: Spec) -> list[str]:
    """Return what could not be checked for want of facts, a sentence each."""
    lacking = []
    if spec.target.attention_heads is None and spec.parallel.tensor > 1:
        lacking.append(
            "target.attention_heads is not known: whether the tensor parallel size divides them "
            "was not checked."
        )
    if None in (spec.target.weights_gib, spec.memory.gpu_gib):
        lacking.append(
            "target.weights_gib or memory.gpu_gib is not known: whether the weights fit was not "
            "checked."
        )
    own = spec.drafter.method == "draft_model" and spec.drafter.other_vocabulary is None
    if spec.drafts and own and None in (spec.target.vocab_size, spec.drafter.vocab_size):
        lacking.append(
            "vocab_size of target or drafter is not known: whether they share a vocabulary was "
            "not checked."
        )
    return lacking


def other_vocabulary(spec: Spec, engine: Engine) -> bool:
    """Return whether an engine sees another vocabulary in the drafter: as stated, else by size.

    Padding makes sizes of the same vocabulary differ; engines accept some difference or none.
    """
    drafter, target = spec.drafter, spec.target
    if drafter.other_vocabulary is not None or drafter.method != "draft_model":
        return bool(drafter.other_vocabulary)
    if drafter.vocab_size is None or target.vocab_size is None:
        return False
    return abs(drafter.vocab_size - target.vocab_size) > engine.padding


def _contradictions(spec: Spec) -> Iterator[str]:
    """Yield what is wrong with how a spec drafts, on any engine."""
    drafter, method = spec.drafter, spec.drafter.method
    if drafter.required and not spec.drafts:
        reason = "the draft length is 0 at every batch size"
        yield (
            "drafter.required asks for speculation, but "
            f"{'drafter.method is none' if method == 'none' else reason}; give a drafter and a "
            "length of 1 or more, or drop required."
        )
    if method == "none" and spec.draft_length:
        yield (
            f"A draft length of {spec.draft_length} is given, but no drafter; name one, or drop "
            "the length."
        )
    if method in WITH_CHECKPOINT and drafter.model is None:
        yield (
            f"drafter.method {method} needs drafter.model; name its checkpoint, as in --method "
            f"{method} --drafter ORG/NAME."
        )
    if method not in WITH_CHECKPOINT and drafter.model is not None:
        yield (
            f"drafter.method {method} takes no checkpoint, but drafter.model is "
            f"{shown(drafter.model)}; drop it, or give another method."
        )
    low, high = drafter.prompt_lookup_min, drafter.prompt_lookup_max
    if (low or high) and method != "ngram":
        yield "prompt_lookup_min and prompt_lookup_max belong to method ngram alone."
    if low and high and low > high:
        yield f"prompt_lookup_min is {low}, above prompt_lookup_max, {high}."


def _missing(spec: Spec, engine: Engine, name: str) -> Iterator[str]:
    """Yield what an engine does not have or cannot do of a spec."""
    drafter, method = spec.drafter, spec.drafter.method
    if method != "none" and method not in engine.methods:
        yield f"{name} has no method {method}; it has {', '.join(engine.methods)}."
    if drafter.adaptive and method not in engine.adaptive:
        where = f"for {', '.join(engine.adaptive)} alone" if engine.adaptive else "for no method"
        yield f"{name} chooses draft lengths itself {where}; drop drafter.adaptive."
    yield from _wrong_lengths(spec, engine, name)
    if other_vocabulary(spec, engine) and method not in engine.other_vocabulary:
        sizes = able = ""
        if drafter.vocab_size and spec.target.vocab_size:
            own, targets = drafter.vocab_size, spec.target.vocab_size
            sizes = f" ({own:,} tokens, the target has {targets:,})"
        if engine.other_vocabulary:
            able = f" It takes one for {', '.join(engine.other_vocabulary)}."
        yield (
            f"{name} refuses a drafter with another vocabulary{sizes}; take one with the target's "
            f"tokenizer, or another engine.{able}"
        )
    yield from _wrong_split(spec, engine, name)
    yield from _wrong_formats(spec, engine, name)
    yield from _too_large(spec)


def _wrong_lengths(spec: Spec, engine: Engine, name: str) -> Iterator[str]:
    drafter, given = spec.drafter, spec.drafter.num_speculative_tokens
    if drafter.schedule and not engine.schedule and given is None:
        yield (
            f"{name} has no draft lengths by batch size; give drafter.num_speculative_tokens, or "
            "take an engine that has them (vllm, trtllm)."
        )
    if drafter.schedule and drafter.adaptive:
        yield "drafter.schedule and drafter.adaptive exclude each other; keep one."
    longest = max((length for _, _, length in drafter.schedule), default=0)
    if given is not None and longest > given:
        yield (
            f"drafter.schedule drafts {longest} tokens, more than num_speculative_tokens, {given}; "
            "raise it, or shorten the schedule."
        )
    if spec.draft_length is None and drafter.method in engine.needs_length:
        yield (
            f"{name} needs a draft length for {drafter.method}; give "
            "drafter.num_speculative_tokens."
        )
    room = spec.limits.max_model_len
    if room is not None and (spec.draft_length or 0) >= room:
        yield (
            f"A draft of {spec.draft_length} tokens does not fit into max_model_len, {room}; "
            "shorten it."
        )


def _wrong_split(spec: Spec, engine: Engine, name: str) -> Iterator[str]:
    tensor, pipeline, method = spec.parallel.tensor, spec.parallel.pipeline, spec.drafter.method
    if spec.parallel.gpus > 1 and not engine.parallel:
        yield (
            f"{name} runs on one device, but parallel asks for {spec.parallel.gpus}; take vllm, "
            "sglang or trtllm."
        )
    heads = spec.target.attention_heads
    if heads is not None and heads % tensor:
        fitting = [str(n) for n in range(1, min(heads, 64) + 1) if heads % n == 0]
        yield (
            f"parallel.tensor is {tensor}, which does not divide the target's {heads} attention "
            f"heads; give {', '.join(fitting)}."
        )
    own = spec.drafter.attention_heads if spec.drafts else None
    if own is not None and own % tensor:
        yield (
            f"parallel.tensor is {tensor}, which does not divide the drafter's {own} attention "
            "heads, and it runs on the target's GPUs; take another drafter or size."
        )
    if spec.drafts and pipeline > 1 and method not in engine.with_pipeline:
        able = ", ".join(engine.with_pipeline) or "no method"
        yield (
            f"{name} drafts over several pipeline stages with {able}, not with {method}; give "
            "parallel.pipeline 1."
        )
    size = spec.drafter.tensor_parallel_size
    if size is not None and size != tensor:
        yield (
            f"drafter.tensor_parallel_size is {size}; {name} runs a drafter on the target's GPUs: "
            f"give {tensor}, or drop it."
        )


def _wrong_formats(spec: Spec, engine: Engine, name: str) -> Iterator[str]:
    target, drafted = spec.target, spec.drafter.quantization
    for where, value, known in (
        ("target.dtype", target.dtype, engine.dtypes),
        ("target.quantization", target.quantization, engine.quantizations),
        ("drafter.quantization", drafted, engine.quantizations),
    ):
        if where.startswith("drafter") and not engine.draft_quantization:
            if drafted is not None:
                yield f"{name} has no option for a drafter's quantization; drop it."
        elif value is not None and value not in known:
            choices = ", ".join(known) or "none: the checkpoint says it"
            yield f"{where} is {shown(value)}, which {name} does not take; give {choices}."


def _too_large(spec: Spec) -> Iterator[str]:
    weights, whole = spec.target.weights_gib, spec.memory.gpu_gib
    if weights is None or whole is None:
        return
    drafter = (spec.drafter.weights_gib or 0) if spec.drafts else 0
    own = spec.drafter.tensor_parallel_size or spec.parallel.tensor
    needed = weights / spec.parallel.gpus + drafter / own
    share = spec.memory.gpu_share or USUAL_SHARE
    if needed >= whole * share:
        yield (
            f"Weights take {needed:.1f} GiB of each GPU, but {share:.0%} of {whole:.4g} GiB is "
            f"{whole * share:.1f} GiB; split them over more GPUs, quantise them, or drop the "
            "drafter."
        )
