"""From ids to text while they come: deltas, and the end at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from .stop import StopFinder

CONTEXT = 6
"""Prompt tokens put before the output, so that its first token keeps its leading space."""
UNFINISHED = "\ufffd"
"""What a decoder makes of bytes that are not, or not yet, a character."""


def _added(before: str, after: str) -> str:
    """What ``after`` has behind the beginning that it shares with ``before``."""
    if after.startswith(before):
        return after[len(before) :]
    pairs = enumerate(zip(before, after, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
    return after[same:]


class Detokenizer:
    """The text of one sequence's output, token by token.

    Each token is decoded after those that were shown last. tokenizers' own ``DecodeStream`` raises
    where a byte makes earlier ones invalid; here what was shown stands, and the text goes on.

    Args:
        tokenizer: None gives empty text throughout.
        prompt: the prompt's ids.
        stop: strings that end the output.
        include_stop: the text goes on to their end.
        skip_special: special tokens are left out of the text.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop: Sequence[str],
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stop = StopFinder(stop, include_stop)
        # The tokens shown last, then those that are held back.
        self._ids = list(prompt[-CONTEXT:])
        self._num_shown = len(self._ids)
        self._shown = self._decoded()

    def _decoded(self) -> str:
        if self._tokenizer is None:
            return ""
        text: str = self._tokenizer.decode(self._ids, skip_special_tokens=self._skip_special)
        return text

    def push(self, token: int, may_stop: bool = True) -> tuple[str, bool]:
        """Take one more token: (the text that may be shown now, whether a stop string ended it).

        Stop strings are looked for only in text that comes while ``may_stop``.
        """
        if self._tokenizer is None:
            return "", False
        self._ids.append(token)
        text = self._decoded()
        if text.endswith(UNFINISHED) or text == self._shown:
            return "", False
        new = _added(self._shown, text)
        self._ids = self._ids[self._num_shown :]
        self._num_shown = len(self._ids)
        self._shown = self._decoded()
        return self._stop.push(new) if may_stop else (new, False)

    def flush(self) -> str:
        """The text held back so far, at the end of the output."""
        if self._tokenizer is None:
            return ""
        text = self._decoded()  # with bytes that never became a character
        shown, _ = self._stop.push(_added(self._shown, text))
        self._shown = text
        return shown + self._stop.flush()
