"""Reads the tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tokenizers import Tokenizer

from ..errors import ModelError
from ..text.codec import TextCodec, differing_entries
from .files import Files, files_of
from .formats.gguf import GGUF, is_gguf
from .formats.gguf_tokenizer import SPECIALS, Words, chat_templates, gguf_tokenizer
from .growth import check_growth
from .unread import UnreadCodec, codec_of, trying

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = "tokenizer.ggml.tokens"
"""The key of a GGUF file's list of tokens."""


def read_codec(folder: Path | Files, specials: bool = True) -> TextCodec:
    """Return the codec of a checkpoint, which may be opened already.

    A GGUF file that holds its tokenizer needs no transformers, which is slow to import.
    ``specials`` is as of ``TextCodec``.
    """
    files = files_of(folder)
    with trying(files.folder):
        words = _of_gguf(files.gguf) or _words(files)
        return codec_of(words, files.folder, specials)


def codec_to_read(files: Files, specials: bool) -> TextCodec | UnreadCodec:
    """Return the codec of a checkpoint, unread if that needs nothing but its GGUF file."""
    if files.gguf is None or files.folder.with_name("tokenizer.json").is_file():
        return read_codec(files, specials)
    return UnreadCodec(files.folder, specials, files.gguf)


def vocabulary_of(files: Files) -> dict[str, int]:
    """Return the ids of a checkpoint's tokens; builds no tokenizer if a GGUF file lists them."""
    if files.gguf is None or files.folder.with_name("tokenizer.json").is_file():
        return read_codec(files).backend.get_vocab()
    tokens = files.gguf.metadata[TOKENS]
    return {token: id for id, token in enumerate(tokens)}


def differences(target: Files, drafter: Files) -> list[str]:
    """Return how the vocabularies of two checkpoints differ, see ``differing_entries``."""
    one, other = target.gguf, drafter.gguf
    if one is not None and other is not None and one.metadata.same(other.metadata, TOKENS):
        return []
    return differing_entries(vocabulary_of(target), vocabulary_of(drafter))


def read_tokenizer(folder: Path | Files) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint, a folder or a GGUF file, as transformers has it."""
    from transformers import PreTrainedTokenizerFast

    files = files_of(folder)
    if files.gguf is None:
        return _of_folder(files.folder)
    codec = read_codec(files)
    names = {name: codec.special_tokens.get(name) for name in SPECIALS}
    return PreTrainedTokenizerFast(
        tokenizer_object=codec.backend,
        chat_template=codec.chat_template,
        clean_up_tokenization_spaces=False,
        **names,
    )


def _of_folder(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer in a folder, or in that of a GGUF file."""
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    path = folder.parent if is_gguf(folder) else folder
    if (path / "tokenizer.json").is_file():
        check_growth(path / "tokenizer.json")
    tokenizer: PreTrainedTokenizerBase = (
        PreTrainedTokenizerFast.from_pretrained(path)
        if is_gguf(folder)
        else AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    )
    return tokenizer


def _words(files: Files) -> Words:
    """Return what a codec takes of the tokenizer in a folder, or in that of a GGUF file."""
    tokenizer = _of_folder(files.folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        what = f"the tokenizer in {files} is written in Python and has no tokenizer.json"
        raise ModelError(f"{what}; convert it to one.")
    own = None if files.gguf is None else chat_templates(files.gguf)
    end = tokenizer.eos_token_id
    return Words(
        backend, dict(tokenizer.special_tokens_map), own or tokenizer.chat_template,
        end if isinstance(end, int) else None,
    )  # fmt: skip


def _of_gguf(file: GGUF | None) -> Words | None:
    """Return the tokenizer in a GGUF file; None if that of the file's folder is to be used."""
    try:
        return None if file is None else gguf_tokenizer(file)
    except ModelError:
        if file is None or not file.path.with_name("tokenizer.json").is_file():
            raise
        return None


def has_tokenizer(folder: Path | Files) -> bool:
    """Return whether the checkpoint, which may be opened already, has a tokenizer."""
    files = files_of(folder)
    if files.gguf is not None:
        has_tokens = files.gguf.metadata.count(TOKENS) > 0
        return has_tokens or files.folder.with_name("tokenizer.json").is_file()
    names = "tokenizer.json", "tokenizer.model", "vocab.json"
    return any((files.folder / name).is_file() for name in names)
