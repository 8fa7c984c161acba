"""Checks whether a drafter's checkpoint fits a target, without loading the weights of either."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from ..base.outside.text import printable
from ..checkpoints.architecture import Architecture
from ..checkpoints.assistant import is_assistant, missing, pairs
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.extras import Extras, extras_of
from ..checkpoints.files import Files
from ..checkpoints.head_tensors import HeadTensors, drafted_ids, misfits
from ..checkpoints.heads import MEDUSA, Head, read_head
from ..checkpoints.mtp import lacking, num_layers, promised, why_none
from ..checkpoints.tokenizers import differences, has_tokenizer, read_codec, vocabulary_of
from ..errors import ModelError, shown
from ..models.native import is_native
from ..text.intersection import Intersection, intersection, pieces_of
from .assistant import AssistantSpec
from .mtp import MtpSpec
from .retokenize import RetokenizeSpec

DRAFT_TOKENS = 4
"""Tokens of the drafts for which losses are computed."""
SHOWN_ENTRIES = 3
"""Differences of tokenizers that are shown."""


class Fact(NamedTuple):
    """One thing that drafter and target must agree on: what each has, and whether it fits."""

    what: str
    drafter: str
    target: str
    fits: bool
    value: float | None = None
    """The number in the words, if there is one."""


def check_retokenized(folder: Path, target: Path, texts: Sequence[str]) -> tuple[str, list[Fact]]:
    """Return how a checkpoint with another tokenizer fits the target, and its losses on ``texts``.

    Raises ModelError if one of them cannot be read.
    """
    return RetokenizeSpec.name, [*_retokenized(Files(folder), Files(target), texts)]


def _retokenized(own: Files, target: Files, texts: Sequence[str]) -> Iterator[Fact]:
    both = target, own
    opened = [open_checkpoint(each) for each in both]
    native = [is_native(each) for each in opened]
    kinds = [
        each.config.model_type + ("" if n else ", no native step")
        for each, n in zip(opened, native, strict=True)
    ]
    yield Fact("family", kinds[1], kinds[0], all(native))
    there = [has_tokenizer(each) for each in both]
    if not all(there):
        words = ["there" if each else "none" for each in there]
        yield Fact("tokenizer", words[1], words[0], False)
        return
    codecs = [read_codec(each) for each in both]
    try:
        theirs, ours = (
            pieces_of(codec.backend, each.shape.vocab_size, str(each.folder))
            for codec, each in zip(codecs, opened, strict=True)
        )
    except ModelError as error:
        yield Fact("tokenizer", str(error), "", False)
        return
    shared = intersection(theirs, ours)
    of_target, of_drafter = shared.shares
    counts = [f"{shared.count} tokens, {share:.0%} of all" for share in (of_drafter, of_target)]
    yield Fact("shared vocabulary", counts[0], counts[1], shared.count > 0, of_target)
    said, lost = losses(shared, [codecs[0].encode(text, special=False) for text in texts])
    told = f"says {said:.1%} of the target's tokens in the bundled texts"
    yield Fact("tokens it can say", told, "the others end a draft", True, said)
    share = f"{lost:.1%} of drafts of {DRAFT_TOKENS} tokens"
    yield Fact("expected loss", share, "at the least", True, lost)


def losses(shared: Intersection, texts: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Return the share of ``texts``' tokens, ids of the target, that a drafter can draft.

    Also return the share that drafts lose: one of ``DRAFT_TOKENS`` begins at each token and ends
    before the first that is not shared; the rest is lost.
    """
    known = {id for id in shared.targets if id >= 0}
    said = count = reached = asked = 0
    for ids in texts:
        run = 0
        for left, id in enumerate(reversed(ids), 1):
            run = run + 1 if id in known else 0
            said += id in known
            reached += min(run, DRAFT_TOKENS)
            asked += min(left, DRAFT_TOKENS)
        count += len(ids)
    return said / max(1, count), 1 - reached / max(1, asked)


def check(folder: Path, target: Path) -> tuple[str, list[Fact]]:
    """Return which kind of drafter a checkpoint is, and how it fits the target in a folder.

    Raises ModelError if one of them cannot be read.
    """
    both = Files(folder), Files(target)
    if is_assistant(both[0]):
        return AssistantSpec.name, [*_assistant(*both)]
    head = read_head(both[0])
    if head is None:
        return "model", [*_model(*both), *_extras(extras_of(both[0]))]
    return head.kind, [*_head(head, both[1]), *_tensors(head), *_extras(head.extras)]


