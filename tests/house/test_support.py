"""Tiny checkpoints on disk: made once, whole or not at all, and nobody else's to change."""

import multiprocessing
import os
import time
from pathlib import Path

import pytest

from tests.support import on_disk
from tests.support.on_disk import UNUSED_SECONDS, kept_on_disk


@kept_on_disk
def written(folder: Path, calls: Path, size: int = 3) -> Path:
    """A file of ``size`` letters, and a letter more in ``calls``."""
    (folder / "inner").mkdir(parents=True)
    (folder / "inner" / "text").write_text("a" * size)
    with calls.open("a") as file:
        file.write("x")
    return folder


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home"
    folder.mkdir()
    monkeypatch.setattr(on_disk, "home", lambda: folder)
    return folder


def test_the_same_arguments_are_made_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    for name in ("a", "b"):
        folder = written(tmp_path / name, calls, size=5)
        assert folder == tmp_path / name
        assert (folder / "inner" / "text").read_text() == "aaaaa"
        (folder / "inner" / "text").write_text("mine")
    assert calls.read_text() == "x"
    assert (written(tmp_path / "c", calls) / "inner" / "text").read_text() == "aaa"
    assert calls.read_text() == "xx"


@pytest.mark.parametrize("harm", ["cut", "lost", "more", "half"])
def test_a_damaged_entry_is_made_again(tmp_path: Path, home: Path, harm: str) -> None:
    calls = tmp_path / "calls"
    written(tmp_path / "a", calls)
    (entry,) = (each for each in home.iterdir() if each.is_dir())
    file = entry / "files" / "inner" / "text"
    if harm == "half":
        (entry / on_disk.CONTENTS).unlink()
    elif harm == "lost":
        file.unlink()
    else:
        file.write_text("aa" if harm == "cut" else "aaaa")
    assert (written(tmp_path / "b", calls) / "inner" / "text").read_text() == "aaa"
    assert calls.read_text() == "xx"


def test_a_maker_that_fails_leaves_no_entry(tmp_path: Path, home: Path) -> None:
    with pytest.raises(FileNotFoundError):
        written(tmp_path / "a", tmp_path / "missing" / "calls")
    assert not any((each / on_disk.CONTENTS).exists() for each in home.iterdir())
    written(tmp_path / "a", tmp_path / "calls")


def test_processes_side_by_side_make_it_once(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    context = multiprocessing.get_context("fork")
    many = [context.Process(target=written, args=(tmp_path / str(i), calls)) for i in range(4)]
    for process in many:
        process.start()
    for process in many:
        process.join()
        assert process.exitcode == 0
    assert calls.read_text() == "x"


def test_entries_that_nobody_uses_are_removed(tmp_path: Path, home: Path) -> None:
    calls = tmp_path / "calls"
    written(tmp_path / "a", calls)
    old = time.time() - UNUSED_SECONDS - 1
    for entry in home.iterdir():
        os.utime(entry, (old, old))
    written(tmp_path / "b", calls, size=1)
    assert len([entry for entry in home.iterdir() if entry.is_dir()]) == 1
