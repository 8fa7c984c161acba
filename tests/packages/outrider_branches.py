"""A drafter of trees that sees the hidden states of two layers of the target: a toy."""

from dataclasses import dataclass, field

from outrider.base.types import Draft, DraftNodes
from outrider.drafters.base import Drafter, DrafterSpec, Needs


class BranchesSpec(DrafterSpec):
    name = "branches"

    def needs(self, context):
        config = context.config
        return Needs(
            page_bytes=64 * config.page_size,
            fixed_bytes=1 << 20,
            max_nodes=2 * config.max_draft_length,
            target_layers=(0, 1),
        )

    def make(self, context):
        return Branches(context.config.max_draft_length, context.model.shape.vocab_size)


@dataclass
class Branches(Drafter):
    """Drafts two chains side by side, from what it saw of the last row."""

    max_length: int
    vocab_size: int
    target_layers: tuple[int, ...] = (0, 1)
    seen: dict = field(default_factory=dict)  # by sequence, position and layer
    released: list = field(default_factory=list)
    name = "branches"

    @property
    def max_nodes(self):
        return 2 * self.max_length

    def propose(self, batch, budgets, noise):
        return Draft(self._tree(*each) for each in zip(batch, budgets, strict=True))

    def _tree(self, item, budget):
        tokens, parents = [], []
        length = min(budget.depth, budget.nodes // 2)
        states = self.seen.get(item.sequence.id, {})
        last = states.get((len(item.sequence.tokens) - 2, 1))
        first = 0 if last is None else int(abs(last).sum()) % self.vocab_size
        for branch in range(2):
            for i in range(length):
                tokens.append((first + branch + 2 * i) % self.vocab_size)
                parents.append(len(tokens) - 2 if i else -1)
        return DraftNodes(tokens, parents)

    def observe(self, record):
        states = record.states
        for number, item in enumerate(record.plan.batch):
            kept = self.seen.setdefault(item.sequence.id, {})
            first = states.first[number]
            rows = {item.start + row: row for row in range(item.count)}
            for depth, node in enumerate(record.verdict.path[number]):
                rows[item.start + item.count + depth] = item.count + node
            for position, row in rows.items():
                for layer in self.target_layers:
                    kept[position, layer] = states.layers[layer][first + row].copy()

    def release(self, seq_id, ended):
        self.released.append((seq_id, ended))
