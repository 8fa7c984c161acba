"""Checks whether a drafter's checkpoint fits a target, without loading the weights of either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ..checkpoints.dtypes import native_dtype
from ..checkpoints.families import Architecture, read_architecture, read_config, read_shape
from ..checkpoints.head_tensors import HeadTensors, drafted_ids, misfits
from ..checkpoints.heads import MEDUSA, Head, read_head
from ..checkpoints.tokenizers import has_tokenizer, read_codec
from ..errors import ModelError
from ..models.native import covers
from ..text.codec import differing_entries
from ..text.intersection import Intersection, intersection, pieces_of
from .retokenize import RetokenizeSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

DRAFT = 4
"""Tokens of the drafts by which losses are told."""
SHOWN = 3
"""Differences of tokenizers that are named."""


class Fact(NamedTuple):
    """One thing that drafter and target must agree on: what each has, and whether it fits."""

    what: str
    drafter: str
    target: str
    fits: bool
    value: float | None = None
    """The share that the words tell."""


def check_retokenized(folder: Path, target: Path, texts: Sequence[str]) -> tuple[str, list[Fact]]:
    """Return how a checkpoint with another tokenizer fits the target in a folder.

    What is lost to tokens that are not shared is reckoned on ``texts``, as the target writes them.

    Raises:
        ModelError: one of them cannot be read.
    """
    return RetokenizeSpec.name, [*_retokenized(folder, target, texts)]


def _retokenized(folder: Path, target: Path, texts: Sequence[str]) -> Iterator[Fact]:
    both = target, folder
    configs = [read_config(each) for each in both]
    native = [_is_native(*pair) for pair in zip(configs, both, strict=True)]
    kinds = [
        config.model_type + ("" if n else ", no native step")
        for config, n in zip(configs, native, strict=True)
    ]
    yield Fact("family", kinds[1], kinds[0], all(native))
    there = [has_tokenizer(each) for each in both]
    if not all(there):
        words = ["there" if each else "none" for each in there]
        yield Fact("tokenizer", words[1], words[0], False)
        return
    codecs = [read_codec(each) for each in both]
    sizes = [read_shape(*pair).vocab_size for pair in zip(configs, both, strict=True)]
    try:
        theirs, ours = (
            pieces_of(codec.backend, size, str(each))
            for codec, size, each in zip(codecs, sizes, both, strict=True)
        )
    except ModelError as error:
        yield Fact("tokenizer", str(error), "", False)
        return
    shared = intersection(theirs, ours)
    of_target, of_drafter = shared.shares
    own, other = (f"{shared.count} tokens, {share:.0%} of all" for share in (of_drafter, of_target))
    yield Fact("shared vocabulary", own, other, shared.count > 0, of_target)
    said, lost = losses(shared, [codecs[0].encode(text, special=False) for text in texts])
    told = f"says {said:.1%} of the target's tokens in the bundled texts"
    yield Fact("tokens it can say", told, "the others end a draft", True, said)
    yield Fact(
        "expected loss", f"{lost:.1%} of drafts of {DRAFT} tokens", "at the least", True, lost
    )


def losses(shared: Intersection, texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return which share of the tokens of texts a drafter can say, and how much drafts lose.

    A draft of ``DRAFT`` tokens begins at each token and ends at the first that is not shared; what
    lies behind that is lost, however well the drafter knows it.

    Args:
        shared: the tokens of both.
        texts: as ids of the target.
    """
    known = {id for id in shared.targets if id >= 0}
    said = count = reached = asked = 0
    for ids in texts:
        run = 0
        for left, id in enumerate(reversed(ids), 1):
            run = run + 1 if id in known else 0
            said += id in known
            reached += min(run, DRAFT)
            asked += min(left, DRAFT)
        count += len(ids)
    return said / max(1, count), 1 - reached / max(1, asked)


def _is_native(config: PretrainedConfig, folder: Path) -> bool:
    found = read_architecture(config, folder)
    return found is not None and covers(config, found, native_dtype("auto", found.dtype))


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
    yield from _tokenizer(folder, target, "the same is needed, or retokenize:PATH")
    yield _vocabulary(folder, target, own.vocab_size, theirs.vocab_size)
    fits = own.context >= theirs.context
    told = f"{theirs.context} tokens" if fits else f"{theirs.context}; it drafts up to its own"
    yield Fact("context", f"{own.context} tokens", told, True)


def _vocabulary(folder: Path, target: Path, own: int, theirs: int) -> Fact:
    """Return whether the sizes of two vocabularies are equal, or differ by padding only."""
    held = [
        1 + max(read_codec(each).backend.get_vocab().values(), default=-1)
        for each in (folder, target)
        if has_tokenizer(each)
    ]
    if own == theirs:
        return Fact("vocabulary", f"{own}", f"{theirs}", True)
    padded = bool(held) and max(held) <= min(own, theirs)
    why = "the difference is padding" if padded else "another vocabulary"
    return Fact("vocabulary", f"{own}", f"{theirs}; {why}", padded)


def _tokenizer(folder: Path, target: Path, needed: str) -> Iterator[Fact]:
    """Yield whether two checkpoints have the same tokenizer, if both have one."""
    if has_tokenizer(folder) and has_tokenizer(target):
        both = (read_codec(each).backend.get_vocab() for each in (target, folder))
        entries = differing_entries(*both)
        more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
        said = "; ".join(entries[:SHOWN]) + more if entries else "the same"
        yield Fact("tokenizer", said, needed, not entries)


def _head(head: Head, target: Path) -> Iterator[Fact]:
    config = read_config(target)
    found = read_architecture(config, target)
    yield Fact("target", head.verifier or "not said", str(target), True)
    yield from _tokenizer(head.folder, target, "the same is needed")
    native = _is_native(config, target)
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
    wrong = False
    for name, found, needed in misfits(head):
        yield Fact(f"tensor {name}", found, needed, False)
        wrong = True
    if head.kind != MEDUSA and not wrong:
        try:
            drafted_ids(HeadTensors(head.folder), head)
        except ModelError as error:
            yield Fact("ids", str(error), "", False)
            wrong = True
    if not wrong:
        yield Fact("tensors", "complete", "", True)
