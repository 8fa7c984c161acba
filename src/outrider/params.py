"""Sampling options: ``SamplingParams``, in vLLM's names. The standard library only."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .base import limits
from .base.limits import LARGEST_INT, LARGEST_SEED, LONGEST_WORD, MOST_WORDS, Number, refuse
from .base.options import option
from .errors import ConfigError, no_option

LARGEST_GRAMMAR = 2**18
"""Characters of a form; compiling takes 500 bytes and 4 µs for each."""
FORMS = ("json", "regex", "choice", "grammar")
DEFAULT_MAX_TOKENS = 16
# Below this a temperature is taken as 0: dividing by it would leave one token anyway.
SMALLEST_TEMPERATURE = 1e-5
SMALLEST_TOP_P = 1e-7

LogitsProcessor = Callable[[list[int], Any], Any]
"""Makes other logits of a position's logits: ``processor(ids, logits) -> logits``.

``ids`` are the ids of prompt and output up to the position, drafted tokens before it among them as
if they were output; ``logits`` is a NumPy array of its own, float32 [vocabulary], as the model gave
it but for grammar, allowed tokens, bad words, min_tokens and logit_bias; penalties, temperature and
truncation come after. What it returns is an array of floats of the same shape, -inf where a token
is banned. It must be a pure function of its two arguments: it is called in any order, for drafts
that never become output, and more than once for a position.
"""


def _listed(value: Any) -> tuple[Any, ...]:
    """Return the members of a list, none for None; any other value is its own only member."""
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


class _Named:
    """Refuses options that do not exist, naming the nearest that does."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in names:
                raise no_option(cls.__name__, name, names)
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(_Named):
    """The form of the output; exactly one of these.

    Args:
        json: a JSON schema, as a dict or its text.
        regex: a regular expression that the whole output matches.
        choice: texts, of which the output is one.
        grammar: a context-free grammar, in Lark's notation or as GBNF (llama.cpp's EBNF).
        disable_additional_properties: whether objects of a JSON schema have only the keys in
            ``properties``, unless it says otherwise; False allows others, as JSON Schema does.
        after: the text of one token, such as "</think>", behind which the form begins; the output
            is free until that comes, and does not end before. It needs no form with a ``budget``.
        opening: the text of one token; an output that does not begin with it has the form at once.
        budget: tokens before ``after`` at most; then that comes.

    Raises ConfigError: there is none or there are several, or the one is malformed.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None
    disable_additional_properties: bool = True
    after: str | None = None
    opening: str | None = None
    budget: int | None = None

    def __post_init__(self) -> None:
        closes: Any = self.disable_additional_properties
        if not isinstance(closes, bool):
            refuse(self, "disable_additional_properties", closes, "give True or False")
        for mark in ("after", "opening"):
            text = getattr(self, mark)
            if text is not None and not (isinstance(text, str) and text):
                refuse(self, mark, text, "give the text of a token")
        self._check_before()
        forms = [name for name in FORMS if getattr(self, name) is not None]
        if not forms and self.budget is not None:
            return
        if len(forms) != 1:
            raise ConfigError(
                f"StructuredOutputsParams has {', '.join(forms) or 'nothing'}; "
                "give exactly one of json, regex, choice, grammar."
            )
        (name,) = forms
        value: Any = getattr(self, name)
        if name == "json":
            try:
                schema = json.loads(value) if isinstance(value, str) else value
            except (ValueError, RecursionError) as error:
                refuse(self, name, value, f"it is no JSON ({error}); give a JSON schema")
            if not isinstance(schema, Mapping):
                refuse(self, name, value, "give a JSON schema: an object")
            try:
                value = json.dumps(schema)
            except (TypeError, ValueError, RecursionError) as error:
                refuse(self, name, value, f"it cannot be written as JSON ({error})")
        elif name == "choice":
            value = _listed(value)
            if not value or not all(isinstance(c, str) and c for c in value):
                refuse(self, name, self.choice, "give one text or more, none of them empty")
        elif not (isinstance(value, str) and value):
            refuse(self, name, value, "give a text that is not empty")
        self._check_text(name, "".join(value))
        size = len(str(value))
        if size > LARGEST_GRAMMAR:
            raise ConfigError(
                f"StructuredOutputsParams: {name} has {size} characters; "
                f"give at most {LARGEST_GRAMMAR}."
            )
        object.__setattr__(self, name, value)

    def _check_before(self) -> None:
        """Refuse what is said of the tokens before ``after`` where that is wrong."""
        budget: Any = self.budget
        for mark in ("after", "opening"):
            self._check_text(mark, getattr(self, mark) or "")
        if self.after is None and (self.opening is not None or budget is not None):
            raise ConfigError(
                "StructuredOutputsParams has opening or budget without after; give that, too."
            )
        whole = isinstance(budget, int) and not isinstance(budget, bool)
        if budget is not None and not (whole and 0 <= budget <= LARGEST_INT):
            refuse(self, "budget", budget, f"give 0 to {LARGEST_INT}")

    def _check_text(self, name: str, text: str) -> None:
        try:
            text.encode()
        except UnicodeEncodeError:
            refuse(self, name, text, "give a text without lone surrogates")


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Named):
    """The sampling options of a request; names, defaults, order and scopes follow vLLM.

    The help of a number, which ``outrider generate --help`` and the site show, says what it means.

    Args:
        logit_bias: added to the logits of these ids, each -100 to 100.
        bad_words: texts whose tokens are not completed in the output.
        allowed_token_ids: nothing else is sampled.
        stop: strings that end the output and are not part of it.
        stop_token_ids: ids that end the output.
        include_stop_str_in_output: the stop string, or the text of the stop token, is part of it.
        skip_special_tokens: special tokens are left out of the text.
        structured_outputs: the form of the output, see ``StructuredOutputsParams``.
        logits_processors: functions of ids and logits, see ``LogitsProcessor``.

    Raises ConfigError: a value is out of its range, or there is no such option; the sentence names
    field, value and remedy.
    """

    temperature: float = option(
        1.0,
        "0 to 10^6; 0 (or below 1e-5) takes the most likely token.",
        # All tokens are as likely at the end as fp32 can tell; far beyond, logits are no numbers.
        Number(0, 10**6, "give 0 (greedy) or a number above 0, at most {most}", whole=False),
    )
    top_k: int = option(
        0,
        "Keep the k most likely tokens; 0, -1 or more than the vocabulary keeps all.",
        Number(-1, LARGEST_INT, "give 1 to {most}, or 0 to keep every token"),
    )
    top_p: float = option(
        1.0,
        "Keep the smallest set of most likely tokens whose mass reaches this, above 0 to 1.",
        Number(0, 1, "give a number above 0 and at most 1 (1 keeps all)", whole=False, above=True),
    )
    min_p: float = option(
        0.0,
        "Drop tokens less likely than this times the most likely one, 0 to 1.",
        Number(0, 1, "give a number from 0 (off) to 1", whole=False),
    )
    repetition_penalty: float = option(
        1.0,
        "0.01 to 100; logits of tokens in prompt or output are divided by it where positive and "
        "multiplied where negative.",
        # Logits overflow beyond these.
        Number(0.01, 100, "give a number from {least} to {most} (1 is off)", whole=False),
    )
    presence_penalty: float = option(
        0.0,
        "-2 to 2; taken off the logits of tokens in the output.",
        Number(-2, 2, "give a number from {least} to {most} (0 is off)", whole=False),
    )
    frequency_penalty: float = option(
        0.0,
        "-2 to 2; taken off once for every time that a token is in the output.",
        Number(-2, 2, "give a number from {least} to {most} (0 is off)", whole=False),
    )
    logit_bias: Mapping[int, float] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    seed: int | None = option(
        None,
        "0 to 2^64 - 1; the same seed gives the same tokens, with any drafter.",
        Number(0, LARGEST_SEED, "give a whole number from 0 to {most}, or None", optional=True),
    )
    n: int = option(
        1, "Samples of the prompt, 1 to 128.", Number(1, 128, "give 1 to {most} samples")
    )
    max_tokens: int | None = option(
        DEFAULT_MAX_TOKENS,
        "Tokens to generate at most, or what the context holds.",
        Number(1, LARGEST_INT, "give 1 to {most}, or None", optional=True),
    )
    min_tokens: int = option(
        0,
        "Tokens before EOS, stop tokens or stop strings may end the output.",
        Number(0, LARGEST_INT, "give 0 to {most}"),
    )
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = option(False, "Go on after EOS.")
    skip_special_tokens: bool = True
    logprobs: int | None = option(
        None,
        "Log probabilities of so many most likely tokens besides the sampled one, 0 to 20; -1 for "
        "all.",
        Number(-1, 20, "give 0 to {most}, -1 for all, or None for none", optional=True),
    )
    prompt_logprobs: int | None = option(
        None, "", Number(-1, 20, "give 0 to {most}, -1 for all, or None for none", optional=True)
    )
    """The same for the tokens of the prompt."""
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logits_processors: list[LogitsProcessor] | tuple[LogitsProcessor, ...] | None = None

    def __post_init__(self) -> None:
        limits.check_numbers(self, SAMPLING)
        # As good as one token, and still more than 0 in fp32.
        object.__setattr__(self, "top_p", max(self.top_p, SMALLEST_TOP_P))
        most = self.max_tokens
        if most is not None and self.min_tokens > most:
            refuse(self, "min_tokens", self.min_tokens, f"give at most max_tokens ({most})")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                refuse(self, name, getattr(self, name), "give True or False")
        self._check_bias()
        self._check_words()
        self._check_ids()
        self._check_form()

    def _check_bias(self) -> None:
        bias: Any = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, Mapping):
            refuse(self, "logit_bias", bias, limits.BIAS.remedy)
        if len(bias) > limits.MOST_IDS:
            raise ConfigError(f"logit_bias has {len(bias)} ids; give at most {limits.MOST_IDS}.")
        if wrong := limits.wrong_biases(bias):
            raise ConfigError(f"SamplingParams: logit_bias has {wrong}; {limits.BIAS.remedy}.")
        biases = dict(filter(None, (limits.bias_of(*pair) for pair in bias.items())))
        object.__setattr__(self, "logit_bias", biases)

    def _check_words(self) -> None:
        for name in ("stop", "bad_words"):
            words = _listed(getattr(self, name))
            right = all(isinstance(s, str) and 0 < len(s) <= LONGEST_WORD for s in words)
            if len(words) > MOST_WORDS or not right:
                remedy = f"give at most {MOST_WORDS} strings of 1 to {LONGEST_WORD} characters"
                refuse(self, name, getattr(self, name), remedy)
            object.__setattr__(self, name, words)

    def _check_ids(self) -> None:
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = _listed(getattr(self, name))
            if len(ids) > limits.MOST_IDS:
                raise ConfigError(f"{name} has {len(ids)} ids; give at most {limits.MOST_IDS}.")
            limits.check_ids(self, name, ids)
            if name == "allowed_token_ids" and not ids:
                if self.allowed_token_ids is not None:
                    refuse(self, name, [], "give one id or more, or None for all")
                continue  # None says that all are allowed
            object.__setattr__(self, name, ids)

    def _check_form(self) -> None:
        form: Any = self.structured_outputs
        if isinstance(form, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**form))
        elif form is not None and not isinstance(form, StructuredOutputsParams):
            remedy = "give StructuredOutputsParams or a dict with json, regex, choice or grammar"
            refuse(self, "structured_outputs", form, remedy)
        if form is not None and self.ignore_eos:
            remedy = "drop it: with structured_outputs EOS says that the form is complete"
            refuse(self, "ignore_eos", self.ignore_eos, remedy)
        processors = _listed(self.logits_processors)
        if not all(callable(p) for p in processors):
            remedy = "give functions of (ids, logits)"
            refuse(self, "logits_processors", self.logits_processors, remedy)
        object.__setattr__(self, "logits_processors", processors)

    @property
    def greedy(self) -> bool:
        """True when no noise is drawn."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """True when any penalty is on."""
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        return penalties != (1, 0, 0)


SAMPLING: dict[str, Number] = {
    each.name: each.metadata["number"]
    for each in fields(SamplingParams)
    if each.metadata.get("number") is not None
}
"""The numbers of ``SamplingParams``; fields of the server and flags of the command follow them."""
DISTRIBUTION = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty",
    "frequency_penalty",
)  # fmt: skip
"""Those that shape the distribution; a checkpoint's generation_config.json may set them."""
