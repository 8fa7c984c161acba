"""The door for Python users: ``LLM``, in the manner of vLLM's."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

from tqdm import tqdm

from .config import EngineConfig
from .drafters.registry import DrafterSpec, find_drafter
from .engine.engine import Engine
from .errors import (
    ConfigError,
    ModelError,
    NumericalError,
    OutriderError,
    RequestError,
    no_option,
)
from .models.families import Folder, find_folder, read_config
from .sampling.seeds import fresh_seed, request_seed
from .text.template import Message, TextCodec, differing_entries, has_tokenizer
from .types import Counts, Event, Logprob, Logprobs, Origin, Request, SamplingParams

logger = logging.getLogger("outrider")

Prompt = str | Seq[int] | Mapping[str, Any]

OLD_NAMES = {
    "speculative_model": "drafter",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
LORA = ("enable_lora", "lora_modules", "max_loras", "max_lora_rank", "lora_request")
IGNORED = ("use_v2_block_manager",)
OPTIONS = (
    "dtype", "quantization", "drafter_quantization", "max_model_len", "max_num_seqs",
    "max_num_batched_tokens", "memory", "seed", "num_speculative_tokens", "acceptance_rule",
    "prompt_lookup_min", "prompt_lookup_max", "drafter_window", "preset", "logprobs_mode",
)  # fmt: skip


@dataclass(frozen=True)
class CompletionOutput:
    """One sample: ``finish_reason`` is "stop", "length" or "error"; ``origins`` run with the ids.

    ``seed`` with the sample's ``index`` repeats it: ask for ``n > index`` samples of that seed.
    ``logprobs`` run with the ids, and ``cumulative_logprob`` is their sum over the sampled tokens;
    both are None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    seed: int
    origins: list[Origin]
    logprobs: list[Logprobs] | None = None
    cumulative_logprob: float | None = None


@dataclass(frozen=True)
class RequestMetrics:
    """How a request went, its samples together.

    ``tokens_per_second`` is output tokens over the time from the call to the last token, ``ttft``
    the seconds to the first token; the rest is defined at ``Counts``.
    """

    tokens_per_second: float
    ttft: float
    steps: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    acceptance_length: float | None
    acceptance_by_position: list[float]


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and what was made of it; ``prompt`` is None where ids were given.

    ``prompt_logprobs`` run with the prompt's ids if asked for, None for the first.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    prompt_logprobs: list[Logprobs | None] | None = None


@dataclass
class _Sample:
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    origins: list[Origin] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str = ""

    def output(self, index: int, request: Request) -> CompletionOutput:
        """The sample as the caller sees it."""
        listed = total = None
        if request.params.logprobs is not None:
            listed = self.logprobs
            pairs = zip(listed, self.token_ids, strict=True)
            total = sum(found[token].logprob for found, token in pairs)
        return CompletionOutput(
            index,
            "".join(self.text),
            self.token_ids,
            self.finish_reason,
            request.seed,
            self.origins,
            listed,
            total,
        )


@dataclass
class _Pending:
    """A request under way, collected from events."""

    prompt: str | None
    request: Request
    start: float
    samples: list[_Sample]
    counts: Counts = field(default_factory=Counts)
    first: float = 0.0
    end: float = 0.0
    error: str | None = None
    prompt_logprobs: list[Logprobs | None] | None = None

    def take(self, event: Event) -> None:
        self.end = time.perf_counter()
        sample = self.samples[event.sample_index]
        sample.text.append(event.text)
        if event.token_id is not None:
            self.first = self.first or self.end
            sample.token_ids.append(event.token_id)
            sample.origins.append(event.origin)
            if event.logprobs is not None:
                sample.logprobs.append(event.logprobs)
            self.prompt_logprobs = self.prompt_logprobs or event.prompt_logprobs
        if event.finish_reason is not None:
            sample.finish_reason = event.finish_reason
            self.error = self.error or event.error
        if event.counts is not None:
            self.counts.add(event.counts)

    @property
    def done(self) -> bool:
        return all(s.finish_reason for s in self.samples)

    def output(self) -> RequestOutput:
        tokens, counts = sum(len(s.token_ids) for s in self.samples), self.counts
        metrics = RequestMetrics(
            tokens_per_second=tokens / (self.end - self.start),
            ttft=max(0.0, self.first - self.start),
            steps=counts.steps,
            drafted=counts.drafted,
            accepted=counts.accepted,
            acceptance_rate=counts.acceptance_rate,
            acceptance_length=counts.acceptance_length,
            acceptance_by_position=counts.acceptance_by_position,
        )
        outputs = [s.output(i, self.request) for i, s in enumerate(self.samples)]
        ids = list(self.request.prompt_token_ids)
        return RequestOutput(self.prompt, ids, outputs, metrics, self.prompt_logprobs)


