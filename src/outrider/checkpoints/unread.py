"""The codec of a GGUF file, read when it is first needed, by the process that needs it.

Building the tokenizer takes most of a second for 152,000 tokens, and again in each process that it
is sent to. The frontend needs it at once, the worker only for its first grammar.
"""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from weakref import ref

from ..base.fields import readable
from ..errors import ModelError
from ..text.codec import TextCodec
from .formats.gguf import GGUF, open_gguf
from .formats.gguf_tokenizer import Words, gguf_tokenizer
from .growth import check_specials


def trying(path: Path) -> AbstractContextManager[None]:
    """Return the context in which the tokenizer at ``path`` is read: damage is a ModelError."""
    return readable(f"the tokenizer in {path} cannot be read", "fetch the checkpoint again.")


def codec_of(words: Words, folder: Path, specials: bool) -> TextCodec:
    """Return the codec of a tokenizer, after a trial."""
    backend = words.backend
    check_specials(backend, folder)
    backend.no_truncation()
    backend.no_padding()
    backend.decode(backend.encode("a tokenizer's try: 1, 2\n").ids)  # finds damage
    return TextCodec(backend, words.template, words.specials, words.end, folder, specials)


class UnreadCodec:
    """The codec in the GGUF file at ``path``; it can be pickled, and is read once per process."""

    def __init__(
        self,
        path: Path,
        specials: bool,
        file: GGUF | None = None,
        state: tuple[int, int] | None = None,
    ) -> None:
        self._path, self._specials, self._state = path, specials, state or _state(path)
        self._file = None if file is None else ref(file)  # while others hold it open
        self._codec: TextCodec | None = None
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[UnreadCodec], tuple[Any, ...]]:
        return UnreadCodec, (self._path, self._specials, None, self._state)

    def read(self) -> TextCodec:
        """Return the codec. Raises ModelError: it cannot be used."""
        with self._lock:
            if self._codec is None:
                with trying(self._path):
                    words = gguf_tokenizer((self._file and self._file()) or self._opened())
                    if words is None:
                        raise ModelError(f"{self._path} names no tokenizer; give another file.")
                    self._codec = codec_of(words, self._path, self._specials)
            return self._codec

    def _opened(self) -> GGUF:
        file = open_gguf(self._path)
        if _state(self._path) != self._state:
            raise ModelError(f"{self._path} has changed since its model was loaded; load it again.")
        return file


def _state(path: Path) -> tuple[int, int]:
    """Return what distinguishes a file from a replacement: its size and time."""
    state = path.stat()
    return state.st_size, state.st_mtime_ns
