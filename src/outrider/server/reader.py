"""Reads outputs of chats: thoughts, content, and calls of tools."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from ..frontend.outputs import SampleState
from ..text.called import ToolCall, Types, read_auto, read_json
from ..text.calls import Form
from ..text.reasoning import Parts, ReasoningForm

Shown = Callable[[int], bytes]
"""Returns the bytes of a token in the text."""


class Said(NamedTuple):
    """The parts of a sample's output, as clients see them.

    ``answer_begins`` is the offset in the output after thoughts and their marks.
    """

    thoughts: str
    content: str
    calls: list[ToolCall]
    answer_begins: int = 0


@dataclass
class Reader:
    """Reads the outputs of one call.

    Args:
        reasoning: the form of thoughts; None if they are not separated from the content.
        form: the form of calls beside free text.
        how: the tool choice, see ``tools.Choice``.
        types: the schemas of arguments.
        begun: True if the prompt has opened thoughts.
    """

    reasoning: ReasoningForm | None
    form: Form
    how: str
    types: Types
    begun: bool = False

    def read(self, text: str, whole: bool) -> Said:
        """Return the parts of an output; only what is certain unless it is ``whole``."""
        parts = self._parts(text, whole)
        content, calls = self._calls(parts, whole)
        return Said(parts.thoughts, content, calls, parts.end)

    def _parts(self, text: str, whole: bool) -> Parts:
        if self.reasoning is None:
            return Parts("", text)
        return self.reasoning.parts(text, self.begun, whole)

    def _calls(self, parts: Parts, whole: bool) -> tuple[str, list[ToolCall]]:
        """Return the content of an answer, and its calls."""
        text, how = parts.answer, self.how
        if how == "none":
            return text, []
        if parts.calls:
            return text, [
                ToolCall(each.name, each.arguments, each.ended or whole) for each in parts.calls
            ]
        if how.startswith("="):
            begun = bool(text) or whole or self.reasoning is None
            return "", [ToolCall(how[1:], text, whole)] if begun else []
        if how == "required":
            return "", read_json(text)
        return read_auto(text, self.form, whole, self.types)

    def num_thought_tokens(self, sample: SampleState, shown: Shown) -> int:
        """Return how many tokens of an output are thoughts, their marks included."""
        end = len(sample.text[: self._parts(sample.text, True).end].encode(errors="replace"))
        return self.num_tokens_before(sample, end, shown)

    @staticmethod
    def num_tokens_before(sample: SampleState, end: int, shown: Shown) -> int:
        """Return how many tokens begin before byte ``end`` of the text, given ``shown`` bytes."""
        count = place = 0
        for id in sample.token_ids:
            if place >= end:
                break
            place += len(shown(id))
            count += 1
        return count
