"""What clients send, in OpenAI's and vLLM's names, and what it means to the engine."""

from __future__ import annotations

from collections.abc import Mapping
from types import NoneType
from typing import Annotated, Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from ..errors import shown
from ..limits import LARGEST_INT, REQUEST, SAMPLING
from ..params import DEFAULT_MAX_TOKENS, LONGEST_NUMBER, SamplingParams
from .fields import BLANKS, NotInChats, NotInCompletions, Unless, Unsupported
from .shapes import (
    MOST_PROMPTS,
    MOST_TOOLS,
    Biases,
    Choices,
    DraftLength,
    Ids,
    Messages,
    OptionIds,
    Parts,
    Prompts,
    Real,
    Samples,
    Timeout,
    Whole,
    Words,
    check_schema,
)  # fmt: skip
from .shapes import Refusal as Refusal

MOST_SAMPLES = 256
FORM = "structured_outputs"

REQUEST_ID = r"^[\x21-\x7e]{1,128}$"
"""What a client may call its request; nothing that could break a line of the log."""


def ranged(
    least: float, most: float | None = None, *, above: bool = False, default: int | None = None
) -> Any:
    """A field whose range is published; ``SamplingParams`` refuses what is out of it, and says why.

    With ``above`` the least value itself is out.
    """
    bounds: dict[str, Any] = {"exclusiveMinimum" if above else "minimum": least}
    if most is not None:
        bounds["maximum"] = most
    return Field(default, json_schema_extra=bounds)


def sampled(name: str, default: int | None = None) -> Any:
    """A field of ``SamplingParams``, with the range that is checked there."""
    number = SAMPLING[name]
    return ranged(number.least, number.most, above=number.above, default=default)


class Wire(BaseModel):
    """Base of everything that is sent; unknown fields are ignored, as OpenAI's clients expect."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, given: Any) -> Any:
        """Clients write null for what they do not give, of fields too that cannot be null."""
        if not isinstance(given, dict):
            return given

        def kept(name: str, value: Any) -> bool:
            field = cls.model_fields.get(name)
            return value is not None or field is None or NoneType in get_args(field.annotation)

        return {name: value for name, value in given.items() if kept(name, value)}


class SpeculationOptions(Wire):
    """What a request wants of drafting; its text does not depend on it."""

    enabled: bool = True
    drafter: str | None = None
    num_speculative_tokens: DraftLength | None = None


class StreamOptions(Wire):
    """What a stream says besides text: usage at its end, or all the time as vLLM knows it."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Wire):
    """vLLM's ``structured_outputs``: one of these."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Annotated[Any, Unless((False,), BLANKS)] = None
    disable_additional_properties: Annotated[Any, Unless((False,))] = None
    whitespace_pattern: Annotated[Any, Unless((), BLANKS)] = None
    structural_tag: Annotated[Any, Unless()] = None


class JsonSchema(Wire):
    """OpenAI's wrapping of a schema."""

    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """OpenAI's ``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Prediction(Wire):
    """OpenAI's ``prediction``: text that the output is expected to resemble."""

    type: Literal["content"] = "content"
    content: str | Parts

    @property
    def text(self) -> str:
        """All of it."""
        if isinstance(self.content, str):
            return self.content
        texts = (part.get("text") for part in self.content)
        return "".join(text for text in texts if isinstance(text, str))


