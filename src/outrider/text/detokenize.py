"""From ids to text while they come: deltas, and the end at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from .stop import StopFinder

CONTEXT = 6
"""Prompt tokens put before the output, so that its first token keeps its leading space."""


class Detokenizer:
    """The text of one sequence's output, token by token.

    Args:
        tokenizer: None gives empty text throughout.
        prompt: the prompt's ids.
        stop: strings that end the output.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt: Sequence[int], stop: Sequence[str]
    ) -> None:
        self._tokenizer = tokenizer
        self._context = list(prompt[-CONTEXT:])
        self._ids: list[int] = []
        self._stop = StopFinder(stop)
        self._decoded = 0
        self._stream = DecodeStream(skip_special_tokens=True)
        if tokenizer is not None:
            for token in self._context:
                self._stream.step(tokenizer, token)

    def push(self, token: int, may_stop: bool = True) -> tuple[str, bool]:
        """Take one more token: (the text that may be shown now, whether a stop string ended it).

        Stop strings are looked for only in text that comes while ``may_stop``.
        """
        if self._tokenizer is None:
            return "", False
        self._ids.append(token)
        new = self._stream.step(self._tokenizer, token) or ""
        self._decoded += len(new)
        return self._stop.push(new) if may_stop else (new, False)

    def flush(self) -> str:
        """The text held back so far, at the end of the output."""
        if self._tokenizer is None:
            return ""
        # Bytes that never became a character: decode once more, whole, and take what is missing.
        before = self._tokenizer.decode(self._context)
        whole = self._tokenizer.decode(self._context + self._ids)
        missing = whole[len(before) + self._decoded :] if whole.startswith(before) else ""
        shown, _ = self._stop.push(missing)
        return shown + self._stop.flush()
