"""Bodies of requests in OpenAI's and vLLM's names, and their translation for the engine."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from ..base.limits import LARGEST_INT, LONGEST_NUMBER, REQUEST
from ..errors import ConfigError, shown
from ..params import DEFAULT_MAX_TOKENS, FORMS, SAMPLING, SamplingParams
from . import shapes
from .bodies import value_of
from .errors import Refusal
from .shapes import MOST_PROMPTS, Ids, Messages, Parts, Real, Samples, Whole, Words, check_schema
from .unsupported import BLANKS, NotInChats, NotInCompletions, Unless, Unsupported

MOST_SAMPLES = 256
FORM = "structured_outputs"
Body = TypeVar("Body", bound=BaseModel)

REQUEST_ID = r"^[\x21-\x7e]{1,128}$"
"""Ids that a client may give a request: no character that could break a line of the log."""


def ranged(
    least: float, most: float | None = None, *, above: bool = False, default: int | None = None
) -> Any:
    """Return a field whose range is published; ``SamplingParams`` checks it."""
    bounds: dict[str, Any] = {"exclusiveMinimum" if above else "minimum": least}
    if most is not None:
        bounds["maximum"] = most
    return Field(default, json_schema_extra=bounds)


def sampled(name: str, default: int | None = None) -> Any:
    """Return a field of ``SamplingParams``, with the range that is checked there."""
    number = SAMPLING[name]
    return ranged(number.least, number.most, above=number.above, default=default)


class Wire(BaseModel):
    """Base of all bodies; unknown fields are ignored, as OpenAI's clients expect."""

    model_config = ConfigDict(extra="ignore", protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, fields: Any) -> Any:
        """Drop nulls of fields that cannot be null: some clients send null for unset fields."""
        if not isinstance(fields, dict):
            return fields

        own = cls.model_fields
        return {
            name: value
            for name, value in fields.items()
            if value is not None or name not in own or NoneType in get_args(own[name].annotation)
        }


class SpeculationChange(Wire):
    """The body of ``POST /v1/speculation``; fields that are left out keep their value.

    A null draft length lets the engine choose it. ``load`` names a drafter in the server's folder
    for them, which is loaded and takes the place of the one before.
    """

    enabled: bool | None = None
    drafter: str | None = None
    num_speculative_tokens: shapes.DraftLength | None = None
    load: str | None = None


class SpeculationOptions(Wire):
    """Drafting options of a request; its text does not depend on them."""

    enabled: bool = True
    drafter: str | None = None
    num_speculative_tokens: shapes.DraftLength | None = None


class StreamOptions(Wire):
    """Usage in a stream: in a last chunk, or with vLLM's option in every chunk."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class StructuredOutputs(Wire):
    """vLLM's ``structured_outputs``: exactly one form of the output."""

    json_: str | dict[str, Any] | None = Field(None, alias="json")
    regex: str | None = None
    choice: shapes.Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: Annotated[Any, Unless((False,), BLANKS)] = None
    disable_additional_properties: bool | None = None
    after: str | None = None
    opening: str | None = None
    budget: Whole | None = ranged(0, LARGEST_INT)
    whitespace_pattern: Annotated[Any, Unless((), BLANKS)] = None
    structural_tag: Annotated[Any, Unless()] = None

    def before(self) -> dict[str, Any]:
        """Return the options on the output before the form begins."""
        own = {"after": self.after, "opening": self.opening, "budget": self.budget}
        return {name: value for name, value in own.items() if value is not None}


class JsonSchema(Wire):
    """A JSON schema with a name."""

    name: str = ""
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Wire):
    """OpenAI's ``response_format``: the form of the output."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    """The schema, where llama.cpp's clients put it."""


