"""Reads the tokenizer of a folder: tokenizer.json and the files beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from ..base.fields import Fields, read_object
from .formats.gguf_tokenizer import Words
from .growth import check_growth

FILE, CONFIG, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, MORE_TEMPLATES = "chat_template.jinja", "additional_chat_templates"
NAMED = (
    "bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token",
)  # fmt: skip
LISTED = ("additional_special_tokens", "extra_special_tokens")
"""Options with special tokens: single ones, which templates see, and lists."""
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def folder_tokenizer(folder: Path) -> Words | None:
    """Return the tokenizer that a folder's tokenizer.json describes; None without that file.

    Special tokens and chat templates are those that transformers reads.
    """
    file = folder / FILE
    if not file.is_file():
        return None
    check_growth(file)
    backend = Tokenizer.from_file(str(file))
    options = _options(folder)
    values = Fields(options, str(folder / CONFIG))
    named = {name: _text(options, name, values.where) for name in NAMED if name in values}
    _add(backend, values, options, named)
    end = backend.token_to_id(named["eos_token"]) if "eos_token" in named else None
    return Words(backend, named, _templates(folder, values, options), end)


def save_words(words: Words, folder: Path) -> None:
    """Write a tokenizer's files to ``folder``."""
    words.backend.save(str(folder / FILE))
    options = config_of(words.specials, words.template)
    text = json.dumps(options, indent=2, ensure_ascii=False)
    (folder / CONFIG).write_text(text + "\n", encoding="utf-8")


def config_of(specials: Mapping[str, str], template: Any) -> dict[str, Any]:
    """Return the content of tokenizer_config.json; ``template`` is the only one, or all by name."""
    if isinstance(template, dict):
        template = [{"name": name, "template": text} for name, text in template.items()]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **specials,
        **({"chat_template": template} if template else {}),
    }


def _options(folder: Path) -> dict[str, Any]:
    """Return the options beside tokenizer.json; old folders have a file of special tokens."""
    config, apart = folder / CONFIG, folder / SPECIALS
    options = read_object(config) if config.is_file() else {}
    if "added_tokens_decoder" not in options and apart.is_file():
        options |= read_object(apart)
    return options


def _text(options: Mapping[str, Any], name: str, where: str) -> str:
    """Return the text of a token, which may be an object with its ``content``."""
    value = options.get(name)
    if isinstance(value, Mapping):
        return Fields(value, f"{where}: {name}").text("content")
    return Fields(options, where).text(name)


def _add(
    backend: Tokenizer, values: Fields, options: Mapping[str, Any], named: Mapping[str, str]
) -> None:
    """Add the tokens that tokenizer.json lacks, or has with other flags."""
    tokens = [_token(each, named) for each in values.sections("added_tokens_decoder")]
    known = {token.content for token in tokens}
    known |= {token.content for token in backend.get_added_tokens_decoder().values()}
    for text in dict.fromkeys((*named.values(), *_listed(options, values.where))):
        if text not in known:
            tokens.append(AddedToken(text, special=True))
    backend.add_tokens(tokens)


def _token(fields: Fields, named: Mapping[str, str]) -> AddedToken:
    text = fields.text("content")
    flags = {name: fields.flag(name) for name in FLAGS if name in fields}
    if text in named.values():
        flags["special"] = True
    return AddedToken(text, **flags)


def _listed(options: Mapping[str, Any], where: str) -> Iterator[str]:
    """Yield the texts of unnamed special tokens."""
    for name in LISTED:
        listed = options.get(name)
        for each in listed if isinstance(listed, list) else ():
            yield _text({name: each}, name, where)


def _templates(
    folder: Path, values: Fields, options: Mapping[str, Any]
) -> str | dict[str, str] | None:
    """Return the chat templates: the only one, or all by name; files of their own come first."""
    files = {"default": folder / TEMPLATE}
    files |= {file.stem: file for file in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))}
    found = {name: file.read_text("utf-8") for name, file in files.items() if file.is_file()}
    if found:
        return found["default"] if list(found) == ["default"] else found
    template = options.get("chat_template")
    if isinstance(template, list):
        several = [Fields(each, values.where) for each in values.listed("chat_template", dict)]
        return {one.text("name"): one.text("template") for one in several}
    return template
