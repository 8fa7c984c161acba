"""Headers of GGUF files: read in pieces, lists when asked for, types as the package has them."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from outrider.checkpoints.formats import gguf_header
from outrider.checkpoints.formats.gguf import open_gguf
from outrider.checkpoints.formats.gguf_types import SIZES, Kind
from outrider.errors import ModelError
from tests.support.ggufs import empty

TOKENS = ["a", "", "日本", "</s>", "b" * 300, "a"]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list(TOKENS)
        writer.add_token_types([1, 2, 3, 3, 1, 1])
        writer.add_token_scores([0.5, 1.0, 2.0, 3.0, 4.0, 5.0])
        writer.add_string("general.name", "x")

    return empty(tmp_path / "a.gguf", fill)


def test_types_are_the_packages() -> None:
    assert {k.name: (int(k), SIZES[k]) for k in Kind} == {
        k.name: (int(k), GGML_QUANT_SIZES[k]) for k in GGMLQuantizationType
    }


@pytest.mark.parametrize("piece", [1, 7, 1 << 20])
def test_a_header_is_read_in_pieces(
    piece: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gguf_header, "PIECE", piece)
    metadata = open_gguf(file).metadata
    assert metadata["tokenizer.ggml.tokens"] == TOKENS
    assert metadata["tokenizer.ggml.token_type"] == [1, 2, 3, 3, 1, 1]
    assert metadata["tokenizer.ggml.scores"] == [0.5, 1, 2, 3, 4, 5]
    assert metadata["general.name"] == "x"
    assert metadata.count("tokenizer.ggml.tokens") == 6
    assert metadata.count("general.name") == metadata.count("nothing") == 0


def test_texts_are_found_without_reading_a_list(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = open_gguf(file).metadata
    monkeypatch.setattr(gguf_header.UnreadList, "read", None)
    places = metadata.find("tokenizer.ggml.tokens", {*TOKENS, "b", "日", "z"})
    assert places == {token: i for i, token in enumerate(TOKENS)}
    assert metadata.find("tokenizer.ggml.tokens", {"z"}) == {}
    assert metadata.find("tokenizer.ggml.scores", {"a"}) == metadata.find("no", {"a"}) == {}
    assert metadata.same(open_gguf(file).metadata, "tokenizer.ggml.tokens")


def test_texts_that_are_no_texts_are_one_sentence(file: Path) -> None:
    octets = file.read_bytes()
    file.write_bytes(octets.replace("日本".encode(), b"\xff" * 6))
    metadata = open_gguf(file).metadata
    with pytest.raises(ModelError, match="the header is damaged; fetch the file again"):
        _ = metadata["tokenizer.ggml.tokens"]


def test_a_key_that_is_there_twice_is_refused(file: Path) -> None:
    octets = file.read_bytes()
    again = octets.index(b"general.architecture") - 8
    entry = octets[again : again + 8 + len("general.architecture") + 4 + 8 + len("llama")]
    count = int.from_bytes(octets[16:24], "little") + 1
    file.write_bytes(octets[:16] + count.to_bytes(8, "little") + entry + octets[24:])
    with pytest.raises(ModelError, match="hold a key twice"):
        open_gguf(file)
