"""The files of a tokenizer, read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from outrider.checkpoints.files import Files
from outrider.checkpoints.folder_tokenizer import folder_tokenizer
from outrider.checkpoints.tokenizers import read_codec, save_tokenizer
from outrider.errors import ModelError
from tests.support.tiny import save_tokenizer as save_tiny

TEXT = "<a>ab<img> <b>cd</b><x> ab"
BESIDE: dict[str, dict[str, Any]] = {
    "as saved": {},
    "no config": {"tokenizer_config.json": None},
    "named": {
        "tokenizer_config.json": {
            "eos_token": "<a>",
            "pad_token": {"__type": "AddedToken", "content": "<b>"},
        }
    },
    "added": {
        "tokenizer_config.json": {
            "eos_token": "<x>",
            "added_tokens_decoder": {
                "400": {"content": "<img>", "lstrip": True, "special": False},
                "401": {"content": "<x>", "special": False, "normalized": False},
            },
        },
        "special_tokens_map.json": {"eos_token": "<never>"},
    },
    "apart": {
        "tokenizer_config.json": {"eos_token": "<b>"},
        "special_tokens_map.json": {
            "eos_token": {"content": "<a>", "lstrip": False, "rstrip": False},
            "additional_special_tokens": ["<img>", "<x>"],
        },
    },
    "listed": {"tokenizer_config.json": {"extra_special_tokens": ["<img>", "</b>"]}},
    "templates": {
        "tokenizer_config.json": {
            "chat_template": [
                {"name": "default", "template": "1"}, {"name": "tool_use", "template": "2"},
            ]
        }
    },
    "a template of its own": {
        "tokenizer_config.json": {"chat_template": "old"}, "chat_template.jinja": "new",
    },
    "more templates": {
        "chat_template.jinja": "new", "additional_chat_templates/tool_use.jinja": "tools",
    },
    "begins and ends": {
        "tokenizer_config.json": {"add_bos_token": True, "bos_token": "<a>", "add_eos_token": True}
    },
}  # fmt: skip


def beside(folder: Path, files: dict[str, Any]) -> Path:
    save_tiny(folder)
    (folder / "chat_template.jinja").unlink()
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        if content is None:
            (folder / name).unlink()
        else:
            text = content if isinstance(content, str) else json.dumps(content)
            (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("name", BESIDE)
def test_files_are_read_as_transformers_reads_them(name: str, tmp_path: Path) -> None:
    folder = beside(tmp_path, BESIDE[name])
    words, theirs = folder_tokenizer(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    assert words is not None
    assert words.specials == theirs.special_tokens_map
    assert words.template == theirs.chat_template
    assert words.end == theirs.eos_token_id
    for special in (True, False):
        ids = theirs(TEXT, add_special_tokens=special)["input_ids"]
        assert words.backend.encode(TEXT, add_special_tokens=special).ids == ids
        shown = words.backend.decode(ids, skip_special_tokens=special)
        assert shown == theirs.decode(ids, skip_special_tokens=special)


@pytest.mark.parametrize("name", ["as saved", "templates", "named"])
def test_a_written_tokenizer_is_read_as_it_was(name: str, tmp_path: Path) -> None:
    folder, copy = beside(tmp_path, BESIDE[name]), tmp_path / "copy"
    copy.mkdir()
    save_tokenizer(Files(folder), copy)
    before, after = read_codec(folder), read_codec(copy)
    assert before.backend.to_str() == after.backend.to_str()
    assert before.chat_template == after.chat_template
    assert before.special_tokens == after.special_tokens
    theirs = PreTrainedTokenizerFast.from_pretrained(copy)
    assert theirs(TEXT)["input_ids"] == after.encode(TEXT)
    assert theirs.chat_template == after.chat_template


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"eos_token": 3}, "tokenizer_config.json: eos_token is 3; a text is needed"),
        ({"eos_token": {}}, "eos_token: content is missing; a text is needed"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is .*; an object is needed"),
        ({"added_tokens_decoder": {"1": {"content": "a", "special": 1}}}, "special is 1; true or"),
        ({"chat_template": [{"name": "default"}]}, "template is missing; a text is needed"),
    ],
)
def test_wrong_files_are_refused(config: dict[str, Any], sentence: str, tmp_path: Path) -> None:
    folder = beside(tmp_path, {"tokenizer_config.json": config})
    with pytest.raises(ModelError, match=sentence):
        read_codec(folder)
