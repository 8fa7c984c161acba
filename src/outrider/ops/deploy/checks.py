"""Specs that cannot work, refused before anything is rendered."""

from __future__ import annotations

from ...base.methods import WITH_CHECKPOINT
from ...errors import ConfigError, shown
from .capabilities import Engine
from .spec import Spec

USUAL_SHARE = 0.9
"""Share of a GPU's memory that engines take by default."""


def check(spec: Spec, engine: Engine) -> None:
    """Refuse a spec that contradicts itself or that this engine cannot serve."""
    _check_drafting(spec)
    _check_method(spec, engine)
    _check_lengths(spec, engine)
    _check_vocabulary(spec, engine)
    _check_parallel(spec, engine)
    _check_formats(spec, engine)
    _check_memory(spec)


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


def _check_drafting(spec: Spec) -> None:
    drafter = spec.drafter
    if drafter.required and not spec.drafts:
        reason = (
            "drafter.method is none"
            if drafter.method == "none"
            else "the draft length is 0 at every batch size"
        )
        raise ConfigError(
            f"drafter.required asks for speculation, but {reason}; give a drafter and a length of "
            "1 or more, or drop required."
        )
    if drafter.method == "none" and spec.draft_length:
        raise ConfigError(
            f"A draft length of {spec.draft_length} is given, but no drafter; name one, or drop "
            "the length."
        )
    if drafter.method in WITH_CHECKPOINT and drafter.model is None:
        raise ConfigError(
            f"drafter.method {drafter.method} needs drafter.model; name its checkpoint, as in "
            f"--method {drafter.method} --drafter ORG/NAME."
        )
    if drafter.method not in WITH_CHECKPOINT and drafter.model is not None:
        raise ConfigError(
            f"drafter.method {drafter.method} takes no checkpoint, but drafter.model is "
            f"{shown(drafter.model)}; drop it, or give another method."
        )
    low, high = drafter.prompt_lookup_min, drafter.prompt_lookup_max
    if (low or high) and drafter.method != "ngram":
        raise ConfigError("prompt_lookup_min and prompt_lookup_max belong to method ngram alone.")
    if low and high and low > high:
        raise ConfigError(f"prompt_lookup_min is {low}, above prompt_lookup_max, {high}.")


def _check_method(spec: Spec, engine: Engine) -> None:
    method = spec.drafter.method
    if method != "none" and method not in engine.methods:
        raise ConfigError(
            f"{engine.title} {engine.version} has no method {method}; it has "
            f"{', '.join(engine.methods)}."
        )
    if spec.drafter.adaptive and method not in engine.adaptive:
        where = f"for {', '.join(engine.adaptive)} alone" if engine.adaptive else "for no method"
        raise ConfigError(
            f"{engine.title} {engine.version} chooses draft lengths itself {where}; drop "
            "drafter.adaptive."
        )


def _check_lengths(spec: Spec, engine: Engine) -> None:
    drafter = spec.drafter
    if drafter.schedule and not engine.schedule and drafter.num_speculative_tokens is None:
        raise ConfigError(
            f"{engine.title} {engine.version} has no draft lengths by batch size; give "
            "drafter.num_speculative_tokens, or take an engine that has them (vllm, trtllm)."
        )
    if drafter.schedule and drafter.adaptive:
        raise ConfigError("drafter.schedule and drafter.adaptive exclude each other; keep one.")
    longest = max((length for _, _, length in drafter.schedule), default=0)
    if drafter.num_speculative_tokens is not None and longest > drafter.num_speculative_tokens:
        raise ConfigError(
            f"drafter.schedule drafts {longest} tokens, more than num_speculative_tokens, "
            f"{drafter.num_speculative_tokens}; raise it, or shorten the schedule."
        )
    if spec.draft_length is None and drafter.method in engine.needs_length:
        raise ConfigError(
            f"{engine.title} {engine.version} needs a draft length for {drafter.method}; give "
            "drafter.num_speculative_tokens."
        )
    if (spec.draft_length or 0) >= (spec.limits.max_model_len or 2**62):
        raise ConfigError(
            f"A draft of {spec.draft_length} tokens does not fit into max_model_len, "
            f"{spec.limits.max_model_len}; shorten it."
        )


