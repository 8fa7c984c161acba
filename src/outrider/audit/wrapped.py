"""Wrappers that forward every call: bases for watching a request or injecting faults."""

from collections.abc import Sequence
from typing import Any

from ..base.types import (
    Draft,
    DraftBudget,
    LogitsPipeline,
    Scheduled,
    SequenceState,
    StepRecord,
)
from ..drafters.base import Drafter
from ..models.base import RowsModel
from ..sampling.shared_noise import Noise


class WrappedPipeline:
    """A sequence's logits pipeline around another one; without a handle, Python always calls it."""

    native_handle = 0

    def __init__(self, inner: LogitsPipeline) -> None:
        self.inner = inner
        self.has_grammar, self.penalises = inner.has_grammar, inner.penalises
        self.masks, self.fit = inner.masks, inner.fit

    @property
    def error(self) -> str | None:
        return self.inner.error

    def apply(self, logits: Any, tokens: list[int], paths: list[list[int]]) -> Any:
        return self.inner.apply(logits, tokens, paths)


class WrappedDrafter(Drafter):
    """A drafter around another one, with the same name."""

    def __init__(self, inner: Drafter) -> None:
        self.name, self.target_layers = inner.name, inner.target_layers
        self.max_length, self.max_nodes = inner.max_length, inner.max_nodes
        self.inner = inner

    @property
    def model(self) -> RowsModel | None:
        return self.inner.model

    def prepare(self, sequences: Sequence[SequenceState], noise: Noise) -> bool:
        return self.inner.prepare(sequences, noise)

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        return self.inner.propose(batch, budgets, noise)

    def observe(self, record: StepRecord) -> None:
        self.inner.observe(record)

    def release(self, seq_id: str, ended: bool) -> None:
        self.inner.release(seq_id, ended)
