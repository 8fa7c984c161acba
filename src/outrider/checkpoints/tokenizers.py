"""Reads the tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from ..base.extras import torch_for
from ..errors import ModelError
from ..text.codec import TextCodec, differing_entries
from .files import Files, files_of
from .folder_tokenizer import folder_tokenizer, save_words
from .formats.gguf import GGUF
from .formats.gguf_tokenizer import Words, chat_templates, gguf_tokenizer
from .unread import UnreadCodec, codec_of, trying

TOKENS = "tokenizer.ggml.tokens"
"""The key of a GGUF file's list of tokens."""


def read_codec(folder: Path | Files, specials: bool = True) -> TextCodec:
    """Return the codec of a checkpoint, which may be opened already.

    A GGUF file with its own tokenizer needs no transformers, which is slow to import. ``specials``
    is that of ``TextCodec``.
    """
    files = files_of(folder)
    with trying(files.folder):
        words = _of_gguf(files.gguf) or _words(files)
        return codec_of(words, files.folder, specials)


def codec_to_read(files: Files, specials: bool) -> TextCodec | UnreadCodec:
    """Return the codec of a checkpoint, unread if only its GGUF file is needed."""
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


def save_tokenizer(files: Files, folder: Path) -> None:
    """Write the tokenizer of a checkpoint as the files of a folder."""
    codec = read_codec(files)
    specials = dict(codec.special_tokens)
    save_words(Words(codec.backend, specials, codec.chat_template, None), folder)


def _words(files: Files) -> Words:
    """Return the tokenizer in a folder or beside a GGUF file, whose templates come first."""
    folder = files.folder if files.gguf is None else files.folder.parent
    words = folder_tokenizer(folder) or _by_transformers(folder)
    own = None if files.gguf is None else chat_templates(files.gguf)
    return words._replace(template=own or words.template)


def _by_transformers(folder: Path) -> Words:
    """Return a tokenizer that transformers converts, for folders without a tokenizer.json."""
    with torch_for(f"{folder} has no tokenizer.json; to make one of its other files"):
        from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        what = f"the tokenizer in {folder} is written in Python and has no tokenizer.json"
        raise ModelError(f"{what}; convert it to one.")
    end = tokenizer.eos_token_id
    return Words(
        backend, dict(tokenizer.special_tokens_map), tokenizer.chat_template,
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
