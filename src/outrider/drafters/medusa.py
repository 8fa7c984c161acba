"""Medusa: heads on the target's last hidden state draft all tokens in one pass, without a cache."""

from __future__ import annotations

from dataclasses import dataclass

from ..base.fields import Fields
from ..base.types import DraftBudget, Scheduled, StepRecord
from ..checkpoints.heads import MEDUSA, Head, read_choices
from ..models.native_heads import NativeMedusa
from ..models.rows import Segment
from ..native.interface import Choices
from .base import Drafter, DrafterContext, Needs
from .forward import ForwardDrafter, num_nodes
from .heads import HeadSpec, native_target


@dataclass(frozen=True)
class MedusaSpec(HeadSpec):
    """Medusa's heads in ``folder``.

    Args:
        choices: the tree that they draft, a list of paths of ranks; None for that of the checkpoint
            (``medusa_choices`` in its config.json), or where it has none for trees that are learned
            from what is accepted.
    """

    name = "medusa"
    wants = "Medusa heads trained for the target; memory for them"
    costs = "a pass through the heads"
    prior = 0.65
    kind = "heads of Medusa"
    proposes = (
        "heads on the target's hidden state, one for each of up to {k} tokens, proposes them in "
        "one pass"
    )
    options = "medusa_choices in its config.json, or MedusaSpec(choices=...): the tree it drafts"
    kinds = (MEDUSA,)
    choices: list[list[int]] | None = None

    def _choices(self, head: Head, longest: int) -> Choices | None:
        """Return the tree to draft, of ``longest`` levels at most.

        Raises ModelError: the tree that was given is none.
        """
        tree = head.choices
        if self.choices is not None:
            given = {"medusa_choices": self.choices}
            tree = read_choices(Fields(given, f"drafter {self.name!r}"), head.longest or 1)
        paths = [path for path in tree or () if len(path) <= longest]
        return Choices(paths) if paths else None

    def needs(self, context: DrafterContext) -> Needs:
        config, head, target = context.config, self.head(), native_target(self.name, context)
        model = NativeMedusa(head, target, config.drafter_quantization)
        longest = min(config.max_draft_length, model.num_heads)
        choices, nodes = self._choices(head, longest), num_nodes(config, longest)
        if choices is not None:
            longest = choices.depth
            nodes = max(longest, min(len(choices), config.max_draft_nodes or len(choices)))
        return Needs(
            fixed_bytes=4 * model.hidden_size * config.max_num_seqs,
            max_nodes=nodes,
            target_layers=head.target_layers(target.hidden_layers),
            loaded=(model, longest, choices),
            weight_bytes=model.added_bytes(target),
        )

    def make(self, context: DrafterContext) -> Drafter:
        return MedusaDrafter(context)


class MedusaDrafter(ForwardDrafter[NativeMedusa]):
    """Drafts the token at each depth with a head of its own, from one state of the target.

    Of a sequence it keeps the position of its last row, and that row's state.
    """

    name = "medusa"
    rows_at_once = 1

    def __init__(self, context: DrafterContext) -> None:
        model, longest, self._choices = context.needs.loaded
        store = model.new_store(context.needs.max_nodes, 1)  # which takes no memory
        super().__init__(context, model, store)
        self.max_length, self.target_layers = longest, context.needs.target_layers

    def _rows(self, item: Scheduled, budget: DraftBudget) -> Segment | None:
        sequence = item.sequence
        position, state = self._states.get(sequence.id, (-1, None))
        if state is None or position != len(sequence.tokens) - 2:
            return None
        return self._model.segment(state, sequence.id)

    def observe(self, record: StepRecord) -> None:
        """Keep the state of the last committed row of each sequence."""
        states, batch, paths = record.states, record.plan.batch, record.verdict.path
        assert states is not None
        rows = [
            first + item.count + path[-1] if path else first + item.count - 1
            for item, path, first in zip(batch, paths, states.first, strict=True)
        ]
        last = states.layers[self.target_layers[0]][rows]
        for i, (item, path) in enumerate(zip(batch, paths, strict=True)):
            position = item.start + item.count - 1 + len(path)
            self._states[item.sequence.id] = position, last[i : i + 1]
