"""The door for Python users: ``LLM``, in the manner of vLLM's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import Any, TypeVar, cast

from tqdm import tqdm

from .drafters.base import DrafterSpec, NoSpec
from .engine.build import build_engine
from .engine.engine import Engine
from .engine.speculation import SpeculationState
from .errors import OutriderError, RequestError
from .intake import Intake, Prompt, as_list
from .models.families import Folder
from .outputs import (
    GenerationError,
    Pending,
    RequestOutput,
)
from .text.codec import Message
from .types import Event, SamplingParams, Speculation

logger = logging.getLogger("outrider")
T = TypeVar("T")


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
        tokenizer: a folder with a tokenizer, instead of the checkpoint's own.
        dtype, quantization, drafter_quantization, drafter_window, preset, max_model_len,
            max_num_seqs, max_num_batched_tokens, memory, seed, logprobs_mode,
            scheduling_policy: see ``EngineConfig``. ``gpu_memory_utilization`` is ``memory`` as a
            share. With ``seed`` the i-th request since the start gets a seed of its own that
            depends on both.

    Raises:
        ConfigError: an option is wrong.
        ModelError: a checkpoint or tokenizer cannot be used.
        MemoryBudgetError: the memory is too small.
    """

    def __init__(
        self, model: Folder, drafter: Folder | DrafterSpec | None = "auto", **options: Any
    ) -> None:
        intake = Intake(model, drafter, options)
        self._wire(intake, build_engine(intake.folder, intake.spec, intake.config, intake.backend))

    @classmethod
    def from_engine(cls, intake: Intake, engine: Engine) -> LLM:
        """Return an ``LLM`` over an engine that was built for ``intake``."""
        llm = cls.__new__(cls)
        llm._wire(intake, engine)
        return llm

    def _wire(self, intake: Intake, engine: Engine) -> None:
        self._intake, self.engine = intake, engine
        self.config = intake.config
        drafts = self.speculation.drafter == intake.spec.name
        self.drafter = intake.spec if drafts else NoSpec()
        logger.info("%s", self.engine.budget)

    @property
    def speculation(self) -> SpeculationState:
        """What drafts unless a request says, and how far."""
        return self.engine.speculator.state

    def set_speculation(self, state: SpeculationState) -> None:
        """Draft in another way from the next step on.

        Raises:
            ConfigError: there is no such drafter, or the length is out of range.
        """
        self.engine.speculator.set(state)

    def generate(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None = None,
        *,
        speculation: Speculation | Seq[Speculation] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt and return the outputs in the prompts' order.

        Args:
            prompts: a text, token ids, ``{"prompt_token_ids": ids}``, or a list of these.
            params: one for all, or one each; None takes the defaults.
            speculation: what requests want of drafting, one for all, or one each; None takes the
                engine's way.

        Raises:
            RequestError: a prompt cannot be served; nothing has been started then.
            GenerationError: a request failed on the way; the error holds all outputs.
        """
        pending = self._start(prompts, params, speculation)
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
        *,
        speculation: Speculation | Seq[Speculation] | None = None,
    ) -> Iterator[tuple[int, Event]]:
        """As ``generate``, token by token: yields (index of the prompt, event).

        An event carries the token, its text and its origin: accepted, bonus or plain. Leaving the
        iterator aborts what is not finished.
        """
        pending = self._start(prompts, params, speculation)
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
        codec = self._intake.codec
        if codec is None:
            raise RequestError("this model has no tokenizer, so chat() has no template to use.")
        return self.generate([codec.chat(list(c)) for c in conversations], params)

    def decode(self, ids: Seq[int]) -> str:
        """The text of token ids, special tokens written out; empty for a model without text."""
        return self._intake.decode(ids)

    def _start(
        self,
        prompts: Prompt | Seq[Prompt],
        params: SamplingParams | Seq[SamplingParams] | None,
        speculation: Speculation | Seq[Speculation] | None,
    ) -> dict[str, Pending]:
        """Queue every prompt, or none of them."""
        listed = as_list(prompts)
        chosen = _one_each(params, SamplingParams, len(listed), "params")
        wanted = _one_each(speculation, Speculation, len(listed), "speculation")
        pending: dict[str, Pending] = {}
        try:
            for prompt, param, speculate in zip(listed, chosen, wanted, strict=True):
                request, text = self._intake.request(prompt, param, speculation=speculate)
                self.engine.add(request)
                pending[request.id] = Pending(text, request)
        except BaseException as error:
            for id in pending:
                self.engine.abort(id)
            if isinstance(error, OutriderError) and len(listed) > 1:
                error.args = (f"prompt {len(pending)}: {error}",)
            raise
        return pending

    def _run(self, pending: dict[str, Pending]) -> Iterator[Event]:
        """Step until all is done; whatever ends it early frees what is left."""
        left = dict(pending)
        try:
            while left:
                for event in map(self._intake.worded, self.engine.step()):
                    item = pending[event.request_id]
                    item.take(event)
                    if event.finish_reason is not None and item.done:
                        del left[event.request_id]
                    yield event
        finally:
            for id in left:
                self.engine.abort(id)


def _one_each(given: T | Seq[T] | None, kind: type[T], count: int, name: str) -> list[T]:
    """Return ``given`` for each of ``count`` prompts; None stands for the defaults.

    Raises:
        RequestError: there are more or fewer than prompts.
    """
    if given is None:
        return [kind()] * count
    if isinstance(given, kind):
        return [given] * count
    listed: list[T] = list(cast(Seq[T], given))
    if len(listed) != count:
        raise RequestError(f"{count} prompts came with {len(listed)} {name}; give one each.")
    return listed
