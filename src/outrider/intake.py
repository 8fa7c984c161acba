"""From what a caller gives to what the engine takes: options, prompts, seeds."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer

from .config import OLD_NAMES, EngineConfig, renewed
from .drafters.base import DrafterSpec
from .drafters.ngram import NgramSpec
from .drafters.registry import find_drafter
from .errors import ConfigError, ModelError, RequestError, no_option, shown
from .models.families import Folder, find_folder, read_config, read_shape
from .sampling.seeds import fresh_seed, request_seed
from .text.codec import TextCodec, differing_entries, has_lone_surrogates, has_tokenizer
from .types import (
    DEFAULT_SPECULATION,
    Event,
    Logprob,
    Logprobs,
    Request,
    SamplingParams,
    Speculation,
    check_vocabulary,
)

Prompt = str | Seq[int] | Mapping[str, Any]

LORA = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "lora_request")
IGNORED = ("use_v2_block_manager",)
SPECULATIVE = ("num_speculative_tokens", "prompt_lookup_min", "prompt_lookup_max")
"""What vLLM's ``speculative_config`` and ``LLM`` call alike."""
ALONE = ("draft_tensor_parallel_size", "enforce_eager", "max_model_len", "rejection_sample_method")
"""What else may stand in it, of no meaning on one device and with an exact rule."""
OPTIONS = (
    "dtype", "quantization", "drafter_quantization", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "memory", "seed", "num_speculative_tokens", "acceptance_rule",
    "prompt_lookup_min", "prompt_lookup_max", "drafter_window", "preset", "logprobs_mode",
    "enable_prefix_caching", "scheduling_policy", "tokenizer",
)  # fmt: skip


def _understand(options: dict[str, Any]) -> dict[str, Any]:
    """Today's names for the options of ``LLM``; old spellings warn, unknown ones are refused."""
    known: dict[str, Any] = {}
    for name, value in options.items():
        if name in IGNORED:
            warnings.warn(f"{name} has no meaning any more and is ignored.", FutureWarning, 3)
        elif name == "gpu_memory_utilization":
            known["memory"] = _share(value)
        elif name == "speculative_config":
            known |= _speculative(value)
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
        elif name in OLD_NAMES:
            today, value = renewed(name, value)
            known[today] = value
        elif name in OPTIONS:
            known[name] = value
        else:
            raise no_option("LLM", name, OPTIONS, [*OLD_NAMES, "model", "drafter"])
    return known


def _share(value: object) -> float:
    """``gpu_memory_utilization`` as a share.

    Raises:
        ConfigError: it is none.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1:
        raise ConfigError(
            f"gpu_memory_utilization is {shown(value)}; give a number above 0 and at most 1."
        )
    return float(value)


def of_engine_args(args: object) -> dict[str, Any]:
    """What ``LLM`` knows of an object with vLLM's names (``AsyncEngineArgs``), where it is set."""
    known = {"model", "drafter", "gpu_memory_utilization", "speculative_config", *OPTIONS}
    known |= {*OLD_NAMES, *LORA}
    return {n: v for n, v in vars(args).items() if n in known and v not in (None, False)}


def _speculative(given: object) -> dict[str, Any]:
    """vLLM's ``speculative_config``, a mapping or its JSON, in the names of ``LLM``.

    Raises:
        ConfigError: it is no object, or asks for a method or an option that is not here.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"speculative_config is no JSON ({error}); give an object.") from None
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise ConfigError(f"speculative_config is {shown(given)}; give an object.")
    found: dict[str, Any] = {}
    left = dict(given)
    method, model = left.pop("method", None), left.pop("model", None)
    if method in ("ngram", "ngram_gpu") or model in ("ngram", "[ngram]"):
        found["drafter"] = "ngram"
    elif method in (None, "draft_model") and model is not None:
        found["drafter"] = model
    else:
        what = f"method {shown(method)}" if method else "neither method nor model"
        raise ConfigError(
            f"speculative_config has {what}; give method 'ngram', or 'draft_model' with model."
        )
    names = {name: name for name in SPECULATIVE} | {"quantization": "drafter_quantization"}
    for name, value in left.items():
        if name in names:
            found[names[name]] = value
        elif value not in (None, False) and name not in ALONE:
            raise no_option("speculative_config", name, ["method", "model", *names])
    return found


def _check_tokenizers(target: TextCodec | None, spec: DrafterSpec) -> None:
    """Refuse a drafter whose ids mean other text than the target's."""
    if spec.folder is None or target is None or not has_tokenizer(spec.folder):
        return
    found = differing_entries(target.vocabulary(), TextCodec(spec.folder).vocabulary())
    if found:
        more = f" and {len(found) - 3} more" if len(found) > 3 else ""
        raise ModelError(
            f"the drafter in {spec.folder} has another tokenizer: {'; '.join(found[:3])}{more}. "
            "Give a drafter trained with the target's tokenizer, or drafter='ngram'."
        )


