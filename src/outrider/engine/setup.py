"""Reads everything that an engine needs except the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from ..base.config import EngineConfig
from ..base.methods import AUTO
from ..base.threads import choose_threads
from ..base.types import Folder
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.files import Files
from ..checkpoints.folders import find_folder
from ..checkpoints.heads import read_head
from ..checkpoints.tokenizers import codec_to_read, differences, has_tokenizer
from ..checkpoints.unread import UnreadCodec
from ..drafters.base import DrafterSpec
from ..drafters.heads import verifier_of
from ..drafters.ngram import NgramSpec
from ..drafters.registry import GroupSpec, find_drafter, with_head, with_loaded
from ..errors import ModelError
from ..text.codec import TextCodec
from .worker.given import given
from .worker.messages import Facts


@dataclass(frozen=True)
class EngineSetup:
    """The parts of an engine: the target's checkpoint and codec, the drafter, and the options."""

    checkpoint: Checkpoint
    spec: DrafterSpec
    config: EngineConfig
    codec: TextCodec | UnreadCodec | None

    @property
    def tokenizes(self) -> Callable[[], Tokenizer] | None:
        """The function that returns the target's tokenizer; None for a model without text."""
        codec = self.codec
        if isinstance(codec, UnreadCodec):
            return lambda: codec.read().backend
        return None if codec is None else lambda: codec.backend

    @property
    def folders(self) -> dict[str, str]:
        """The absolute paths of drafters' checkpoints, by the drafters' names."""
        specs = self.spec.members or (self.spec,)
        return {each.name: str(each.folder.absolute()) for each in specs if each.folder}

    @property
    def facts(self) -> Facts:
        """The facts that the frontend needs."""
        shape = self.checkpoint.shape
        return Facts(
            self.checkpoint.folder, self.config, self.spec.name, shape.vocab_size,
            self.config.model_length(shape.context), shape.eos_token_ids, self.codec,
        )  # fmt: skip


def set_up(
    model: Folder,
    drafter: Folder | DrafterSpec | None,
    options: Mapping[str, Any],
    loaded: Path | None = None,
) -> EngineSetup:
    """Return the parts of an engine; arguments are those of ``LLM``.

    ``loaded`` is a drafter's checkpoint that was loaded later and replaces the first one.

    Raises ConfigError for a wrong option, ModelError where a checkpoint or tokenizer is unusable.
    """
    wanted = given(drafter, options)
    files = Files(find_folder(model))
    head = read_head(files)
    if head is not None:
        files = verifier_of(head)
        if head.proposed is not None and wanted.drafter == AUTO:
            wanted.engine.setdefault("num_speculative_tokens", head.proposed)
    config = EngineConfig(**wanted.engine)
    choose_threads(config.threads)
    checkpoint = open_checkpoint(files)
    spec = find_drafter(wanted.drafter, files)
    if head is not None:
        spec = with_head(spec, head)
    if loaded is not None:
        spec = with_loaded(spec, loaded)
    lookup = NgramSpec(**wanted.lookup)  # refuses wrong sizes, whichever drafter is used
    if isinstance(spec, NgramSpec):
        spec = lookup
    elif isinstance(spec, GroupSpec):
        members = (lookup if isinstance(m, NgramSpec) else m for m in spec.members)
        spec = replace(spec, members=tuple(members))
    source = files if wanted.tokenizer is None else Files(find_folder(wanted.tokenizer))
    codec = codec_to_read(source, config.special_tokens_in_text) if has_tokenizer(source) else None
    if codec is None and wanted.tokenizer is not None:
        raise ModelError(f"{wanted.tokenizer} has no tokenizer; give a folder with tokenizer.json.")
    for each in (spec, *spec.members):
        if codec is not None:
            _check_tokenizers(source, each)
    if isinstance(codec, TextCodec):  # for an unread one the shape has the GGUF file's
        ends = checkpoint.shape.eos_token_ids | codec.end_token_ids
        checkpoint = replace(checkpoint, shape=replace(checkpoint.shape, eos_token_ids=ends))
    return EngineSetup(checkpoint, spec, config, codec)


def _check_tokenizers(target: Files, spec: DrafterSpec) -> None:
    """Raise ModelError where a drafter's token ids mean other text than the target's."""
    if spec.folder is None or spec.retokenizes or not has_tokenizer(spec.files):
        return
    entries = differences(target, spec.files)
    if entries:
        more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
        raise ModelError(
            f"the drafter in {spec.folder} has another tokenizer: {'; '.join(entries[:3])}{more}. "
            "Give a drafter trained with the target's tokenizer, or drafter="
            f"{f'retokenize:{spec.folder}'!r} to have its drafts written in the target's."
        )