class Prediction(Wire):
    """OpenAI's ``prediction``: text that the output is expected to resemble."""

    type: Literal["content"] = "content"
    content: str | Parts

    @property
    def text(self) -> str:
        """The text of all parts."""
        if isinstance(self.content, str):
            return self.content
        texts = (part.get("text") for part in self.content)
        return "".join(text for text in texts if isinstance(text, str))


Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Templated(Wire):
    """Options of the chat template, besides messages and tools."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    documents: Parts | None = None
    reasoning_effort: Effort | None = None
    chat_template_kwargs: dict[str, Any] | None = None


Sampled: Any = create_model(
    "Sampled",
    **{n: ((Whole if SAMPLING[n].whole else Real) | None, sampled(n)) for n in SAMPLING},
    **{each.name: (bool, each.default) for each in fields(SamplingParams) if each.type == "bool"},
)  # type: ignore[call-overload]
"""The numbers and switches of ``SamplingParams``."""


class Generation(Wire, Sampled, Unsupported):  # type: ignore[misc]
    """Fields that completions and chats share."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: Samples = 1
    seed: Whole | str | None = sampled("seed")
    stop: str | Words | None = None
    stop_token_ids: shapes.OptionIds | None = None
    max_completion_tokens: Whole | None = sampled("max_tokens")
    truncate_prompt_tokens: Whole | None = ranged(-1, LARGEST_INT)
    truncation_side: Literal["left", "right"] = "left"
    logit_bias: shapes.Biases | None = None
    bad_words: Words | None = None
    allowed_token_ids: shapes.OptionIds | None = None
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    return_speculation: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: shapes.Choices | None = None
    guided_grammar: str | None = None
    grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None
    speculation: SpeculationOptions | None = None
    prediction: Prediction | None = None
    priority: Whole = Field(0, ge=REQUEST["priority"].least, le=REQUEST["priority"].most)
    request_id: str | None = Field(None, pattern=REQUEST_ID)
    cache_salt: str | None = Field(None, max_length=256)
    timeout: shapes.Timeout | None = None
    store: bool | None = None

    def form(self) -> dict[str, Any] | None:
        """Return the form of the output for ``StructuredOutputsParams``; None for any.

        Raises RequestError: there are several forms, or a schema is missing, too large or too deep.
        """
        forms: dict[str, dict[str, Any]] = {}
        guided = self.structured_outputs
        if guided is not None:
            if guided.json_object and guided.json_ is not None:
                raise Refusal(
                    "json and json_object both set an output format; give one of them.", FORM
                )
            schema = {"type": "object"} if guided.json_object else guided.json_
            parts = zip(FORMS, (schema, guided.regex, guided.choice, guided.grammar), strict=True)
            own = {name: value for name, value in parts if value is not None}
            if own or not guided.before():  # else they belong to another field's form
                forms[FORM] = own
        named = {name: getattr(self, f"guided_{name}") for name in FORMS}
        forms |= {f"guided_{n}": {n: value} for n, value in named.items() if value is not None}
        # Fields of llama.cpp and SGLang; an empty text asks for nothing.
        kinds = {"grammar": "grammar", "ebnf": "grammar", "regex": "regex"}
        texts = {name: getattr(self, name) for name in kinds}
        forms |= {name: {kinds[name]: text} for name, text in texts.items() if text}
        if self.json_schema is not None:
            forms["json_schema"] = {"json": self.json_schema or {"type": "object"}}
        shape = self.response_format
        if shape is not None and shape.type == "json_object":
            forms["response_format"] = {"json": shape.schema_ or {"type": "object"}}
        elif shape is not None and shape.type == "json_schema":
            schema = shape.json_schema.schema_ if shape.json_schema else shape.schema_
            if schema is None:
                raise Refusal(
                    "json_schema.schema is missing; give a JSON schema.", "response_format"
                )
            forms["response_format"] = {"json": schema}
        for name, form in forms.items():
            check_schema(form.get("json"), name)
        read = [_read(form) for form in forms.values()]
        if any(form != read[0] for form in read):
            raise Refusal(
                f"{' and '.join(forms)} set different output formats; give one of them.",
                [*forms][-1],
            )
        before = {} if guided is None else guided.before()
        if not forms:
            if before and not {"after", "budget"} <= before.keys():
                lacks = "an output format that begins there" if "after" in before else "after"
                raise Refusal(f"{' and '.join(before)} needs {lacks}; give both.", FORM)
            return before or None
        form = next(iter(forms.values()))
        strict = shape.json_schema.strict if shape and shape.json_schema else None
        if False in (strict, guided and guided.disable_additional_properties):
            form = {**form, "disable_additional_properties": False}
        return {**form, **before}

    def sampling(
        self, context_left: int, defaults: Mapping[str, Any], **more: Any
    ) -> SamplingParams:
        """Return the sampling options of a request; ``more`` overrides the body's.

        ``context_left`` tokens may follow the prompt; ``max_tokens`` of ``defaults`` bounds the
        call's. Raises ConfigError: a value is out of its range. Refusal: forms contradict.
        """
        limits = (context_left, self.limit, defaults.get("max_tokens"))
        most = min(limit for limit in limits if limit is not None)
        own = {each.name: getattr(self, each.name) for each in fields(SamplingParams)}
        own |= {"seed": read_seed(self.seed), "max_tokens": most, "logprobs": None}
        own |= {"structured_outputs": self.form(), **more}
        given = {name: value for name, value in own.items() if value is not None}
        return SamplingParams(**{**defaults, **given})

    @property
    def limit(self) -> int | None:
        """Tokens to generate at most, None for all that the context holds."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


def _read(form: dict[str, Any]) -> dict[str, Any]:
    """Return a form with its schema parsed, if it was given as text."""
    with suppress(ValueError):
        if isinstance(form.get("json"), str):
            return {**form, "json": value_of(form["json"])}
    return form


def read_seed(seed: int | str | None) -> int | None:
    """Return the seed as a number (above 2^53, JSON has a string); None for none or vLLM's -1."""
    if seed is None or seed in (-1, "-1"):
        return None
    if isinstance(seed, str) and not (
        seed.isascii() and seed.isdecimal() and len(seed) <= LONGEST_NUMBER
    ):
        raise Refusal(f"seed is {shown(seed)}; give a whole number from 0 to 2^64 - 1.", "seed")
    return int(seed)


