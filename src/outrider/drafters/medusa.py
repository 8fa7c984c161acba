"""Medusa: heads on the target's last hidden state draft all tokens in one pass, without a cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch

from ..errors import ModelError
from ..models.decide import DraftInput
from ..models.families import find_folder
from ..models.heads import MEDUSA, Head, read_head
from ..models.native import NativeTransformer
from ..models.native_medusa import NativeMedusa
from ..models.rows import Segment
from ..sampling.shared_noise import Noise
from ..types import Draft, DraftBudget, HiddenStates, Scheduled, Verdict
from .base import Drafter, DrafterContext, DrafterSpec, Needs
from .eagle import check_native
from .model import NODES, NOTHING, draft_limits


@dataclass(frozen=True)
class MedusaSpec(DrafterSpec):
    """Medusa's heads in ``folder``."""

    name = "medusa"
    wants = "Medusa heads trained for the target; memory for them"
    costs = "a pass through the heads"
    suits = "any text"
    by_folder = True
    folder: Path

    @classmethod
    def recognise(cls, option: str | Path) -> Self | None:
        if isinstance(option, str) and "/" not in option and not Path(option).exists():
            return None
        folder = find_folder(option)
        head = read_head(folder) if folder.is_dir() else None
        return cls(folder) if head is not None and head.kind == MEDUSA else None

    def _head(self) -> Head:
        head = read_head(self.folder)
        if head is None or head.kind != MEDUSA:
            raise ModelError(f"{self.folder} has no Medusa heads; give the folder of some.")
        return head

    def needs(self, context: DrafterContext) -> Needs:
        config, target, head = context.config, context.model, self._head()
        check_native(self.name, context)
        assert isinstance(target, NativeTransformer)
        model = NativeMedusa(head, target, config.drafter_quantization)
        longest, most = min(config.max_draft_length, model.num_heads), config.max_draft_nodes
        if most is None and config.num_speculative_tokens is None:
            most = NODES
        return Needs(
            fixed_bytes=4 * model.hidden_size * config.max_num_seqs,
            max_nodes=max(longest, most or 0),
            target_layers=head.target_layers(target.hidden_layers),
            loaded=model,
        )

    def make(self, context: DrafterContext) -> MedusaDrafter:
        longest = min(context.config.max_draft_length, context.needs.loaded.num_heads)
        return MedusaDrafter(context.needs.loaded, longest, context.needs.max_nodes)


class MedusaDrafter(Drafter):
    """Drafts the token at each depth with a head of its own, from one state of the target.

    Args:
        model: the heads.
        max_length: longest draft.
        max_nodes: most nodes of a draft; more than ``max_length`` makes trees.
    """

    name = "medusa"
    rows_at_once = 1

    def __init__(self, model: NativeMedusa, max_length: int, max_nodes: int) -> None:
        self._model = model
        self.max_length, self.max_nodes = max_length, max_nodes
        self.target_layers = model.head.target_layers(model.target.hidden_layers)
        self._store = model.new_store(max(model.num_heads, max_nodes), 1)  # which takes no memory
        self._last: dict[str, tuple[int, torch.Tensor]] = {}
        """By sequence the position of its last row, and that row's state."""

    @property
    def model(self) -> NativeMedusa:
        return self._model

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        found = [NOTHING] * len(batch)
        segments: list[Segment] = []
        inputs: list[DraftInput] = []
        drafting: list[int] = []
        for i, (item, budget) in enumerate(zip(batch, budgets, strict=True)):
            sequence = item.sequence
            position, state = self._last.get(sequence.id, (-1, None))
            known = state is not None and position == len(sequence.tokens) - 2
            if budget.depth and known and state is not None and sequence.pipeline.native_handle:
                drafting.append(i)
                segments.append(self._model.segment(state, sequence.id))
                inputs.append(DraftInput(sequence, draft_limits(budget)))
        if segments:
            drafts = self._model.draft(segments, self._store, inputs, noise)
            for i, nodes in zip(drafting, drafts, strict=True):
                found[i] = nodes
        tokens, parents, _, margins, survivals, _ = map(list, zip(*found, strict=True))
        return Draft(tokens, parents, margins=margins, survivals=survivals)

    def observe(
        self,
        batch: Sequence[Scheduled],
        draft: Draft,
        verdict: Verdict,
        states: HiddenStates | None,
    ) -> None:
        """Keep the state of the last committed row of each sequence."""
        assert states is not None
        rows = [
            first + item.count + path[-1] if path else first + item.count - 1
            for item, path, first in zip(batch, verdict.path, states.first, strict=True)
        ]
        last = states.layers[self.target_layers[0]][rows]
        for i, (item, path) in enumerate(zip(batch, verdict.path, strict=True)):
            position = item.start + item.count - 1 + len(path)
            self._last[item.sequence.id] = position, last[i : i + 1]

    def release(self, seq_id: str, ended: bool) -> None:
        self._last.pop(seq_id, None)
