"""YAML as this package writes it."""

import re
from typing import Any

import yaml

DISPUTED = re.compile(
    r"[-+]?\.?\d[\d_.:]*(e[-+]?\d+)?|[-+]?0[box][\da-f_]+|[-+]?\.(inf|nan)|y|n", re.I
)
"""Texts that some version of YAML reads as a number or a boolean, as 1.2 does with 1e3."""


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes every text that some reader could take for another type."""


class _WideDumper(_Dumper):
    """The same, with the dashes of lists indented below their key."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> Any:
        return super().increase_indent(flow, False)


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    style = "'" if DISPUTED.fullmatch(text) else None
    if not text.replace("\n", "").isprintable():  # other quotes would fold such text
        style = '"'
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style)


_Dumper.add_representer(str, _text)
_WideDumper.add_representer(str, _text)


def dump(value: Any, wide: bool = False) -> str:
    """Return a value as block YAML; ``wide`` indents the dashes of lists below their key."""
    text: str = yaml.dump(
        value, Dumper=_WideDumper if wide else _Dumper, sort_keys=False, allow_unicode=True,
        width=100, default_flow_style=False,
    )  # fmt: skip
    return text
