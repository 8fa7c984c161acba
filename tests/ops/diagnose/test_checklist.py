"""``ops.diagnose.checklist``: thirty points, their answers, and the file that keeps them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider.errors import ConfigError
from outrider.ops.diagnose.checklist import (
    NO,
    OPEN,
    YES,
    PointAnswer,
    checklist,
    markdown,
    points,
    read_state,
    save_state,
)
from tests.support import REPOSITORY
from tests.support.diagnose_section import TABLES

DOCS = REPOSITORY / "docs" / "diagnose.md"
AREAS = (
    "baseline", "selection", "configuration", "staging", "acceptance", "tuning", "monitoring",
    "alerts", "rollback", "rehearsal",
)  # fmt: skip


def test_there_are_thirty_points_in_ten_areas() -> None:
    found = points()
    assert len(found) == 30
    assert tuple(dict.fromkeys(point.area for point in found)) == AREAS
    assert len({point.id for point in found}) == 30
    assert all(point.id.startswith(point.area) and point.check and point.remedy for point in found)


@pytest.mark.parametrize("name", TABLES)
def test_the_docs_have_the_tables_of_the_data_files(name: str) -> None:
    text = DOCS.read_text(encoding="utf-8")
    table = text.partition(f"<!-- {name} -->\n")[2].partition(f"<!-- /{name} -->")[0]
    assert table.splitlines() == list(TABLES[name]())


def test_facts_tick_what_they_can_and_win_over_words() -> None:
    found = checklist(
        facts={"drafted": 10, "memory_used": 0.99}, yes=["configuration-memory", "staging-soak"]
    )
    assert found["configuration-active"].status == YES
    assert found["configuration-active"].by == "verified"
    assert found["configuration-memory"].status == NO
    assert "99.0 %" in found["configuration-memory"].evidence
    assert found["staging-soak"].status == YES
    assert found["staging-soak"].by == "said"
    assert found["baseline-load"].status == OPEN


def test_answers_stay_until_others_come() -> None:
    first = checklist(yes=["baseline-load"], no=["alerts-speed"])
    second = checklist(first, yes=["alerts-speed"])
    assert second["baseline-load"] == first["baseline-load"]
    assert second["alerts-speed"].status == YES
    text = markdown(second)
    assert "- [x] baseline-load" in text
    assert "2 of 30 done, 0 not done, 28 open" in text


def test_the_state_is_kept_whole(tmp_path: Path) -> None:
    file = tmp_path / "state.json"
    assert read_state(file) == {}
    state = checklist(yes=["baseline-load"])
    save_state(state, file)
    assert read_state(file) == state
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


def test_a_state_that_cannot_be_replaced_stays_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "state.json"
    save_state({"baseline-load": PointAnswer(YES)}, file)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(ConfigError, match="cannot be written: No space"):
        save_state({}, file)
    assert read_state(file)["baseline-load"].status == YES
    assert [each.name for each in tmp_path.iterdir()] == ["state.json"]


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{", "3", '{"checklist": 9, "points": {}}', '{"checklist": 1}',
        '{"checklist": 1, "points": []}', '{"checklist": 1, "points": {"a": {"status": "so"}}}',
        '{"checklist": 1, "points": {"a": {"x": 1}}}', '{"checklist": 1, "points": {"a": 1}}',
        '{"checklist": 1, "points": {"a": {"status": []}}}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_state_gets_a_sentence(tmp_path: Path, text: str) -> None:
    file = tmp_path / "state.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match="is not a checklist's state"):
        read_state(file)
    assert file.read_text() == text


def test_wrong_ids_get_a_sentence() -> None:
    with pytest.raises(ConfigError, match="did you mean 'baseline-load'"):
        checklist(yes=["baseline-lode"])
    with pytest.raises(ConfigError, match="both yes and no"):
        checklist(yes=["baseline-load"], no=["baseline-load"])
    json.dumps(markdown(checklist()))
