"""Checks whether a drafter's checkpoint fits a target, without loading the weights of either."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..errors import ModelError
from ..models.families import Architecture, read_architecture, read_config, read_shape
from ..models.heads import (
    MEDUSA,
    Head,
    HeadTensors,
    drafted_ids,
    expected_tensors,
    optional_tensors,
    read_head,
)
from ..models.native import covers, native_dtype
from ..text.codec import TextCodec, differing_entries, has_tokenizer

SHOWN = 3
"""Differences of tokenizers that are named."""


class Fact(NamedTuple):
    """One thing that drafter and target must agree on: what each has, and whether it fits."""

    what: str
    drafter: str
    target: str
    fits: bool


def check(folder: Path, target: Path) -> tuple[str, list[Fact]]:
    """Return what a checkpoint is as a drafter, and how it fits the target in a folder.

    Raises:
        ModelError: one of them cannot be read.
    """
    head = read_head(folder)
    if head is None:
        return "model", [*_model(folder, target)]
    return head.kind, [*_head(head, target), *_tensors(head)]


def _model(folder: Path, target: Path) -> Iterator[Fact]:
    own, theirs = (read_shape(read_config(each), each) for each in (folder, target))
    if has_tokenizer(folder) and has_tokenizer(target):
        both = (TextCodec(each).backend.get_vocab() for each in (target, folder))
        entries = differing_entries(*both)
        more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
        said = "; ".join(entries[:SHOWN]) + more if entries else "the same"
        yield Fact("tokenizer", said, "the same is needed", not entries)
    size = own.vocab_size, theirs.vocab_size
    yield Fact("vocabulary", f"{size[0]}", f"{size[1]}; padding may differ", True)
    fits = own.context >= theirs.context
    told = f"{theirs.context} tokens" if fits else f"{theirs.context}; it drafts up to its own"
    yield Fact("context", f"{own.context} tokens", told, True)


def _head(head: Head, target: Path) -> Iterator[Fact]:
    config = read_config(target)
    found = read_architecture(config, target)
    yield Fact("target", head.verifier or "not said", str(target), True)
    native = found is not None and covers(config, found, native_dtype("auto", found.dtype))
    needed = "a family that the native step runs is needed"
    yield Fact("family", needed, config.model_type, native)
    if found is None:
        return
    for what, own, theirs in (
        ("vocabulary", head.vocab_size, found.vocab_size),
        ("width", head.hidden_size, found.hidden_size),
    ):
        yield Fact(what, f"{own}", f"{theirs}", own == theirs)
    yield _layers(head, found)


def _layers(head: Head, target: Architecture) -> Fact:
    count = f"{target.num_layers} layers"
    try:
        return Fact("layers", f"outputs of {[*head.target_layers(target.num_layers)]}", count, True)
    except ModelError:
        return Fact("layers", f"outputs of {[*(head.layers or ())]}", count, False)


def _tensors(head: Head) -> Iterator[Fact]:
    """Yield what is wrong with a head's own tensors; one fact where nothing is."""
    tensors, wrong = HeadTensors(head.folder), False
    needed = expected_tensors(head)
    for name, shape in {**needed, **optional_tensors(head)}.items():
        found = tensors.shape(name)
        if found != shape and (found is not None or name in needed):
            said = "missing" if found is None else f"{[*found]}"
            yield Fact(f"tensor {name}", said, f"its config.json says {[*shape]}", False)
            wrong = True
    if head.kind != MEDUSA and not wrong:
        try:
            drafted_ids(tensors, head)
        except ModelError as error:
            yield Fact("ids", str(error), "", False)
            wrong = True
    if not wrong:
        yield Fact("tensors", "complete", "", True)
