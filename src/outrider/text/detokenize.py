"""Streaming detokenisation: text deltas, and the end at a stop string."""

from collections.abc import Sequence

from tokenizers import Tokenizer

from .panics import ENDS
from .stop import StopFinder

CONTEXT = 6
"""Prompt tokens put before the output, so that its first token keeps its leading space."""
UNFINISHED = "\ufffd"
"""A decoder's text for bytes that are not, or not yet, a character."""
MOST_HELD = 16
"""Most tokens that wait for the rest of a character; every new one decodes all of them again."""
KEPT = 8
"""Tokens that a cut keeps as context for the next ones: more than two characters' bytes."""
PART = 3
"""Most bytes of an unfinished character; a token has one or more."""


def _added(before: str, after: str) -> str:
    """Return the text of ``after`` past the beginning that it shares with ``before``."""
    if after.startswith(before):
        return after[len(before) :]
    pairs = enumerate(zip(before, after, strict=False))
    same = next((i for i, (a, b) in pairs if a != b), min(len(before), len(after)))
    return after[same:]


class Detokenizer:
    """The text of one sequence's output after ``prompt``, token by token, up to a ``stop``.

    Each token is decoded after those that were shown last. If a byte makes earlier ones invalid,
    tokenizers' own ``DecodeStream`` raises; here the text goes on. Without a tokenizer it is empty.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        prompt: Sequence[int],
        stop: Sequence[str],
        include_stop: bool = False,
        skip_special: bool = True,
    ) -> None:
        self.writes = tokenizer is not None
        """False without a tokenizer."""
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._stop = StopFinder(stop, include_stop)
        # The tokens shown last, then those that are held back.
        self._ids = list(prompt[-CONTEXT:])
        self._num_shown = len(self._ids)
        self._shown = "" if tokenizer is None else self._decoded(self._ids)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text, if any."""
        return self._stop.stopped_by

    def _decoded(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        try:
            return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special))
        except ENDS:
            raise
        except BaseException:  # a panic on one text must not end the others
            return UNFINISHED

    def push(self, token: int, may_stop: bool = True) -> tuple[str, bool]:
        """Add a token; return (the text that may be shown now, True if a stop string ended it)."""
        if self._tokenizer is None:
            return "", False
        self._ids.append(token)
        text = self._decoded(self._ids)
        if text.endswith(UNFINISHED) or text == self._shown:
            if len(self._ids) - self._num_shown <= MOST_HELD:
                return "", False
            new = self._cut(text)
        else:
            new = _added(self._shown, text)
            self._ids = self._ids[self._num_shown :]
            self._num_shown = len(self._ids)
            self._shown = self._decoded(self._ids)
        return self._stop.push(new) if may_stop else (new, False)

    def _cut(self, text: str) -> str:
        """Keep the last tokens, which may be part of a character; return the others' text."""
        waiting = self._ids[self._num_shown :]
        visible = [*self._ids[: self._num_shown], *(i for i in waiting if self._decoded([i]))]
        if self._decoded(visible) == text:
            self._ids = visible
        if len(visible) - self._num_shown <= MOST_HELD // 2 and self._ids is visible:
            return ""
        new = _added(self._shown, text.removesuffix(UNFINISHED))
        self._ids = self._tail(text)
        self._num_shown = len(self._ids)
        self._shown = self._decoded(self._ids).removesuffix(UNFINISHED)
        return new

    def _tail(self, text: str) -> list[int]:
        """Return the last tokens, preceded by one with which they decode as in ``text``.

        A decoder of single bytes shows no character of a run with a wrong byte, so a wrong byte
        must stay in its run.
        """
        tail = self._ids[-KEPT:]
        expected = [text, *(self._decoded(self._ids[:-n]) for n in range(1, PART + 1))]
        for before in ([], *([i] for i in self._ids[:-KEPT])):
            ids = before + tail
            # Also without the last bytes, which may be unfinished; the first may end a character.
            texts = (self._decoded(ids[: len(ids) - n]) for n in range(PART + 1))
            if all(
                t.endswith(e[-1:]) and e.endswith(t[PART:])
                for t, e in zip(texts, expected, strict=True)
            ):
                return ids
        return tail

    def flush(self) -> str:
        """Return the text that is still held back, at the end of the output."""
        if self._tokenizer is None:
            return ""
        text = self._decoded(self._ids)  # with bytes that never became a character
        shown, _ = self._stop.push(_added(self._shown, text))
        self._shown = text
        return shown + self._stop.flush()
