"""Workloads: what a benchmark asks, and where it is recorded, what the answer was.

A workload file is .jsonl, one item a line, or .json, one list of items: a prompt, or an object with
"prompt" or "messages", which go through the target's chat template. It may have an "answer", which
replay targets need, and a "schema", a JSON schema that the output is held to. Other keys are passed
over, so that data sets can be used as they are. ``workloads/README.md`` says where what is bundled
comes from.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, shown

if TYPE_CHECKING:
    from ..text.codec import Message, TextCodec

FOLDER = Path(__file__).parent / "workloads"
CODE = "code"  # continues held-out code: its prompts belong to the pocket pair, a floor above
BUNDLED = ("edit", "prose", "json", "chat")
NAMES = (CODE, *BUNDLED)


@dataclass(frozen=True)
class Item:
    """One thing to ask: a text, or ``messages``; ``answer`` and ``schema`` are of the output."""

    prompt: str = ""
    messages: tuple[Message, ...] = ()
    answer: str | None = None
    schema: dict[str, Any] | None = None

    def encode(self, codec: TextCodec) -> list[int]:
        """Return the prompt's ids. Raises RequestError: no chat template, or it refuses."""
        return codec.chat(list(self.messages)) if self.messages else codec.encode(self.prompt)


@dataclass(frozen=True)
class Workload:
    """Items under one name."""

    name: str
    items: tuple[Item, ...]

    @staticmethod
    def of_prompts(name: str, prompts: Sequence[str]) -> Workload:
        """Return prompts without answers as a workload."""
        return Workload(name, tuple(Item(prompt) for prompt in prompts))

    def first(self, count: int | None) -> Workload:
        """Return the first ``count`` items, 8 or all unless given. Raises ConfigError: too few."""
        most = len(self.items)
        wanted = min(8, most) if count is None else count
        if not 1 <= wanted <= most:
            raise ConfigError(
                f"num_prompts is {wanted}, but workload {self.name!r} has {most}; give 1 to {most}."
            )
        return Workload(self.name, self.items[:wanted])


def load_workload(which: str) -> Workload:
    """Return the bundled workload of that name, or the file. Raises ConfigError: it is wrong."""
    path = Path(which)
    if which in BUNDLED:
        path = FOLDER / f"{which}.jsonl"
    elif path.suffix not in (".json", ".jsonl"):
        raise ConfigError(
            f"workload {which!r} is not known; give one of {', '.join(NAMES)}, or a .jsonl or "
            ".json file."
        )
    where = f"workload {which}"
    if path.suffix == ".json":
        members = parsed(read_content(path, where), where)
        if not isinstance(members, list):
            raise ConfigError(f"{where}, line 1: no list; put the items between [ and ].")
        entries = [(f"{where}, item {i}", member) for i, member in enumerate(members, 1)]
    else:
        entries = [(line, parsed(text, line)) for line, text in lines_of(path, where)]
    if not entries:
        raise ConfigError(f"workload {which} is empty; give it one prompt at least.")
    name = which if which in BUNDLED else path.stem
    return Workload(name, tuple(item_of(entry, where) for where, entry in entries))


def read_content(file: Path, name: str) -> bytes:
    """Return what a file holds. Raises ConfigError: it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read ({error.strerror}); give a file that is there."
        ) from None


def lines_of(file: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield where each line of a file stands, and the line; blank ones are passed over."""
    for number, line in enumerate(read_content(file, name).split(b"\n"), 1):
        if line.strip():
            yield f"{name}, line {number}", line


def parsed(text: bytes, where: str) -> Any:
    """Return the value of JSON. Raises ConfigError: it is none."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8; save it as such.") from None
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = "nested too deeply" if deep else error  # the error names line and column
        raise ConfigError(f"{where}: not JSON ({why}); correct it there.") from None


def item_of(entry: Any, where: str) -> Item:
    """Return the item that an entry of a file describes. Raises ConfigError: it describes none."""
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict):
        raise ConfigError(f'{where}: neither a text nor an object; write {{"prompt": "..."}}.')
    if ("prompt" in entry) == ("messages" in entry):
        raise ConfigError(f"{where}: give either prompt or messages.")
    for key in ("prompt", "answer"):
        if key in entry and not (isinstance(entry[key], str) and entry[key]):
            raise ConfigError(
                f"{where}: {key} is {shown(entry[key])}; give a text that is not empty."
            )
    if "messages" in entry and not _are_messages(entry["messages"]):
        raise ConfigError(
            f'{where}: messages must be a list like [{{"role": "user", "content": "..."}}]; '
            "correct it."
        )
    if "schema" in entry and not isinstance(entry["schema"], dict):
        raise ConfigError(
            f"{where}: schema is {shown(entry['schema'])}; give a JSON schema, an object."
        )
    return Item(
        entry.get("prompt", ""), tuple(entry.get("messages", ())), entry.get("answer"),
        entry.get("schema"),
    )  # fmt: skip


def _are_messages(value: Any) -> bool:
    """Return True for a list of roles and texts, one at least."""
    form = ["content", "role"]
    return isinstance(value, list) and bool(value) and all(
        isinstance(m, dict) and sorted(m) == form and all(isinstance(t, str) for t in m.values())
        for m in value
    )  # fmt: skip
