"""Options: their names, kinds, defaults and ranges, the same for Python, flags, files and docs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..errors import ConfigError, shown
from .limits import LARGEST_INT, Number, check_number

PREFIX = "OUTRIDER_"
TYPES: dict[str, type] = {"str": str, "int": int, "bool": bool, "float": float}
"""The type of an option by its field's annotation; for a union, the first listed here."""


@dataclass(frozen=True)
class Option:
    """One option, with the range of an int or a float; its name has underscores.

    A ``default`` of None means unset. With ``zero`` 0 is allowed too, and turns the option off.
    """

    name: str
    type: type[str] | type[int] | type[float] | type[bool]
    default: Any
    help: str
    low: float = 0
    high: float = LARGEST_INT
    zero: bool = False

    @property
    def flag(self) -> str:
        """The name on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The name in the environment."""
        return PREFIX + self.name.upper()

    @property
    def expected(self) -> str:
        """The allowed values, in words."""
        if self.type is str:
            return "a text"
        if self.type is bool:
            return "true or false"
        words = "a whole number" if self.type is int else "a number"
        return f"{words} from {self.low:,} to {self.high:,}" + (", or 0" if self.zero else "")


def option(
    default: Any, help: str, number: Number | None = None, choices: Sequence[Any] = ()
) -> Any:
    """Return a dataclass field with help and check; without help it is not an option for users."""
    return field(default=default, metadata={"help": help, "number": number, "choices": choices})


def options_of(owner: type) -> Iterator[Option]:
    """Yield an ``Option`` for each field of a dataclass that ``option`` made with a help text."""
    for each in fields(owner):
        if not each.metadata.get("help"):
            continue
        number = each.metadata["number"]
        of_type = next(type for name, type in TYPES.items() if name in str(each.type).split(" | "))
        limits = (number.least, number.most) if number is not None else ()
        yield Option(each.name, of_type, each.default, each.metadata["help"], *limits)


def check_fields(owner: Any) -> None:
    """Refuse the first value of a dataclass that the checks of its fields do not allow."""
    for each in fields(owner):
        value, choices = getattr(owner, each.name), each.metadata["choices"]
        if each.metadata["number"] is not None:
            check_number(each.name, value, each.metadata["number"])
        elif isinstance(each.default, bool) and not isinstance(value, bool):
            raise ConfigError(f"{each.name} is {shown(value)}; give True or False.")
        elif choices and value not in choices:
            names = [str(choice) for choice in choices if choice is not None]
            listed = names[0] if len(names) == 1 else f"one of {', '.join(names)}"
            none = ", or None" if None in choices else ""
            raise ConfigError(f"{each.name} is {shown(value)}; give {listed}{none}.")