class GenerationError(NumericalError):
    """Some requests of a call failed; ``outputs`` holds every request's, the good ones whole."""

    def __init__(self, message: str, outputs: list[RequestOutput]) -> None:
        super().__init__(message)
        self.outputs = outputs


def _understand(options: dict[str, Any]) -> dict[str, Any]:
    """Today's names for the options of ``LLM``; old spellings warn, unknown ones are refused."""
    known: dict[str, Any] = {}
    for name, value in options.items():
        if name in IGNORED:
            warnings.warn(f"{name} has no meaning any more and is ignored.", FutureWarning, 3)
        elif name == "gpu_memory_utilization":
            known["memory"] = float(value)
        elif name == "tensor_parallel_size":
            if value != 1:
                raise ConfigError(
                    f"tensor_parallel_size is {value}; this engine runs on one device. For more, "
                    "serve with vLLM, SGLang or TensorRT-LLM, which Outrider's production tools "
                    "configure."
                )
        elif name in LORA:
            if value:
                raise ConfigError(
                    f"{name} is not supported: this engine serves no LoRA adapters. Merge the "
                    "adapter into the checkpoint (peft's merge_and_unload) and load that."
                )
        elif name in OLD_NAMES:
            today = OLD_NAMES[name]
            warnings.warn(f"{name}= is an old spelling; use {today}=.", FutureWarning, 3)
            if today == "drafter" and value == "[ngram]":
                warnings.warn('"[ngram]" is an old spelling; use "ngram".', FutureWarning, 3)
                value = "ngram"
            known[today] = value
        elif name in OPTIONS:
            known[name] = value
        else:
            raise no_option("LLM", name, OPTIONS, [*OLD_NAMES, "model", "drafter"])
    return known


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


