"""The list of likely ids: what comes onto it and goes, when all ids are taken, what is kept."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider.base.types import SequenceState
from outrider.checkpoints.architecture import Architecture
from outrider.drafters import likely
from outrider.drafters.likely import LikelyIds, pays, read_ids
from outrider.models.native import NativeTransformer

VOCABULARY, SIZE, END = 100, 8, 99


class Rows:
    """A model that remembers which row of its head stands at which place."""

    def __init__(self) -> None:
        self.shape = SimpleNamespace(vocab_size=VOCABULARY, eos_token_ids=frozenset({END, 7000}))
        self.handle = self.likely = 0
        self.at: dict[int, int] = {}
        self.library = self

    def set_likely(self, handle: int, size: int, places: Any, ids: Any) -> None:
        assert size == SIZE
        self.at |= dict(zip(places, ids, strict=True))


@pytest.fixture(autouse=True)
def size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(likely, "SIZE", SIZE)
    monkeypatch.setattr(likely, "KEPT_AFTER", 2)


def made(file: Path | None = None) -> tuple[Rows, LikelyIds]:
    rows = Rows()
    return rows, LikelyIds(cast(NativeTransformer, rows), file)


def say(listed: LikelyIds, *tokens: int, name: str = "a", before: tuple[int, ...] = ()) -> None:
    sequence = SimpleNamespace(id=name, tokens=[*before, *tokens])
    listed.learn(cast(SequenceState, sequence))


def test_a_list_begins_with_ends_and_the_lowest_ids() -> None:
    rows, _ = made()
    assert rows.at == dict(enumerate([END, 0, 1, 2, 3, 4, 5, 6]))
    assert rows.likely == SIZE


def test_what_is_said_takes_the_place_of_what_was_not_said_for_long() -> None:
    rows, listed = made()
    say(listed, 6, 50)  # 6 was said: the next lower one goes
    assert sorted(rows.at.values()) == [0, 1, 2, 3, 4, 6, 50, END]
    say(listed, 51, 52, 53, 54, 55, before=(6, 50))
    assert sorted(rows.at.values()) == [6, 50, 51, 52, 53, 54, 55, END]
    say(listed, 56, before=(6, 50, 51, 52, 53, 54, 55))  # nobody has said the end
    assert sorted(rows.at.values()) == [6, 50, 51, 52, 53, 54, 55, 56]


def test_a_text_of_more_ids_than_places_leaves_its_last_ones() -> None:
    rows, listed = made()
    say(listed, *range(VOCABULARY))
    assert set(rows.at.values()) >= {VOCABULARY - 2, VOCABULARY - 3}
    assert len(set(rows.at.values())) == SIZE


def test_ids_past_the_drafters_vocabulary_are_passed_over() -> None:
    rows, listed = made()
    say(listed, VOCABULARY, VOCABULARY + 50)
    assert sorted(rows.at.values()) == [0, 1, 2, 3, 4, 5, 6, END]


def test_drafts_come_from_all_ids_while_a_text_says_many_that_are_not_listed() -> None:
    rows, listed = made()
    say(listed, *range(40, 60), name="foreign")
    say(listed, *range(40, 60), name="known")
    assert not rows.at.keys() - set(range(SIZE))
    listed.choose(["foreign"])
    assert rows.likely == 0
    say(listed, 1, 2, 1, 2, name="home")
    listed.choose(["home"])
    assert rows.likely == SIZE
    listed.choose(["home", "foreign"])
    assert rows.likely == 0
    say(listed, *[59] * 300, name="foreign", before=tuple(range(40, 60)))
    listed.choose(["home", "foreign"])
    assert rows.likely == SIZE
    say(listed, *range(40, 60), name="other")
    listed.release("other")
    listed.choose(["other"])
    assert rows.likely == SIZE


def test_what_was_said_is_kept_for_another_start(tmp_path: Path) -> None:
    file = tmp_path / "likely" / "ids.json"
    _, listed = made(file)
    say(listed, 50)
    assert not file.exists()  # one is not worth it
    say(listed, 51, before=(50,))
    assert json.loads(file.read_text()) == {"vocabulary": VOCABULARY, "ids": [50, 51]}
    rows, listed = made(file)
    assert rows.at == dict(enumerate([50, 51, END, 0, 1, 2, 3, 4]))
    say(listed, 60, 61)
    assert {50, 51, 60, 61} <= set(rows.at.values())
    assert json.loads(file.read_text())["ids"] == [50, 51, 60, 61]


def test_a_folder_that_cannot_be_written_keeps_nothing(tmp_path: Path) -> None:
    (tmp_path / "likely").write_text("no folder")
    rows, listed = made(tmp_path / "likely" / "ids.json")
    say(listed, 50, 51, 52)
    assert {50, 51, 52} <= set(rows.at.values())


@pytest.mark.parametrize(
    "text",
    [
        "", "{", "[]", "null", "[" * 100_000, '{"vocabulary": 100}', '{"ids": [1]}',
        '{"vocabulary": 99, "ids": [1]}', '{"vocabulary": 100, "ids": [-1]}',
        '{"vocabulary": 100, "ids": [100]}', '{"vocabulary": 100, "ids": [1e999]}',
        '{"vocabulary": 100, "ids": [1.0]}', '{"vocabulary": 100, "ids": [true]}',
        '{"vocabulary": 100, "ids": [1, 1]}', '{"vocabulary": 100, "ids": "12"}',
        '{"vocabulary": 100, "ids": {"1": 2}}', '{"vocabulary": 100, "ids": [4294967297]}',
        '{"vocabulary": 100, "ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}',
        '{"vocabulary": 100, "ids": [' + "1," * 600_000 + "1]}",
    ],
)  # fmt: skip
def test_a_file_of_anything_else_is_passed_over_with_a_word(
    tmp_path: Path, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "ids.json"
    file.write_text(text)
    assert read_ids(file, VOCABULARY, SIZE) == []
    assert "keeps no list of likely ids" in caplog.text
    rows, listed = made(file)
    assert sorted(rows.at.values()) == [0, 1, 2, 3, 4, 5, 6, END]
    say(listed, 50, 51)
    assert read_ids(file, VOCABULARY, SIZE) == [50, 51]


def test_no_file_is_no_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_ids(tmp_path / "ids.json", VOCABULARY, SIZE) == []
    assert not caplog.text


@pytest.mark.parametrize(
    ("vocabulary", "layers", "is_worth"),
    [(151936, 24, True), (32768, 2, False), (151936, 400, False)],
)
def test_a_list_is_for_heads_that_are_a_good_part_of_a_pass(
    vocabulary: int, layers: int, is_worth: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sizes of Qwen2.5-0.5B, with other vocabularies and layers."""
    shape = SimpleNamespace(
        vocab_size=vocabulary, num_layers=layers, head_dim=64, num_heads=14, num_kv_heads=2,
        intermediate_size=4864,
    )  # fmt: skip
    assert pays(cast(Architecture, shape)) is is_worth
