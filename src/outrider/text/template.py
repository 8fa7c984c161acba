"""The tokenizer of a checkpoint: ids from text, ids from messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ModelError, RequestError
from ..fields import one_line
from ..gguf import is_gguf, open_gguf
from .chat import render
from .gguf import gguf_tokenizer
from .guard import readable

Message = dict[str, Any]
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
        with readable(f"the tokenizer in {folder} cannot be read", "fetch the checkpoint again."):
            tokenizer: PreTrainedTokenizerBase = (
                _of_gguf(folder)
                if is_gguf(folder)
                else AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            )
            self._tokenizer = tokenizer
            self.backend: Tokenizer = _backend(tokenizer, folder)
            _try(tokenizer)

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
        if not messages:
            raise RequestError("the conversation is empty; give at least one message.")
        text = render(
            self._chosen(tools),
            messages,
            **{"documents": None, **self._tokenizer.special_tokens_map, **given},
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
        )
        if has_lone_surrogates(text):
            raise RequestError("the messages have lone surrogates; send UTF-8.")
        return text

    def _chosen(self, tools: list[Any] | None) -> str:
        """The template for a conversation, of several by name that for ``tools``."""
        try:
            found = self._tokenizer.get_chat_template(tools=tools or None)
        except ValueError as error:
            raise RequestError(f"{self._folder}: {one_line(error)}.") from None
        if not isinstance(found, str):
            raise RequestError(f"{self._folder} has a chat template that is no text; correct it.")
        return found

    def vocabulary(self) -> dict[str, int]:
        """Every entry and its id, added ones included."""
        return self.backend.get_vocab(with_added_tokens=True)


def _backend(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Tokenizer:
    """The tokenizer as the tokenizers library has it.

    Raises:
        ModelError: it is one of Python's, which have none.
    """
    found = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(found, Tokenizer):
        raise ModelError(
            f"the tokenizer in {folder} is written in Python and has no tokenizer.json; convert it "
            "to one."
        )
    return found


def _try(tokenizer: PreTrainedTokenizerBase) -> None:
    """Encode and decode a few words: damage that only shows then is found at load."""
    ids = tokenizer("a tokenizer's try: 1, 2\n")["input_ids"]
    tokenizer.decode(ids)


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
