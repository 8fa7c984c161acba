"""The pocket pair's text: the building interpreter's standard library, its tokenizer, its tokens.

The PSF licence lets the source of the standard library be copied and used for any purpose. A hash
of its path assigns a module to the held-out part, so every build on the same interpreter holds out
the same modules.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 4096
CONTEXT = 4096
END = "<|endoftext|>"
PAD = "<|pad|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIALS = [END, PAD, TURN_START, TURN_END, *(f"<|reserved_{i}|>" for i in range(28))]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HELD_OUT_ONE_IN = 40
# Tables rather than code: character maps and the text of pydoc's topics.
TABLES = ("encodings/", "pydoc_data/", "lib2to3/tests/data/", "site-packages/")
LARGEST_MODULE = 400_000


@dataclass(frozen=True)
class Module:
    """One source file: its path below the standard library, and its text."""

    path: str
    text: str

    @property
    def held_out(self) -> bool:
        """True for about one module in forty, decided by the path alone."""
        digest = hashlib.sha256(self.path.encode()).digest()
        return int.from_bytes(digest[:4], "little") % HELD_OUT_ONE_IN == 0


def standard_library() -> Iterator[Module]:
    """Yield the standard library's modules in path order: readable UTF-8 code, no tables."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py")):
        path = file.relative_to(root).as_posix()
        if (
            path.startswith(TABLES)
            or "site-packages" in path
            or file.stat().st_size > LARGEST_MODULE
        ):
            continue
        try:
            text = file.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if text.strip():
            yield Module(path, text)


def train_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE of 4,096 entries, the first 32 of them specials, on ``texts``."""
    from transformers import PreTrainedTokenizerFast  # which reading the corpus does without

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIALS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class Corpus:
    """Token ids of each module, END appended, and the bytes of the held-out text."""

    train: list[npt.NDArray[np.int64]]
    held_out: list[npt.NDArray[np.int64]]
    held_out_bytes: int

    @property
    def train_tokens(self) -> int:
        return sum(len(ids) for ids in self.train)


def encode(tokenizer: PreTrainedTokenizerFast, modules: list[Module]) -> Corpus:
    """Encode every module and append END to each."""
    end = tokenizer.convert_tokens_to_ids(END)
    encoded = tokenizer.backend_tokenizer.encode_batch([m.text for m in modules])
    ids = [np.array([*e.ids, end], dtype=np.int64) for e in encoded]
    pairs = list(zip(modules, ids, strict=True))
    return Corpus(
        train=[i for m, i in pairs if not m.held_out],
        held_out=[i for m, i in pairs if m.held_out],
        held_out_bytes=sum(len(m.text.encode()) for m in modules if m.held_out),
    )


def windows(
    documents: list[npt.NDArray[np.int64]], length: int, seed: int
) -> npt.NDArray[np.int64]:
    """Cut shuffled documents, laid end to end, into shuffled windows.

    Returns an int64 array [windows, length]; the tail that fills no window is dropped.
    """
    rng = np.random.default_rng(seed)
    stream = np.concatenate([documents[i] for i in rng.permutation(len(documents))])
    count = (len(stream) - int(rng.integers(length))) // length
    cut = stream[len(stream) - count * length :].reshape(count, length)
    return cut[rng.permutation(count)]