def check_mtp(target: Path) -> tuple[str, list[Fact]]:
    """Return whether the MTP layers inside a target exist and are complete.

    Raises ModelError if the target cannot be read.
    """
    files = Files(target)
    own = MtpSpec.inside(files)
    said = f"{promised(files)} promised"
    if own is None:
        return MtpSpec.name, [Fact("MTP layers", f"none: {why_none(files)}", said, False)]
    checkpoint = open_checkpoint(files)
    native = is_native(checkpoint)
    needed = "a family that the native step runs is needed"
    facts = [
        Fact("MTP layers", f"{num_layers(own.files)} in {own.files}", said, True),
        Fact("family", needed, checkpoint.config.model_type, native),
    ]
    if checkpoint.architecture is not None:
        lost = lacking(own.files, checkpoint.architecture)
        facts += [Fact(f"tensor {name}", what, "needed", False) for name, what in lost.items()]
        facts += [] if lost else [Fact("tensors", "complete", "", True)]
    return MtpSpec.name, facts


def _extras(extras: Extras) -> Iterator[Fact]:
    """Yield what a checkpoint recommends, and what was measured of it."""
    for use, length in extras.lengths.items():
        yield Fact(f"tokens for {use}", f"{length} recommended", "", True, length)
    for each in extras.measured:
        yield Fact(f"measured, {each.use}", each.said(), "", True, each.acceptance_length)


def _assistant(folder: Files, target: Files) -> Iterator[Fact]:
    own = open_checkpoint(folder)
    yield from _tokenizer(folder, target, "the same is needed")
    yield from (Fact(*pair) for pair in pairs(own.config, open_checkpoint(target).config))
    wrong = missing(own)
    yield from (Fact(f"tensor {name}", what, "needed", False) for name, what in wrong.items())
    if not wrong:
        yield Fact("tensors", "complete", "", True)


def _model(folder: Files, target: Files) -> Iterator[Fact]:
    own, theirs = (open_checkpoint(each).shape for each in (folder, target))
    yield from _tokenizer(folder, target, "the same is needed, or retokenize:PATH")
    yield _vocabulary(folder, target, own.vocab_size, theirs.vocab_size)
    fits = own.context >= theirs.context
    told = f"{theirs.context} tokens" if fits else f"{theirs.context}; it drafts up to its own"
    yield Fact("context", f"{own.context} tokens", told, True)


def _vocabulary(folder: Files, target: Files, own: int, theirs: int) -> Fact:
    """Return whether the sizes of two vocabularies are equal, or differ by padding only."""
    held = [
        1 + max(vocabulary_of(each).values(), default=-1)
        for each in (folder, target)
        if has_tokenizer(each)
    ]
    if own == theirs:
        return Fact("vocabulary", f"{own}", f"{theirs}", True)
    padded = bool(held) and max(held) <= min(own, theirs)
    why = "the difference is padding" if padded else "another vocabulary"
    return Fact("vocabulary", f"{own}", f"{theirs}; {why}", padded)


def _tokenizer(folder: Files, target: Files, needed: str) -> Iterator[Fact]:
    """Yield whether two checkpoints have the same tokenizer, if both have one."""
    if has_tokenizer(folder) and has_tokenizer(target):
        entries = differences(target, folder)
        more = f" and {len(entries) - SHOWN_ENTRIES} more" if len(entries) > SHOWN_ENTRIES else ""
        said = "; ".join(entries[:SHOWN_ENTRIES]) + more if entries else "the same"
        yield Fact("tokenizer", said, needed, not entries)


def _head(head: Head, target: Files) -> Iterator[Fact]:
    checkpoint = open_checkpoint(target)
    architecture = checkpoint.architecture
    yield Fact("target", printable(head.verifier or "not said"), str(target), True)
    yield from _tokenizer(head.files, target, "the same is needed")
    needed = "a family that the native step runs is needed"
    yield Fact("family", needed, checkpoint.config.model_type, is_native(checkpoint))
    if architecture is None:
        return
    for what, own, theirs in (
        ("vocabulary", head.vocab_size, architecture.vocab_size),
        ("width", head.hidden_size, architecture.hidden_size),
    ):
        yield Fact(what, f"{own}", f"{theirs}", own == theirs)
    yield _layers(head, architecture)


def _layers(head: Head, target: Architecture) -> Fact:
    count = f"{target.num_layers} layers"
    try:
        layers, fits = head.target_layers(target.num_layers), True
    except ModelError:
        layers, fits = head.layers or (), False
    return Fact("layers", f"outputs of {shown([*layers])}", count, fits)


def _tensors(head: Head) -> list[Fact]:
    """Return what is wrong with a head's own tensors; one fact where nothing is."""
    wrong = [Fact(f"tensor {name}", own, needed, False) for name, own, needed in misfits(head)]
    if head.kind != MEDUSA and not wrong:
        try:
            drafted_ids(HeadTensors(head.files), head)
        except ModelError as error:
            wrong.append(Fact("ids", str(error), "", False))
    return wrong or [Fact("tensors", "complete", "", True)]
