"""Writes changed values into the text of a YAML file and leaves every other line as it was.

Only the lines of changed keys are replaced, so that a reader sees what changed. The result is
parsed again; if its values are wrong, all documents are written anew, without comments.
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
"""A list whose dashes are indented below its key."""


class _NodeLoader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Composes nodes; an alias becomes a leaf at its own position."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if not self.check_event(yaml.AliasEvent):
            return super().compose_node(parent, index)
        event = self.get_event()
        return yaml.ScalarNode("alias", event.anchor, event.start_mark, event.end_mark)


def splice(text: str, old: list[Any], new: list[Any]) -> str:
    """Return a YAML text with the values ``new``; ``old`` are the values of its documents."""
    try:
        # Composing builds no objects, so it is safe.
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
    """Return a value as text, whose comparison tells booleans and numbers apart."""
    return json.dumps(value, sort_keys=True)


class _Edits:
    """Collects the edits of a text: begin and end index, and the replacement."""

    def __init__(self, text: str) -> None:
        self.text, self.wide = text, WIDE.search(text) is not None
        self.edits: list[tuple[int, int, str]] = []

    def applied(self) -> str:
        """Return the text with all edits."""
        text = self.text
        # Of two edits that add at one index, the later is the outer one and comes after.
        for begin, end, instead in sorted(self.edits, key=lambda edit: edit[:2])[::-1]:
            text = text[:begin] + instead + text[end:]
        return text

    def make(self, node: Any, old: Any, new: Any) -> bool:
        """Add the edits that turn a node into ``new``; return False if that is not possible."""
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
        """Edit the keys of a block; an added key takes the place of a removed one."""
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
            if self.text[line + 1 : begin].strip():  # after the dash of a list
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
        """Return the index after the last letter of a node, before comments that follow it."""
        while not isinstance(node, yaml.ScalarNode) and not node.flow_style and node.value:
            last = node.value[-1]
            node = last[1] if isinstance(last, tuple) else last
        return len(self.text[: node.end_mark.index].rstrip())

    def _line_end(self, at: int) -> int:
        end = self.text.find("\n", at)
        return len(self.text) if end < 0 else end
