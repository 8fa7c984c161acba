"""Reads prompts to make data from: JSON lines, ShareGPT's layout, and saved datasets."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

from ..base.kept import part_of
from ..bench.load.datasets import load_prompts
from ..bench.workload import Item, item_of, lines_of, parsed
from ..errors import ConfigError
from ..text.codec import has_lone_surrogates

TEXTS = ("prompt", "text")
"""Keys of plain prompts; the first one present counts."""
CONVERSATIONS = ("messages", "conversations")
SKIP = " --skip-bad leaves out such prompts."
ROLES = {"human": "user", "gpt": "assistant"}


def read_prompts(
    file: Path, skip: bool, told: Callable[[str], None], remedy: str = SKIP
) -> list[Item]:
    """Return the prompts in a file, or in a folder: of .jsonl files, or of a saved dataset.

    Each line of a .jsonl file is an object with "prompt" or "text", or with "messages" (or
    "conversations" in ShareGPT's layout); other keys are ignored. A bad line is a ConfigError with
    its number and the ``remedy``; with ``skip`` it is left out, and ``told`` is called.
    """
    entries: Iterator[tuple[str, Any]]
    if file.is_dir():
        files = sorted(each for each in file.glob("*.jsonl") if not each.name.startswith("."))
        lines = chain.from_iterable(lines_of(each, str(each)) for each in files)
        entries = lines if files else _of_folder(file)
    elif file.suffix == ".jsonl":
        entries = lines_of(file, str(file))
    else:
        whole = [*load_prompts(str(file)).items]
        for number, item in enumerate(whole, 1):
            _check(item, f"{file}, item {number}")
        return whole
    items: list[Item] = []
    for where, entry in entries:
        try:
            value = parsed(entry, where) if isinstance(entry, bytes) else entry
            item = item_of(plain(value), where)
            _check(item, where)
            items.append(item)
        except ConfigError as error:
            if not skip:
                raise ConfigError(f"{error}{remedy}") from None
            told(f"left out: {error}")
    if not items:
        raise ConfigError(f"{file} has no prompts; give a file or folder that has some.")
    return items


def _check(item: Item, where: str) -> None:
    """Raise ConfigError: a prompt cannot be encoded."""
    if has_lone_surrogates("".join([item.prompt, *(m["content"] for m in item.messages)])):
        raise ConfigError(f"{where}: lone surrogates; save it as UTF-8.")


def plain(entry: Any) -> Any:
    """Return an entry with the keys of a workload's item; anything else as it is."""
    if not isinstance(entry, dict):
        return entry
    for name in CONVERSATIONS:
        if isinstance(entry.get(name), list):
            return {"messages": [_message(each) for each in entry[name]]}
    return next(({"prompt": entry[name]} for name in TEXTS if name in entry), entry)


def _message(entry: Any) -> Any:
    """Return a message with role and content; ShareGPT's names are translated."""
    if not isinstance(entry, dict):
        return entry
    role = entry.get("role", entry.get("from"))
    content = entry.get("content", entry.get("value"))
    return {"role": ROLES.get(str(role), role), "content": content}


def _of_folder(folder: Path) -> Iterator[tuple[str, Any]]:
    """Yield the rows of a dataset that ``datasets`` saved to disk."""
    try:
        from datasets import Dataset, load_from_disk
    except ModuleNotFoundError:
        raise ConfigError(
            f"{folder} is a folder, which needs datasets, which is not installed: "
            "pip install datasets."
        ) from None
    try:
        data = load_from_disk(str(folder))
    except Exception as error:  # of whatever kind the library raises
        raise ConfigError(f"{folder} is no dataset that was saved to disk ({error}).") from None
    if not isinstance(data, Dataset):
        raise ConfigError(f"{folder} has several splits; give the folder of one of them.")
    for number, row in enumerate(data, 1):
        yield f"{folder}, row {number}", row


def save_prompts(items: Sequence[Item], file: Path) -> None:
    """Write prompts as JSON lines."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with part_of(file) as part, part.open("w", encoding="utf-8") as opened:
        for item in items:
            said = {"messages": list(item.messages)} if item.messages else {"prompt": item.prompt}
            opened.write(json.dumps(said, ensure_ascii=False) + "\n")


def digest(items: list[Item]) -> str:
    """Return the SHA-256 of prompts."""
    told = json.dumps([[item.prompt, list(item.messages)] for item in items], sort_keys=True)
    return sha256(told.encode()).hexdigest()
