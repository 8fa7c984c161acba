"""Writes changed values into the text of a YAML file, where every other line stays as it was.

Only the lines of changed keys are replaced, so that a reader sees what changed. The result is read
again: where it does not say what it should, the documents are written anew, without comments.
"""

from __future__ import annotations

import json
import re
import textwrap
from typing import Any

import yaml

from ....base.outside.documents import parse_yaml
from ....errors import ConfigError
from ..yamls import dump

WIDE = re.compile(r"^( *)[^\s#-].*:[ ]*\n\1 +- ", re.M)
"""A list whose dashes stand right of its key."""


class _NodeLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Composes nodes; an alias is a leaf at its own place."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if not self.check_event(yaml.AliasEvent):
            return super().compose_node(parent, index)
        event = self.get_event()
        return yaml.ScalarNode("alias", event.anchor, event.start_mark, event.end_mark)


def splice(text: str, old: list[Any], new: list[Any]) -> str:
    """Return a YAML text with the values ``new``; ``old`` are those of its documents."""
    try:
        # Building no objects, it is as safe as reading.
        nodes = list(yaml.compose_all(text, Loader=_NodeLoader))
        edits = _Edits(text)
        if all(edits.make(*each) for each in zip(nodes, old, new, strict=True)):
            changed = edits.applied()
            if _json(parse_yaml(changed, "The manifest")) == _json(new):
                return changed
    except (yaml.YAMLError, ConfigError, ValueError):
        pass
    return "---\n".join(dump(each) for each in new if each is not None)


def _json(value: Any) -> str:
    """Return a value for a comparison that tells booleans and numbers apart."""
    return json.dumps(value, sort_keys=True)


class _Edits:
    """Collects the edits of a text: first and last index, and what stands there instead."""

    def __init__(self, text: str) -> None:
        self.text, self.wide = text, WIDE.search(text) is not None
        self.edits: list[tuple[int, int, str]] = []

    def applied(self) -> str:
        """Return the text with all edits."""
        text = self.text
        # Of two that add at one place, the later is the outer one and comes behind.
        for begin, end, instead in sorted(self.edits, key=lambda edit: edit[:2])[::-1]:
            text = text[:begin] + instead + text[end:]
        return text

    def make(self, node: Any, old: Any, new: Any) -> bool:
        """Add the edits that make ``new`` of a node; return False where there is no way to."""
        if old == new:
            return True
        if isinstance(node, yaml.ScalarNode) or node.flow_style or type(old) is not type(new):
            return False
        if isinstance(new, dict):
            return self._keys(node, old, new)
        items = list(zip(node.value, old, new, strict=False))
        if len(new) < len(old) or not all(self.make(*item) for item in items):
            return False
        if more := new[len(old) :]:
            first = node.value[0].start_mark.index
            line = self.text[self.text.rfind("\n", 0, first) + 1 :]
            self._add_below(node, more, len(line) - len(line.lstrip(" ")))
        return True

    def _keys(self, node: Any, old: dict[str, Any], new: dict[str, Any]) -> bool:
        """Make new keys of a block; the first of them stands in the place of one that is gone."""
        column = node.value[0][0].start_mark.column
        written = [key.value for key, _ in node.value]
        added = [
            key for key in new if key not in written and (key not in old or old[key] != new[key])
        ]
        for key, value in node.value:
            name, begin, end = key.value, key.start_mark.index, self._end(value)
            if name not in old:  # <<
                continue
            before = len(self.edits)
            if name in new and self.make(value, old[name], new[name]):
                continue
            del self.edits[before:]
            if name in new or added:
                name = name if name in new else added.pop(0)
                self.edits.append((begin, end, self._block({name: new[name]}, column)))
                continue
            line = self.text.rfind("\n", 0, begin)
            if self.text[line + 1 : begin].strip():  # behind the dash of a list
                return False
            self.edits.append((max(line, 0), self._line_end(end), ""))
        if added:
            self._add_below(node, {name: new[name] for name in added}, column)
        return True

    def _add_below(self, node: Any, value: Any, column: int) -> None:
        """Add keys or items below a node's last line."""
        end = self._line_end(self._end(node))
        self.edits.append((end, end, "\n" + " " * column + self._block(value, column)))

    def _block(self, value: Any, column: int) -> str:
        """Return a value whose lines after the first begin at a column."""
        first, newline, rest = dump(value, self.wide).rstrip("\n").partition("\n")
        return first + newline + textwrap.indent(rest, " " * column)

    def _end(self, node: Any) -> int:
        """Return the index after the last letter of a node, before comments behind it."""
        while not isinstance(node, yaml.ScalarNode) and not node.flow_style and node.value:
            last = node.value[-1]
            node = last[1] if isinstance(last, tuple) else last
        return len(self.text[: node.end_mark.index].rstrip())

    def _line_end(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end
