"""vLLM's names of engine options, translated into ours."""

import json
import warnings
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError, no_option, shown
from .config import ENGINE_OPTIONS
from .limits import Number, check_number
from .methods import TABLE, find_method

OPTIONS = tuple(option.name for option in ENGINE_OPTIONS)
DEPRECATED = {
    "speculative_model": "drafter",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
"""Names that vLLM has removed; they work with a warning."""
LORA = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "lora_request")
SHARE = Number(0, 1, "give a number above 0 and at most 1", whole=False, above=True, optional=True)
IGNORED = ("use_v2_block_manager",)
SPECULATIVE = {
    **{n: n for n in ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")},
    "quantization": "drafter_quantization",
}
"""Keys of vLLM's ``speculative_config``, and the options they set."""
SPECULATIVE_IGNORED = (
    "draft_tensor_parallel_size", "enforce_eager", "max_model_len", "rejection_sample_method",
    "parallel_drafting",
)  # fmt: skip
"""Keys without a meaning on one device and with an exact rule."""
SUFFIX = {
    "suffix_decoding_max_tree_depth": (64, "a match has up to 64 tokens"),
    "suffix_decoding_max_cached_requests": (0, "suffix_store keeps past outputs, by tokens"),
    "suffix_decoding_max_spec_factor": (1, "a match drafts up to as many tokens as it has"),
    "suffix_decoding_min_token_prob": (0.1, "a draft's probability is 0.1 or more"),
}
"""Keys of method suffix: our drafter's value and its meaning; others are ignored with a warning."""


def translate_deprecated(name: str, value: Any) -> tuple[str, Any]:
    """Return the current name and value of an option; warn where the name is deprecated."""
    if name not in DEPRECATED:
        return name, value
    current = DEPRECATED[name]
    warnings.warn(f"{name} is an old name; use {current}.", FutureWarning, 2)
    if current == "drafter" and value == "[ngram]":
        warnings.warn('"[ngram]" is an old spelling; use "ngram".', FutureWarning, 2)
        value = "ngram"
    return current, value


def translate(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of ``LLM`` in our names; warn of deprecated ones, refuse unknown ones."""
    translated: dict[str, Any] = {}
    for name, value in options.items():
        if name in IGNORED:
            warnings.warn(f"{name} has no meaning any more and is ignored.", FutureWarning, 3)
        elif name == "gpu_memory_utilization":
            check_number(name, value, SHARE)
            if value is not None:
                translated["memory"] = float(value)
        elif name == "speculative_config":
            translated |= _speculative(value)
        elif name == "tensor_parallel_size":
            if value not in (None, 1):
                raise ConfigError(
                    f"tensor_parallel_size is {shown(value)}; this engine runs on one device. For "
                    "more, serve with vLLM, SGLang or TensorRT-LLM, which Outrider's production "
                    "tools configure."
                )
        elif name in LORA:
            if value:
                raise ConfigError(
                    f"{name} is not supported: this engine serves no LoRA adapters. Merge the "
                    "adapter into the checkpoint (peft's merge_and_unload) and load that."
                )
        elif name in DEPRECATED or name in OPTIONS:
            current, value = translate_deprecated(name, value)
            translated[current] = value
        else:
            raise no_option("LLM", name, OPTIONS, [*DEPRECATED, "model"])
    return translated


def of_engine_args(args: object) -> dict[str, Any]:
    """Return the options that an object with vLLM's names (``AsyncEngineArgs``) sets."""
    names = {"model", *OPTIONS, *DEPRECATED, *LORA}
    return {n: v for n, v in vars(args).items() if n in names and v not in (None, False)}


def _speculative(config: object) -> dict[str, Any]:
    """Return the options that vLLM's ``speculative_config``, an object or its JSON, sets."""
    if isinstance(config, str):
        try:
            config = json.loads(config)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"speculative_config is no JSON ({error}); give an object.") from None
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigError(f"speculative_config is {shown(config)}; give an object.")
    options: dict[str, Any] = {}
    rest = dict(config)
    stated, model = rest.pop("method", None), rest.pop("model", None)
    # vLLM accepts a method's name in place of a model, such as ngram.
    method = find_method(stated if stated is not None else model)
    ours = method.ours if method is not None else None
    alone = method is not None and not method.checkpoint
    if ours is not None and alone and (model is None or ours == "ngram" or model == ours):
        options["drafter"] = ours
        for name, (usual, meaning) in SUFFIX.items() if ours == "suffix" else ():
            if rest.pop(name, None) not in (None, usual):
                warnings.warn(f"{name} is ignored; in drafter suffix {meaning}.", UserWarning, 4)
    elif model is not None and (stated is None or (ours is not None and not alone)):
        options["drafter"] = model
    else:
        said = f"method {shown(stated)}" if stated else "neither method nor model"
        plain, named = (
            ", ".join(each.name for each in TABLE if each.ours and each.checkpoint is checkpoint)
            for checkpoint in (False, True)
        )
        remedy = f"give {plain}, or one of {named} with model"
        raise ConfigError(f"speculative_config has {said}; {remedy}.")
    for name, value in rest.items():
        if name in SPECULATIVE:
            options[SPECULATIVE[name]] = value
        elif value not in (None, False) and name not in SPECULATIVE_IGNORED:
            raise no_option("speculative_config", name, ["method", "model", *SPECULATIVE])
    return options
