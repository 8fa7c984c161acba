"""What messages keep of libraries' errors."""

import pytest

from outrider.base.fields import one_line


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ("a is wrong.", "a is wrong"),
        ("", "ValueError"),
        ("a is\n wrong\n\nmore", "a is wrong"),
        (
            "It has custom code. Please pass trust_remote_code=True to allow it.",
            "It has custom code",
        ),
        (
            "Weights only load failed. Set weights_only to False. Tensor 3.",
            "Weights only load failed. Tensor 3",
        ),
        ("`sentencepiece` is missing: try pip install it.", "`sentencepiece` is missing"),
        ("unknown `\x1b[31m\x9c\ud800\u2028`", "unknown `\\x1b[31m\\x9c\\ud800 `"),
        ("Pass allow_pickle=True.", "ValueError"),
    ],
)
def test_advice_that_is_unsafe_here_is_left_out(text: str, kept: str) -> None:
    assert one_line(ValueError(text)) == kept
