"""Files that change between their header and their weights: a sentence, no mix of two models."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.errors import ModelError
from outrider.models.native import NativeTransformer
from outrider.native import choice as native
from tests.support.ggufs import SIZES, convert, split
from tests.support.tiny import MakeCheckpoint


def renamed(file: Path) -> None:
    """Puts another file in its place, as downloads do."""
    state = file.stat()
    copy = file.with_name("copy")
    copy.write_bytes(file.read_bytes())
    os.utime(copy, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    copy.replace(file)


def rewritten(file: Path) -> None:
    """Writes other weights of the same length."""
    state = file.stat()
    with file.open("r+b") as opened:
        opened.seek(-4, os.SEEK_END)
        opened.write(b"\0\0\0\0")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns + 10**9))


def grown(file: Path) -> None:
    state = file.stat()
    with file.open("ab") as opened:
        opened.write(b"\0")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))


@pytest.mark.skipif(native.library() is None, reason="the native step is off")
@pytest.mark.parametrize("kind", ["folder", "file", "parts"])
@pytest.mark.parametrize("change", [renamed, rewritten, grown])
def test_a_file_that_changed_since_its_header_was_read(
    change: Callable[[Path], None], kind: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    given = make_checkpoint(tmp_path / "model", "llama", **SIZES)
    changed = given / "model.safetensors"
    if kind != "folder":
        given = changed = convert(given, tmp_path / "a.gguf", Kind.Q8_0)[0]
    if kind == "parts":
        parts = split(given, 7)
        given, changed = parts[0], parts[2]

    def load(between: Callable[[Path], None] | None) -> None:
        checkpoint, library = open_checkpoint(given), native.library()
        assert library is not None
        if between:
            between(changed)
        NativeTransformer(library, checkpoint, np.dtype(np.float32), 64)

    load(None)
    with pytest.raises(ModelError) as error:
        load(change)
    assert str(error.value) == f"{changed} has changed since its header was read; load it again."
