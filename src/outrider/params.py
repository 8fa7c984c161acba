"""How a request is sampled: ``SamplingParams``, in vLLM's names. The standard library only."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

from .errors import ConfigError, no_option

SHOWN = 1000
"""Characters of a wrong value that its error tells."""
LARGEST_SEED = 2**64 - 1
LARGEST_N = 128
LARGEST_STOP = 64
LONGEST_WORD = 1000
LARGEST_IDS = 2**18
"""No vocabulary is larger."""
LONGEST_NUMBER = 20
"""Digits of an id, where it is a text."""
LARGEST_LOGPROBS = 20
LARGEST_BIAS = 100
LARGEST_PENALTY = 2
REPETITION = (0.01, 100)
"""Beyond it logits overflow."""
LARGEST_GRAMMAR = 2**20
# Below this a temperature is taken as 0: dividing by it would leave one token anyway.
SMALLEST_TEMPERATURE = 1e-5
SMALLEST_TOP_P = 1e-7
LARGEST_TEMPERATURE = 10**6
"""All tokens are as likely there as fp32 can tell; far beyond it logits are no numbers."""

LogitsProcessor = Callable[[list[int], Any], Any]
"""Makes other logits of a position's logits: ``processor(ids, logits) -> logits``.

``ids`` are the ids of prompt and output up to the position, drafted tokens before it among them as
if they were output; ``logits`` is fp32 [vocabulary], as the model gave it but for grammar, allowed
tokens, bad words, min_tokens and logit_bias; penalties, temperature and truncation come after. What
it returns is a tensor of the same shape, -inf where a token is banned. It must be a pure function
of its two arguments: it is called in any order, for drafts that never become output, and more than
once for a position.
"""


def _refuse(owner: object, field_name: str, value: object, remedy: str) -> None:
    shown = repr(value)
    shown = shown if len(shown) <= SHOWN else f"{shown[:SHOWN]}..."
    raise ConfigError(f"{type(owner).__name__}: {field_name} is {shown}; {remedy}.")


def _listed(value: Any) -> tuple[Any, ...]:
    """The members of a list, none for None; what is no list is its own only member."""
    return tuple(value) if isinstance(value, list | tuple) else () if value is None else (value,)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    known = isinstance(value, int | float) and not isinstance(value, bool)
    return known and not math.isnan(value)  # type: ignore[arg-type]


class _Named:
    """Refuses options that do not exist, naming the nearest that does."""

    def __new__(cls, *args: Any, **options: Any) -> Any:
        known = [f.name for f in fields(cls)]  # type: ignore[arg-type]
        for name in options:
            if name not in known:
                raise no_option(cls.__name__, name, known)
        return super().__new__(cls)


@dataclass(frozen=True, kw_only=True)
class StructuredOutputsParams(_Named):
    """What form the output must have; exactly one of these.

    Args:
        json: a JSON schema, as a dict or its text.
        regex: a regular expression that the whole output matches.
        choice: texts, of which the output is one.
        grammar: a context-free grammar, in Lark's notation or as GBNF (llama.cpp's EBNF).

    Raises:
        ConfigError: none or several are given, or one is not what it should be.
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | tuple[str, ...] | None = None
    grammar: str | None = None

    def __post_init__(self) -> None:
        given = [f.name for f in fields(self) if getattr(self, f.name) is not None]
        if len(given) != 1:
            raise ConfigError(
                f"StructuredOutputsParams has {', '.join(given) or 'nothing'}; "
                "give exactly one of json, regex, choice, grammar."
            )
        schema = self.json
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                _refuse(self, "json", self.json, f"it is no JSON ({error}); give a JSON schema")
        if self.json is not None and not isinstance(schema, Mapping):
            _refuse(self, "json", self.json, "give a JSON schema: an object")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            if value is not None and not (isinstance(value, str) and value):
                _refuse(self, name, value, "give a text that is not empty")
        if self.choice is not None:
            choice = _listed(self.choice)
            if not choice or not all(isinstance(c, str) and c for c in choice):
                _refuse(self, "choice", self.choice, "give one text or more, none of them empty")
            object.__setattr__(self, "choice", choice)
        if schema is not None:
            object.__setattr__(self, "json", json.dumps(schema))
        size = max(len(str(getattr(self, name))) for name in given)
        if size > LARGEST_GRAMMAR:
            raise ConfigError(
                f"StructuredOutputsParams: {given[0]} has {size} characters; "
                f"give at most {LARGEST_GRAMMAR}."
            )


