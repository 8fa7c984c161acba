"""Reads the tokenizer of a checkpoint; what is read runs without transformers."""

from contextlib import nullcontext, suppress
from pathlib import Path

from tokenizers import Tokenizer
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from ..errors import ModelError
from ..fields import readable
from ..gguf import is_gguf, open_gguf
from .codec import TextCodec
from .gguf_tokenizer import chat_templates, gguf_tokenizer
from .growth import check_growth, check_specials


def read_codec(folder: Path, specials: bool = True) -> TextCodec:
    """Return the codec of a checkpoint.

    Args:
        folder: the checkpoint: a folder or a GGUF file.
        specials: see ``TextCodec``.

    Raises:
        ModelError: see ``read_tokenizer``.
    """
    tokenizer = read_tokenizer(folder)
    backend: Tokenizer = tokenizer.backend_tokenizer
    end = tokenizer.eos_token_id
    return TextCodec(
        backend,
        tokenizer.chat_template,
        dict(tokenizer.special_tokens_map),
        end if isinstance(end, int) else None,
        folder,
        specials,
    )


def read_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a checkpoint, a folder or a GGUF file, as transformers has it.

    Raises:
        ModelError: its files are damaged, or a GGUF file's tokenizer is unknown.
    """
    with readable(f"the tokenizer in {folder} cannot be read", "fetch the checkpoint again."):
        tokenizer = _of_gguf(folder) if is_gguf(folder) else _of_folder(folder)
        backend = getattr(tokenizer, "backend_tokenizer", None)
        if not isinstance(backend, Tokenizer):
            raise ModelError(
                f"the tokenizer in {folder} is written in Python and has no tokenizer.json; "
                "convert it to one."
            )
        check_specials(backend, folder)
        found = tokenizer("a tokenizer's try: 1, 2\n")["input_ids"]
        tokenizer.decode(found)  # finds damage
    backend.no_truncation()
    backend.no_padding()
    return tokenizer


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
