"""The tokenizer of a checkpoint: ids from text and from chat messages."""

import re
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..errors import RequestError
from .calls import Form, form_of
from .conversation import write
from .messages import readable as readable_messages
from .panics import no_panic

Message = dict[str, Any]
PIECE = 1 << 15
"""Characters that ``exceeds`` tokenises at a time."""
SLACK = 64
"""More tokens than cutting a text into pieces adds."""
BREAK = "\ufdd1"
"""Splits control tokens in clients' texts; a noncharacter, which Unicode reserves for programs."""


class TextCodec:
    """Encodes prompts and chats with the checkpoint's tokenizer; ``read_codec`` makes it.

    It can be pickled, and needs neither torch nor transformers. ``backend`` neither truncates nor
    pads. ``chat_template`` is the only one, or all by name. ``special_tokens`` are keyed by their
    names in templates. Without ``specials`` control tokens in clients' texts are plain text.
    """

    def __init__(
        self,
        backend: Tokenizer,
        chat_template: str | dict[str, str] | None,
        special_tokens: Mapping[str, Any],
        end: int | None,
        source: Path,
        specials: bool = True,
    ) -> None:
        self.backend = backend
        self.chat_template = chat_template
        self.end_token_ids = frozenset([] if end is None else [end])
        self.special_tokens = special_tokens
        self.source = source
        self._specials = specials
        self.set_form: Form | None = None

    def encode(self, text: str, special: bool = True, rendered: bool = False) -> list[int]:
        """Return the ids of a text, with the tokenizer's ``special`` tokens around it.

        ``rendered`` is for a text that ``render`` made: its control tokens come from the template.
        """
        if not (self._specials or rendered):
            text = self._broken(text)
        with no_panic():
            encoding = self.backend.encode(text, add_special_tokens=special)
        ids: list[int] = encoding.ids
        if self._specials or BREAK not in text:
            return ids
        pairs = zip(ids, encoding.offsets, strict=True)  # no token crosses a break
        return [id for id, (start, end) in pairs if text[start:end] != BREAK]

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """A pattern of control tokens, longest first."""
        added = self.backend.get_added_tokens_decoder().values()
        texts = sorted((t.content for t in added if t.special), key=len, reverse=True)
        return re.compile("|".join(re.escape(text) for text in texts if len(text) > 1) or "(?!)")

    def _broken(self, value: Any) -> Any:
        """Return ``value`` with a break in each control token of its strings."""
        if isinstance(value, str):
            while self._controls.search(value):  # again for tokens that overlap
                value = self._controls.sub(lambda m: m[0][0] + BREAK + m[0][1:], value)
            return value
        if isinstance(value, list):
            return [self._broken(each) for each in value]
        if isinstance(value, dict):
            return {self._broken(name): self._broken(each) for name, each in value.items()}
        return value

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a text has more than ``limit`` tokens; one with a few more may pass."""
        count = 0
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            with no_panic():
                (encoding,) = self.backend.encode_batch_fast([piece], add_special_tokens=False)
            count += len(encoding) - SLACK
            if count > limit:
                return True
        return False

    def chat(self, messages: list[Message], *args: Any, **variables: Any) -> list[int]:
        """Return the ids of a conversation by the checkpoint's chat template, see ``render``."""
        return self.encode(self.render(messages, *args, **variables), False, rendered=True)

    @property
    def templates(self) -> dict[str, str]:
        """The checkpoint's chat templates by name: "default", "tool_use", both or none."""
        known = self.chat_template
        named = known if isinstance(known, dict) else {"default": known} if known else {}
        used: dict[str, str] = {n: named[n] for n in ("default", "tool_use") if n in named}
        if not all(isinstance(template, str) for template in used.values()):
            raise RequestError(f"{self.source} has a chat template that is not text; correct it.")
        return used

    @property
    def call_form(self) -> Form:
        """The form of calls if no template prints them: the set one, else the templates'."""
        return self.set_form or form_of("".join(self.templates.values()))

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[Any] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation by the checkpoint's chat template.

        With ``tools`` the template "tool_use" is used if there is one; ``variables`` are the
        template's.
        """
        named = self.templates
        if not named:
            raise RequestError(
                f"{self.source} has no chat template; use generate() with a plain prompt."
            )
        if not messages:
            raise RequestError("the conversation is empty; give at least one message.")
        said, listed = readable_messages(messages), tools or []
        called = any("tool_calls" in message or message["role"] == "tool" for message in said)
        names = ("tool_use", "default") if listed else ("default", "tool_use")
        templates = [named[n] for n in (names if listed or called else names[:1]) if n in named]
        if not self._specials:
            said, listed, variables = map(self._broken, (said, listed, variables))
        own = {"documents": None, **self.special_tokens}
        values = {**own, **variables, "add_generation_prompt": add_generation_prompt}
        text = write(templates or list(named.values()), said, listed, self.call_form, values)
        if has_lone_surrogates(text):
            raise RequestError("the messages have lone surrogates; send UTF-8.")
        return text


def has_lone_surrogates(text: str) -> bool:
    """Return whether a text cannot be encoded as UTF-8, which tokenizers need."""
    return text.encode(errors="ignore").decode() != text


def differing_entries(target: dict[str, int], drafter: dict[str, int]) -> list[str]:
    """Return how two vocabularies differ, as phrases "'entry' is 5, not 7" in the order of ids.

    Entries past the shorter vocabulary's end are padding and do not count.
    """
    if target == drafter:
        return []
    length = 1 + min(max(v.values(), default=-1) for v in (target, drafter))
    differences = []
    for entry in sorted({*target, *drafter}, key=lambda e: (target.get(e, length), e)):
        ids = target.get(entry), drafter.get(entry)
        if ids[0] == ids[1] or all(i is None or i >= length for i in ids):
            continue
        expected = "absent" if ids[0] is None else ids[0]
        actual = "missing" if ids[1] is None else ids[1]
        differences.append(f"{entry!r} is {actual}, not {expected}")
    return differences
