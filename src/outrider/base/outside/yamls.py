"""Reads YAML without its traps: multiplying aliases, cycles, duplicate keys, tags, dates, ``on``.

The events of a text are counted before anything is built, since a kilobyte of nested aliases can
fill any memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import yaml

MOST_VALUES = 200_000
"""Most values in all documents of a text, with aliases expanded."""
LONGEST_NUMBER = 300
MERGE = "tag:yaml.org,2002:merge"
PLAIN = ("null", "bool", "int", "float", "str", "seq", "map")
Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class _Loader(Base):  # type: ignore[misc]  # yaml has no types
    """Builds only values that JSON also has. Keys are strings as they are written."""

    yaml_implicit_resolvers: ClassVar[Any] = {
        first: [pair for pair in pairs if pair[0].rpartition(":")[2] in (*PLAIN, "merge")]
        for first, pairs in Base.yaml_implicit_resolvers.items()
    }
    yaml_constructors: ClassVar[Any] = {
        tag: build
        for tag, build in Base.yaml_constructors.items()
        if tag is None or tag.rpartition(":")[2] in PLAIN
    }

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[str, Any]:
        self.flatten_mapping(node)
        return {_key(key): self.construct_object(value, deep=deep) for key, value in node.value}

    def construct_number(self, node: Any) -> Any:
        if len(node.value) > LONGEST_NUMBER:  # base 60 takes quadratic time
            raise ValueError(f"it has a number of more than {LONGEST_NUMBER} digits")
        whole = node.tag.endswith("int")
        return self.construct_yaml_int(node) if whole else self.construct_yaml_float(node)


for _tag in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_tag}", _Loader.construct_number)
_Loader.add_constructor(MERGE, Base.construct_yaml_str)


def _key(node: Any) -> str:
    if not isinstance(node, yaml.ScalarNode):
        raise ValueError(f"line {node.start_mark.line + 1}: a key is not text")
    return str(node.value)


def documents(text: str, deepest: int) -> list[Any]:
    """Return the documents of a text, or raise ValueError."""
    try:
        _check(text, deepest)
        return list(yaml.load_all(text, Loader=_Loader))  # a safe loader: texts and numbers only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f"line {mark.line + 1}: " if mark else ""
        raise ValueError(f"{line}{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
    except (LookupError, TypeError, AttributeError):  # e.g. !!bool maybe
        raise ValueError("a value is not what its tag says") from None


@dataclass
class _Open:
    """An unfinished list or object; ``values`` counts it and the values below it."""

    anchor: str | None
    keyed: bool
    values: int = 1
    keys: set[str] = field(default_factory=set)
    expects_key: bool = True


def _check(text: str, deepest: int) -> None:
    """Raise ValueError for too many values, too deep nesting, or a duplicate key."""
    sizes: dict[str, int] = {}
    opened: list[_Open] = []
    values = 0
    for event in yaml.parse(text, Loader=_Loader):
        line = f"line {event.start_mark.line + 1}: "
        if isinstance(event, yaml.DocumentStartEvent):
            sizes = {}
        elif isinstance(event, yaml.CollectionStartEvent):
            values += 1
            if len(opened) >= deepest:
                raise ValueError(f"{line}it is nested too deeply")
            _next(opened, None, line)
            opened.append(_Open(event.anchor, isinstance(event, yaml.MappingStartEvent)))
            sizes.pop(event.anchor, None)
        elif isinstance(event, yaml.CollectionEndEvent):
            done = opened.pop()
            if done.anchor is not None:
                sizes[done.anchor] = done.values
            if opened:
                opened[-1].values += done.values
        elif isinstance(event, yaml.NodeEvent):
            size = 1
            if isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"{line}the alias *{event.anchor} has nothing before it")
                size = sizes[event.anchor]
                _next(opened, None, line)
            else:
                _next(opened, event.value, line)
                if event.anchor is not None:
                    sizes[event.anchor] = 1
            values += size
            if opened:
                opened[-1].values += size
        if values > MOST_VALUES:
            raise ValueError(f"{line}it has, with its aliases, more than {MOST_VALUES:,} values")


def _next(opened: list[_Open], value: str | None, line: str) -> None:
    """Count a value of the innermost list or object; ``value`` is the text of a scalar."""
    if not opened or not opened[-1].keyed:
        return
    inner = opened[-1]
    if inner.expects_key and value is not None and value != "<<":
        if value in inner.keys:
            raise ValueError(f"{line}the key {value[:100]!r} stands twice in one object")
        inner.keys.add(value)
    inner.expects_key = not inner.expects_key
