"""Reads a checkpoint: everything that an engine needs except the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..base.methods import AUTO
from ..base.types import Folder
from ..checkpoints.families import find_folder, read_config, read_shape
from ..checkpoints.heads import read_head
from ..checkpoints.tokenizers import has_tokenizer, read_codec
from ..drafters.base import DrafterSpec
from ..drafters.heads import verifier_of
from ..drafters.ngram import NgramSpec
from ..drafters.registry import GroupSpec, find_drafter, with_head
from ..errors import ModelError
from ..text.codec import TextCodec, differing_entries
from .worker.given import given
from .worker.messages import Facts


class Checkpoint:
    """A checkpoint and the options of its engine.

    ``folder`` is the target's, ``model_config`` its config, ``spec`` the drafter, ``config`` the
    engine's options, ``tokenizer`` the target's, for grammars. ``facts`` are for the frontend.

    Args:
        model, drafter, options: as ``LLM`` takes them.

    Raises:
        ConfigError: an option is wrong.
        ModelError: the checkpoint or a tokenizer cannot be used.
    """

    def __init__(
        self, model: Folder, drafter: Folder | DrafterSpec | None, options: Mapping[str, Any]
    ) -> None:
        wanted = given(drafter, options)
        self.folder = find_folder(model)
        head = read_head(self.folder)
        if head is not None:
            self.folder = verifier_of(head)
            if head.longest is not None and wanted.drafter == AUTO:
                wanted.engine.setdefault("num_speculative_tokens", head.longest)
        self.config = wanted.config()
        self.model_config = read_config(self.folder)
        shape = read_shape(self.model_config, self.folder)
        self.spec = find_drafter(wanted.drafter, self.folder)
        if head is not None:
            self.spec = with_head(self.spec, head)
        lookup = NgramSpec(**wanted.lookup)  # refuses wrong sizes, whichever drafter is used
        if isinstance(self.spec, NgramSpec):
            self.spec = lookup
        elif isinstance(self.spec, GroupSpec):
            members = (lookup if isinstance(m, NgramSpec) else m for m in self.spec.members)
            self.spec = replace(self.spec, members=tuple(members))
        source = self.folder if wanted.tokenizer is None else find_folder(wanted.tokenizer)
        codec = (
            read_codec(source, self.config.special_tokens_in_text)
            if has_tokenizer(source)
            else None
        )
        if codec is None and wanted.tokenizer is not None:
            raise ModelError(
                f"{wanted.tokenizer} has no tokenizer; give a folder with tokenizer.json."
            )
        for each in (self.spec, *self.spec.members):
            _check_tokenizers(codec, each)
        self.tokenizer = None if codec is None else codec.backend
        ends = shape.eos_token_ids | (codec.end_token_ids if codec else frozenset())
        self.model_config.eos_token_id = sorted(ends) or None  # the engine reads it there
        self.facts = Facts(
            self.folder, self.config, self.spec.name, shape.vocab_size,
            self.config.model_length(shape.context), ends, codec,
        )  # fmt: skip


def _check_tokenizers(target: TextCodec | None, spec: DrafterSpec) -> None:
    """Refuse a drafter whose token ids mean other text than the target's.

    Raises:
        ModelError: they do.
    """
    if spec.folder is None or spec.retokenizes or target is None:
        return
    if not has_tokenizer(spec.folder):
        return
    entries = differing_entries(*(c.backend.get_vocab() for c in (target, read_codec(spec.folder))))
    if entries:
        more = f" and {len(entries) - 3} more" if len(entries) > 3 else ""
        raise ModelError(
            f"the drafter in {spec.folder} has another tokenizer: {'; '.join(entries[:3])}{more}. "
            "Give a drafter trained with the target's tokenizer, or drafter="
            f"{f'retokenize:{spec.folder}'!r} to have its drafts written in the target's."
        )
