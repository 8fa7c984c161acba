"""The tokenizer of a checkpoint: ids from text, ids from messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ModelError, RequestError
from ..gguf import is_gguf, open_gguf
from .gguf import gguf_tokenizer

Message = dict[str, Any]
LONGEST_REASON = 200
"""Characters of a template's own error that are told; it may hold the whole conversation."""
PIECE = 1 << 15
"""Characters that are tokenised at a time where only their number of tokens is wanted."""
SLACK = 64
"""More tokens than a cut through a text makes."""


class TextCodec:
    """Encodes prompts and chats as the checkpoint's own tokenizer does.

    Args:
        folder: the checkpoint: a folder or a GGUF file.

    Raises:
        ModelError: the tokenizer's files are damaged, or that of a GGUF file is not known.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            tokenizer = (
                _of_gguf(folder)
                if is_gguf(folder)
                else AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            )
        except ModelError:
            raise
        except Exception as error:  # the library raises whatever its parser raised
            reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
            raise ModelError(f"the tokenizer in {folder} cannot be read: {reason}") from None
        self._tokenizer: PreTrainedTokenizerBase = tokenizer
        self.backend: Tokenizer = tokenizer.backend_tokenizer

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a prompt, with the ``special`` tokens that the checkpoint's tokenizer adds."""
        ids: list[int] = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def exceeds(self, text: str, most: int) -> bool:
        """True when a text has more than ``most`` tokens, found at the memory of a short one.

        A text that has hardly more may pass.
        """
        count = 0
        for start in range(0, len(text), PIECE):
            piece = text[start : start + PIECE]
            (found,) = self.backend.encode_batch_fast([piece], add_special_tokens=False)
            count += len(found) - SLACK
            if count > most:
                return True
        return False

    @property
    def template(self) -> str | None:
        """The checkpoint's chat template."""
        found: str | None = self._tokenizer.chat_template
        return found

    @template.setter
    def template(self, text: str) -> None:
        self._tokenizer.chat_template = text

    def chat(self, messages: list[Message], *options: Any, **given: Any) -> list[int]:
        """Ids of a conversation by the checkpoint's chat template, see ``render``."""
        return self.encode(self.render(messages, *options, **given), special=False)

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[Any] | None = None,
        **given: Any,
    ) -> str:
        """The text of a conversation by the checkpoint's chat template.

        ``tools`` are what the model may call, and ``given`` goes to the template as it is.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if not self._tokenizer.chat_template:
            raise RequestError(
                f"{self._folder} has no chat template; use generate() with a plain prompt."
            )
        try:
            text = str(
                self._tokenizer.apply_chat_template(
                    messages,
                    tools=tools or None,
                    tokenize=False,
                    add_generation_prompt=add_generation_prompt,
                    **given,
                )
            )
        except RecursionError:
            raise RequestError("the messages nest too deeply; flatten them.") from None
        except (TemplateError, TypeError, KeyError, ValueError, AttributeError) as error:
            line = str(error).partition("\n")[0]
            said = line[:LONGEST_REASON].rstrip(".").encode(errors="replace").decode()
            raise RequestError(f"the chat template refused the messages: {said}.") from None
        if has_lone_surrogates(text):
            raise RequestError("the messages have lone surrogates; send UTF-8.")
        return text

    def vocabulary(self) -> dict[str, int]:
        """Every entry and its id, added ones included."""
        return self.backend.get_vocab(with_added_tokens=True)


def _of_gguf(path: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in the GGUF file at ``path``, or beside it where that one is not known."""
    beside = path.with_name("tokenizer.json").is_file()
    file = open_gguf(path)
    try:
        found = gguf_tokenizer(file)
    except ModelError:
        if not beside:
            raise
        found = None
    if found is None:
        found = PreTrainedTokenizerFast.from_pretrained(path.parent)
        found.chat_template = file.metadata.get("tokenizer.chat_template", found.chat_template)
    return found


def has_tokenizer(folder: Path) -> bool:
    """True when the checkpoint brings a tokenizer."""
    if is_gguf(folder):
        held = open_gguf(folder).metadata.get("tokenizer.ggml.tokens")
        return bool(held) or folder.with_name("tokenizer.json").is_file()
    return any((folder / n).is_file() for n in ("tokenizer.json", "tokenizer.model", "vocab.json"))


def has_lone_surrogates(text: str) -> bool:
    """Whether a text cannot be written as UTF-8, which tokenizers want."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return True
    return False


def differing_entries(target: dict[str, int], drafter: dict[str, int]) -> list[str]:
    """Entries that two vocabularies do not share, as "'entry' is 5, not 7" phrases, by id.

    Entries past the shorter vocabulary's end are padding and no difference.
    """
    length = 1 + min(max(v.values(), default=-1) for v in (target, drafter))
    found = []
    for entry in sorted({*target, *drafter}, key=lambda e: (target.get(e, length), e)):
        mine, theirs = target.get(entry), drafter.get(entry)
        if mine == theirs or all(i is None or i >= length for i in (mine, theirs)):
            continue
        there = "missing" if theirs is None else theirs
        found.append(f"{entry!r} is {there}, not {'absent' if mine is None else mine}")
    return found
