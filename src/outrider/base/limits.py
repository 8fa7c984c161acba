"""The bounds of every number that a user gives. They are checked and published from here."""

from collections.abc import Collection, Mapping
from itertools import islice
from typing import Any, NamedTuple, NoReturn

from ..errors import ConfigError, shown

LARGEST_INT = 2**31 - 1
"""The native step has counts, token ids and lengths in int32."""
LARGEST_FLOAT = (2 - 2**-23) * 2.0**127
"""The largest number of float32."""
LARGEST_SEED = 2**64 - 1
LARGEST_CONTEXT = 2**24
"""Tokens; the longest contexts of today's models have 10 million."""
LARGEST_DRAFT = 1024
LARGEST_GRAM = 128
"""Tokens; every token of a text enters the index once for each length."""
MOST_IDS = 2**18
"""Most ids in a list of token ids; few vocabularies are larger."""
LONGEST_NUMBER = 20
"""Most digits of an id that is given as text."""
MOST_SHOWN = 16
"""Most wrong ids that a message names."""
MOST_WORDS = 64
LONGEST_WORD = 1000


class Number(NamedTuple):
    """The numbers that a field accepts, and the end of the message that refuses others.

    They include ``least`` and ``most``; with ``above`` not ``least``. With ``whole`` they are whole
    numbers only, and with ``optional`` they include None. ``give`` may contain ``{least}`` and
    ``{most}``.
    """

    least: float
    most: float
    give: str
    whole: bool = True
    above: bool = False
    optional: bool = False

    def holds(self, value: object) -> bool:
        """Return True if ``value`` is one of these numbers. True, False and NaN are no numbers."""
        if value is None:
            return self.optional
        if isinstance(value, bool) or not isinstance(value, int if self.whole else int | float):
            return False
        return self.least <= value <= self.most and not (self.above and value == self.least)

    @property
    def remedy(self) -> str:
        """The values to give instead."""
        most = "2^64 - 1" if self.most == LARGEST_SEED else self.most
        return self.give.format(least=self.least, most=most)


TOKEN_ID = Number(0, LARGEST_INT, "give token ids, 0 to {most}")
BIAS = Number(-100, 100, "give ids with numbers from {least} to {most}", whole=False)

REQUEST = {
    "seed": Number(0, LARGEST_SEED, "give a whole number from 0 to {most}"),
    "priority": Number(-LARGEST_INT - 1, LARGEST_INT, "give {least} to {most}"),
}
"""The numbers of ``Request``, besides those of its options."""

SPECULATION = {
    "num_speculative_tokens": Number(0, LARGEST_DRAFT, "give 0 to {most}, or None", optional=True)
}
"""The numbers of ``Speculation``."""

LOOKUP = {
    "prompt_lookup_min": Number(1, LARGEST_GRAM, "give 1 to {most}"),
    "prompt_lookup_max": Number(1, LARGEST_GRAM, "give 1 to {most}"),
}
"""The numbers of drafter ngram."""


def refuse(owner: object, name: str, value: object, remedy: str) -> NoReturn:
    """Refuse the value of a field in a sentence."""
    raise ConfigError(f"{type(owner).__name__}: {name} is {shown(value)}; {remedy}.")


def check_numbers(owner: object, numbers: Mapping[str, Number]) -> None:
    """Refuse a field of ``owner`` that is out of its bounds."""
    for name, number in numbers.items():
        check_number(name, getattr(owner, name), number, f"{type(owner).__name__}: ")


def check_number(name: str, value: object, number: Number, where: str = "") -> None:
    """Refuse a value that is out of its bounds."""
    if not number.holds(value):
        raise ConfigError(f"{where}{name} is {shown(value)}; {number.remedy}.")


def check_ids(owner: object, name: str, ids: Collection[Any]) -> None:
    """Refuse ids that no vocabulary has."""
    if wrong := wrong_ids(ids, LARGEST_INT + 1):
        refuse(owner, name, wrong, TOKEN_ID.remedy)


def wrong_ids(ids: Collection[Any], end: int) -> list[Any]:
    """Return the first few of ``ids`` that are not whole numbers from 0 to below ``end``."""
    # A body may have a million ids: a Python loop would take ten times as long.
    if not ids or (set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < end):
        return []
    return list(islice((id for id in ids if not (TOKEN_ID.holds(id) and id < end)), MOST_SHOWN))


def bias_of(key: Any, value: Any, end: int = LARGEST_INT + 1) -> tuple[int, float] | None:
    """Return an entry of ``logit_bias`` as token id below ``end`` and bias; None if it is wrong."""
    written = isinstance(key, str) and key.isdecimal() and len(key) <= LONGEST_NUMBER
    id = int(key) if written else key
    right = TOKEN_ID.holds(id) and id < end and BIAS.holds(value)
    return (id, float(value)) if right else None


def wrong_biases(biases: Mapping[Any, Any], end: int = LARGEST_INT + 1) -> str:
    """Return the wrong entries of ``logit_bias`` as a phrase, "" if all are right."""
    wrong = [pair for pair in biases.items() if bias_of(*pair, end) is None]
    parts = [f"{shown(key)}: {shown(value)}" for key, value in wrong[:MOST_SHOWN]]
    more = f" and {len(wrong) - MOST_SHOWN} more" if len(wrong) > MOST_SHOWN else ""
    return ", ".join(parts) + more
