"""Products in registers, which the peers' harness takes for the peak of an instruction set."""

from __future__ import annotations

import pytest

from outrider.errors import ModelError
from outrider.native.choice import available, open_library
from outrider.native.interface import PEAKS


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("kind", PEAKS)
def test_products_are_counted(isa: str, kind: str) -> None:
    library = open_library(isa)
    assert library is not None
    one = library.multiply(kind, 1)
    assert one > 0
    assert library.multiply(kind, 3) == 3 * one


@pytest.mark.parametrize("pieces", [0, -1, 2**16 + 1])
def test_so_many_pieces_there_are_not(pieces: int) -> None:
    library = open_library("portable")
    assert library is not None
    with pytest.raises(ModelError, match="pieces"):
        library.multiply(PEAKS[0], pieces)
