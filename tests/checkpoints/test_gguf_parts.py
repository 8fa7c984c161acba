"""GGUF files in several parts: one model, or one sentence that says what is wrong."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.formats.gguf import GGUF, open_gguf, part_files
from outrider.engine.probe import checkpoint
from outrider.errors import ModelError
from tests.support.ggufs import SIZES, byte_level, convert, split
from tests.support.tiny import MakeCheckpoint


@pytest.fixture
def whole(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> Path:
    source = make_checkpoint(tmp_path / "source", "llama", tokenizer=True, **SIZES)
    return convert(source, tmp_path / "a.gguf", Kind.Q8_0, byte_level())[0]


def octets(file: GGUF) -> dict[str, bytes]:
    return {name: file.read(tensor).tobytes() for name, tensor in file.tensors.items()}


def test_the_first_part_stands_for_the_model(whole: Path) -> None:
    parts = split(whole, 7)
    one, several = open_gguf(whole), open_gguf(parts[0])
    assert len(parts) > 2
    assert several.files == tuple(parts) == tuple(part_files(parts[1]))
    assert octets(one) == octets(several)
    assert one.metadata.items() <= several.metadata.items()
    told = checkpoint(str(parts[0]))
    assert told["bytes"] == sum(part.stat().st_size for part in parts)
    assert told["weights"] == checkpoint(str(whole))["weights"]
    said = [
        LLM(path, drafter=None, memory=2**24, max_model_len=64)
        .generate(["def greet"], SamplingParams(temperature=0, max_tokens=16))[0].outputs[0]
        for path in (whole, parts[0])
    ]  # fmt: skip
    assert said[0].token_ids == said[1].token_ids


def renumbered(key: str, value: int) -> Callable[[list[Path]], object]:
    """Gives the second part another number under ``key``, both of 16 bits."""

    def change(parts: list[Path]) -> None:
        data = parts[1].read_bytes()
        at = data.index(key.encode()) + len(key) + 4
        parts[1].write_bytes(data[:at] + value.to_bytes(2, "little") + data[at + 2 :])

    return change


def fewer(parts: list[Path]) -> None:
    data, key = parts[0].read_bytes(), b"split.tensors.count"
    at = data.index(key) + len(key) + 4
    parts[0].write_bytes(data[:at] + (5).to_bytes(4, "little") + data[at + 4 :])


def repeated(parts: list[Path]) -> None:
    """Gives the second part the tensors of the third."""
    shutil.copy(parts[2], parts[1])
    renumbered("split.no", 1)(parts)


DAMAGE: dict[str, tuple[Callable[[list[Path]], object], str]] = {
    "missing": (lambda parts: parts[2].unlink(), r"a-00003-of-.* is missing, part 3 of \d+; fetch"),
    "number": (renumbered("split.no", 4), r"a-00002-.*: split.no is 4, not 1 as its name says"),
    "count": (renumbered("split.count", 9), r"a-00002-.*: split.count is 9, not \d+ as its name"),
    "total": (fewer, r"a-00001-.*: split.tensors.count is 5, but its parts have \d+"),
    "twice": (repeated, r"a-00003-.*: tensor '.*' is in another part, too; fetch"),
    "cut off": (lambda parts: parts[1].write_bytes(parts[1].read_bytes()[:-99]), r"a-00002-.* cut"),
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGE)
def test_parts_that_do_not_fit(name: str, whole: Path) -> None:
    parts = split(whole, 7)
    damage, sentence = DAMAGE[name]
    damage(parts)
    with pytest.raises(ModelError, match=sentence) as error:
        open_checkpoint(parts[0])
    assert "\n" not in str(error.value)


def test_another_part_names_the_first(whole: Path) -> None:
    parts = split(whole, 7)
    with pytest.raises(ModelError, match=rf"is part 2 of {len(parts)}; give the first, {parts[0]}"):
        open_checkpoint(parts[1])
    moved = parts[0].rename(whole.with_name("b.gguf"))
    with pytest.raises(ModelError, match="its name does not end in -00001-of-0000"):
        open_checkpoint(moved)


def test_a_tensor_stands_once_in_a_file(whole: Path) -> None:
    data = whole.read_bytes()
    whole.write_bytes(data.replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight"))
    with pytest.raises(ModelError, match="there twice"):
        open_gguf(whole)
