"""The switch of speculation: whether the engine drafts, with what, and how far."""

from collections.abc import Collection
from dataclasses import dataclass

from ..errors import ConfigError, shown


@dataclass(frozen=True)
class SpeculationState:
    """The switch: on or off, the default drafter, and the draft length.

    The engine chooses the length, and ``auto`` also the drafter, at each step: up to the length
    with ``auto``, up to its longest where the length is None. Another drafter with a length is
    obeyed.
    """

    enabled: bool
    drafter: str
    num_speculative_tokens: int | None


def check_known(name: str, drafters: Collection[str]) -> None:
    """Refuse the name of a drafter that the engine does not have.

    Raises:
        ConfigError: it is none of ``drafters``.
    """
    if name not in drafters:
        known = ", ".join(sorted(drafters))
        raise ConfigError(f"there is no drafter {shown(name)} here; give one of {known}.")


def check_choice(state: SpeculationState, drafters: Collection[str], longest: int) -> None:
    """Refuse a default that the engine cannot use.

    Raises:
        ConfigError: there is no such drafter, or the length is not from 1 to ``longest``.
    """
    check_known(state.drafter, drafters)
    length = state.num_speculative_tokens
    if length is not None and not 1 <= length <= longest:
        raise ConfigError(f"num_speculative_tokens is {length}; give 1 to {longest}.")