class LLM:
    """A target model, a drafter, and the engine that runs them.

    Args:
        model: a checkpoint's folder or .gguf file, or its name on the Hugging Face hub.
        drafter: "auto" (a checkpoint in the sub-folder or sibling ``drafter``, else ngram; nothing
            for a model whose state cannot go back), None or "none", "ngram", or a checkpoint's
            folder or .gguf file.
        num_speculative_tokens: the draft length K; 4 unless given.
        acceptance_rule: "coupled" unless given, "rejection" or "block", see ``EngineConfig``.
        prompt_lookup_min, prompt_lookup_max: ngram's shortest and longest n-gram.
        dtype, quantization, drafter_quantization, drafter_window, preset, max_model_len,
            max_num_seqs, max_num_batched_tokens, memory, seed, logprobs_mode: see ``EngineConfig``.
            ``gpu_memory_utilization`` is ``memory`` as a share. With ``seed`` the i-th request
            since the start gets a seed of its own that depends on both.

    Raises:
        ConfigError: an option is wrong.
        ModelError: a checkpoint or tokenizer cannot be used.
        MemoryBudgetError: the memory is too small.
    """

    def __init__(self, model: Folder, drafter: Folder | None = "auto", **options: Any) -> None:
        known = _understand(options)
        drafter = known.pop("drafter", drafter)
        sizes = {n: known.pop(n) for n in ("prompt_lookup_min", "prompt_lookup_max") if n in known}
        given = {name: value for name, value in known.items() if value is not None}
        self.config = EngineConfig(**given)
        folder = find_folder(model)
        read_config(folder)
        spec = replace(find_drafter(drafter, folder), **sizes)
        self._codec = TextCodec(folder) if has_tokenizer(folder) else None
        _check_tokenizers(self._codec, spec)
        backend = self._codec.backend if self._codec else None
        self.engine = Engine(folder, spec, self.config, backend)
        self.drafter = self.engine.spec
        logger.info("%s", self.engine.budget)
        self._requests = 0
        self._words: dict[int, str] = {}  # of single tokens, as log probabilities show them

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt and return the outputs in the prompts' order.

        Args:
            prompts: a text, token ids, ``{"prompt_token_ids": ids}``, or a list of these.
            params: one for all, or one each; None takes the defaults.

        Raises:
            RequestError: a prompt cannot be served; nothing has been started then.
            GenerationError: a request failed on the way; the error holds all outputs.
        """
        pending = self._start(prompts, params)
        hidden = True if len(pending) < 2 else None  # None: where stderr is no terminal
        with tqdm(total=len(pending), desc="generating", leave=False, disable=hidden) as bar:
            for event in self._run(pending):
                bar.update(event.finish_reason is not None and pending[event.request_id].done)
        outputs = [p.output() for p in pending.values()]
        failed = [(i, p.error) for i, p in enumerate(pending.values()) if p.error]
        if failed:
            where = f"prompt {failed[0][0]}" if len(pending) > 1 else "the prompt"
            raise GenerationError(f"{where} failed: {failed[0][1]}", outputs)
        return outputs

    def stream(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> Iterator[tuple[int, Event]]:
        """As ``generate``, token by token: yields (index of the prompt, event).

        An event carries the token, its text and its origin: accepted, bonus or plain. Leaving the
        iterator aborts what is not finished.
        """
        pending = self._start(prompts, params)
        order = {id: i for i, id in enumerate(pending)}
        for event in self._run(pending):
            yield order[event.request_id], event

    def chat(
        self, messages: Seq[Message] | Seq[Seq[Message]], params: SamplingParams | None = None
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, by the checkpoint's chat template.

        Args:
            messages: [{"role": ..., "content": ...}, ...], or a list of such lists.
            params: for all of them.

        Raises:
            RequestError: the checkpoint has no template, or the template refuses the messages.
        """
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        if self._codec is None:
            raise RequestError("this model has no tokenizer, so chat() has no template to use.")
        return self.generate([self._codec.chat(list(c)) for c in conversations], params)

    def decode(self, ids: Seq[int]) -> str:
        """The text of token ids, special tokens written out; empty for a model without text."""
        if self._codec is None:
            return ""
        text: str = self._codec.backend.decode(list(ids), skip_special_tokens=False)
        return text

    def _start(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None
    ) -> dict[str, _Pending]:
        """Queue every prompt, or none of them."""
        listed = _as_list(prompts)
        if params is None or isinstance(params, SamplingParams):
            chosen = [params or SamplingParams()] * len(listed)
        else:
            chosen = list(params)
        if len(chosen) != len(listed):
            raise RequestError(
                f"{len(listed)} prompts came with {len(chosen)} params; give one each."
            )
        pending: dict[str, _Pending] = {}
        try:
            for prompt, param in zip(listed, chosen, strict=True):
                request, text = self._request(prompt, param)
                samples = [_Sample() for _ in range(param.n)]
                self.engine.add(request)
                pending[request.id] = _Pending(text, request, time.perf_counter(), samples)
        except BaseException as error:
            for id in pending:
                self.engine.abort(id)
            if isinstance(error, OutriderError) and len(listed) > 1:
                error.args = (f"prompt {len(pending)}: {error}",)
            raise
        return pending

    def _request(self, prompt: Prompt, params: SamplingParams) -> tuple[Request, str | None]:
        text: str | None = None
        if isinstance(prompt, Mapping):
            text, prompt = (
                prompt.get("prompt"),
                prompt.get("prompt_token_ids", prompt.get("prompt", ())),
            )
        if isinstance(prompt, str):
            if self._codec is None:
                raise RequestError("this model has no tokenizer; give prompts as token ids.")
            if any("\ud800" <= letter <= "\udfff" for letter in prompt):
                raise RequestError("the prompt has lone surrogates; decode it as UTF-8.")
            text, prompt = prompt, self._codec.encode(prompt)
        ids = tuple(i for i in prompt if isinstance(i, int))
        if len(ids) != len(prompt):
            raise RequestError("a prompt is a text or a list of token ids; this one is neither.")
        index, self._requests = self._requests, self._requests + 1
        seed = params.seed
        if seed is None:
            base = self.config.seed
            seed = fresh_seed() if base is None else request_seed(base, index)
        eos = self.engine.model.shape.eos_token_ids
        return Request(f"request-{index}", ids, params, seed, eos), text

    def _worded(self, event: Event) -> Event:
        """The event with the text of every token whose log probability it gives."""
        if (event.logprobs is None and event.prompt_logprobs is None) or self._codec is None:
            return event

        def worded(found: Logprobs) -> Logprobs:
            for id in found:
                if id not in self._words:
                    self._words[id] = self.decode([id])
            return {i: Logprob(p.logprob, p.rank, self._words[i]) for i, p in found.items()}

        own, prompt = event.logprobs, event.prompt_logprobs
        return event._replace(
            logprobs=None if own is None else worded(own),
            prompt_logprobs=None if prompt is None else [f and worded(f) for f in prompt],
        )

    def _run(self, pending: dict[str, _Pending]) -> Iterator[Event]:
        """Step until all is done; whatever ends it early frees what is left."""
        left = dict(pending)
        try:
            while left:
                for event in map(self._worded, self.engine.step()):
                    item = pending[event.request_id]
                    item.take(event)
                    if event.finish_reason is not None and item.done:
                        del left[event.request_id]
                    yield event
        finally:
            for id in left:
                self.engine.abort(id)


def _as_list(prompts: Prompt | Seq[Prompt]) -> list[Prompt]:
    """Tell one prompt from a list of prompts."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    listed: list[Any] = list(prompts)
    if listed and all(isinstance(p, int) for p in listed):
        return [listed]
    return listed
