"""The binding is made of the C header."""

from __future__ import annotations

from outrider.native.generate import HEADER, MODULE, interface_module
from outrider.native.interface import PEAKS


def test_the_binding_is_what_the_header_gives() -> None:
    """Where it is not, run ``python -m outrider.native.generate``."""
    assert MODULE.read_text() == interface_module(HEADER.read_text())


def test_another_declaration_is_another_interface_and_another_comment_is_not() -> None:
    header = HEADER.read_text()
    made = interface_module(header)
    assert interface_module(header.replace("// The cache", "// A cache")) == made
    changed = interface_module(header.replace("float norm_eps, scale", "float scale, norm_eps"))
    assert changed.splitlines()[4] != made.splitlines()[4]


def test_the_kinds_of_products_have_their_numbers() -> None:
    assert PEAKS == ("float32", "bfloat16", "digits16", "digits8", "digits8_codes4")