class Templated(Wire):
    """What the chat template makes a prompt of, besides messages and tools."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Parts | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = (
        None
    )
    chat_template_kwargs: dict[str, Any] | None = None


class Generation(Wire, Unsupported):  # type: ignore[misc]
    """What completions and chats have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Samples = 1
    temperature: Real | None = sampled("temperature")
    top_p: Real | None = sampled("top_p")
    top_k: Whole | None = sampled("top_k")
    min_p: Real | None = sampled("min_p")
    seed: Whole | str | None = sampled("seed")
    stop: str | Words | None = None
    stop_token_ids: OptionIds | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    min_tokens: Whole = sampled("min_tokens", 0)
    max_tokens: Whole | None = sampled("max_tokens")
    max_completion_tokens: Whole | None = sampled("max_tokens")
    truncate_prompt_tokens: Whole | None = ranged(-1, LARGEST_INT)
    truncation_side: Literal["left", "right"] = "left"
    presence_penalty: Real | None = sampled("presence_penalty")
    frequency_penalty: Real | None = sampled("frequency_penalty")
    repetition_penalty: Real | None = sampled("repetition_penalty")
    logit_bias: Biases | None = None
    bad_words: Words | None = None
    allowed_token_ids: OptionIds | None = None
    prompt_logprobs: Whole | None = sampled("prompt_logprobs")
    return_token_ids: bool = False
    return_speculation: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None
    speculation: SpeculationOptions | None = None
    prediction: Prediction | None = None
    priority: Whole = Field(0, ge=REQUEST["priority"].least, le=REQUEST["priority"].most)
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    cache_salt: str | None = Field(None, max_length=256)
    timeout: Timeout | None = None

    def form(self) -> dict[str, Any] | None:
        """The form that the output must have, as ``StructuredOutputsParams`` takes it.

        Raises:
            RequestError: several are asked for, or a schema is missing, too large or too deep.
        """
        asked: dict[str, dict[str, Any]] = {}
        guided = self.structured_outputs
        if guided is not None:
            if guided.json_object and guided.json_ is not None:
                raise Refusal("json and json_object both ask for a form; give one of them.", FORM)
            schema = {"type": "object"} if guided.json_object else guided.json_
            parts = {
                "json": schema, "regex": guided.regex, "choice": guided.choice,
                "grammar": guided.grammar,
            }  # fmt: skip
            asked[FORM] = {k: v for k, v in parts.items() if v is not None}
        for name in ("json", "regex", "choice", "grammar"):
            value = getattr(self, f"guided_{name}")
            if value is not None:
                asked[f"guided_{name}"] = {name: value}
        shape = self.response_format
        if shape is not None and shape.type == "json_object":
            asked["response_format"] = {"json": {"type": "object"}}
        elif shape is not None and shape.type == "json_schema":
            found = shape.json_schema.schema_ if shape.json_schema else None
            if found is None:
                raise Refusal(
                    "json_schema.schema is missing; give a JSON schema.", "response_format"
                )
            asked["response_format"] = {"json": found}
        if len(asked) > 1:
            raise Refusal(f"{' and '.join(asked)} both ask for a form; give one of them.")
        for name, given in asked.items():
            check_schema(given.get("json"), name)
            return given
        return None

    def sampling(
        self, context_left: int, defaults: Mapping[str, Any], **more: Any
    ) -> SamplingParams:
        """How to sample.

        Args:
            context_left: the most that may follow the prompt, in tokens.
            defaults: of what the call leaves out; ``max_tokens`` bounds what it asks for.
            more: beside the call's own.

        Raises:
            ConfigError: a value is out of its range.
            Refusal: forms contradict each other.
        """
        limits = (context_left, self.limit, defaults.get("max_tokens"))
        most = min(limit for limit in limits if limit is not None)
        given = {
            "temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k,
            "min_p": self.min_p, "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty, "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias, "bad_words": self.bad_words, "stop": self.stop,
            "allowed_token_ids": self.allowed_token_ids, "stop_token_ids": self.stop_token_ids,
            "prompt_logprobs": self.prompt_logprobs, "structured_outputs": self.form(),
            "skip_special_tokens": self.skip_special_tokens, "max_tokens": most, **more,
        }  # fmt: skip
        return SamplingParams(
            n=self.n,
            seed=read_seed(self.seed),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
            include_stop_str_in_output=self.include_stop_str_in_output,
            **{**defaults, **{name: value for name, value in given.items() if value is not None}},
        )

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most, None for all that the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def read_seed(seed: int | str | None) -> int | None:
    """Return the seed as a number, None for -1, which vLLM takes for no seed.

    JSON's readers can hold a seed above 2^53 only as a string.

    Raises:
        Refusal: it is no whole number.
    """
    if seed in (-1, "-1"):
        return None
    if isinstance(seed, str):
        if not (seed.isascii() and seed.isdecimal() and len(seed) <= LONGEST_NUMBER):
            raise Refusal(f"seed is {shown(seed)}; give a whole number from 0 to 2^64 - 1.", "seed")
        return int(seed)
    return seed


class CompletionRequest(Generation, NotInCompletions):  # type: ignore[misc]
    """``POST /v1/completions``."""

    prompt: Prompts
    max_tokens: Whole | None = ranged(0, LARGEST_INT, default=DEFAULT_MAX_TOKENS)
    logprobs: Whole | None = sampled("logprobs")
    echo: bool = False
    add_special_tokens: bool = True
    best_of: Samples | None = None

    def prompts(self) -> list[str | Ids]:
        """Every prompt.

        Raises:
            Refusal: there is none, or there are too many.
        """
        given = self.prompt
        one = isinstance(given, str) or (bool(given) and isinstance(given[0], int))
        found: list[Any] = [given] if one else list(given)
        if not 1 <= len(found) <= MOST_PROMPTS:
            raise Refusal(f"there are {len(found)} prompts; give 1 to {MOST_PROMPTS}.", "prompt")
        if len(found) * self.n > MOST_SAMPLES:
            raise Refusal(
                f"{len(found)} prompts with n of {self.n} are {len(found) * self.n} samples; "
                f"a call may have {MOST_SAMPLES}.", "n",
            )  # fmt: skip
        return found


class Function(Wire):
    """A function that the model may call; the template sees what else it has, as ``strict``."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(Wire):
    """One of ``tools``; the chat template sees what else it has."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)]


class NamedFunction(Wire):
    """The function of a named tool choice."""

    name: str


class NamedTool(Wire):
    """A tool choice that names its tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(Generation, Templated, NotInChats):  # type: ignore[misc]
    """``POST /v1/chat/completions``."""

    messages: Messages
    logprobs: bool = False
    top_logprobs: Whole | None = sampled("logprobs")
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True


class TokenizeRequest(Templated):
    """``POST /tokenize``: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    tools: Tools | None = None


class DetokenizeRequest(Wire):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: Ids


class SpeculationChange(Wire):
    """``POST /v1/speculation``: what is not given stays."""

    enabled: bool | None = None
    drafter: str | None = None
    num_speculative_tokens: DraftLength | None = None
