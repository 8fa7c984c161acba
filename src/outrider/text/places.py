"""Finds where tokens, or the characters that they continue, begin in a text, in characters."""

import codecs
from collections.abc import Iterable, Sequence

from .detokenize import Detokenizer

SLACK = 8
"""Most characters that normalisation may have changed or dropped between two tokens."""


class Places:
    """Finds the positions of an output's tokens; ``writer`` writes its text, from ``start`` on."""

    def __init__(self, writer: Detokenizer, start: int) -> None:
        self._writer = writer
        self._end = start  # of the text so far
        self._open = b""  # bytes that wait for the rest of a character

    def add(self, token: int, shown: bytes) -> int:
        """Return where the next token begins; its bytes in the text are ``shown``."""
        opened, _ = codecs.utf_8_decode(self._open, "replace", _begins(shown))
        place = self._end + len(opened)
        new, _ = self._writer.push(token)
        self._end += len(new)
        self._open = b"" if new else self._open + shown
        return place


def _begins(token: bytes) -> bool:
    """Return whether a token begins with a new character, not with the rest of one."""
    return token[:1] != b"" and token[0] & 0b1100_0000 != 0b1000_0000


def places_in(text: str, tokens: Iterable[bytes]) -> list[int]:
    """Return where tokens begin in a given text, which may lack or normalise some of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    begins, parts, end = [], [], 0
    for token in tokens:
        broken = bool(decoder.getstate()[0]) and _begins(token)  # a character, by this token
        begins.append(end + broken)
        parts.append(decoder.decode(token))
        end += len(parts[-1])
    parts.append(decoder.decode(b"", True))
    decoded = "".join(parts)
    if decoded == text:
        return begins
    pairs = zip(begins, [*begins[1:], len(decoded)], strict=True)
    return _aligned([decoded[begin:end] for begin, end in pairs], text)


def _aligned(pieces: Sequence[str], text: str) -> list[int]:
    """Return where pieces that roughly make up the text begin in it."""
    places, end = [], 0
    for piece in pieces:
        for spelled in (piece, piece.lstrip(" ")):
            place = text.find(spelled, end, end + len(spelled) + SLACK)
            if place >= 0:
                end = place + len(spelled)
                break
        else:
            place = end
        places.append(place)
    return places
