"""The tokenizer of a checkpoint: ids from text and from chat messages."""

from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ModelError, RequestError
from ..fields import one_line, readable
from ..gguf import is_gguf, open_gguf
from .gguf_tokenizer import gguf_tokenizer
from .template import render

Message = dict[str, Any]
PIECE = 1 << 15
"""Characters that ``exceeds`` tokenises at a time."""
SLACK = 64
"""More tokens than cutting a text adds."""


class TextCodec:
    """Encodes prompts and chats as the checkpoint's own tokenizer does.

    Args:
        folder: the checkpoint: a folder or a GGUF file.

    Raises:
        ModelError: the tokenizer's files are damaged, or a GGUF file's tokenizer is unknown.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        with readable(f"the tokenizer in {folder} cannot be read", "fetch the checkpoint again."):
            self.tokenizer: PreTrainedTokenizerBase = (
                _of_gguf(folder)
                if is_gguf(folder)
                else AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            )
            backend = getattr(self.tokenizer, "backend_tokenizer", None)
            if not isinstance(backend, Tokenizer):
                raise ModelError(
                    f"the tokenizer in {folder} is written in Python and has no tokenizer.json; "
                    "convert it to one."
                )
            self.backend = backend
            self.tokenizer.decode(self.encode("a tokenizer's try: 1, 2\n"))  # finds damage

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return the ids of a text, with the tokenizer's ``special`` tokens around it."""
        ids: list[int] = self.tokenizer(text, add_special_tokens=special)["input_ids"]
        return ids

    def exceeds(self, text: str, limit: int) -> bool:
        """Return whether a text has more than ``limit`` tokens, in the memory of a short text.

        A text that has only a few more may pass.
        """
        count = 0
        for start in range(0, len(text), PIECE):
            (encoding,) = self.backend.encode_batch_fast(
                [text[start : start + PIECE]], add_special_tokens=False
            )
            count += len(encoding) - SLACK
            if count > limit:
                return True
        return False

    def chat(self, messages: list[Message], *args: Any, **variables: Any) -> list[int]:
        """Return the ids of a conversation by the checkpoint's chat template, see ``render``."""
        return self.encode(self.render(messages, *args, **variables), special=False)

    def render(
        self,
        messages: list[Message],
        add_generation_prompt: bool = True,
        tools: list[Any] | None = None,
        **variables: Any,
    ) -> str:
        """Return the text of a conversation by the checkpoint's chat template.

        ``tools`` are what the model may call; ``variables`` are the template's.

        Raises:
            RequestError: there is no template, or it refuses these messages.
        """
        if not self.tokenizer.chat_template:
            raise RequestError(
                f"{self._folder} has no chat template; use generate() with a plain prompt."
            )
        if not messages:
            raise RequestError("the conversation is empty; give at least one message.")
        try:
            template = self.tokenizer.get_chat_template(tools=tools or None)
        except ValueError as error:
            raise RequestError(f"{self._folder}: {one_line(error)}.") from None
        if not isinstance(template, str):
            raise RequestError(f"{self._folder} has a chat template that is no text; correct it.")
        text = render(
            template,
            messages,
            **{"documents": None, **self.tokenizer.special_tokens_map, **variables},
            tools=tools or None,
            add_generation_prompt=add_generation_prompt,
        )
        if has_lone_surrogates(text):
            raise RequestError("the messages have lone surrogates; send UTF-8.")
        return text


def _of_gguf(path: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in the GGUF file at ``path``, or the one in its folder if unknown."""
    file, in_folder = open_gguf(path), path.with_name("tokenizer.json").is_file()
    with suppress(ModelError) if in_folder else nullcontext():
        tokenizer = gguf_tokenizer(file)
        if tokenizer is not None:
            return tokenizer
    other: PreTrainedTokenizerBase = PreTrainedTokenizerFast.from_pretrained(path.parent)
    other.chat_template = file.metadata.get("tokenizer.chat_template", other.chat_template)
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
