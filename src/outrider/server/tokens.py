"""vLLM's paths for token ids: one renders a prompt, another continues it."""

from collections.abc import AsyncIterator
from dataclasses import fields, is_dataclass
from typing import Annotated, Any

from fastapi import Request as HttpRequest
from pydantic import Field

from ..base.types import SAMPLE, grouped_by
from ..errors import shown
from ..frontend.outputs import SampleState
from ..params import SamplingParams
from .answer import chat_logprobs, prompt_logprobs, stop_of
from .answering import leaving, unless_gone
from .api_call import ApiCall
from .completions import Completion
from .errors import Refusal
from .protocol import REQUEST_ID, CompletionRequest, StreamOptions, Wire, checked
from .service import Service
from .shapes import Ids, Timeout, Whole
from .unsupported import Unless, Unsupported

OPTIONS = {each.name for each in fields(SamplingParams)} | Unsupported.model_fields.keys()


class TokensRequest(Wire):
    """The body of ``POST /inference/v1/generate``."""

    token_ids: Annotated[Ids, Field(min_length=1)]
    sampling_params: dict[str, Any] = Field(default_factory=dict)
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: Whole = 0
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    timeout: Timeout | None = None
    features: Annotated[Any, Unless()] = None
    kv_transfer_params: Annotated[Any, Unless(({},))] = None

    def completion(self) -> CompletionRequest:
        """Return the completion that is asked for. Raises Refusal: it needs the text."""
        given = self.sampling_params
        if given.get("detokenize") is False and given.get("stop"):
            raise Refusal(
                f"stop is {shown(given['stop'])}, which needs the text; leave out detokenize.",
                "sampling_params",
            )
        taken = {name: given[name] for name in given.keys() & OPTIONS - {"detokenize"}}
        own = self.model_dump(exclude={"token_ids", "sampling_params"}, exclude_none=True)
        return checked(
            CompletionRequest, {"max_tokens": None, **taken, **own, "prompt": self.token_ids}
        )


class Tokens(Completion):
    """A call for token ids; the text is not shown."""

    prefix = "generate-tokens"

    def __init__(self, service: Service, asked: TokensRequest, http: HttpRequest) -> None:
        super().__init__(service, asked.completion(), http)

    def head(self, kind: str) -> dict[str, Any]:
        return {"request_id": self.id}

    def build(self) -> dict[str, Any]:
        (state,) = self.states
        return {
            **self.head(""),
            "choices": [self._choice(i, sample) for i, sample in enumerate(state.samples)],
            "prompt_logprobs": prompt_logprobs(state.prompt_logprobs),
            "kv_transfer_params": None, "usage": self.usage(), **self.figures(),
        }  # fmt: skip

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        (run,) = self.runs()
        async for events in run:
            for i, new in grouped_by(events, SAMPLE).items():
                part = SampleState()
                part.take(new)
                if part.token_ids or part.finish_reason:
                    yield self.chunk(self._choice(i, part), len(part.token_ids))

    def _choice(self, number: int, part: SampleState) -> dict[str, Any]:
        """Return a choice, complete or the part of a step."""
        most, listed = self.body.logprobs, None
        if most is not None:
            outputs = self.service.llm.inputs.outputs
            listed = chat_logprobs(part.logprobs, part.token_ids, most or 1, outputs)
        return {
            "index": number, "token_ids": part.token_ids, "logprobs": listed,
            "finish_reason": part.finish_reason, **stop_of(part),
        }  # fmt: skip


async def rendered(call: ApiCall[Any], http: HttpRequest) -> list[dict[str, Any]]:
    """Return the prompts of a call and its options, as ``/inference/v1/generate`` takes them."""
    with leaving(call):
        await unless_gone(http, call.prepare())
    call.lease.close()
    body = call.body
    return [
        {
            "request_id": call.id, "model": body.model or call.service.name,
            "token_ids": list(state.request.prompt_token_ids),
            "sampling_params": _given(state.request.params),
            "stream": body.stream,
            "stream_options": body.stream_options and body.stream_options.model_dump(),
            "cache_salt": body.cache_salt, "priority": body.priority,
            "features": None, "kv_transfer_params": None,
        }
        for state in call.states
    ]  # fmt: skip


def _given(options: Any) -> Any:
    """Return options as JSON values, without those that ask for nothing."""
    if not is_dataclass(options):
        return options
    values = {each.name: getattr(options, each.name) for each in fields(options)}
    return {n: _given(value) for n, value in values.items() if value not in (None, (), {})}
