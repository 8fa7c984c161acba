"""Packed weights that are kept on disk: the same output, damage, room, what changes the key."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.models import kept_weights
from outrider.models.load import load_model
from outrider.models.native import NativeTransformer
from outrider.models.rows import Segment
from outrider.native.library import Library
from tests.support.exactness import FAMILY_OPTIONS, HYBRIDS, MIXTURES
from tests.support.ggufs import SIZES, convert
from tests.support.tiny import MakeCheckpoint

CPU = "cpu"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder, in which models of any size are kept."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(kept_weights, "LEAST", 0)
    return tmp_path / "outrider" / "weights"


@pytest.fixture
def gguf(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    """A GGUF file whose matrices are of a type of codes."""
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)
    return convert(source, tmp_path / "a.gguf", Kind.Q8_0)[0]


def opened(folder: Path, recipe: str | None = "int8", **options: object) -> NativeTransformer:
    model = load_model(open_checkpoint(folder), "auto", CPU, 64, recipe, keeps=True, **options)  # type: ignore[arg-type]
    assert isinstance(model, NativeTransformer)
    return model


def logits(model: NativeTransformer) -> NDArray[np.float32]:
    """What a model says after each of some tokens; its rows are those of one prompt."""
    segment = Segment([5, 17, 3, 60, 2, 9], 0, (1,), 6, 6, (), (), "a")
    out = model.run([segment], model.new_store(4, 16)).logits
    assert out is not None
    return out


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of matrices that were read from checkpoints."""
    read: list[str] = []
    pack = NativeTransformer._pack

    def counted(self: NativeTransformer, index: int, kind: str, *more: object) -> None:
        read.append(kind)
        pack(self, index, kind, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeTransformer, "_pack", counted)
    return read


@pytest.mark.parametrize("recipe", ["int4-g32-a8", "int8", None])
def test_kept_weights_give_the_same_bits(
    recipe: str | None, tiny_llama: Path, gguf: Path, home: Path, loads: list[str]
) -> None:
    folder = tiny_llama if recipe else gguf
    first = opened(folder, recipe)
    first.keep()
    assert len([*home.glob("*.packed")]) == 1
    assert not [*home.glob("*.part")]
    assert loads
    loads.clear()
    second = opened(folder, recipe)
    assert not loads
    assert np.array_equal(logits(first), logits(second))
    assert second.added_bytes(None) == first.added_bytes(None)


@pytest.mark.parametrize("family", [*HYBRIDS, *MIXTURES])
def test_all_that_layers_have_is_kept(
    family: str, make_checkpoint: MakeCheckpoint, tmp_path: Path, home: Path, loads: list[str]
) -> None:
    """States' parameters, routers, what chooses experts, sinks."""
    options = {"hidden_size": 64, "head_dim": 16, **FAMILY_OPTIONS[family]}
    folder = make_checkpoint(tmp_path / "made", family, **options)
    first = opened(folder)
    assert loads
    loads.clear()
    second = opened(folder)
    assert not loads
    assert np.array_equal(logits(first), logits(second))


def test_only_servers_keep_the_codes_of_a_file(gguf: Path, home: Path) -> None:
    opened(gguf, None)
    assert not home.exists()


@pytest.mark.parametrize("where", [0, 20, 90, 2**21, 2**21 + 8, 2**21 + 5000, -9])
def test_damaged_weights_are_packed_again(where: int, tiny_llama: Path, home: Path) -> None:
    wanted = logits(opened(tiny_llama))
    (file,) = home.iterdir()
    octets = bytearray(file.read_bytes())
    damaged = bytearray(octets)
    damaged[where] ^= 4
    file.write_bytes(damaged)
    assert np.array_equal(logits(opened(tiny_llama)), wanted)
    # Kept anew, but for a byte that pads the header.
    assert file.read_bytes() == (damaged if where == 90 else octets)


@pytest.mark.parametrize("size", [0, 100, 2**21, 2**21 + 640])
def test_weights_that_are_cut_off_are_packed_again(size: int, tiny_llama: Path, home: Path) -> None:
    wanted = logits(opened(tiny_llama))
    (file,) = home.iterdir()
    octets = file.read_bytes()
    os.truncate(file, size)
    assert np.array_equal(logits(opened(tiny_llama)), wanted)
    assert file.read_bytes() == octets