class CompletionRequest(Generation, NotInCompletions):  # type: ignore[misc]
    """The body of ``POST /v1/completions``."""

    prompt: shapes.Prompts
    max_tokens: Whole | None = ranged(0, LARGEST_INT, default=DEFAULT_MAX_TOKENS)
    logprobs: Whole | None = sampled("logprobs")
    echo: bool = False
    add_special_tokens: bool = True
    best_of: Samples | None = None

    def prompts(self) -> list[str | Ids]:
        """Return every prompt. Raises Refusal: there is none, or there are too many."""
        prompt = self.prompt
        one = isinstance(prompt, str) or (bool(prompt) and isinstance(prompt[0], int))
        prompts: list[Any] = [prompt] if one else list(prompt)
        if not 1 <= len(prompts) <= MOST_PROMPTS:
            raise Refusal(f"there are {len(prompts)} prompts; give 1 to {MOST_PROMPTS}.", "prompt")
        if len(prompts) * self.n > MOST_SAMPLES:
            raise Refusal(
                f"{len(prompts)} prompts with n of {self.n} are {len(prompts) * self.n} samples; "
                f"a call may have at most {MOST_SAMPLES}.", "n",
            )  # fmt: skip
        return prompts


class Function(Wire):
    """A function that the model may call; the chat template gets further fields."""

    model_config = ConfigDict(extra="allow")
    name: str = Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Wire):
    """One of ``tools``; the chat template gets further fields."""

    model_config = ConfigDict(extra="allow")
    type: Literal["function"] = "function"
    function: Function


Tools = Annotated[list[Tool], Field(fail_fast=True, max_length=shapes.MOST_TOOLS)]


class NamedFunction(Wire):
    """The function of a named tool choice."""

    name: str


class NamedTool(Wire):
    """A tool choice that names its tool."""

    type: Literal["function"] = "function"
    function: NamedFunction


