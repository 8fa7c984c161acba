"""Converts a growing text from the target's tokens to another tokenizer's ids."""

import codecs
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from .intersection import Intersection, Pieces

TRIED_BEFORE = ("", "\n", ".")
"""Texts tried before a continuation, since some tokenizers put a space before a first word."""
LONGEST_LOOKUP = 16
"""Most bytes of a token that is looked up by its bytes."""


@dataclass
class Context:
    """The text of a sequence in the drafter's ids.

    The first ``taken`` tokens of the target are in ``ids``, except the ``pending`` bytes, which are
    not whole characters yet. The first ``at_once`` tokens are encoded as a text, later ones one by
    one.
    """

    at_once: int
    ids: list[int] = field(default_factory=list)
    taken: int = 0
    pending: bytes = b""


def num_unfinished(data: bytes) -> int:
    """Return how many bytes at the end belong to an incomplete character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.decode(data)
    return len(decoder.getstate()[0])


def ids_before(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that a tokenizer puts before any text."""
    text: list[int] = tokenizer.encode("a", add_special_tokens=False).ids
    whole: list[int] = tokenizer.encode("a").ids
    for place in range(len(whole) - len(text) + 1):
        if whole[place : place + len(text)] == text:
            return whole[:place]
    return []


class Reencoder:
    """Converts the target's tokens to the drafter's ids, each once.

    The ids spell the text of the tokens: byte for byte if the drafter's tokenizer can, else as it
    normalises text. ``theirs`` and ``ours`` are the bytes of target's and drafter's ids.
    """

    def __init__(
        self,
        target: Tokenizer,
        drafter: Tokenizer,
        theirs: Pieces,
        ours: Pieces,
        shared: Intersection,
    ) -> None:
        self._tokenizer = drafter
        self._theirs, self._ours, self.shared = theirs, ours, shared
        self._size = len(ours.tokens)
        self._their_begin, self._our_begin = ids_before(target), ids_before(drafter)
        first = target.encode("a", add_special_tokens=False).ids[:1]
        # SentencePiece puts a space before a text, which is no part of it.
        self._spaced = any(theirs.tokens[id].startswith(b" ") for id in first)

    def take(self, context: Context, tokens: Sequence[int], most: int) -> int:
        """Convert up to ``most`` more of a sequence's tokens; return how many were converted.

        The first ones are encoded as a text, as the drafter's tokenizer does it. Later tokens in
        both vocabularies get their own ids, so that accepted drafts stay as drafted.
        """
        start = context.taken
        if start < context.at_once:
            stop = min(start + most, context.at_once)
            self._take_text(context, tokens[start:stop])
        else:
            stop = min(start + most, len(tokens))
            for token in tokens[start:stop]:
                self._take_token(context, token)
        context.taken = stop
        return stop - start

    def _take_text(self, context: Context, tokens: Sequence[int]) -> None:
        begins = not context.taken
        count = len(self._their_begin)
        if begins and list(tokens[:count]) == self._their_begin:
            tokens = tokens[count:]
        data = context.pending + b"".join(map(self._theirs.tokens.__getitem__, tokens))
        if begins and self._spaced:
            data = data.removeprefix(b" ")
        end = len(data) - num_unfinished(data)
        context.pending, text = data[end:], data[:end].decode(errors="replace")
        exact = None if begins else self._exact(text)
        ids = self._encoded(text) if exact is None else exact
        if begins and ids[: len(self._our_begin)] != self._our_begin:
            ids = self._our_begin + ids
        context.ids += ids

    def _take_token(self, context: Context, token: int) -> None:
        if token in self._theirs.special:
            context.ids += self._spelled(context.pending)
            context.pending = b""
            context.ids += self._ids(self._theirs.tokens[token])
            return
        own = self.shared.inputs[token]
        if own >= 0 and not context.pending:
            context.ids.append(own)
            return
        data = context.pending + self._theirs.tokens[token]
        end = len(data) - num_unfinished(data)
        context.ids += self._ids(data[:end])
        context.pending = data[end:]

    def _encoded(self, text: str) -> list[int]:
        ids, size = self._tokenizer.encode(text, add_special_tokens=False).ids, self._size
        return [id for id in ids if id < size]

    def _exact(self, text: str) -> list[int] | None:
        """Return ids that spell exactly this text after another one; None if there are none."""
        data, known = text.encode(), self._ours.tokens
        for before in TRIED_BEFORE:
            ids = self._encoded(before + text)
            place, size = len(ids), 0
            while place and size < len(data):
                place -= 1
                size += len(known[ids[place]])
            if b"".join(known[id] for id in ids[place:]) == data:
                return ids[place:]
        return None

    def _ids(self, data: bytes) -> list[int]:
        """Return ids of a few bytes that follow others."""
        if not data:
            return []
        try:
            exact = self._exact(data.decode())
        except UnicodeDecodeError:
            exact = None
        return self._spelled(data) if exact is None else exact

    def _spelled(self, data: bytes) -> list[int]:
        """Return the longest tokens that make up a few bytes, whole characters or not."""
        known, ids, start = self._ours.ids, [], 0
        while start < len(data):
            ends = range(min(len(data), start + LONGEST_LOOKUP), start, -1)
            end = next((end for end in ends if data[start:end] in known), None)
            if end is None:
                return self._encoded(data.decode(errors="replace"))
            ids.append(known[data[start:end]])
            start = end
        return ids
