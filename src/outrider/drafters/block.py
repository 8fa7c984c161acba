"""DFlash, DFlash2 and DSpark: a head drafts a block in one pass, from the target's states.

See ``models.native_block``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..base.types import SequenceState
from ..checkpoints.files import weight_files
from ..checkpoints.heads import BLOCKS
from ..models.native_block import NativeBlock
from .base import Drafter, DrafterContext, Needs
from .eagle import EagleDrafter, head_needs
from .heads import HeadSpec, native_target
from .likely import likely_ids


@dataclass(frozen=True)
class BlockSpec(HeadSpec):
    """A DFlash, DFlash2 or DSpark checkpoint in ``folder``."""

    name = "dflash"
    wants = "a DFlash, DFlash2 or DSpark head trained for the target; memory for it and its cache"
    costs = "one pass of a few layers"
    prior = 0.8
    kind = "block head"
    proposes = "a head on the target's hidden states, proposes a block of {k} tokens in one pass"
    kinds = BLOCKS

    def needs(self, context: DrafterContext) -> Needs:
        config, head, target = context.config, self.head(), native_target(self.name, context)
        model = NativeBlock(head, target, context.max_model_len, config.drafter_quantization)
        likely = None
        if head.borrows_logits:
            likely = likely_ids(model, weight_files(head.folder), context)
        longest = min(config.max_draft_length, head.longest or config.max_draft_length)
        return replace(head_needs(config, model, target, longest), loaded=(model, likely))

    def make(self, context: DrafterContext) -> Drafter:
        return BlockDrafter(context)


class BlockDrafter(EagleDrafter[NativeBlock]):
    """Drafts with a head whose cache has an entry from each token's own state but the last's."""

    name = "dflash"
    _ahead = 1

    def __init__(self, context: DrafterContext) -> None:
        super().__init__(context)
        self.rows_at_once = self.max_length + (not self._model.block.from_anchor)

    def _ends(self, sequence: SequenceState, start: int, count: int) -> dict[int, int]:
        """Return nothing: no entry is made from another token's state."""
        return {}