class AllowedList(Wire):
    """Tools that may be called, and whether one must be."""

    mode: Literal["auto", "required"]
    tools: Annotated[
        list[NamedTool], Field(fail_fast=True, min_length=1, max_length=shapes.MOST_TOOLS)
    ]


class AllowedTools(Wire):
    """A tool choice that allows some of the tools."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedList


class ChatRequest(Generation, Templated, NotInChats):  # type: ignore[misc]
    """The body of ``POST /v1/chat/completions``."""

    messages: Messages
    logprobs: bool = False
    top_logprobs: Whole | None = sampled("logprobs")
    tools: Tools | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool = True
    echo: bool = False
    include_reasoning: bool = True
    separate_reasoning: bool = True
    stream_reasoning: bool = True
    thinking_token_budget: Whole | None = ranged(-1, LARGEST_INT)


PASSED = (
    "seed", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
    "min_tokens", "logit_bias", "stop", "stop_token_ids", "bad_words", "allowed_token_ids",
    "ignore_eos", "include_stop_str_in_output", "structured_outputs", "speculation", "prediction",
    "priority", "cache_salt", "request_id", "timeout", "chat_template_kwargs", "documents",
    "thinking_token_budget", "include_reasoning", "continue_final_message",
)  # fmt: skip
"""Fields of chats that responses and messages take as they are, though their own APIs lack them."""


class Other(Wire):
    """Base of bodies of other APIs, which are answered as chats."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())
    generates: ClassVar[bool] = True

    @property
    def passed(self) -> dict[str, Any]:
        """The fields that a chat takes as they are.

        Raises Refusal: another field of chats is set to more than its default.
        """
        extra = self.model_extra or {}
        taken = {*PASSED, *Unsupported.model_fields} if self.generates else {*PASSED}
        others = ChatRequest.model_fields.keys() - taken if self.generates else set[str]()
        for name in extra.keys() & others:
            value, usual = extra[name], ChatRequest.model_fields[name].default
            if value is not None and value != usual:
                raise Refusal(
                    f"{name}: this path does not support it; send the call to "
                    "/v1/chat/completions, or leave it out.", name,
                )  # fmt: skip
        return {name: extra[name] for name in extra.keys() & taken}


def with_effort(passed: Mapping[str, Any], effort: str | None) -> dict[str, Any]:
    """Return the fields of a chat whose template is told how much to think.

    In APIs other than chats, an effort is a hint, which many templates do not read.
    """
    if effort is None:
        return {**passed}
    return with_hints(passed, {"reasoning_effort": effort, "enable_thinking": effort != "none"})


def with_hints(passed: Mapping[str, Any], hints: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a chat whose template gets ``hints``; its own options override them."""
    options = passed.get("chat_template_kwargs") or {}
    if not isinstance(options, dict):
        raise Refusal("chat_template_kwargs is not an object; give one.", "chat_template_kwargs")
    return {**passed, "chat_template_kwargs": {**hints, **options}}


def checked(model: type[Body], fields: dict[str, Any]) -> Body:
    """Return a body of these fields. Raises RequestValidationError: one is wrong."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False)
    raise RequestValidationError(problems)


class Invocation(Wire):
    """The body of ``POST /invocations``, SageMaker's path: that of a chat or a completion."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    def asked(self) -> ChatRequest | CompletionRequest:
        """Return a chat or a completion. Raises RequestValidationError: a field is wrong."""
        given = self.model_extra or {}
        return checked(ChatRequest if "messages" in given else CompletionRequest, given)


class TokenizeRequest(Templated):
    """The body of ``POST /tokenize``: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    tools: Tools | None = None


class DetokenizeRequest(Wire):
    """The body of ``POST /detokenize``."""

    model: str | None = None
    tokens: Ids


def to_refusal(error: ConfigError) -> Refusal:
    """Return an option's error as a refusal that names the call's field."""
    text = str(error).removeprefix("SamplingParams: ").removeprefix("StructuredOutputsParams ")
    field = text.partition(" ")[0]
    fields = {**CompletionRequest.model_fields, **ChatRequest.model_fields}
    return Refusal(text, field if field in fields else None)
