"""The rules for old options, and the changes that a translation reports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..capabilities import data


@dataclass(frozen=True)
class OptionRule:
    """The successor of one old option: a key of ``speculative_config``, an option, or nothing.

    With ``switch`` the old one took no value; the new one may then have ``value``.
    """

    old: str
    why: str
    key: str | None = None
    option: str | None = None
    value: str | None = None
    switch: bool = False

    @property
    def new(self) -> str:
        """The current form, for a table."""
        if self.key is not None:
            return f"speculative_config.{self.key}"
        return " ".join(filter(None, (self.option, self.value))) or "nothing"


@dataclass(frozen=True)
class Change:
    """One change: the old text, the new text, and why."""

    old: str
    new: str
    why: str

    def __str__(self) -> str:
        """Return the change on one line, with control characters escaped."""
        said = f"{self.old} -> {self.new}: {self.why}."
        escaped = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in said)
        return "".join(escaped)


class Changes(list[Change]):
    """All changes of a translation, in order."""

    def add(self, old: str, new: str, why: str) -> None:
        """Add a change."""
        self.append(Change(old, new, why))

    def note(self, name: str, /, **values: object) -> None:
        """Add a change from ``data/changes.toml``, with ``values`` put into its braces."""
        self.add(*(part.format_map(values) for part in data("changes")[name]))


@dataclass(frozen=True)
class Translated:
    """The current text, and every change in it; ``name`` is its file name, ``files`` are others."""

    name: str
    text: str
    changes: list[Change]
    files: Mapping[str, str] = field(default_factory=dict)

    def commented(self) -> str:
        """Return the text below a comment for each change."""
        head = "".join(f"# {change}\n" for change in self.changes)
        return (head or "# Nothing in it is old.\n") + self.text


def rules_of(source: str) -> dict[str, OptionRule]:
    """Return the rules of ``source`` (vllm, llamacpp, tgi, trtllm or python) by old option."""
    return {rule["old"]: OptionRule(**rule) for rule in data("translations")[source]["rules"]}
