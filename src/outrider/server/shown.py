"""Short forms of values of any size and kind, for logs, traces and messages."""

import math
from typing import Any

from ..errors import shown

LONGEST_VALUE = 200
MOST_VALUES = 16


def short(text: str, most: int = LONGEST_VALUE) -> str:
    """Return ``text``, or its beginning and its length if it exceeds ``most`` characters."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text)} characters)"


def plain(value: Any, depth: int = 2) -> Any:
    """Return a value of any size as short JSON; lists and dicts below ``depth`` become texts."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else f"an integer of {value.bit_length()} bits"
    if depth and isinstance(value, list | tuple):
        return [plain(one, depth - 1) for one in value[:MOST_VALUES]]
    if depth and isinstance(value, dict):
        return {short(str(name)): plain(one, depth - 1) for name, one in value.items()}
    # ``str`` would write a large container in full before it is cut.
    return short(shown(value) if isinstance(value, list | tuple | dict) else str(value))
