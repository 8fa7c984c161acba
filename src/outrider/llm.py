"""The Python interface: ``LLM``, after vLLM's."""

from __future__ import annotations

import logging
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from itertools import groupby
from operator import attrgetter
from typing import Any, TypeVar, Unpack, cast

from tqdm import tqdm

from .base.config import POCKET, EngineOptions
from .base.types import Event, Folder, SamplingParams, Speculation
from .drafters.base import DrafterSpec, NoSpec
from .engine.build import build_engine
from .engine.control.switch import SpeculationState
from .engine.engine import Engine
from .engine.setup import EngineSetup, set_up
from .errors import GenerationError, OutriderError, RequestError
from .frontend.inputs import InputProcessor, Prompt, as_list
from .frontend.outputs import RequestOutput, RequestState
from .text.codec import Message

logger = logging.getLogger("outrider")
T = TypeVar("T")
OWNER = attrgetter("request_id", "sample_index")


class LLM:
    """A target model, a drafter, and the engine that runs them.

    Args:
        model: a checkpoint's folder or .gguf file, or its name on the Hugging Face hub; the
            bundled "pocket" unless given.
        drafter: "auto" (chooses at each step among all that are at hand), "ngram", "suffix", None
            or "none", a checkpoint's folder or .gguf file, several joined by "+"; or a
            ``DrafterSpec``.
        options: see ``EngineOptions``; ``outrider generate --help`` explains each. With ``seed``
            the i-th request since the start gets a seed that depends on both.

    Raises ConfigError: an option is wrong. ModelError: a checkpoint or tokenizer cannot be used.
    MemoryBudgetError: the memory is too small.
    """

    def __init__(
        self,
        model: Folder = POCKET,
        drafter: Folder | DrafterSpec | None = "auto",
        **options: Unpack[EngineOptions],
    ) -> None:
        setup = set_up(model, drafter, cast(Mapping[str, Any], options))
        inputs = InputProcessor(setup.facts)  # what is wrong with a tokenizer comes before weights
        self._wire(setup, build_engine(setup), inputs)

    @classmethod
    def from_engine(cls, setup: EngineSetup, engine: Engine) -> LLM:
        """Return an ``LLM`` over an engine that was built from a setup."""
        llm = cls.__new__(cls)
        llm._wire(setup, engine, InputProcessor(setup.facts))
        return llm

    def _wire(self, setup: EngineSetup, engine: Engine, inputs: InputProcessor) -> None:
        self.inputs, self.engine = inputs, engine
        self.config = setup.config
        drafts = self.speculation.drafter == setup.spec.name
        self.drafter = setup.spec if drafts else NoSpec()
        logger.info("%s", self.engine.budget)

    @property
    def speculation(self) -> SpeculationState:
        """The default drafter and draft length."""
        return self.engine.menu.state

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the sampling options that requests without any have.

        They come from the checkpoint's ``generation_config.json``, or a GGUF file's metadata.
        """
        return self.inputs.default_params

    def set_speculation(self, state: SpeculationState) -> None:
        """Set the default drafter and draft length (None: the engine's) from the next step on.

        Raises ConfigError: there is no such drafter, or the length is out of range.
        """
        self.engine.menu.set(state)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation] | None = None,
    ) -> list[RequestOutput]:
        """Continue every prompt and return the outputs in the prompts' order.

        Args:
            prompts: a text, token ids, ``{"prompt_token_ids": ids}``, or a list of these.
            sampling_params, speculation: one for all, or one each; None takes the defaults, of
                sampling those that come with the checkpoint.

        Raises RequestError: a prompt cannot be served; nothing has been started then.
        GenerationError: a request failed on the way; the error holds all outputs.
        """
        states = self.start(prompts, sampling_params, speculation=speculation, offline=True)
        hidden = len(states) < 2 or None  # None: where stderr is no terminal
        with tqdm(total=len(states), desc="generating", leave=False, disable=hidden) as bar:
            for state, events in self._steps(states):
                state.collect(events)
                if events[-1].finish_reason is not None and state.done:
                    state.write()
                    bar.update()
        outputs = [state.output() for state in states]
        failed = [(state.index, state.error) for state in states if state.error]
        if failed:
            where = f"prompt {failed[0][0]}" if len(states) > 1 else "the prompt"
            raise GenerationError(f"{where} failed: {failed[0][1]}", outputs)
        return outputs

    def stream(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation] | None = None,
    ) -> Iterator[Event]:
        """Continue prompts as ``generate`` does, and yield one ``Event`` for each token.

        ``error`` of an event says why a request failed. Leaving the iterator aborts the rest.
        """
        yield from self.run(self.start(prompts, sampling_params, speculation=speculation))

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Answer a conversation ([{"role": ..., "content": ...}, ...]), or a list of them.

        Args:
            tools: functions that may be called, in OpenAI's form.
            chat_template_kwargs: further variables of the chat template.

        Raises RequestError: the checkpoint has no template, or the template refuses the messages.
        """
        prompts = self._prompts(messages, tools, chat_template_kwargs)
        return self.generate(prompts, sampling_params)

    def stream_chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> Iterator[Event]:
        """Answer conversations as ``chat`` does, and yield events as ``stream`` does."""
        prompts = self._prompts(messages, tools, chat_template_kwargs)
        yield from self.stream(prompts, sampling_params)

    def _prompts(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        tools: Sequence[Mapping[str, Any]] | None,
        variables: Mapping[str, Any] | None,
    ) -> list[Prompt]:
        """Return the token ids of a conversation, or of each of several."""
        one = bool(messages) and isinstance(messages[0], Mapping)
        conversations: list[Any] = [messages] if one else list(messages)
        more: dict[str, Any] = {**(variables or {}), "tools": [dict(tool) for tool in tools or ()]}
        texts = (self.inputs.render(list(each), **more) for each in conversations)
        return [self.inputs.encode(text, special=False, rendered=True) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, special tokens included; empty for a model without text."""
        return self.inputs.outputs.decode(ids)

    def start(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        speculation: Speculation | Sequence[Speculation] | None = None,
        offline: bool = False,
    ) -> list[RequestState]:
        """Queue every prompt, or none of them; return their states for ``run``.

        Nobody reads the output of ``offline`` requests before all are done.
        """
        listed = as_list(prompts)
        if sampling_params is None:
            sampling_params = self.get_default_sampling_params()
        params = _one_each(sampling_params, SamplingParams, len(listed), "sampling_params")
        speculations = _one_each(speculation, Speculation, len(listed), "speculation")
        states: list[RequestState] = []
        try:
            for prompt, param, how in zip(listed, params, speculations, strict=True):
                state = self.inputs.request(
                    prompt, param, speculation=how, index=len(states), offline=offline
                )
                self.engine.add(state.request)
                states.append(state)
        except BaseException as error:
            for state in states:
                self.engine.abort(state.request.id)
            if isinstance(error, OutriderError) and len(listed) > 1:
                error.args = (f"prompt {len(states)}: {error}",)
            raise
        return states

    def run(self, states: Sequence[RequestState]) -> Iterator[Event]:
        """Step until all requests are done; yield their events, which the states have taken.

        Leaving the iterator aborts what is not finished.
        """
        with closing(self._steps(states)) as steps:
            for state, events in steps:
                for event in events:
                    yield state.take(event)
                    if state.broken:
                        break

    def _steps(
        self, states: Sequence[RequestState]
    ) -> Generator[tuple[RequestState, list[Event]], None, None]:
        """Step until all are done; yield each sample's events, which its state must take first."""
        left = {state.request.id: state for state in states}
        try:
            while left:
                for (id, _), events in groupby(self.engine.step(), OWNER):
                    state = left.get(id)
                    if state is None:  # broken by an earlier sample of this step
                        continue
                    yield state, [*events]
                    if state.broken:
                        self.engine.abort(id)
                    if state.broken or state.done:
                        del left[id]
        finally:
            for id in left:
                self.engine.abort(id)
            self.engine.settle()


def _one_each(values: T | Sequence[T] | None, kind: type[T], count: int, name: str) -> list[T]:
    """Return a value for each of ``count`` prompts; None stands for the defaults."""
    if values is None or isinstance(values, kind):
        return [values or kind()] * count
    listed: list[T] = list(cast(Sequence[T], values))
    if len(listed) != count:
        raise RequestError(f"{count} prompts came with {len(listed)} {name}; give one each.")
    return listed
