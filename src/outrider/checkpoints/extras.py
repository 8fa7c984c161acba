"""The part of a drafter's config beyond its format: draft lengths, and measured acceptance.

It is under one key, which other readers ignore.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..base.fields import Fields
from ..base.limits import LARGEST_DRAFT
from ..base.outside.text import printable
from .files import Files, files_of

KEY = "outrider"
CHAT = "chat"
USES = (CHAT, "code", "agents", "long context")
MOST_MEASURED, MOST_POSITIONS, LONGEST_TEXT = 64, 64, 200


class Measured(NamedTuple):
    """Acceptance of a drafter on some prompts.

    ``by_position`` is the share of drafts whose token of that position was accepted. ``digest`` is
    the prompts' hash, ``data`` describes them in words.
    """

    use: str
    temperature: float
    acceptance_length: float
    by_position: tuple[float, ...]
    prompts: int
    digest: str
    data: str
    date: str
    machine: str

    def said(self) -> str:
        """Return it in words."""
        shares = " ".join(f"{share:.2f}" for share in self.by_position)
        return (
            f"acceptance length {self.acceptance_length:.2f} at temperature {self.temperature:g}, "
            f"by position {shares} ({self.prompts} prompts, {self.data}; {self.date}, "
            f"{self.machine})"
        )


class Extras(NamedTuple):
    """The recommended draft lengths, by use, and measured acceptance."""

    lengths: Mapping[str, int]
    measured: tuple[Measured, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the value under ``KEY`` in a config."""
        measured = [each._asdict() | {"by_position": [*each.by_position]} for each in self.measured]
        return {"recommended_tokens": dict(self.lengths), "measured": measured}


NO_EXTRAS = Extras({}, ())


def read_extras(config: Fields) -> Extras:
    """Return the extras in a config; there may be none. Raises ModelError: they are damaged."""
    values = config.section(KEY)
    recommended = values.section("recommended_tokens")
    lengths = {use: recommended.whole(use, 0, LARGEST_DRAFT) for use in USES if use in recommended}
    listed = values.listed("measured", dict)
    if len(listed) > MOST_MEASURED:
        raise values.refuse("measured", f"a list of at most {MOST_MEASURED} objects")
    where = f"{values.where}: measured"
    return Extras(lengths, tuple(_measured(Fields(each, where)) for each in listed))


def extras_of(drafter: Path | Files) -> Extras:
    """Return the extras of a drafter's checkpoint. Raises ModelError: they are damaged."""
    files = files_of(drafter)
    return read_extras(Fields(files.config or {}, str(files.folder / "config.json")))


def _measured(values: Fields) -> Measured:
    shares = values.listed("by_position", float)
    if len(shares) > MOST_POSITIONS or not all(0 <= share <= 1 for share in shares):  # nor NaN
        raise values.refuse("by_position", f"a list of at most {MOST_POSITIONS} shares, 0.0 to 1.0")
    texts = [_short(values, name) for name in ("use", "digest", "data", "date", "machine")]
    return Measured(
        texts[0], values.number("temperature", low=0), values.number("acceptance_length", low=1),
        tuple(shares), values.whole("prompts"), *texts[1:],
    )  # fmt: skip


def _short(values: Fields, name: str) -> str:
    text = values.text(name, "")
    if len(text) > LONGEST_TEXT:
        raise values.refuse(name, f"a text of at most {LONGEST_TEXT} characters")
    return printable(text)
