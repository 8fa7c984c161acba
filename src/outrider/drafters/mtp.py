"""MTP: layers inside a checkpoint that were trained to predict its further tokens.

DeepSeek-AI, "DeepSeek-V3 technical report", 2024, section 2.2; one layer is applied again and again
(Qwen3.5).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from ..checkpoints.files import Files
from ..checkpoints.mtp import companion, has_mtp, is_alone, mtp_files
from ..models.native_mtp import NativeMtp
from .base import Drafter, DrafterContext, FolderSpec, Needs
from .eagle import EagleDrafter, head_needs
from .heads import native_target
from .likely import likely_ids


@dataclass(frozen=True)
class MtpSpec(FolderSpec):
    """The MTP layers of the checkpoint in ``folder``, which is the target's."""

    name = "mtp"
    wants = "a target whose checkpoint has MTP layers (mtp.*); memory for them and their cache"
    costs = "a layer and the output matrix's rows of likely ids for each token of depth"
    suits = "any text"
    prior = 0.8
    kind = "MTP layers"
    proposes = "the checkpoint's own MTP layers, propose {k} tokens"
    found: bool = False
    """True if ``auto`` found them; it goes on without them if they do not load."""

    @classmethod
    def of(cls, files: Files) -> Self | None:
        """Return the drafter of a checkpoint that has nothing but MTP layers."""
        return super().of(files) if is_alone(files) else None

    @classmethod
    def inside(cls, files: Files) -> Self | None:
        """Return the drafter inside a target's checkpoint, or in a GGUF file that goes with it."""
        own = files if has_mtp(files) else companion(files)
        return None if own is None else super().of(own)

    def needs(self, context: DrafterContext) -> Needs:
        config, target = context.config, native_target(self.name, context)
        longest, recipe = context.max_model_len, config.drafter_quantization
        model = NativeMtp(self.files, target, longest, recipe)
        likely = likely_ids(model, mtp_files(self.files), context)
        return replace(head_needs(config, model, target), loaded=(model, likely))

    def make(self, context: DrafterContext) -> Drafter:
        return MtpDrafter(context)


class MtpDrafter(EagleDrafter[NativeMtp]):
    """Drafts with MTP layers, whose rows take states as those of an EAGLE-3 head do."""

    name = "mtp"
