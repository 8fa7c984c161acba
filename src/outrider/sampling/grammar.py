"""Structured output: masks of the tokens that a grammar allows next, by llguidance."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper, grammar_from
from numpy.typing import NDArray
from tokenizers import Tokenizer

from ..base.outside.text import printable
from ..errors import ModelError, RequestError, shown
from ..params import FORMS, SamplingParams, StructuredOutputsParams
from ..text.intersection import pieces_of
from ..text.panics import no_panic
from .schemas import held, opened

SLOWEST_MASK_SECONDS = 0.05
"""Longest CPU time of one mask, which delays all requests; a slower mask may end its request.

JSON, code and prose take at most 10 ms with a vocabulary of 128,000.
"""
FEW_ITEMS = 5_000
"""Items of the parser that a mask may always make: 15 ms at most on an idle machine.

Schemas make a few hundred.
"""
Mask = NDArray[np.uint8]
"""Allowed tokens, a bit each, the lowest id in the lowest bit: [vocabulary / 8] or more."""
SCHEMA = re.compile(r"%json\s*(?=\{)")  # the text before a schema in llguidance's dialect of Lark
DEAD_END = "NoExtensionBias"  # start of llguidance's error where no token can follow
TOO_SLOW = "a step of the grammar takes too long"


def _limits(items: int) -> LLParserLimits:
    """Return the limits on a parser's work in one mask; errors hide its state: it has output."""
    return LLParserLimits(step_max_items=items, max_items_in_row=2_000, verbose_errors=False)


class _Words(TokenizerWrapper):
    """A tokenizer for llguidance, whose own reader takes added tokens for special ones."""

    def __init__(self, tokenizer: Tokenizer, size: int, ends: list[int]) -> None:
        pieces = pieces_of(tokenizer, size, "the model")
        self.is_tokenizer_wrapper = True
        self.tokens = pieces.tokens
        self.special_token_ids = sorted(pieces.special.union(ends) - {-1})
        self.eos_token_id, self.bos_token_id = ends[0], None
        self._tokenizer, self._size = tokenizer, size
        before = self._ids("\n")
        # Some tokenizers put a space before each text; it must not count.
        self._before = before if before and pieces.tokens[before[0]][:1] == b" " else []

    def _ids(self, text: str) -> list[int]:
        with no_panic():
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        return [id for id in ids if id < self._size]

    def __call__(self, text: str) -> list[int]:
        count = len(self._before)
        ids = self._ids(f"\n{text}") if count else self._ids(text)
        return ids[count:] if ids[:count] == self._before else self._ids(text)


