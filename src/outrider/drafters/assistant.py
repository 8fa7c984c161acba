"""Gemma 4's assistant: a small model that drafts from the target's keys and values.

It has no cache of its own, so that nothing is read again, and nothing goes back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from ..base.config import NO_RECIPES
from ..base.extras import torch_for
from ..base.types import DraftBudget, Scheduled
from ..checkpoints.assistant import TARGETS, is_assistant
from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.files import Files
from ..errors import ConfigError, ModelError
from ..models.base import Store
from ..models.decide import DraftInput
from ..models.rows import Segment
from .base import Drafter, DrafterContext, FolderSpec, Needs
from .forward import ForwardDrafter, draft_limits

if TYPE_CHECKING:
    from ..models.assistant import Assistant


@dataclass(frozen=True)
class AssistantSpec(FolderSpec):
    """The assistant of a Gemma 4 in ``folder``."""

    name = "assistant"
    wants = "Gemma 4 as the target, and the assistant that was published for it; no cache"
    costs = "a few small layers and an output matrix for each token of depth"
    suits = "any text"
    prior = 0.8
    kind = "assistant"
    proposes = "an assistant that reads the target's keys and values, proposes {k} tokens"

    @classmethod
    def of(cls, files: Files) -> Self | None:
        return super().of(files) if is_assistant(files) else None

    def needs(self, context: DrafterContext) -> Needs:
        target, quantization = context.model, context.config.drafter_quantization
        if target.shape.family not in TARGETS:
            raise ModelError(
                f"{self.folder} is the assistant of a Gemma 4, and the target is a "
                f"{target.shape.family!r} model; give the target that it was made for."
            )
        if quantization not in NO_RECIPES:
            raise ConfigError(
                f"drafter {self.name!r} runs in the target's dtype; leave drafter_quantization out."
            )
        checkpoint = open_checkpoint(self.files)
        with torch_for(f"drafter {self.name!r}"):
            from ..models.assistant import Assistant
            from ..models.fallback import Fallback

        if not isinstance(target, Fallback):
            raise ConfigError(
                f"drafter {self.name!r} reads the target's own keys and values, and a replay of it "
                "has none; give another drafter."
            )
        model = Assistant(checkpoint, target)
        return Needs(
            max_nodes=context.config.max_draft_length,
            loaded=model,
            weight_bytes=model.added_bytes(target),
        )

    def make(self, context: DrafterContext) -> Drafter:
        return AssistantDrafter(context, context.needs.loaded)


class AssistantDrafter(ForwardDrafter["Assistant"]):
    """Drafts after sequences whose last step the target ran; others wait for the next step."""

    name = "assistant"

    def __init__(self, context: DrafterContext, model: Assistant) -> None:
        super().__init__(context, model, Store())

    def attach(self, store: Store) -> None:
        self._store = store

    def _rows(self, item: Scheduled, budget: DraftBudget) -> Segment | None:
        sequence, length = item.sequence, len(item.sequence.tokens)
        if not self._model.can_draft(self._store, sequence.id, length):
            return None
        last, prompt = sequence.tokens[-1:], sequence.prompt_length
        return Segment(last, length - 1, (), 1, prompt, key=sequence.id)

    def _asked(self, item: Scheduled, budget: DraftBudget) -> DraftInput:
        limits = budget._replace(nodes=min(budget.nodes, budget.depth))  # a chain
        return DraftInput(item.sequence, draft_limits(limits))