def _check_vocabulary(spec: Spec, engine: Engine) -> None:
    if other_vocabulary(spec, engine) and spec.drafter.method not in engine.other_vocabulary:
        sizes = (
            f" ({spec.drafter.vocab_size:,} tokens, the target has {spec.target.vocab_size:,})"
            if spec.drafter.vocab_size and spec.target.vocab_size
            else ""
        )
        able = (
            f" It takes one for {', '.join(engine.other_vocabulary)}."
            if engine.other_vocabulary
            else ""
        )
        raise ConfigError(
            f"{engine.title} {engine.version} refuses a drafter with another vocabulary{sizes}; "
            f"take one with the target's tokenizer, or another engine.{able}"
        )


def _check_parallel(spec: Spec, engine: Engine) -> None:
    tensor, pipeline = spec.parallel.tensor, spec.parallel.pipeline
    if spec.parallel.gpus > 1 and not engine.parallel:
        raise ConfigError(
            f"{engine.title} {engine.version} runs on one device, but parallel asks for "
            f"{spec.parallel.gpus}; take vllm, sglang or trtllm."
        )
    heads = spec.target.attention_heads
    if heads is not None and heads % tensor:
        fitting = [str(n) for n in range(1, min(heads, 64) + 1) if heads % n == 0]
        raise ConfigError(
            f"parallel.tensor is {tensor}, which does not divide the target's {heads} attention "
            f"heads; give {', '.join(fitting)}."
        )
    own = spec.drafter.attention_heads if spec.drafts else None
    if own is not None and own % tensor:
        raise ConfigError(
            f"parallel.tensor is {tensor}, which does not divide the drafter's {own} attention "
            "heads, and it runs on the target's GPUs; take another drafter or size."
        )
    if spec.drafts and pipeline > 1 and spec.drafter.method not in engine.with_pipeline:
        able = ", ".join(engine.with_pipeline) or "no method"
        raise ConfigError(
            f"{engine.title} {engine.version} drafts over several pipeline stages with {able}, not "
            f"with {spec.drafter.method}; give parallel.pipeline 1."
        )
    own = spec.drafter.tensor_parallel_size
    if own is not None and own != tensor:
        raise ConfigError(
            f"drafter.tensor_parallel_size is {own}; {engine.title} {engine.version} runs a "
            f"drafter on the target's GPUs: give {tensor}, or drop it."
        )


def _check_formats(spec: Spec, engine: Engine) -> None:
    target = spec.target
    for name, value, known in (
        ("target.dtype", target.dtype, engine.dtypes),
        ("target.quantization", target.quantization, engine.quantizations),
    ):
        if value is not None and value not in known:
            choices = ", ".join(known) or "none: the checkpoint says it"
            raise ConfigError(
                f"{name} is {shown(value)}, which {engine.title} {engine.version} does not take; "
                f"give {choices}."
            )
    drafted = spec.drafter.quantization
    if drafted is not None and engine.draft_quantization and drafted not in engine.quantizations:
        raise ConfigError(
            f"drafter.quantization is {shown(drafted)}, which {engine.title} {engine.version} does "
            f"not take; give {', '.join(engine.quantizations)}."
        )
    if drafted is not None and not engine.draft_quantization:
        raise ConfigError(
            f"{engine.title} {engine.version} has no option for a drafter's quantization; drop it."
        )


def _check_memory(spec: Spec) -> None:
    weights, whole = spec.target.weights_gib, spec.memory.gpu_gib
    if weights is None or whole is None:
        return
    drafter = (spec.drafter.weights_gib or 0) if spec.drafts else 0
    own = spec.drafter.tensor_parallel_size or spec.parallel.tensor
    needed = weights / spec.parallel.gpus + drafter / own
    share = spec.memory.gpu_share or USUAL_SHARE
    if needed >= whole * share:
        raise ConfigError(
            f"Weights take {needed:.1f} GiB of each GPU, but {share:.0%} of {whole:.4g} GiB is "
            f"{whole * share:.1f} GiB; split them over more GPUs, quantise them, or drop the "
            "drafter."
        )
