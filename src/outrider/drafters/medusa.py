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
            (``medusa_choices`` in its config.json), or if it has none, for trees that follow
            acceptance.
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

        Raises ModelError if the given choices are not a tree.
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
        choices, nodes = self._choices(head, longest), num_nodes(config, longest, target)
        if self.choices is None and not target.trees:
            choices = None  # the checkpoint's own
        if choices is not None:
            longest = choices.depth
            nodes = max(longest, min(len(choices), config.max_draft_nodes or len(choices)))
        return Needs(
            max_nodes=nodes,
            target_layers=head.target_layers(target.hidden_layers),
            loaded=(model, longest, choices),
            weight_bytes=model.added_bytes(target),
        )

    def make(self, context: DrafterContext) -> Drafter:
        return MedusaDrafter(context)


class MedusaDrafter(ForwardDrafter[NativeMedusa]):
    """Drafts the token at each depth with a head of its own, from one state of the target.

    It is the state of the sequence's last row, kept from the last step. Nothing else is kept, so
    steps in which others draft cost nothing.
    """

    name = "medusa"
    rows_at_once = 1

    def __init__(self, context: DrafterContext) -> None:
        model, longest, self._choices = context.needs.loaded
        store = model.new_store(context.needs.max_nodes, 1)  # which takes no memory
        super().__init__(context, model, store)
        self.max_length, self.target_layers = longest, context.needs.target_layers
        self._last: StepRecord | None = None
        self._places: dict[str, int] = {}
        """Places of sequences in the last step's batch, by id; filled when a draft needs them."""

    def _rows(self, item: Scheduled, budget: DraftBudget) -> Segment | None:
        record, sequence = self._last, item.sequence
        if record is None:
            return None
        if not self._places:
            batch = record.plan.batch
            self._places = {each.sequence.id: i for i, each in enumerate(batch)}
        place = self._places.get(sequence.id)
        if place is None:
            return None
        last, path, states = record.plan.batch[place], record.verdict.path[place], record.states
        assert states is not None
        position = last.start + last.count - 1 + len(path)
        if last.sequence is not sequence or position != len(sequence.tokens) - 2:
            return None
        row = states.first[place] + last.count + (path[-1] if path else -1)
        state = states.layers[self.target_layers[0]][row : row + 1]
        return self._model.segment(state, sequence.id)

    def observe(self, record: StepRecord) -> None:
        """Keep the step, whose states the next draft begins from."""
        self._last, self._places = record, {}
