"""The tokenizer of a checkpoint: ids from text and from chat messages."""

import re
from contextlib import nullcontext, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ModelError, RequestError
from ..fields import readable
from ..gguf import is_gguf, open_gguf
from .calls import Form, form_of
from .conversation import write
from .gguf_tokenizer import chat_templates, gguf_tokenizer
from .growth import check_growth, check_specials
from .messages import readable as readable_messages
from .panics import no_panic

Message = dict[str, Any]
PIECE = 1 << 15
"""Characters that ``exceeds`` tokenises at a time."""
SLACK = 64
"""More tokens than cutting a text adds."""
BREAK = "\ufdd1"
"""Parts a control token that a client spelled; Unicode keeps it for uses within a program."""


class TextCodec:
    """Encodes prompts and chats as the checkpoint's own tokenizer does.

    Args:
        folder: the checkpoint: a folder or a GGUF file.
        specials: whether texts of clients may hold control tokens; else these are plain text.

    Raises:
        ModelError: the tokenizer's files are damaged, or a GGUF file's tokenizer is unknown.
    """

    def __init__(self, folder: Path, specials: bool = True) -> None:
        self._call_form: Form | None = None
        self._specials = specials
        self._folder = folder
        with readable(f"the tokenizer in {folder} cannot be read", "fetch the checkpoint again."):
            self.tokenizer: PreTrainedTokenizerBase = (
                _of_gguf(folder) if is_gguf(folder) else _of_folder(folder)
            )
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            if not isinstance(backend, Tokenizer):
                raise ModelError(
                    f"the tokenizer in {folder} is written in Python and has no tokenizer.json; "
                    "convert it to one."
                )
            self.backend = backend
            check_specials(backend, folder)
            found = self.tokenizer("a tokenizer's try: 1, 2\n")["input_ids"]
            self.tokenizer.decode(found)  # finds damage

    def encode(self, text: str, special: bool = True, rendered: bool = False) -> list[int]:
        """Return the ids of a text, with the tokenizer's ``special`` tokens around it.

        A text that ``render`` made is ``rendered``: its control tokens are the template's.
        """
        if not self._specials:
            text = text if rendered else self._broken(text)
            if BREAK in text:
                return self._without_breaks(text, special)
        # The tokenizer's own warning of length is not about what is done here.
        with no_panic():
            found = self.tokenizer(text, add_special_tokens=special, verbose=False)
        ids: list[int] = found["input_ids"]
        return ids

    def _without_breaks(self, text: str, special: bool) -> list[int]:
        """Return the ids of a text but for those of its breaks, which no token crosses."""
        with no_panic():
            found = self.backend.encode(text, add_special_tokens=special)
        pairs = zip(found.ids, found.offsets, strict=True)
        return [id for id, (start, end) in pairs if text[start:end] != BREAK]

    @cached_property
    def _controls(self) -> re.Pattern[str]:
        """Matches a control token, the longest at a place."""
        added = self.backend.get_added_tokens_decoder().values()
        texts = sorted((t.content for t in added if t.special), key=len, reverse=True)
        return re.compile("|".join(re.escape(text) for text in texts if len(text) > 1) or "(?!)")

    def _broken(self, value: Any) -> Any:
        """Return ``value`` with a break in each control token of its texts."""
        if isinstance(value, str):
            while self._controls.search(value):  # again for those that overlap
                value = self._controls.sub(lambda m: m[0][0] + BREAK + m[0][1:], value)
            return value
        if isinstance(value, list):
            return [self._broken(each) for each in value]
        if isinstance(value, dict):
            return {self._broken(name): self._broken(each) for name, each in value.items()}
        return value

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokenizer's own end of a text."""
        end = self.tokenizer.eos_token_id
        return frozenset([end] if isinstance(end, int) else [])

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a text has more than ``limit`` tokens, in the memory of a short text.

        A text that has only a few more may pass.
        """
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
        """The checkpoint's chat templates by name: "default", "tool_use", both or none.

        Raises:
            RequestError: one is no text.
        """
        known = self.tokenizer.chat_template
        named = known if isinstance(known, dict) else {"default": known} if known else {}
        found = {name: named[name] for name in ("default", "tool_use") if name in named}
        if not all(isinstance(template, str) for template in found.values()):
            raise RequestError(f"{self._folder} has a chat template that is no text; correct it.")
        return found

    @property
    def call_form(self) -> Form:
        """How calls of tools are written where no template prints them; follows the templates."""
        return self._call_form or form_of("".join(self.templates.values()))

    @call_form.setter
    def call_form(self, form: Form | None) -> None:
        self._call_form = form

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[Any] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation by the checkpoint's chat template.

        ``tools`` are what the model may call; ``variables`` are the template's. The template
        "tool_use" is for tools, where there is one.

        Raises:
            RequestError: there is no template, or it refuses these messages or leaves some out.
        """
        named = self.templates
        if not named:
            raise RequestError(
                f"{self._folder} has no chat template; use generate() with a plain prompt."
            )
        if not messages:
            raise RequestError("the conversation is empty; give at least one message.")
        said, listed = readable_messages(messages), tools or []
        called = any("tool_calls" in message or message["role"] == "tool" for message in said)
        names = ("tool_use", "default") if listed else ("default", "tool_use")
        templates = [named[n] for n in (names if listed or called else names[:1]) if n in named]
        if not self._specials:
            said, listed, variables = map(self._broken, (said, listed, variables))
        text = write(
            templates or list(named.values()),
            said,
            listed,
            self.call_form,
            {
                "documents": None, **self.tokenizer.special_tokens_map, **variables,
                "add_generation_prompt": add_generation_prompt,
            },
        )  # fmt: skip
        if has_lone_surrogates(text):
            raise RequestError("the messages have lone surrogates; send UTF-8.")
        return text


def _of_folder(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder."""
    if (folder / "tokenizer.json").is_file():
        check_growth(folder / "tokenizer.json")
    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    return found


def _of_gguf(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the GGUF file at ``path``, or the one in its folder if unknown."""
    file, in_folder = open_gguf(path), path.with_name("tokenizer.json").is_file()
    with suppress(ModelError) if in_folder else nullcontext():
        tokenizer = gguf_tokenizer(file)
        if tokenizer is not None:
            return tokenizer
    if in_folder:
        check_growth(path.with_name("tokenizer.json"))
    other: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(path.parent)
    other.chat_template = chat_templates(file) or other.chat_template
    return other


def has_tokenizer(folder: Path) -> bool:
    """Return whether the checkpoint has a tokenizer."""
    if is_gguf(folder):
        has_tokens = bool(open_gguf(folder).metadata.get("tokenizer.ggml.tokens"))
        return has_tokens or folder.with_name("tokenizer.json").is_file()
    return any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def has_lone_surrogates(text: str) -> bool:
    """Return whether a text cannot be encoded as UTF-8, which tokenizers need."""
    return text.encode(errors="ignore").decode() != text


def differing_entries(target: dict[str, int], drafter: dict[str, int]) -> list[str]:
    """Return how two vocabularies differ, as phrases "'entry' is 5, not 7" in the order of ids.

    Entries past the shorter vocabulary's end are padding and do not count.
    """
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
