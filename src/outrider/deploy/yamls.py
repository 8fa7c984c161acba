"""YAML as this package writes it."""

from typing import Any

import yaml


def dump(value: Any) -> str:
    """Return a value as YAML, keys in their own order, lists in blocks."""
    text: str = yaml.safe_dump(
        value, sort_keys=False, allow_unicode=True, width=100, default_flow_style=False
    )
    return text
