"""The bytes that tokens stand for, and the tokens that two vocabularies share.

For drafters with another tokenizer than the target's (Timor et al., "Accelerating LLM inference
with lossless speculative decoding algorithms for heterogeneous vocabularies", 2025).
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from ..errors import ModelError

BYTE = re.compile(r"<0x([0-9A-F]{2})>")
"""A token of SentencePiece that stands for one byte."""


def byte_level() -> dict[str, int]:
    """Return the bytes that the characters of byte-level tokens stand for."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    shifted = {chr(256 + place): byte for place, byte in enumerate(others)}
    return {chr(byte): byte for byte in printable} | shifted


LEVEL = byte_level()


@dataclass(frozen=True)
class Pieces:
    """The bytes of a tokenizer's tokens by id, empty if an id has none.

    ``special`` ids mark something; their bytes are the text that is written for them. ``single``
    ids are SentencePiece's tokens for one byte, which it uses if no other token fits.
    """

    tokens: list[bytes]
    special: frozenset[int]
    single: frozenset[int] = frozenset()
    ids: dict[bytes, int] = field(init=False, repr=False)
    """The id of each text; if several have it, the lowest that is not ``single``."""

    def __post_init__(self) -> None:
        ids: dict[bytes, int] = {}
        plain = [id for id, text in enumerate(self.tokens) if text and id not in self.special]
        for id in sorted(plain, key=lambda id: (id in self.single, id)):
            ids.setdefault(self.tokens[id], id)
        object.__setattr__(self, "ids", ids)


@dataclass(frozen=True)
class Spelling:
    """The way in which a byte-level or SentencePiece vocabulary spells bytes.

    ``space`` stands for a space; ``falls_back`` is True if there are tokens for single bytes.
    """

    byte_level: bool
    space: str | None
    falls_back: bool

    def bytes_of(self, token: str) -> bytes:
        """Return the bytes that a token of the vocabulary stands for."""
        if not self.byte_level:
            spaced = token.replace(self.space or " ", " ")
            return self.single(token) or spaced.encode(errors="replace")
        try:
            return bytes([LEVEL[letter] for letter in token])
        except KeyError:  # an added token, which stands for its own text
            return token.encode(errors="replace")

    def single(self, token: str) -> bytes:
        """Return the byte of a SentencePiece token for a single byte; empty for other tokens."""
        digits = BYTE.fullmatch(token) if self.falls_back else None
        return bytes.fromhex(digits[1]) if digits else b""


def spelling_of(tokenizer: Tokenizer) -> Spelling | None:
    """Return a tokenizer's spelling of bytes; None unless it is byte-level or SentencePiece."""
    decoder = tokenizer.decoder
    steps = [*_steps(json.loads(decoder.__getstate__()))] if decoder is not None else []
    kinds = {step["type"] for step in steps}
    space = next(filter(None, map(_space, steps)), None)
    if "ByteLevel" not in kinds and space is None:
        return None
    return Spelling("ByteLevel" in kinds, space, "ByteFallback" in kinds)


def pieces_of(tokenizer: Tokenizer, size: int, owner: str) -> Pieces:
    """Return the bytes of the ids below ``size`` of a byte-level or SentencePiece tokenizer.

    Raises ModelError: it is of another kind; the message names its ``owner``.
    """
    spelling = spelling_of(tokenizer)
    if spelling is None:
        raise ModelError(
            f"the tokenizer of {owner} is neither byte-level nor SentencePiece, so the bytes of "
            "its tokens are not known; give a drafter with the target's tokenizer."
        )
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    tokens = {id: spelling.bytes_of(token) for token, id in vocabulary.items()}
    single = {id for token, id in vocabulary.items() if spelling.single(token)}
    special = {vocabulary.get(getattr(tokenizer.model, "unk_token", None) or "", -1)}
    for id, added in tokenizer.get_added_tokens_decoder().items():
        tokens[id] = added.content.encode(errors="replace")
        if added.special:
            special.add(id)
    known = [tokens.get(id, b"") for id in range(size)]
    return Pieces(known, frozenset(special), frozenset(single))


def _steps(decoder: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the steps of a decoder; the library that wrote it bounds how deep they nest."""
    if decoder["type"] != "Sequence":
        yield decoder
    for each in decoder.get("decoders", ()):
        yield from _steps(each)


def _space(step: dict[str, Any]) -> str | None:
    """Return the text for a space in tokens, if a step of a decoder defines it."""
    match step:
        case {"type": "Metaspace", "replacement": str(space)}:
            return space
        case {"type": "Replace", "content": " ", "pattern": {"String": str(space)}}:
            return space
    return None


@dataclass(frozen=True)
class Intersection:
    """The tokens that a target and a drafter share.

    ``targets`` maps the drafter's ids to the target's with the same bytes, or -1; ``inputs`` is the
    reverse, for all ids of the target with these bytes. ``shares`` are the shares of the target's
    and of the drafter's tokens that both have.
    """

    targets: list[int]
    inputs: list[int]
    shares: tuple[float, ...]

    @property
    def count(self) -> int:
        """The number of shared tokens."""
        return sum(id >= 0 for id in self.targets)

    def __str__(self) -> str:
        of_target, of_drafter = self.shares
        return (
            f"{self.count} tokens are in both vocabularies, {of_target:.0%} of the target's and "
            f"{of_drafter:.0%} of the drafter's; a draft ends where the target says another one"
        )


def intersection(target: Pieces, drafter: Pieces) -> Intersection:
    """Return the tokens that have the same bytes in two vocabularies."""
    targets, inputs = [-1] * len(drafter.tokens), [-1] * len(target.tokens)
    shared = target.ids.keys() & drafter.ids.keys()
    for text in shared:
        targets[drafter.ids[text]] = target.ids[text]
    for id, text in enumerate(target.tokens):
        if text in shared and id not in target.special:
            inputs[id] = drafter.ids[text]
    shares = (len(shared) / max(1, len(each.ids)) for each in (target, drafter))
    return Intersection(targets, inputs, (*shares,))
