"""Makes requests from prompts and options, for ``LLM``, ``AsyncLLM`` and the server alike."""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from ..base.types import DEFAULT_SPECULATION, Request, SamplingParams, Speculation, check_vocabulary
from ..checkpoints.unread import UnreadCodec
from ..engine.worker.messages import Facts
from ..errors import RequestError, shown
from ..params import DEFAULT_MAX_TOKENS
from ..sampling.seeds import fresh_seed, request_seed
from ..text.codec import Message, has_lone_surrogates
from .outputs import OutputProcessor, RequestState
from .presets import sampling_defaults

Prompt = str | Sequence[int] | Mapping[str, Any]


class InputProcessor:
    """Makes requests for an engine. Raises ModelError: the tokenizer cannot be read."""

    def __init__(self, facts: Facts) -> None:
        self.folder, self.config, codec = facts.folder, facts.config, facts.codec
        self.codec = codec.read() if isinstance(codec, UnreadCodec) else codec
        self.drafter = facts.drafter
        self.vocab_size, self.max_model_len = facts.vocab_size, facts.max_model_len
        self.eos_token_ids = facts.eos_token_ids
        self.outputs = OutputProcessor(self.codec)
        self._numbers = itertools.count()

    @cached_property
    def defaults(self) -> dict[str, Any]:
        """The checkpoint's sampling defaults, see ``presets.sampling_defaults``."""
        return sampling_defaults(self.folder)

    @property
    def default_params(self) -> SamplingParams:
        """The sampling options of a request that gives none."""
        return SamplingParams(**self.defaults)

    def request(
        self,
        prompt: Prompt,
        params: SamplingParams,
        id: str | None = None,
        *,
        speculation: Speculation | None = None,
        priority: int = 0,
        cache_salt: str = "",
        text: str | None = None,
        index: int = 0,
        offline: bool = False,
    ) -> RequestState:
        """Return the state of the request for a prompt, which starts now; see ``Request``.

        Args:
            prompt: a text, token ids, or ``{"prompt_token_ids": ids}``.
            params, speculation, priority, cache_salt, offline: of the request.
            id: unique among running requests; made up by default.
            text: the prompt's text if it is known and ``prompt`` is token ids.
            index: the place of the prompt among those of the call.

        Raises RequestError: it cannot be served.
        """
        ids: Any = prompt
        if isinstance(prompt, Mapping):
            text = prompt.get("prompt")
            ids = prompt.get("prompt_token_ids", prompt.get("prompt", ()))
        if isinstance(ids, str):
            text, ids = ids, self.encode(ids)
        if not isinstance(ids, Sequence) or not set(map(type, ids)) <= {int}:
            raise RequestError("a prompt is a text or a list of token ids; this one is neither.")
        speculation = speculation or DEFAULT_SPECULATION
        if not ids:
            raise RequestError("the prompt has no tokens; give at least one.")
        self.room_after(ids)
        check_vocabulary("the prompt", ids, self.vocab_size)
        check_vocabulary("prediction", speculation.prediction, self.vocab_size)
        self.check_max_tokens(params.max_tokens)
        self.check_priority(priority)
        if self.codec is None and (params.stop or params.bad_words):
            name = "stop strings" if params.stop else "bad_words"
            raise RequestError(f"{name} need a tokenizer, and this model has none.")
        number = next(self._numbers)
        seed, base = params.seed, self.config.seed
        if seed is None:
            seed = fresh_seed() if base is None else request_seed(base, number)
        request = Request(
            f"request-{number}" if id is None else id, tuple(ids), params, seed,
            self.eos_token_ids, speculation, priority, cache_salt, offline,
        )  # fmt: skip
        return RequestState(self.outputs, request, text, index)

    def room_after(self, ids: Sequence[int]) -> int:
        """Return how many tokens may follow a prompt."""
        room = self.max_model_len - len(ids)
        if room < 1:
            raise RequestError(
                # Clients detect a prompt that is too long by SGLang's words.
                f"the prompt has {len(ids)} tokens and is longer than the model's context length "
                f"of {self.max_model_len} allows; shorten it to {self.max_model_len - 1} or less.",
                "prompt",
            )  # fmt: skip
        return room

    def check_max_tokens(self, number: int | None, name: str = "max_tokens") -> None:
        """Refuse more output than the context holds."""
        # A context smaller than the default clips it, since the user did not choose the default.
        if (number or 0) > max(self.max_model_len, DEFAULT_MAX_TOKENS):
            raise RequestError(
                f"{name} is {shown(number)}, but the context of this model is "
                f"{self.max_model_len} tokens; give at most that.", name,
            )  # fmt: skip

    def check_priority(self, priority: int) -> None:
        """Refuse a priority that the scheduler would ignore."""
        if priority and self.config.scheduling_policy != "priority":
            raise RequestError(
                f"priority is {priority}, but priority scheduling is not enabled; give 0, or set "
                "scheduling_policy to 'priority'.", "priority",
            )  # fmt: skip

    def encode(self, text: str, special: bool = True, rendered: bool = False) -> list[int]:
        """Return the token ids of a text, see ``TextCodec.encode``."""
        if self.codec is None:
            raise RequestError("this model has no tokenizer; give prompts as token ids.", "prompt")
        if has_lone_surrogates(text):
            raise RequestError("the prompt has lone surrogates; give valid UTF-8.", "prompt")
        return self.codec.encode(text, special, rendered)

    def render(self, messages: list[Message], **options: Any) -> str:
        """Return the text of a conversation, see ``TextCodec.render``."""
        if self.codec is None:
            raise RequestError("this model has no tokenizer, so it cannot chat.", "messages")
        return self.codec.render(messages, **options)


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts of a call, a list of one for a single prompt."""
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts is {shown(prompts)}; give texts or lists of token ids.")
    listed: list[Any] = list(prompts)
    return [listed] if listed and all(isinstance(p, int) for p in listed) else listed
