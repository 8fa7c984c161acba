"""The native libraries that can be tried here."""

from __future__ import annotations

import pytest

from outrider.native import choice as native
from outrider.native.library import Library

HERE = native.available()


def step(isa: str) -> Library:
    found = native.open_library(isa)
    assert found is not None
    if found.isa != isa:
        pytest.skip(f"{isa} was not built")
    return found