class Intake:
    """A checkpoint's tokenizer, and the options of the engine that runs it.

    Args:
        model, drafter, options: as ``LLM`` takes them.

    Raises:
        ConfigError: an option is wrong.
        ModelError: the checkpoint or a tokenizer cannot be used.
    """

    def __init__(
        self, model: Folder, drafter: Folder | DrafterSpec | None, options: dict[str, Any]
    ) -> None:
        known = _understand(options)
        drafter = known.pop("drafter", drafter)
        sizes = {n: known.pop(n) for n in ("prompt_lookup_min", "prompt_lookup_max") if n in known}
        tokenizer = known.pop("tokenizer", None)
        given = {name: value for name, value in known.items() if value is not None}
        self.config = EngineConfig(**given)
        self.folder = find_folder(model)
        shape = read_shape(read_config(self.folder), self.folder)
        self.eos_token_ids, self.vocab_size = shape.eos_token_ids, shape.vocab_size
        self.max_model_len = self.config.model_length(shape.context)
        self.spec = find_drafter(drafter, self.folder)
        sizes = {name: value for name, value in sizes.items() if value is not None}
        lookup = self.spec if isinstance(self.spec, NgramSpec) else NgramSpec()
        lookup = replace(lookup, **sizes)  # refuses a wrong size, whoever drafts
        if isinstance(self.spec, NgramSpec):
            self.spec = lookup
        self.tokenizer = self.folder if tokenizer is None else find_folder(tokenizer)
        self.codec = TextCodec(self.tokenizer) if has_tokenizer(self.tokenizer) else None
        if self.codec is None and tokenizer is not None:
            raise ModelError(f"{tokenizer} has no tokenizer; give a folder with tokenizer.json.")
        _check_tokenizers(self.codec, self.spec)
        self._requests = 0
        self._words: dict[int, str] = {}  # of single tokens, as log probabilities show them

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        id: str | None = None,
        speculation: Speculation | None = None,
    ) -> tuple[Request, str | None]:
        """A request and its prompt's text, None where ids were given.

        Raises:
            RequestError: the prompt is neither text nor ids, or of another vocabulary, or text
                without a tokenizer.
        """
        text: str | None = None
        given: Any = prompt
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt")
            given = prompt.get("prompt_token_ids", prompt.get("prompt", ()))
        if isinstance(given, str):
            if self.codec is None:
                raise RequestError("this model has no tokenizer; give prompts as token ids.")
            if has_lone_surrogates(given):
                raise RequestError("the prompt has lone surrogates; decode it as UTF-8.")
            text, given = given, self.codec.encode(given)
        if not isinstance(given, Seq) or not set(map(type, given)) <= {int}:
            raise RequestError("a prompt is a text or a list of token ids; this one is neither.")
        ids: tuple[int, ...] = tuple(given)
        check_vocabulary("the prompt", ids, self.vocab_size)
        index, self._requests = self._requests, self._requests + 1
        seed = params.seed
        if seed is None:
            base = self.config.seed
            seed = fresh_seed() if base is None else request_seed(base, index)
        name = f"request-{index}" if id is None else id
        wanted = speculation or DEFAULT_SPECULATION
        return Request(name, ids, params, seed, self.eos_token_ids, wanted), text

    @property
    def backend(self) -> Tokenizer | None:
        """The tokenizer, None for a model without text."""
        return self.codec.backend if self.codec else None

    def decode(self, ids: Seq[int]) -> str:
        """The text of token ids, special tokens written out; empty for a model without text."""
        if self.codec is None:
            return ""
        text: str = self.codec.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def word(self, id: int) -> str:
        """The text of a single token."""
        if id not in self._words:
            self._words[id] = self.decode([id])
        return self._words[id]

    @cached_property
    def special_tokens(self) -> frozenset[str]:
        """The texts of the tokenizer's special tokens."""
        added = self.codec.backend.get_added_tokens_decoder().values() if self.codec else ()
        return frozenset(token.content for token in added if token.special)

    def worded(self, event: Event) -> Event:
        """The event with the text of every token whose log probability it gives."""
        if (event.logprobs is None and event.prompt_logprobs is None) or self.codec is None:
            return event

        def shown(found: Logprobs) -> Logprobs:
            return {i: Logprob(p.logprob, p.rank, self.word(i)) for i, p in found.items()}

        own, prompt = event.logprobs, event.prompt_logprobs
        return event._replace(
            logprobs=None if own is None else shown(own),
            prompt_logprobs=None if prompt is None else [f and shown(f) for f in prompt],
        )


def as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Tell one prompt from a list of prompts.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {shown(prompts)}; give texts or lists of token ids.")
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(p, int) for p in listed):
        return [listed]
    return listed
