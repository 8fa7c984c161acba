"""Reads outputs of chats: thoughts, content, and calls of tools."""

from dataclasses import dataclass
from typing import NamedTuple

from ..frontend.outputs import OutputProcessor, SampleState
from ..text.called import ToolCall, Types, read_auto, read_json
from ..text.calls import Form
from ..text.reasoning import Parts, ReasoningForm


class Said(NamedTuple):
    """The parts of a sample's output, as clients see them."""

    thoughts: str
    content: str
    calls: list[ToolCall]


@dataclass
class Reader:
    """Reads the outputs of one call.

    Args:
        reasoning: the form of thoughts; None where they are not told from the content.
        form: of calls beside free text.
        how: of the choice of tools, see ``tools.Choice``.
        types: the schemas of arguments.
        begun: True where the prompt has opened thoughts.
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
        return Said(parts.thoughts, content, calls)

    def _parts(self, text: str, whole: bool) -> Parts:
        if self.reasoning is None:
            return Parts("", text)
        return self.reasoning.parts(text, self.begun, whole)

    def _calls(self, parts: Parts, whole: bool) -> tuple[str, list[ToolCall]]:
        """Return what is content of an answer, and its calls."""
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

    def num_thought_tokens(self, sample: SampleState, outputs: OutputProcessor) -> int:
        """Return how many tokens of an output are thoughts, their marks included."""
        end = len(sample.text[: self._parts(sample.text, True).end].encode(errors="replace"))
        return self.num_tokens_before(sample, end, outputs)

    @staticmethod
    def num_tokens_before(sample: SampleState, end: int, outputs: OutputProcessor) -> int:
        """Return how many tokens of an output begin before a byte of its text."""
        count = place = 0
        for id in sample.token_ids:
            if place >= end:
                break
            place += len(outputs.bytes_of(id))
            count += 1
        return count
