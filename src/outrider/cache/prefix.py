"""Which pages hold the beginning of a sequence already: full, committed pages, by what they hold.

A page's key is a digest of the tokens on it and of the key before it, so that it stands for all
tokens up to its end. Keys and values of a row do not depend on the company that it was computed in,
so a page that is found is the page that would be computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b

KEY_BYTES = 16


def first_key(salt: str) -> bytes:
    """What stands before the first page: tenants with another salt share nothing."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES).digest()


def next_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of a full page that holds ``tokens`` behind a page of key ``before``."""
    return blake2b(before + array("q", tokens).tobytes(), digest_size=KEY_BYTES).digest()


def extend_keys(keys: list[bytes], tokens: Sequence[int], pages: int, size: int, salt: str) -> None:
    """Lengthen ``keys`` in place to those of the first ``pages`` pages of ``tokens``."""
    for page in range(len(keys), pages):
        before = keys[-1] if keys else first_key(salt)
        keys.append(next_key(before, tokens[page * size : (page + 1) * size]))
