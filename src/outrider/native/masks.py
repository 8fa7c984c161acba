"""Masks of the tokens that may follow drafted ones, which C++ asks for while it drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import ModelError
from ._interface import ffi

AllowedAfter = Callable[[list[int]], NDArray[np.uint8] | None]
"""Returns the tokens that may follow drafted ids, a bit each; None allows all."""
NO_MASKS: Mapping[int, AllowedAfter] = MappingProxyType({})


class MaskCalls:
    """Answers the calls of C++ for masks, of ``size`` bytes or more, of one ``Library.draft``.

    ``allowed`` is by the number of a draft. Masks live as long as this. After an exception no token
    may follow anything.
    """

    def __init__(self, allowed: Mapping[int, AllowedAfter], size: int) -> None:
        self._allowed = allowed
        self._nothing = np.zeros(size, np.uint8)
        self._kept: list[Any] = []
        self._error: BaseException | None = None

    def pointer(self, draft: int, path: Any, length: int) -> Any:
        """Return a pointer to a mask, a null pointer for none."""
        try:
            ids = ffi.unpack(path, length) if length else []
            mask = self._nothing if self._error else self._allowed[draft](ids)
            if mask is None:
                return ffi.NULL
            if mask.dtype != np.uint8 or mask.shape[0] < len(self._nothing) or mask.strides != (1,):
                raise ModelError(f"a mask of shape {mask.shape} is none of this vocabulary.")
        except BaseException as error:  # none may cross C++
            self._error, mask = error, self._nothing
        self._kept.append(ffi.from_buffer("uint8_t[]", mask))
        return self._kept[-1]

    def check(self) -> None:
        """Raise what a mask's function raised, if one did."""
        if self._error is not None:
            raise self._error
