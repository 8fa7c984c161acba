"""The logits pipeline: a request's options, applied to the model's logits.

Processed logits are fp32 log-weights z, unnormalised: divided by the temperature, -inf where a
token is masked. The order of processors, their names and scopes are vLLM's: grammar,
allowed_token_ids, bad_words, min_tokens, logit_bias, logits_processors, penalties, temperature,
min_p, top_k, top_p. At temperature 0 it ends with the penalties.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.types import Request, Row, check_vocabulary
from ..errors import RequestError
from ..params import LogitsProcessor, SamplingParams
from .arrays import softmax
from .grammar import Grammar, LateGrammar, Mask, keep
from .history import History

NEVER = float("-inf")
Logits = NDArray[np.float32]


class RequestPipeline:
    """The part of a request's options that is the same at every position, shared by its samples.

    ``bad_words`` are token ids, one list for each way to write a word.
    Raises RequestError where an option names an id outside the vocabulary, or nothing is left.
    """

    def __init__(
        self,
        request: Request,
        vocab_size: int,
        bad_words: Sequence[Sequence[int]] = (),
        grammar: Grammar | LateGrammar | None = None,
    ) -> None:
        self.request, self.vocab_size = request, vocab_size
        self.params = params = request.params
        self.grammar = grammar
        bias, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
        for name, ids in (("logit_bias", bias), ("allowed_token_ids", allowed)):
            check_vocabulary(name, ids, vocab_size)

        self.bias_ids = np.array(list(bias), np.int64)
        self.bias = np.array(list(bias.values()), np.float32)
        self.ends = sorted(i for i in request.end_token_ids if 0 <= i < vocab_size)
        self.banned: NDArray[np.bool_] | None = None  # [vocabulary]: never, at any position
        # A word with an id that the model lacks is never completed.
        words = [word for word in bad_words if max(word) < vocab_size]
        alone = [word[0] for word in words if len(word) == 1]
        if allowed or alone:
            self.banned = np.full(vocab_size, bool(allowed))
            self.banned[list(allowed)] = False
            self.banned[alone] = True
            left = ~self.banned
            if params.min_tokens:
                left[self.ends] = False
            if not left.any():
                names = "allowed_token_ids, bad_words and min_tokens"
                raise RequestError(f"{names} together leave no token to sample; allow another.")
        self.bad_words = [tuple(word) for word in words if len(word) > 1]
        self.tried: set[int] = set()  # processors that have been checked


class SequencePipeline:
    """One sequence's options, and their memory of its tokens.

    Target and drafters call it alike, each for the positions of its rows. Tokens drafted before a
    row count as output there, so that a draft changes no distribution.
    """

    def __init__(self, request: RequestPipeline) -> None:
        self._pipeline = request
        self._prompt = request.request.prompt_token_ids
        self._grammar = None if request.grammar is None else request.grammar.copy()
        self._history: History | None = None
        self.native_handle = 0
        """The pipeline in C++, 0 where Python is needed for more than a grammar's masks."""
        self.has_grammar = self._grammar is not None  # True if a grammar masks tokens
        self.penalises = request.params.penalises
        """True if drafted tokens before a row change its processed logits."""
        self.error: str | None = None
        """The cause of NaN rows after the last ``apply``: a processor, or a grammar's parser."""

    def apply(self, logits: Logits, tokens: list[int], paths: list[list[int]]) -> Logits:
        """Process logits in place, fp32 [rows, vocabulary], and return them, now z.

        ``tokens`` are the committed ids, prompt and output; ``paths`` for each row the drafted ids
        between those and the position that it decides. Raises RequestError where the grammar's
        parser gave up on the committed tokens.
        """
        self._constrain(logits, tokens, paths)
        self._ban_and_bias(logits, tokens, paths)
        self._process(logits, tokens, paths)
        return self._shape(logits, tokens, paths)

    def _constrain(self, logits: Logits, tokens: list[int], paths: list[list[int]]) -> None:
        """Mask what the grammar and bad words of several tokens forbid."""
        self.error = None
        if self.has_grammar:
            for z, mask in zip(logits, self.masks(tokens, paths), strict=True):
                if isinstance(mask, str):
                    self.error = self.error or mask
                    z.fill(np.nan)
                elif mask is not None:
                    keep(z, mask)
        if self._pipeline.bad_words:
            self._ban_words(logits, tokens, paths)

    def masks(self, tokens: list[int], paths: Sequence[Sequence[int]]) -> list[Mask | str | None]:
        """Return the tokens that the grammar allows after ``paths``, see ``Grammar.masks``.

        Before ``min_tokens`` end tokens are not allowed, unless the form is complete.
        """
        assert self._grammar is not None
        output = tokens[len(self._prompt) :]
        self._grammar.advance(output)
        masks = self._grammar.masks(paths)
        missing = self._pipeline.params.min_tokens - len(output)
        if missing > 0:
            masks = [
                self._going_on(mask)
                if isinstance(mask, np.ndarray) and len(path) < missing
                else mask
                for mask, path in zip(masks, paths, strict=True)
            ]
        return masks

    def _going_on(self, mask: Mask) -> Mask:
        """Return a mask without end tokens; the mask itself if the form is complete."""
        going_on = mask.copy()
        for id in self._pipeline.ends:
            going_on[id // 8] &= ~np.uint8(1 << id % 8)
        return going_on if going_on.any() else mask

    def _ban_and_bias(self, logits: Logits, tokens: list[int], paths: list[list[int]]) -> None:
        pipeline = self._pipeline
        if pipeline.banned is not None:
            np.copyto(logits, NEVER, where=pipeline.banned)
        if not self.has_grammar:  # a grammar's masks do it
            self._keep_going(logits, len(tokens) - len(self._prompt), paths)
        if len(pipeline.bias_ids):
            logits[:, pipeline.bias_ids] += pipeline.bias

    def _process(self, logits: Logits, tokens: list[int], paths: list[list[int]]) -> None:
        """Apply the processors to every row, the first time twice to check that they are pure."""
        for number, processor in enumerate(self._pipeline.params.logits_processors or ()):
            for row, path in enumerate(paths):
                ids = [*tokens, *path]
                try:
                    made = self._made(number, processor, logits[row], ids)
                    if number not in self._pipeline.tried:
                        again = self._made(number, processor, logits[row], ids)
                        if not np.array_equal(made, again):
                            raise RequestError(
                                f"logits_processors[{number}] gave two results for the same ids "
                                "and logits; it must be a pure function of them."
                            )
                        self._pipeline.tried.add(number)
                    logits[row] = made
                except RequestError as error:
                    # A failure after drafted tokens counts only if they turn out to be the output.
                    self.error = self.error or str(error)
                    logits[row] = np.nan

    @np.errstate(over="ignore", invalid="ignore")
    def _shape(self, logits: Logits, tokens: list[int], paths: list[list[int]]) -> Logits:
        """Penalties, temperature and truncation."""
        params = self._pipeline.params
        if self._history is None and params.penalises:
            self._history = History(params, self._prompt)
        if self._history is not None:
            self._history.penalise(logits, tokens, paths)
        if params.greedy:
            return logits
        if params.temperature != 1:
            logits /= params.temperature
        return truncate(logits, params)

    def _ban_words(self, logits: Logits, tokens: list[int], paths: list[list[int]]) -> None:
        """Mask the last token of a bad word whose other tokens stand at the end of the output."""
        longest = max(map(len, self._pipeline.bad_words)) - 1
        recent = tokens[len(self._prompt) :][-longest:]
        for row, path in enumerate(paths):
            before = tuple([*recent, *path][-longest:])
            for word in self._pipeline.bad_words:
                if before[len(before) - len(word) + 1 :] == word[:-1]:
                    logits[row, word[-1]] = NEVER

    def _keep_going(self, logits: Logits, output: int, paths: list[list[int]]) -> None:
        """Mask what would end the output before ``min_tokens``."""
        least, ends = self._pipeline.params.min_tokens, self._pipeline.ends
        early = [row for row, path in enumerate(paths) if output + len(path) < least]
        if early and ends:
            logits[np.ix_(early, ends)] = NEVER

    @staticmethod
    def _made(number: int, processor: LogitsProcessor, row: Logits, ids: list[int]) -> Logits:
        name = f"logits_processors[{number}]"
        try:
            made = processor(ids, row.copy())
        except Exception as error:  # whatever a user's function raises is this request's error
            raise RequestError(f"{name} raised {type(error).__name__}: {error}") from error
        array = isinstance(made, np.ndarray)
        if not array or made.shape != row.shape or not np.issubdtype(made.dtype, np.floating):
            kind = f"{made.dtype} {list(made.shape)}" if array else type(made).__name__
            raise RequestError(
                f"{name} returned {kind}; it must return a NumPy array of logits "
                f"[{row.shape[0]}], as it was given."
            )
        with np.errstate(over="ignore"):
            logits = np.asarray(made, np.float32)
        if not (logits < np.inf).all():
            raise RequestError(f"{name} returned NaN or infinity; ban a token with -inf.")
        return logits

    def fit(
        self, tokens: list[int], nodes: list[int], parents: list[int], length: int
    ) -> tuple[list[int], list[int]]:
        """Cut a draft where the grammar refuses it, and go on where it leaves no choice.

        Returns the nodes and parents of a draft at most ``length`` deep; a tree is cut but not
        continued. Raises RequestError as ``apply`` does.
        """
        grammar = self._grammar
        assert grammar is not None
        grammar.advance(tokens[len(self._prompt) :])
        if parents == list(range(-1, len(nodes) - 1)):
            kept = nodes[: grammar.accepts(nodes)]
            # What follows a refused token was drafted for another text.
            kept += grammar.forced(kept)[: max(0, length - len(kept))]
            return kept, list(range(-1, len(kept) - 1))
        paths: list[list[int]] = []
        place: dict[int, int] = {-1: -1}
        kept, above = [], []
        for node, (token, parent) in enumerate(zip(nodes, parents, strict=True)):
            path = [*(paths[parent] if parent >= 0 else []), token]
            paths.append(path)
            if parent in place and grammar.accepts(path) == len(path):
                place[node] = len(kept)
                kept.append(token)
                above.append(place[parent])
        return kept, above


def truncate(z: Logits, params: SamplingParams) -> Logits:
    """Mask what min_p, top_k and top_p leave out, in place; z is fp32 [rows, vocabulary].

    min_p keeps p >= min_p * max p; top_k keeps ties with the k-th; top_p keeps the smallest set of
    most likely tokens whose mass reaches it, the lowest id first among equals, one at least.
    """
    if params.min_p > 0:
        z[z < z.max(-1, keepdims=True) + math.log(params.min_p)] = NEVER
    if 0 < params.top_k < z.shape[1]:
        z[z < np.partition(z, -params.top_k)[:, -params.top_k, None]] = NEVER
    if params.top_p < 1:
        ids = np.argsort(-z, kind="stable")
        mass = np.take_along_axis(softmax(z), ids, -1)
        out = mass.cumsum(-1) - mass >= params.top_p
        z[np.nonzero(out)[0], ids[out]] = NEVER
    return z


class StepLogits(NamedTuple):
    """The target's processed logits of one step, fp32 [rows, vocabulary], row by row.

    ``first[s]`` is the row of sequence s's last committed token, None when it draws nothing; its
    draft nodes' rows follow it in order. ``drawn`` are the rows' tokens and scores by the shared
    noise, where the model drew them itself; there are no z and rows then.
    """

    logits: Logits
    rows: list[Row]
    first: list[int | None]
    drawn: tuple[Sequence[int], Sequence[float]] | None = None
