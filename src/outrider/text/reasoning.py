"""Separates a model's thoughts from its answer.

Most models put their thoughts between two marks at the beginning of the output. gpt-oss writes
messages on channels (OpenAI's Harmony format): ``analysis`` has thoughts, ``final`` the answer, and
a message to ``functions.NAME`` calls a tool.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from .stop import longest_start

CHANNELS = "openai_gptoss"
"""vLLM's name of gpt-oss's format."""
CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
HEADER = re.compile(
    r"(?P<before>[^<]*)<\|channel\|>(?P<channel>\w*)"
    r"(?P<behind>[^<]*(?:<\|constrain\|>[^<]*)?)<\|message\|>"
)
"""The head of a message; its recipient is before or after the channel."""
ENDS = ("<|end|>", "<|return|>", "<|call|>")
END = re.compile(r"<\|(?:end|return|call)\|>(?:\s*<\|start\|>assistant)?")
FUNCTION = re.compile(r"to=functions\.([\w.-]+)")


class ChannelCall(NamedTuple):
    """A call of a tool on a channel; ``ended`` is True if its message has ended."""

    name: str
    arguments: str
    ended: bool


class Parts(NamedTuple):
    """An output in parts.

    ``end`` is the offset after thoughts and their marks; the text's length while more may come.
    """

    thoughts: str
    answer: str
    end: int = 0
    calls: tuple[ChannelCall, ...] = ()


class ReasoningForm(Protocol):
    """The form in which a model thinks.

    Attributes:
        name: that of vLLM's ``--reasoning-parser``.
        opening, closing: marks around thoughts; None if there are none.
        marks: texts that must be shown, though they may be special tokens.
    """

    @property
    def name(self) -> str: ...
    @property
    def opening(self) -> str | None: ...
    @property
    def closing(self) -> str | None: ...
    @property
    def marks(self) -> frozenset[str]: ...

    def begun(self, prompt: str) -> bool:
        """Return whether a prompt ends with the mark that opens thoughts."""

    def ended(self, prompt: str) -> bool:
        """Return whether a prompt ends with the mark that closes thoughts: none will follow."""

    def unclosed(self, text: str) -> bool:
        """Return whether an answer that is to be continued ends within thoughts."""

    def parts(self, text: str, begun: bool, whole: bool) -> Parts:
        """Return the parts of an output; only what is certain unless it is ``whole``.

        ``begun`` is True if the prompt has opened thoughts. Space around thoughts, and between them
        and the answer, is left out.
        """


@dataclass(frozen=True)
class Marked:
    """Thoughts between two marks, at the beginning of the output."""

    name: str
    opening: str
    closing: str

    @property
    def marks(self) -> frozenset[str]:
        """See ``ReasoningForm``."""
        return frozenset((self.opening, self.closing))

    def begun(self, prompt: str) -> bool:
        """See ``ReasoningForm``."""
        return prompt.rstrip().endswith(self.opening)

    def ended(self, prompt: str) -> bool:
        """See ``ReasoningForm``."""
        return prompt.rstrip().endswith(self.closing)

    def unclosed(self, text: str) -> bool:
        """See ``ReasoningForm``."""
        return text.lstrip().startswith(self.opening) and self.closing not in text

    def parts(self, text: str, begun: bool, whole: bool) -> Parts:
        """See ``ReasoningForm``."""
        start = text.lstrip()
        undecided = not whole and self.opening.startswith(start)
        if undecided:
            return Parts("", "", len(text))
        if not (begun or start.startswith(self.opening)):
            return Parts("", text)
        thoughts, closing, rest = start.removeprefix(self.opening).partition(self.closing)
        if closing:
            return Parts(thoughts.strip(), rest.lstrip(), len(text) - len(rest))
        held = 0 if whole else longest_start(thoughts, [self.closing])
        return Parts(thoughts[: len(thoughts) - held].strip(), "", len(text))


@dataclass(frozen=True)
class Channels:
    """Messages on channels, as in gpt-oss; an output that does not begin with one is all answer."""

    name: str = CHANNELS
    opening = closing = None

    @property
    def marks(self) -> frozenset[str]:
        """See ``ReasoningForm``."""
        return frozenset((CHANNEL, MESSAGE, "<|start|>", "<|constrain|>", *ENDS))

    def begun(self, prompt: str) -> bool:
        """See ``ReasoningForm``."""
        return False

    def ended(self, prompt: str) -> bool:
        """See ``ReasoningForm``."""
        return False

    def unclosed(self, text: str) -> bool:
        """See ``ReasoningForm``."""
        return False

    def parts(self, text: str, begun: bool, whole: bool) -> Parts:
        """See ``ReasoningForm``."""
        if not _may_begin(text):
            return Parts("", text)
        said: dict[bool, list[str]] = {True: [], False: []}  # thoughts, and all else
        calls, at, thought_end = [], 0, 0
        while head := HEADER.match(text, at):
            end = END.search(text, head.end())
            stop = len(text) if end is None else end.start()
            if end is None and not whole:
                stop -= longest_start(text[head.end() :], ENDS)
            body, function = text[head.end() : stop], FUNCTION.search(head[0])
            thinks = head["channel"] == "analysis" and function is None
            if function is not None:
                calls.append(ChannelCall(function[1], body, end is not None))
            else:
                said[thinks].append(body)
            at = len(text) if end is None else end.end()
            if thinks:
                thought_end = at
            if end is None:
                break
        if at == 0 and whole:
            return Parts("", text)
        # An incomplete header has no text yet.
        thoughts, answer = ("\n".join(filter(None, said[kind])) for kind in (True, False))
        return Parts(thoughts, answer, thought_end, tuple(calls))


def _may_begin(text: str) -> bool:
    """Return whether a text may become the head of a message."""
    start = text.lstrip()
    return any(start.startswith(mark) or mark.startswith(start) for mark in (CHANNEL, "to="))


FORMS: Mapping[str, ReasoningForm] = {
    "deepseek_r1": Marked("deepseek_r1", "<think>", "</think>"),
    "qwen3": Marked("qwen3", "<think>", "</think>"),
    "mistral": Marked("mistral", "[THINK]", "[/THINK]"),
    "seed_oss": Marked("seed_oss", "<seed:think>", "</seed:think>"),
    "cohere": Marked("cohere", "<|START_THINKING|>", "<|END_THINKING|>"),
    "granite": Marked("granite", "Here is my thought process:", "Here is my response:"),
    CHANNELS: Channels(),
}
"""Forms by name. Those with the same marks are one form by two names."""


def form_of(templates: str) -> ReasoningForm | None:
    """Return the form of thoughts of a model with these chat templates; None if it has none."""
    if CHANNEL in templates and "analysis" in templates:
        return FORMS[CHANNELS]
    known = (form for form in FORMS.values() if form.closing is not None)
    # A template may omit or print the opening mark; it must know the closing one.
    return next((form for form in known if str(form.closing) in templates), None)
