"""A checkpoint's files are opened once a load, by whoever needs them first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from gguf import GGMLQuantizationType as Kind
from transformers import AutoConfig

from outrider import LLM
from outrider.checkpoints import files
from outrider.native import choice as native
from tests.support.ggufs import byte_level, convert
from tests.support.heads import Eagle, make_head, save_head
from tests.support.tiny import MakeCheckpoint


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Counter[Path]:
    """How often each config.json, each header and each folder's list was read."""
    counts: Counter[Path] = Counter()

    def counted(read: Callable[[Path], Any], place: Path) -> Any:
        counts[place] += 1
        return read(place)

    for name in ("read_object", "read_header", "open_gguf", "weight_files"):
        monkeypatch.setattr(files, name, partial(counted, getattr(files, name)))
    return counts


def load(model: Path, drafter: Path | str | None) -> None:
    LLM(model, drafter, memory=2**24, max_model_len=64)


def test_a_folder(reads: Counter[Path], make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", tokenizer=True)
    drafter = make_checkpoint(tmp_path / "drafter", "llama", tokenizer=True)
    load(target, drafter)
    of_folder = (Path(), Path("config.json"), Path("model.safetensors"))
    assert reads == {folder / name: 1 for folder in (target, drafter) for name in of_folder}


def test_a_gguf_file(reads: Counter[Path], make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True)
    paths = [convert(source, tmp_path / name, Kind.F32, byte_level())[0] for name in "ab"]
    paths = [path.rename(path.with_suffix(".gguf")) for path in paths]
    reads.clear()  # of what made them
    load(*paths)
    assert reads == dict.fromkeys(paths, 1)


@pytest.mark.skipif(native.library() is None, reason="the native step is off")
@pytest.mark.parametrize("as_model", [False, True])
def test_a_head(
    as_model: bool, reads: Counter[Path], make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    target = make_checkpoint(tmp_path / "target", "llama", tokenizer=True)
    head = save_head(
        make_head(Eagle(drafted=97), AutoConfig.from_pretrained(target)), tmp_path / "head"
    )
    config = head / "config.json"
    config.write_text(config.read_text().replace("some/target", str(target)))
    load(*((head, "auto") if as_model else (target, head)))
    of_folder = (Path(), Path("config.json"), Path("model.safetensors"))
    assert reads == {folder / name: 1 for folder in (target, head) for name in of_folder}
