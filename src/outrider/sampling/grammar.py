"""Structured output: which tokens a grammar lets come next, through llguidance."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import suppress
from weakref import WeakValueDictionary

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ..errors import RequestError
from ..params import SamplingParams, StructuredOutputsParams

SLOWEST_MASK_SECONDS = 0.05
"""A mask is made between two steps of everybody: one that takes longer ends its request.

Of the processor's time, so that no output depends on what else a machine does. JSON, code and prose
take 10 ms at most with a vocabulary of 128,000.
"""
Mask = NDArray[np.uint8]
"""Which tokens may come, a bit each, the lowest id in the lowest: [vocabulary / 8] or more."""
DEAD_END = "NoExtensionBias"
"""What llguidance says where no token goes on."""
TOO_SLOW = "a step of the grammar takes too long"


def _limits(vocab_size: int) -> LLParserLimits:
    """What bounds a mask before it can be timed.

    Its items grow with the vocabulary: 0.3 a token for JSON whose whitespace recurses, the form in
    which llama.cpp's users know it. Errors are terse, for they are logged and the parser's state
    tells of the output.
    """
    return LLParserLimits(
        step_max_items=5_000 + vocab_size // 2, max_items_in_row=2_000, verbose_errors=False
    )


class Grammars:
    """Compiles what requests ask for, against one tokenizer.

    Args:
        tokenizer: the model's; None refuses every request for structured output.
        vocab_size: the model's, padding included.
        eos_token_ids: with which an output that is complete can end.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = sorted(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._known: LLTokenizer | None = None
        # Prompts of one call have one form; none is kept beyond the requests that use it.
        self._compiled: WeakValueDictionary[StructuredOutputsParams, Grammar] = (
            WeakValueDictionary()
        )

    def warm_up(self) -> None:
        """Read the vocabulary now, which takes all threads seconds where it is large."""
        if self._tokenizer is not None and self._eos:
            with suppress(RequestError):  # said to whoever asks for a form
                self._vocabulary(self._tokenizer)

    def _vocabulary(self, tokenizer: Tokenizer) -> LLTokenizer:
        if self._known is None:
            try:
                self._known = LLTokenizer(
                    tokenizer.to_str(), n_vocab=self._vocab_size, eos_token=self._eos
                )
            except ValueError as error:
                raise RequestError(
                    f"this model's tokenizer cannot be used for structured_outputs: {error}."
                ) from None
        return self._known

    def compile(self, params: SamplingParams) -> Grammar | None:
        """The grammar of a request, None when it asks for none.

        Raises:
            RequestError: the grammar is impossible, or the model has no tokenizer or no EOS.
        """
        form = params.structured_outputs
        if form is None:
            return None
        if self._tokenizer is None or not self._eos:
            missing = "a tokenizer" if self._tokenizer is None else "an end-of-sequence token"
            raise RequestError(
                f"structured_outputs need a model with {missing}; drop them, or take one."
            )
        assert isinstance(form, StructuredOutputsParams)
        same = self._compiled.get(form)
        if same is not None:
            return same.copy()
        known = self._vocabulary(self._tokenizer)
        name, text = _source(params)
        matcher = LLMatcher(known, text, limits=_limits(self._vocab_size), log_level=0)
        if matcher.is_error():
            reason = " ".join(matcher.get_error().split())
            raise RequestError(
                f"structured_outputs.{name} cannot be used: {reason[:300]}; correct it."
            )
        grammar = Grammar(matcher, self._vocab_size, self._eos)
        (mask,) = grammar.masks([[]])
        if isinstance(mask, np.ndarray) and not mask.any():
            raise RequestError(
                f"structured_outputs.{name} lets no token of this model begin the output; "
                "correct it."
            )
        self._compiled[form] = grammar
        return grammar


def _source(params: SamplingParams) -> tuple[str, str]:
    """Which kind of form a request gives, and llguidance's text for it.

    Raises:
        RequestError: the grammar is neither Lark's notation nor GBNF.
    """
    form = params.structured_outputs
    assert isinstance(form, StructuredOutputsParams)
    if form.json is not None:
        return "json", grammar_from("json", str(form.json))
    if form.regex is not None:
        return "regex", grammar_from("regex", form.regex)
    if form.choice is not None:
        # As one terminal: each alternative of a rule would be an item to follow.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return "choice", grammar_from("grammar", f"start: CHOICE\nCHOICE: {texts}")
    try:
        return "grammar", grammar_from("grammar", str(form.grammar))
    except ValueError as error:
        raise RequestError(
            f"structured_outputs.grammar cannot be used: {error}; correct it."
        ) from None


def _failed(reason: str) -> str:
    said = " ".join(reason.split())[:300]
    return f"structured_outputs failed: {said}; simplify the grammar."


def keep(z: torch.Tensor, mask: Mask) -> None:
    """Leave of the logits z [vocabulary], in place, what the mask lets come."""
    refused = np.unpackbits(mask, count=len(z), bitorder="little") == 0
    if z.is_cpu:  # by NumPy: torch's operations wake its threads, which then spin beside a step's
        np.putmask(z.numpy(), refused, -np.inf)
    else:
        z.masked_fill_(torch.from_numpy(refused).to(z.device), -torch.inf)


class Grammar:
    """Where one sequence stands in its grammar. Tokens are tried and taken back, never replayed.

    A parser that gives up stays so for good. After a draft that may not be: what it says of drafted
    tokens must not reach the output, so another takes the committed ones and goes on.
    """

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: list[int]) -> None:
        self._begin = matcher
        self._matcher = matcher.deep_copy()
        self._vocab_size = vocab_size
        self._ends = ends
        self._taken: list[int] = []
        self._slow = False

    def copy(self) -> Grammar:
        """The same grammar from the start, for another sample."""
        return Grammar(self._begin, self._vocab_size, self._ends)

    def advance(self, output: Sequence[int]) -> None:
        """Take the committed output, longer from call to call.

        Raises:
            RequestError: the parser gave up.
        """
        fresh = list(output[len(self._taken) :])
        if fresh and not self._matcher.consume_tokens(fresh):
            raise RequestError(self._given_up())
        self._taken += fresh

    def _given_up(self) -> str:
        return _failed(self._matcher.get_error())

    def _recover(self) -> str | None:
        """Go on where the parser has given up on what is no output; what it said, else None.

        A mask that took too long counts as given up.

        Raises:
            RequestError: it gives up on the committed ones too.
        """
        slow, self._slow = self._slow, False
        if not self._matcher.is_error():
            return _failed(TOO_SLOW) if slow else None
        # Where no token goes on nothing failed, though the parser stops there too.
        dead = self._matcher.get_error().startswith(DEAD_END)
        said, self._matcher = None if dead else self._given_up(), self._begin.deep_copy()
        if self._taken and not self._matcher.consume_tokens(self._taken):
            raise RequestError(self._given_up())
        return said

    def _mask(self) -> Mask:
        """Which tokens may come next."""
        begin = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._slow = time.thread_time() - begin > SLOWEST_MASK_SECONDS
        # Where no token goes on, llguidance offers EOS, though the output is not complete.
        ends = sum(int(bits[id // 8]) >> id % 8 & 1 for id in self._ends)
        if np.bitwise_count(bits).sum() == ends and not self._matcher.is_accepting():
            return np.zeros_like(bits)
        return bits

    def masks(self, paths: Sequence[Sequence[int]]) -> list[Mask | str | None]:
        """Which tokens may come after each of ``paths``.

        None where the grammar refuses the path itself: nothing ever comes from there. What the
        parser said where it gave up behind drafted tokens.

        Raises:
            RequestError: it gave up behind the committed ones.
        """
        # Texts, no errors: a local that is raised keeps this frame and its grammar alive.
        found: list[Mask | str | None] = []
        for path in paths:
            taken = self._matcher.try_consume_tokens(list(path))
            mask = self._mask() if taken == len(path) else None
            stopped, said = self._matcher.is_error(), self._recover()
            if taken and not stopped:
                self._matcher.rollback(taken)
            if said is not None and not path:
                raise RequestError(said)
            found.append(said or mask)
        return found

    def accepts(self, path: Sequence[int]) -> int:
        """How many tokens of ``path`` may follow."""
        count: int = self._matcher.validate_tokens(list(path)) if path else 0
        stopped = self._matcher.is_error()
        self._recover()
        return 0 if stopped else count

    def forced(self, path: Sequence[int]) -> list[int]:
        """The tokens that can only follow ``path``, often none."""
        taken = self._matcher.try_consume_tokens(list(path))
        tokens = self._matcher.compute_ff_tokens() if taken == len(path) else []
        if self._matcher.is_error():
            self._recover()
            return []
        if taken:
            self._matcher.rollback(taken)
        return list(tokens)
