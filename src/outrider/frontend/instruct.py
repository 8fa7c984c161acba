"""Distinguishes models that are made to chat from those that continue texts."""

import re
from pathlib import Path

from ..checkpoints.formats.gguf import is_gguf, open_gguf
from ..text.codec import TextCodec

CHATS = re.compile(
    r"(?<![a-z])(instruct|chat|it|assistant|think(ing)?|reason(ing|er)?|r1|gpt-oss)(?![a-z])", re.I
)
"""Words in the names of models that chat; base models have chat templates, too."""
KEYS = ("general.finetune", "general.name", "general.basename")
"""Metadata of a GGUF file with such words."""


def is_instruct(model: Path, codec: TextCodec | None) -> bool:
    """Return whether a checkpoint has a chat template, and a name of a model that chats."""
    if codec is None or not codec.templates:
        return False
    names = [model.name]
    if is_gguf(model):
        metadata = open_gguf(model).metadata
        names += [str(metadata.get(key) or "") for key in KEYS]
    return any(CHATS.search(name) for name in names)
