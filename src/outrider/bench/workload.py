"""Workloads: the prompts of a benchmark, with answers if they were recorded.

A workload file is .jsonl, one item a line, or .json, one list of items: a prompt, or an object with
"prompt", "messages", which go through the target's chat template, or "turns", a user's messages in
a conversation. It may have an "answer", which replay targets need, a "schema", a JSON schema that
constrains the output, and a "category". Other keys are ignored, so that data sets can be used as
they are: MT-Bench's and Spec-Bench's question.jsonl, and SPEED-Bench's .parquet files, whose rows
are such objects. ``workloads/README.md`` gives the sources of bundled ones.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, shown

if TYPE_CHECKING:
    from ..text.codec import Message, TextCodec

FOLDER = Path(__file__).parent / "workloads"
CODE = "code"  # continues held-out code; its prompts are the pocket pair's, a layer above
BUNDLED = ("edit", "prose", "json", "chat")
NAMES = (CODE, *BUNDLED)
LINES, LIST, ROWS = ".jsonl", ".json", ".parquet"
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"
"""The beginning of a SPEED-Bench turn whose text must be fetched from another data set."""
LONGEST_CATEGORY = 100


@dataclass(frozen=True)
class Item:
    """One prompt: a text, or ``messages``; ``answer`` and ``schema`` are those of the output.

    With ``turns`` the messages are only a user's, and the model's own answers belong between them;
    the first message is the prompt.
    """

    prompt: str = ""
    messages: tuple[Message, ...] = ()
    answer: str | None = None
    schema: dict[str, Any] | None = None
    turns: bool = False
    category: str | None = None

    @property
    def count(self) -> int:
        """The number of answers that the model gives."""
        return len(self.messages) if self.turns else 1

    @property
    def opening(self) -> list[Message]:
        """The messages before the model's first answer."""
        return list(self.messages[:1] if self.turns else self.messages)

    def encode(self, codec: TextCodec) -> list[int]:
        """Return the prompt's ids; without a chat template, those of a first turn's bare text.

        Raises RequestError: ``messages`` without a chat template, or it refuses them.
        """
        chats = bool(self.messages) and not (self.turns and not codec.templates)
        return codec.chat(self.opening) if chats else codec.encode(self.prompt)


@dataclass(frozen=True)
class Workload:
    """Items under one name."""

    name: str
    items: tuple[Item, ...]

    @staticmethod
    def of_prompts(name: str, prompts: Sequence[str]) -> Workload:
        """Return prompts without answers as a workload."""
        return Workload(name, tuple(Item(prompt) for prompt in prompts))

    @property
    def turns(self) -> int:
        """The number of answers that the model gives, including those within conversations."""
        return sum(item.count for item in self.items)

    def first(self, count: int | None) -> Workload:
        """Return the first ``count`` items, by default 8 or all. Raises ConfigError: too few.

        Categories are represented as evenly as possible.
        """
        most = len(self.items)
        wanted = min(8, most) if count is None else count
        if not 1 <= wanted <= most:
            raise ConfigError(
                f"num_prompts is {wanted}, but workload {self.name!r} has {most}; give 1 to {most}."
            )
        seen = Counter[str | None]()
        ranks = []
        for place, item in enumerate(self.items):
            ranks.append((seen[item.category] if item.category else 0, place))
            seen[item.category] += 1
        chosen = sorted(ranks)[:wanted]
        return Workload(self.name, tuple(self.items[place] for _, place in chosen))


def load_workload(which: str) -> Workload:
    """Return the bundled workload of that name, or the file. Raises ConfigError: it is wrong."""
    path = Path(which)
    if which in BUNDLED:
        path = FOLDER / f"{which}.jsonl"
    elif path.suffix not in (LINES, LIST, ROWS):
        raise ConfigError(
            f"workload {which!r} is not known; give one of {', '.join(NAMES)}, or a .jsonl, .json "
            "or .parquet file."
        )
    where = f"workload {which}"
    if path.suffix == ROWS:
        rows = rows_of(path, where)
        entries = [(f"{where}, row {i}", row) for i, row in enumerate(rows, 1)]
    elif path.suffix == LIST:
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
    """Return a file's bytes. Raises ConfigError: it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{name} cannot be read ({error.strerror}); give a file that is there."
        ) from None


def lines_of(file: Path, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield the place of each line of a file, and the line; blank lines are skipped."""
    for number, line in enumerate(read_content(file, name).split(b"\n"), 1):
        if line.strip():
            yield f"{name}, line {number}", line


def rows_of(file: Path, name: str) -> list[Any]:
    """Return the rows of a .parquet file as objects. Raises ConfigError: it cannot be read."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise ConfigError(
            f"{name}: reading .parquet files needs pyarrow; run pip install pyarrow, or give a "
            ".jsonl file."
        ) from None
    content = read_content(file, name)
    try:
        rows: list[Any] = parquet.read_table(pyarrow.BufferReader(content)).to_pylist()
    except (OSError, ValueError, pyarrow.ArrowException) as error:
        why = str(error).partition("\n")[0][:200]
        raise ConfigError(f"{name}: not a .parquet file ({why}); fetch it again.") from None
    return rows


def parsed(text: bytes, where: str) -> Any:
    """Return the value of a JSON text. Raises ConfigError: it is not JSON."""
    try:
        return json.loads(text.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8; save it as such.") from None
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        why = "nested too deeply" if deep else error  # the error names line and column
        raise ConfigError(f"{where}: not JSON ({why}); correct it there.") from None


def item_of(entry: Any, where: str) -> Item:
    """Return the item that an entry of a file describes. Raises ConfigError: it is malformed."""
    if isinstance(entry, str):
        entry = {"prompt": entry}
    if not isinstance(entry, dict):
        raise ConfigError(f'{where}: neither a text nor an object; write {{"prompt": "..."}}.')
    if sum(key in entry for key in ("prompt", "messages", "turns")) != 1:
        raise ConfigError(f"{where}: give either prompt, messages or turns.")
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
    category = entry.get("category")
    if not isinstance(category, str) or not 0 < len(category) <= LONGEST_CATEGORY:
        if "turns" in entry and category is not None:
            raise ConfigError(
                f"{where}: category is {shown(category)}; give a text of up to {LONGEST_CATEGORY} "
                "characters, or leave it out."
            )
        category = None  # the data set's own field with another meaning
    prompt, messages = entry.get("prompt", ""), tuple(entry.get("messages", ()))
    if "turns" in entry:
        said = turns_of(entry["turns"], where)
        prompt, messages = said[0], tuple({"role": "user", "content": text} for text in said)
    return Item(
        prompt, messages, entry.get("answer"), entry.get("schema"), "turns" in entry, category
    )


def turns_of(value: Any, where: str) -> list[str]:
    """Return a user's turns in a conversation. Raises ConfigError: it is not a list of texts."""
    whole = isinstance(value, list) and bool(value)
    if not whole or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(
            f"{where}: turns is {shown(value)}; give a list of texts, at least one and none empty."
        )
    texts: list[str] = value
    if any(text.startswith(PLACEHOLDER) for text in texts):
        raise ConfigError(
            f"{where}: the text is still to be fetched; fill SPEED-Bench's files by "
            "prepare_data.py of NVIDIA's Model-Optimizer, and give test.parquet of its output."
        )
    return texts


def _are_messages(value: Any) -> bool:
    """Return True for a list of at least one message with a role and a text."""
    form = ["content", "role"]
    return isinstance(value, list) and bool(value) and all(
        isinstance(m, dict) and sorted(m) == form and all(isinstance(t, str) for t in m.values())
        for m in value
    )  # fmt: skip