@dataclass(frozen=True, kw_only=True)
class SamplingParams(_Named):
    """How a request is sampled; names, defaults, order and scopes follow vLLM.

    Args:
        temperature: 0 to 10^6; 0 (or below 1e-5) takes the most likely token.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the most likely one, in [0, 1].
        repetition_penalty: 0.01 to 100; logits of tokens in prompt or output are divided by it
            where positive and multiplied where negative.
        presence_penalty: -2 to 2; taken off the logits of tokens in the output.
        frequency_penalty: -2 to 2; taken off once for every time that a token is in the output.
        logit_bias: added to the logits of these ids, each -100 to 100.
        bad_words: texts whose tokens are not completed in the output.
        allowed_token_ids: nothing else is sampled.
        seed: 0 to 2^64 - 1; the same seed gives the same tokens. None takes the engine's.
        n: samples of the same prompt, 1 to 128.
        max_tokens: tokens to generate at most; None goes on to the end of the context.
        min_tokens: tokens before EOS, stop tokens or stop strings may end the output.
        stop: strings that end the output and are not part of it.
        stop_token_ids: ids that end the output.
        include_stop_str_in_output: the stop string, or the text of the stop token, is part of it.
        ignore_eos: go on after EOS.
        skip_special_tokens: special tokens are left out of the text.
        logprobs: log probabilities of so many most likely tokens beside the sampled one, 0 to 20;
            None for none at all.
        prompt_logprobs: likewise for the tokens of the prompt.
        structured_outputs: what form the output must have, see ``StructuredOutputsParams``.
        logits_processors: functions of ids and logits, see ``LogitsProcessor``.

    Raises:
        ConfigError: a value is out of its range, or there is no such option; the sentence names
            field, value and remedy.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = None
    bad_words: list[str] | tuple[str, ...] | None = None
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | None = None
    logits_processors: list[LogitsProcessor] | tuple[LogitsProcessor, ...] | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_penalties()
        self._check_lengths()
        self._check_words()
        self._check_form()

    def _check_numbers(self) -> None:
        for name in ("temperature", "top_p", "min_p"):
            if not _is_number(getattr(self, name)):
                _refuse(self, name, getattr(self, name), "give a number")
        for name in ("top_k", "n", "min_tokens"):
            if not _is_int(getattr(self, name)):
                _refuse(self, name, getattr(self, name), "give a whole number")
        if not 0 <= self.temperature <= LARGEST_TEMPERATURE:
            remedy = f"give 0 (greedy) or a number above 0, at most {LARGEST_TEMPERATURE}"
            _refuse(self, "temperature", self.temperature, remedy)
        if self.top_k < -1:
            _refuse(self, "top_k", self.top_k, "give 1 or more, or 0 to keep every token")
        if not 0 < self.top_p <= 1:
            remedy = "give a number above 0 and at most 1 (1 keeps all)"
            _refuse(self, "top_p", self.top_p, remedy)
        # As good as one token, and still more than 0 in fp32.
        object.__setattr__(self, "top_p", max(self.top_p, SMALLEST_TOP_P))
        if not 0 <= self.min_p <= 1:
            _refuse(self, "min_p", self.min_p, "give a number from 0 (off) to 1")
        if self.seed is not None and not (_is_int(self.seed) and 0 <= self.seed <= LARGEST_SEED):
            _refuse(self, "seed", self.seed, "give a whole number from 0 to 2^64 - 1, or None")
        if not 1 <= self.n <= LARGEST_N:
            _refuse(self, "n", self.n, f"give 1 to {LARGEST_N} samples")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            if value is not None and not (_is_int(value) and 0 <= value <= LARGEST_LOGPROBS):
                _refuse(self, name, value, f"give 0 to {LARGEST_LOGPROBS}, or None for none")

    def _check_penalties(self) -> None:
        value = self.repetition_penalty
        least, most = REPETITION
        if not (_is_number(value) and least <= value <= most):
            remedy = f"give a number from {least} to {most} (1 is off)"
            _refuse(self, "repetition_penalty", value, remedy)
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            if not (_is_number(value) and abs(value) <= LARGEST_PENALTY):
                _refuse(self, name, value, "give a number from -2 to 2 (0 is off)")
        bias: Any = {} if self.logit_bias is None else self.logit_bias
        remedy = f"give ids with numbers from -{LARGEST_BIAS} to {LARGEST_BIAS}"
        if not isinstance(bias, Mapping):
            _refuse(self, "logit_bias", bias, remedy)
        known = {}
        for id, value in bias.items():
            # JSON's keys are strings.
            written = isinstance(id, str) and id.isdecimal() and len(id) <= LONGEST_NUMBER
            number = int(id) if written else id
            if not (_is_int(number) and number >= 0 and _is_number(value)):
                _refuse(self, "logit_bias", {id: value}, remedy)
            if abs(value) > LARGEST_BIAS:
                _refuse(self, "logit_bias", {id: value}, remedy)
            known[number] = float(value)
        object.__setattr__(self, "logit_bias", known)

    def _check_lengths(self) -> None:
        most = self.max_tokens
        if most is not None and not (_is_int(most) and most >= 1):
            _refuse(self, "max_tokens", most, "give 1 or more, or None")
        if self.min_tokens < 0:
            _refuse(self, "min_tokens", self.min_tokens, "give 0 or more")
        if most is not None and self.min_tokens > most:
            _refuse(self, "min_tokens", self.min_tokens, f"give at most max_tokens ({most})")
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                _refuse(self, name, getattr(self, name), "give True or False")

    def _check_words(self) -> None:
        for name in ("stop", "bad_words"):
            words = _listed(getattr(self, name))
            right = all(isinstance(s, str) and 0 < len(s) <= LONGEST_WORD for s in words)
            if len(words) > LARGEST_STOP or not right:
                remedy = f"give at most {LARGEST_STOP} strings of 1 to {LONGEST_WORD} characters"
                _refuse(self, name, getattr(self, name), remedy)
            object.__setattr__(self, name, words)
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = _listed(getattr(self, name))
            if len(ids) > LARGEST_IDS:
                raise ConfigError(f"{name} has {len(ids)} ids; give at most {LARGEST_IDS}.")
            if not all(_is_int(i) and i >= 0 for i in ids):
                _refuse(self, name, getattr(self, name), "give token ids, 0 or above")
            if name == "allowed_token_ids" and not ids:
                if self.allowed_token_ids is not None:
                    _refuse(self, name, [], "give one id or more, or None for all")
                continue  # None says that all are allowed
            object.__setattr__(self, name, ids)

    def _check_form(self) -> None:
        form: Any = self.structured_outputs
        if isinstance(form, Mapping):
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams(**form))
        elif form is not None and not isinstance(form, StructuredOutputsParams):
            remedy = "give StructuredOutputsParams or a dict with json, regex, choice or grammar"
            _refuse(self, "structured_outputs", form, remedy)
        if form is not None and self.ignore_eos:
            remedy = "drop it: with structured_outputs EOS says that the form is complete"
            _refuse(self, "ignore_eos", self.ignore_eos, remedy)
        processors = _listed(self.logits_processors)
        if not all(callable(p) for p in processors):
            remedy = "give functions of (ids, logits)"
            _refuse(self, "logits_processors", self.logits_processors, remedy)
        object.__setattr__(self, "logits_processors", processors)

    @property
    def greedy(self) -> bool:
        """True when no noise is drawn."""
        return self.temperature < SMALLEST_TEMPERATURE

    @property
    def penalises(self) -> bool:
        """True when any penalty is on."""
        off = (self.repetition_penalty, self.presence_penalty, self.frequency_penalty)
        return off != (1, 0, 0)
