"""``/generate``: SGLang's own path, from texts or token ids to texts and token ids."""

from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import Request as HttpRequest
from pydantic import Field

from ..base.types import SAMPLE, grouped_by
from ..frontend.outputs import RequestState, SampleState
from .answer import finite, stop_of
from .api_call import merged
from .completions import Completion
from .errors import Refusal
from .protocol import REQUEST_ID, CompletionRequest, Wire, checked, ranged
from .reader import Reader
from .service import Service
from .shapes import Prompts, Texts, Whole
from .unsupported import Unless

NAMES = {
    "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed",
    "json_schema": "guided_json", "regex": "guided_regex", "ebnf": "guided_grammar",
}  # fmt: skip
"""SGLang's names of options, and the names that completions have for them."""
SAME = (
    "temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "stop", "stop_token_ids", "ignore_eos", "skip_special_tokens", "n",
    "logit_bias",
)  # fmt: skip
OTHERS = ("stop_regex", "structural_tag", "custom_params", "no_stop_trim")
"""Options that would change the output, and are not served."""
MOST_NEW = 128
"""Default number of new tokens, as in SGLang."""
MOST_STREAMED = 1 << 13
"""Most tokens of a stream: each event repeats all tokens before it."""


class GenerateRequest(Wire):
    """The body of ``POST /generate``."""

    text: str | Texts | None = None
    input_ids: Prompts | None = None
    sampling_params: dict[str, Any] | None = None
    stream: bool = False
    return_logprob: bool = False
    top_logprobs_num: Whole = ranged(0, 20, default=0)
    rid: str | None = Field(None, pattern=REQUEST_ID)
    priority: Whole = 0
    logprob_start_len: Annotated[Any, Unless((-1,))] = None
    token_ids_logprob: Annotated[Any, Unless(([],))] = None
    return_hidden_states: Annotated[Any, Unless((False,))] = None
    input_embeds: Annotated[Any, Unless()] = None
    image_data: Annotated[Any, Unless(([],))] = None
    audio_data: Annotated[Any, Unless(([],))] = None
    video_data: Annotated[Any, Unless(([],))] = None
    lora_path: Annotated[Any, Unless()] = None
    custom_logit_processor: Annotated[Any, Unless()] = None

    def completion(self) -> CompletionRequest:
        """Return the completion that is asked for. Raises Refusal: it is not served."""
        prompt = self.input_ids if self.text is None else self.text
        if prompt is None or not (self.text is None or self.input_ids is None):
            raise Refusal("give either text or input_ids.", "text")
        given = self.sampling_params or {}
        for name in OTHERS:
            if given.get(name):
                raise Refusal(
                    f"sampling_params.{name}: this server does not support it; leave it out.",
                    "sampling_params",
                )
        own = {name: given[name] for name in SAME if name in given}
        own |= {ours: given[name] for name, ours in NAMES.items() if name in given}
        listed = self.top_logprobs_num if self.return_logprob else None
        more = {"logprobs": listed, "stream": self.stream, "priority": self.priority}
        return checked(CompletionRequest, {"max_tokens": MOST_NEW, **own, **more, "prompt": prompt})


class Generate(Completion):
    """A call of SGLang's path; a stream repeats the output so far."""

    prefix = "gen"

    def __init__(self, service: Service, asked: GenerateRequest, http: HttpRequest) -> None:
        super().__init__(service, asked.completion(), http)
        self.id = asked.rid or self.id
        listed = asked.text if asked.text is not None else asked.input_ids
        self.one = isinstance(listed, str) or isinstance((listed or [0])[0], int)

    def build(self) -> Any:
        entries = [self._entry(st, sample) for st in self.states for sample in st.samples]
        return entries[0] if self.one and self.body.n == 1 else entries

    async def prepare(self) -> None:
        await super().prepare()
        most = sum((s.request.params.max_tokens or 0) * s.request.params.n for s in self.states)
        if self.body.stream and most > MOST_STREAMED:
            raise Refusal(
                f"the stream may have {most} tokens, and repeats them in each event; ask for at "
                f"most {MOST_STREAMED}, or leave out stream.", "sampling_params",
            )  # fmt: skip

    async def chunks(self) -> AsyncIterator[dict[str, Any]]:
        async for i, events in merged(self.runs()):
            for j in grouped_by(events, SAMPLE):
                state = self.states[i]
                entry = self._entry(state, state.samples[j])
                yield entry if self.one else {"index": i * self.body.n + j, **entry}

    def _entry(self, state: RequestState, sample: SampleState) -> dict[str, Any]:
        """Return the output of a sample so far."""
        count, outputs = len(sample.token_ids), self.service.llm.inputs.outputs
        reason: dict[str, Any] | None = None
        if sample.finish_reason == "stop":
            reason = {"type": "stop", "matched": stop_of(sample)["matched_stop"]}
        elif sample.finish_reason is not None:
            reason = {"type": sample.finish_reason, sample.finish_reason: count}
        told: dict[str, Any] = {
            "id": self.id, "finish_reason": reason, "completion_tokens": count,
            "prompt_tokens": len(state.request.prompt_token_ids),
            "cached_tokens": state.cached_tokens,
            "reasoning_tokens": self._num_thought_tokens(state, sample),
        }  # fmt: skip
        if self.body.logprobs is not None:
            rows = list(zip(sample.token_ids, sample.logprobs, strict=True))
            told["input_token_logprobs"] = []
            told["output_token_logprobs"] = [
                [finite(row[id].logprob), id, outputs.word(id)] for id, row in rows
            ]
            told["output_top_logprobs"] = [
                [[finite(p.logprob), each, outputs.word(each)] for each, p in row.items()]
                for _, row in rows
            ]
        return {"text": sample.text, "output_ids": sample.token_ids, "meta_info": told}

    def _num_thought_tokens(self, state: RequestState, sample: SampleState) -> int:
        """Return how many output tokens are thoughts, opened by the prompt or the output."""
        reasoning, outputs = self.service.settings.reasoning, self.service.llm.inputs.outputs
        if reasoning is None:
            return 0
        prompt = state.prompt or outputs.decode(list(state.request.prompt_token_ids))
        reader = Reader(reasoning, "hermes", "none", {}, reasoning.begun(prompt))
        return reader.num_thought_tokens(sample, outputs.shown(state.request))