class Grammars:
    """Compiles the grammars of requests for one tokenizer, and for a vocabulary with its padding.

    Without a tokenizer or an end token every request for structured output is refused. The
    tokenizer and llguidance's reading of its vocabulary wait for the first grammar; a large one
    takes a second.
    """

    def __init__(
        self,
        tokenizes: Callable[[], Tokenizer] | None,
        vocab_size: int,
        eos_token_ids: frozenset[int],
    ) -> None:
        self._tokenizes, self._vocab_size = tokenizes, vocab_size
        self._eos = sorted(i for i in eos_token_ids if 0 <= i < vocab_size)
        self._llguidance: LLTokenizer | None = None
        self._reading = threading.Lock()
        # Prompts of one call share a grammar; none is kept beyond the requests that use it.
        self._compiled: WeakValueDictionary[StructuredOutputsParams, Grammar | LateGrammar] = (
            WeakValueDictionary()
        )

    def _vocabulary(self, tokenizes: Callable[[], Tokenizer]) -> LLTokenizer:
        with self._reading:
            if self._llguidance is None:
                tokenizer = tokenizes()  # what that raises says why
                try:
                    words = _Words(tokenizer, self._vocab_size, self._eos)
                    self._llguidance = LLTokenizer(words, eos_token=self._eos)
                except (ValueError, ModelError):
                    raise RequestError(
                        "this model's tokenizer cannot be used for structured_outputs: "
                        "it is neither byte-level nor SentencePiece."
                    ) from None
                words.tokens = []  # already read
            return self._llguidance

    def compile(self, params: SamplingParams) -> Grammar | LateGrammar | None:
        """Return the grammar of a request, if it has one; RequestError if that is impossible."""
        form = params.structured_outputs
        if form is None:
            return None
        if self._tokenizes is None or not self._eos:
            missing = "a tokenizer" if self._tokenizes is None else "an end-of-sequence token"
            raise RequestError(
                f"structured_outputs need a model with {missing}; drop them, or take one."
            )
        assert isinstance(form, StructuredOutputsParams)
        compiled = self._compiled.get(form)
        if compiled is not None:
            return compiled.copy()
        grammar: Grammar | LateGrammar | None = None
        inner = None
        if any(getattr(form, name) is not None for name in FORMS):
            inner = grammar = self._grammar(form, self._vocabulary(self._tokenizes))
        if form.after is not None:
            tokenizer = self._tokenizes()
            begins = self._token("after", form.after, tokenizer)
            opening = form.opening and self._token("opening", form.opening, tokenizer)
            more = self._eos, self._vocab_size, opening or None, form.budget
            grammar = LateGrammar(inner, begins, *more)
        assert grammar is not None
        self._compiled[form] = grammar
        return grammar

    def _grammar(self, form: StructuredOutputsParams, vocabulary: LLTokenizer) -> Grammar:
        """Return the grammar of a form, or raise RequestError."""
        name, text = _source(form)

        def parser(items: int) -> LLMatcher:
            return LLMatcher(vocabulary, text, limits=_limits(items), log_level=0)

        # JSON with recursive whitespace, as llama.cpp has it, takes 0.3 items a token.
        matcher = parser(FEW_ITEMS + self._vocab_size // 2)
        if matcher.is_error():
            reason = printable(matcher.get_error())
            raise RequestError(f"structured_outputs.{name} cannot be used: {reason}; correct it.")
        grammar = Grammar(matcher, partial(parser, FEW_ITEMS), self._eos)
        (mask,) = grammar.masks([[]])
        if isinstance(mask, np.ndarray) and not mask.any():
            raise RequestError(
                f"structured_outputs.{name} lets no token of this model begin the output; "
                "correct it."
            )
        return grammar

    def _token(self, name: str, text: str, tokenizer: Tokenizer) -> int:
        """Return the id of the token that an option names by its text."""
        with no_panic():
            ids = tokenizer.encode(text, add_special_tokens=False).ids
        if len(ids) != 1 or not 0 <= ids[0] < self._vocab_size or ids[0] in self._eos:
            raise RequestError(
                f"structured_outputs.{name} is {shown(text)}; give the text of one token that ends "
                "no output."
            )
        return ids[0]


def _source(form: StructuredOutputsParams) -> tuple[str, str]:
    """Return the name of the option that a request sets, and llguidance's text for it."""
    if form.json is not None:
        schema = json.loads(str(form.json))
        if not form.disable_additional_properties:
            schema = opened(schema)
        return "json", grammar_from("json", json.dumps(held(schema)))
    if form.regex is not None:
        return "regex", grammar_from("regex", form.regex)
    if form.choice is not None:
        # As one terminal: each alternative of a rule would be an item to follow.
        texts = " | ".join(json.dumps(text, ensure_ascii=False) for text in form.choice)
        return "choice", grammar_from("grammar", f"start: CHOICE\nCHOICE: {texts}")
    try:
        return "grammar", grammar_from("grammar", _with_schemas_held(str(form.grammar)))
    except ValueError as error:
        raise RequestError(
            f"structured_outputs.grammar cannot be used: {printable(error)}; correct it."
        ) from None


def _with_schemas_held(grammar: str) -> str:
    """Return a grammar whose schemas are closed and bounded like those of ``json``."""
    parts, at = [], 0
    for mark in SCHEMA.finditer(grammar):
        if mark.start() < at:
            continue  # within another schema
        with suppress(ValueError, RecursionError):  # the parser reports these errors
            schema, end = json.JSONDecoder().raw_decode(grammar, mark.end())
            parts += [grammar[at : mark.end()], json.dumps(held(schema))]
            at = end
    return "".join([*parts, grammar[at:]])


def _failed(reason: str) -> str:
    return f"structured_outputs failed: {printable(reason)}; simplify the grammar."


def keep(z: NDArray[np.float32], mask: Mask) -> None:
    """Set the logits z [vocabulary] of tokens that the mask refuses to -inf, in place."""
    refused = np.unpackbits(mask, count=len(z), bitorder="little") == 0
    np.putmask(z, refused, -np.inf)


class Grammar:
    """The state of one sequence in its grammar. Drafted tokens are tried and rolled back.

    A parser that fails stays failed. If drafted tokens made it fail, that must not reach the
    output: a new parser takes the committed tokens and goes on. ``matcher`` is the parser at its
    start; ``sparing`` returns one that gives up beyond ``FEW_ITEMS``.
    """

    def __init__(
        self, matcher: LLMatcher, sparing: Callable[[], LLMatcher], ends: list[int]
    ) -> None:
        self._begin, self._matcher = matcher, matcher.deep_copy()
        self._sparing, self._ends = sparing, ends
        self._committed: list[int] = []
        self._known: dict[tuple[int, ...], Mask | None] = {}
        """Masks after paths since the last commit: the target asks for its drafter's again."""
        self._slow = False

    def copy(self) -> Grammar:
        """Return the same grammar at its start, for another sample."""
        return Grammar(self._begin, self._sparing, self._ends)

    def advance(self, output: Sequence[int]) -> None:
        """Take in the committed ``output``, which only grows; RequestError if the parser fails."""
        tokens = list(output[len(self._committed) :])
        if tokens and not self._matcher.consume_tokens(tokens):
            raise RequestError(_failed(self._matcher.get_error()))
        if tokens:
            self._known.clear()
        self._committed += tokens

    def _recover(self) -> str | None:
        """Replace a parser that failed on drafted tokens; return why it failed, or None.

        A mask that took too long counts as a failure. Raises RequestError where the new parser
        fails on the committed tokens.
        """
        slow, self._slow = self._slow, False
        if not self._matcher.is_error():
            return _failed(TOO_SLOW) if slow else None
        # A dead end is no failure, though the parser stops there too.
        error = self._matcher.get_error()
        self._matcher = self._begin.deep_copy()
        if self._committed and not self._matcher.consume_tokens(self._committed):
            raise RequestError(_failed(self._matcher.get_error()))
        return None if error.startswith(DEAD_END) else _failed(error)

    def _mask(self, path: list[int]) -> Mask:
        """Return the tokens that may come next, after the ``path`` that the parser has consumed."""
        begin = time.thread_time()
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        if time.thread_time() - begin > SLOWEST_MASK_SECONDS:
            self._slow = self._is_slow(path)
        # At a dead end llguidance offers EOS, though the output is not complete.
        ends = sum(int(bits[id // 8]) >> id % 8 & 1 for id in self._ends)
        if np.bitwise_count(bits).sum() == ends and not self._matcher.is_accepting():
            return np.zeros_like(bits)
        return bits

    def _is_slow(self, path: list[int]) -> bool:
        """Return True if the mask after ``path`` itself takes too long.

        Page faults and other processes also lengthen CPU time. So a mask of few items is never
        slow, and one of more items is timed again.
        """
        output = [*self._committed, *path]
        sparing = self._sparing()
        if sparing.consume_tokens(output):
            sparing.compute_bitmask()
        if not sparing.is_error():
            return False
        again = self._begin.deep_copy()
        again.consume_tokens(output)
        begin = time.thread_time()
        again.compute_bitmask()
        return time.thread_time() - begin > SLOWEST_MASK_SECONDS

    def masks(self, paths: Sequence[Sequence[int]]) -> list[Mask | str | None]:
        """Return the tokens that may come after each of ``paths`` of drafted tokens.

        None stands for a path that the grammar refuses, a text for the parser's failure on it.
        Raises RequestError where the parser failed on the committed tokens.
        """
        # Texts instead of exceptions, which would keep this frame and its grammar alive.
        masks: list[Mask | str | None] = []
        for path in paths:
            key = tuple(path)
            if key in self._known:
                masks.append(self._known[key])
                continue
            taken = self._matcher.try_consume_tokens(list(path))
            mask = self._mask(list(path)) if taken == len(path) else None
            stopped, failure = self._matcher.is_error(), self._recover()
            if taken and not stopped:
                self._matcher.rollback(taken)
            if failure is not None and not path:
                raise RequestError(failure)
            if failure is None:
                self._known[key] = mask
            masks.append(failure or mask)
        return masks

    def accepts(self, path: Sequence[int]) -> int:
        """Return how many tokens of ``path`` may follow."""
        count: int = self._matcher.validate_tokens(list(path)) if path else 0
        stopped = self._matcher.is_error()
        self._recover()
        return 0 if stopped else count

    def forced(self, path: Sequence[int]) -> list[int]:
        """Return the tokens that must follow ``path``, often none."""
        taken = self._matcher.try_consume_tokens(list(path))
        tokens = self._matcher.compute_ff_tokens() if taken == len(path) else []
        if self._matcher.is_error():
            self._recover()
            return []
        if taken:
            self._matcher.rollback(taken)
        return list(tokens)


class LateGrammar:
    """A grammar that begins after a token, such as the end of a model's reasoning.

    Until the token ``begins``, committed or drafted, all tokens but ``ends`` are allowed. With
    ``opening`` this holds only for an output whose first token is ``opening``; for any other the
    grammar begins at once. After ``budget`` tokens only ``begins`` is allowed. Without ``inner``
    anything may follow.
    """

    def __init__(
        self,
        inner: Grammar | None,
        begins: int,
        ends: list[int],
        vocab_size: int,
        opening: int | None = None,
        budget: int | None = None,
    ) -> None:
        self._inner, self._begins, self._ends = inner, begins, ends
        self._vocab_size, self._opening, self._budget = vocab_size, opening, budget
        self._first: int | None = None
        """The place in the output where the grammar begins; None if it has not begun."""
        self._read = 0  # tokens of the output
        self._all = np.full(-(-vocab_size // 8), 255, np.uint8)
        self._free = self._all.copy()
        for id in ends:
            self._free[id // 8] &= ~np.uint8(1 << id % 8)
        self._closing = np.zeros_like(self._all)
        self._closing[begins // 8] = 1 << begins % 8

    def copy(self) -> LateGrammar:
        """See ``Grammar.copy``."""
        inner, more = self._inner and self._inner.copy(), (self._opening, self._budget)
        return LateGrammar(inner, self._begins, self._ends, self._vocab_size, *more)

    def advance(self, output: Sequence[int]) -> None:
        """See ``Grammar.advance``."""
        if self._first is None:
            begin = self._begin(output[self._read :])
            self._first = None if begin is None else self._read + begin
            self._read = len(output)
        if self._first is not None and self._inner is not None:
            self._inner.advance(output[self._first :])

    def _begin(self, rest: Sequence[int]) -> int | None:
        """Return where the grammar begins in ``rest``, which follows the output; else None."""
        if self._opening is not None and not self._read and rest and rest[0] != self._opening:
            return 0
        return list(rest).index(self._begins) + 1 if self._begins in rest else None

    def _behind(self, path: Sequence[int]) -> Sequence[int] | None:
        """Return the part of a path that the grammar sees; None where it has not begun there."""
        if self._first is not None:
            return path
        begin = self._begin(path)
        return None if begin is None else path[begin:]

    def masks(self, paths: Sequence[Sequence[int]]) -> list[Mask | str | None]:
        """See ``Grammar.masks``."""
        seen = [self._behind(path) for path in paths]
        undecided = self._opening is not None and not self._read
        asked = [
            () if part is None and undecided and not path else part
            for part, path in zip(seen, paths, strict=True)
        ]
        held = iter(self._inner_masks([part for part in asked if part is not None]))
        return [
            self._before(path) if ask is None else self._or_opening(next(held), part is None)
            for path, part, ask in zip(paths, seen, asked, strict=True)
        ]

    def _inner_masks(self, paths: Sequence[Sequence[int]]) -> list[Mask | str | None]:
        return [self._all] * len(paths) if self._inner is None else self._inner.masks(paths)

    def _before(self, path: Sequence[int]) -> Mask:
        """Return the tokens that may follow a path in which the grammar has not begun."""
        over = self._budget is not None and self._read + len(path) >= self._budget
        return self._closing if over else self._free

    def _or_opening(self, mask: Mask | str | None, opens: bool) -> Mask | str | None:
        """Return the grammar's mask, plus the opening token if the output may begin with it."""
        if not opens or self._opening is None or not isinstance(mask, np.ndarray):
            return mask
        more = mask.copy()
        more[self._opening // 8] |= 1 << self._opening % 8
        return more

    def accepts(self, path: Sequence[int]) -> int:
        """See ``Grammar.accepts``."""
        seen = self._behind(path)
        free = path if seen is None else path[: len(path) - len(seen)]
        for count, id in enumerate(free):
            over = self._budget is not None and self._read + count >= self._budget
            if id in self._ends or (over and id != self._begins):
                return count
        inner = len(seen or ()) if self._inner is None else self._inner.accepts(seen or ())
        return len(free) + (0 if seen is None else inner)

    def forced(self, path: Sequence[int]) -> list[int]:
        """See ``Grammar.forced``."""
        seen = self._behind(path)
        if seen is None:
            return [self._begins] if self._before(path) is self._closing else []
        return [] if self._inner is None else self._inner.forced(seen)
