"""From ids to text while they come: deltas, and the end at a stop string."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from .stop import StopFinder

CONTEXT = 6
"""Prompt tokens put before the output, so that its first token keeps its leading space."""
UNFINISHED = "\ufffd"
"""What a decoder makes of bytes that are not, or not yet, a character."""
MOST_HELD = 16
"""Tokens that wait for the rest of a character at most; every new one decodes them all again."""
KEPT = 8
"""Tokens that a cut leaves to decode the next ones with: more than two characters' bytes."""
PART = 3
"""Bytes of a character that is not whole, at most; a token has one or more."""


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
        self._shown = "" if tokenizer is None else self._decoded(self._ids)

    @property
    def stopped_by(self) -> str | None:
        """The stop string that ended the text."""
        return self._stop.found

    def _decoded(self, ids: list[int]) -> str:
        assert self._tokenizer is not None
        text: str = self._tokenizer.decode(ids, skip_special_tokens=self._skip_special)
        return text

    def push(self, token: int, may_stop: bool = True) -> tuple[str, bool]:
        """Take one more token: (the text that may be shown now, whether a stop string ended it).

        Stop strings are looked for only in text that comes while ``may_stop``.
        """
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
        """Keep a few of the tokens, which decode to ``text``, and return the text of the others.

        The last character may be unfinished, so it stays; all before it is certain.
        """
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
        """The last tokens, after one that makes them decode as they do in ``text``.

        A decoder of single bytes shows no character of a run in which any byte is wrong, so a wrong
        byte must stay in the run.
        """
        tail = self._ids[-KEPT:]
        wanted = [text, *(self._decoded(self._ids[:-n]) for n in range(1, PART + 1))]
        for before in ([], *([i] for i in self._ids[:-KEPT])):
            ids = before + tail
            # The same without what may be unfinished; the first bytes may end a character.
            found = (self._decoded(ids[: len(ids) - n]) for n in range(PART + 1))
            if all(
                f.endswith(w[-1:]) and w.endswith(f[PART:])
                for f, w in zip(found, wanted, strict=True)
            ):
                return ids
        return tail

    def flush(self) -> str:
        """The text held back so far, at the end of the output."""
        if self._tokenizer is None:
            return ""
        text = self._decoded(self._ids)  # with bytes that never became a character
        shown, _ = self._stop.push(_added(self._shown, text))
        self._shown = text
        return shown + self._stop.flush()
