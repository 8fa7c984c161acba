"""Keys of full, committed pages, by which later sequences find the pages of a shared prefix.

A page's key is a digest of its tokens and of the key before it, so it identifies all tokens up to
the page's end. A row's keys and values do not depend on the other rows of its forward, so a page
that is found holds the bits that would be computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from hashlib import blake2b


def extend_keys(keys: list[bytes], tokens: Sequence[int], pages: int, size: int, salt: str) -> None:
    """Extend ``keys`` in place to the first ``pages`` pages of ``tokens``, ``size`` tokens each.

    Requests with different salts share no page.
    """
    for page in range(len(keys), pages):
        before = keys[-1] if keys else _digest(salt.encode())
        held = array("q", tokens[page * size : (page + 1) * size])
        keys.append(_digest(before + held.tobytes()))


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()
