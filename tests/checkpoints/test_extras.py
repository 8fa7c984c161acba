"""What configs of drafters say beyond their format: it is read, shown, and taken as the default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from outrider.base.fields import Fields
from outrider.checkpoints.extras import KEY, NO_EXTRAS, Extras, Measured, read_extras
from outrider.checkpoints.heads import read_head
from outrider.engine.setup import set_up
from outrider.errors import ModelError
from tests.support.commands import outrider
from tests.support.heads import Eagle, make_head, make_medusa, save_head

MEASURED = Measured(
    "code", 0.8, 2.4, (0.7, 0.5, 0.2), 40, "ab12", "held-out prompts", "2026-11-27", "2 cores"
)
EXTRAS = Extras({"chat": 3, "long context": 2}, (MEASURED,))


def read(value: Any) -> Extras:
    return read_extras(Fields({KEY: json.loads(json.dumps(value))}, "config.json"))


def test_what_is_written_is_read() -> None:
    assert read(EXTRAS.to_json()) == EXTRAS
    assert read(None) == read({}) == read_extras(Fields({}, "")) == NO_EXTRAS
    later = EXTRAS.to_json() | {"later": 1}
    later["recommended_tokens"]["another use"] = "many"
    assert read(later) == EXTRAS


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "outrider is .*an object is needed"),
        ({"recommended_tokens": {"chat": 10**6}}, "chat is 1000000"),
        ({"recommended_tokens": {"chat": True}}, "chat is True"),
        ({"measured": {}}, "measured is"),
        ({"measured": [{}] * 65}, "at most 64 objects"),
        ({"measured": [MEASURED._asdict() | {"by_position": [0.5, 1.5]}]}, "by_position is"),
        ({"measured": [MEASURED._asdict() | {"by_position": [float("nan")]}]}, "by_position is"),
        ({"measured": [MEASURED._asdict() | {"by_position": [0.5] * 65}]}, "at most 64 shares"),
        ({"measured": [MEASURED._asdict() | {"by_position": "x"}]}, "a list of decimal numbers"),
        ({"measured": [MEASURED._asdict() | {"acceptance_length": 0}]}, "acceptance_length is 0"),
        ({"measured": [MEASURED._asdict() | {"data": "x" * 201}]}, "at most 200 characters"),
        ({"measured": [{}]}, "temperature is missing"),
    ],
)
def test_damaged_extras_are_refused(value: Any, said: str) -> None:
    with pytest.raises(ModelError, match=said):
        read(value)


def test_control_characters_are_not_shown() -> None:
    hostile = MEASURED._asdict() | {"machine": "a\x1b[31mb\nc"}
    said = read({"measured": [hostile]}).measured[0].said()
    assert "\x1b" not in said
    assert "\n" not in said


def test_the_recommendation_for_chat_is_the_default_of_a_head(
    tiny_llama: Path, tmp_path: Path
) -> None:
    config = AutoConfig.from_pretrained(tiny_llama)
    extra = {KEY: EXTRAS.to_json()}
    eagle = make_head(Eagle(extra=extra), config)
    theirs = read_head(save_head(eagle, tmp_path / "eagle", "safeailab"))
    own = read_head(save_head(eagle, tmp_path / "own"))
    make_medusa(tmp_path / "medusa", config.hidden_size, config.vocab_size, heads=4)
    file = tmp_path / "medusa" / "config.json"
    about = {**json.loads(file.read_text()), **extra, "base_model_name_or_path": str(tiny_llama)}
    file.write_text(json.dumps(about))
    medusa = read_head(tmp_path / "medusa")
    assert (theirs.proposed, own.proposed, medusa.proposed) == (3, 3, 3)
    assert set_up(tmp_path / "medusa", "auto", {}).config.num_speculative_tokens == 3
    given = {"num_speculative_tokens": 2}
    assert set_up(tmp_path / "medusa", "auto", given).config.num_speculative_tokens == 2


def test_the_check_shows_them(tiny_llama: Path, tmp_path: Path) -> None:
    config = AutoConfig.from_pretrained(tiny_llama)
    folder = save_head(make_head(Eagle(extra={KEY: EXTRAS.to_json()}), config), tmp_path / "head")
    done = outrider("drafters", "check", tiny_llama, "--drafter", folder, "--json")
    assert done.exit_code == 0, done.output
    facts = {fact["what"]: fact for fact in json.loads(done.stdout)["facts"]}
    assert facts["tokens for chat"]["value"] == 3
    assert facts["measured, code"]["value"] == 2.4
    assert (
        "0.70 0.50 0.20 (40 prompts, held-out prompts; 2026-11-27"
        in (facts["measured, code"]["drafter"])
    )