def test_another_model_under_the_same_key_is_refused(
    tiny_llama: Path, tiny_drafter: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are checked against the model, whatever the key says."""
    wanted = logits(opened(tiny_drafter))
    monkeypatch.setattr(kept_weights, "_digest", lambda _: bytes(32))
    opened(tiny_llama)
    loads.clear()
    model = opened(tiny_drafter)
    assert loads
    assert np.array_equal(logits(model), wanted)


def test_a_changed_file_is_packed_again(gguf: Path, home: Path) -> None:
    opened(gguf, None).keep()
    os.utime(gguf, ns=(1, 1))
    opened(gguf, None).keep()
    assert len([*home.iterdir()]) == 2


def test_another_file_of_the_same_size_and_time_is_packed_again(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, home: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)
    for name in ("one", "two"):
        path = tmp_path / name / "a.gguf"
        path.parent.mkdir()
        path, _ = convert(source, path, Kind.Q8_0, lambda writer, name=name: writer.add_name(name))
        os.utime(path, ns=(1, 1))
        opened(path.replace(tmp_path / "a.gguf"), None).keep()
    assert len([*home.iterdir()]) == 2


@pytest.mark.parametrize("call", ["stat", "utime", "unlink"])
def test_a_folder_of_somebody_else_is_no_error(
    call: str, tiny_llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = logits(opened(tiny_llama))
    if call == "unlink":
        os.truncate(next(home.iterdir()), 2**21)
    real = getattr(os, call)

    def refused(path: Any, *more: Any, **options: Any) -> object:
        if str(path).startswith(str(home)):
            raise PermissionError(13, "Permission denied")
        return real(path, *more, **options)

    monkeypatch.setattr(os, call, refused)
    assert np.array_equal(logits(opened(tiny_llama)), wanted)


def test_a_user_without_a_home_keeps_nothing(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", nowhere)
    assert np.array_equal(logits(opened(tiny_llama)), logits(opened(tiny_llama)))


def test_a_home_of_any_bytes_keeps_weights(
    tiny_llama: Path, tmp_path: Path, loads: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.fsdecode(os.fsencode(tmp_path) + b"/\xff"))
    opened(tiny_llama)
    loads.clear()
    opened(tiny_llama)
    assert not loads


def test_two_processes_of_one_number_keep_what_is_whole(
    tiny_llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of two containers, of which one writes while the other begins."""
    keep = Library.keep

    def beside(self: Library, model: int, path: Path, key: bytes) -> None:
        monkeypatch.setattr(Library, "keep", keep)
        keep(self, model, path, key)
        opened(tiny_llama)
        (file,) = home.glob("*.packed")
        states.append(file.stat().st_ino)

    states: list[int] = []
    monkeypatch.setattr(Library, "keep", beside)
    opened(tiny_llama)
    assert len(states) == 1
    assert len([*home.iterdir()]) == 1


def test_files_unused_for_longest_go_first(
    tiny_llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, recipe in ((30, "int8"), (20, "int4"), (10, "int4-g32")):
        opened(tiny_llama, recipe)
        newest = max(home.iterdir(), key=lambda file: file.stat().st_mtime_ns)
        os.utime(newest, (newest.stat().st_atime, newest.stat().st_mtime - age))
    opened(tiny_llama, "int8")  # used again
    ages = sorted(home.iterdir(), key=lambda file: file.stat().st_mtime)
    sizes = sum(file.stat().st_size for file in ages)
    stored = open_checkpoint(tiny_llama).tensors.file_bytes
    monkeypatch.setattr(kept_weights, "BOUND", sizes + stored - 1)
    stale = home / "x.1.part"
    stale.touch()
    os.utime(stale, (1, 1))
    opened(tiny_llama, "int4-g64")
    left = {*home.iterdir()}
    assert ages[0] not in left
    assert {*ages[1:]} < left
    assert stale not in left


def test_a_disk_that_is_full_keeps_nothing(
    tiny_llama: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_weights, "LEFT_FREE", 2**62)
    opened(tiny_llama)
    assert not [*home.iterdir()]


def test_a_folder_that_cannot_be_written_is_no_error(tiny_llama: Path, home: Path) -> None:
    home.parent.mkdir(parents=True)
    home.write_text("no folder")
    opened(tiny_llama)
    assert home.read_text() == "no folder"
