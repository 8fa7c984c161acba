"""Merges the drafts of several drafters into one tree for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.types import Draft, DraftBudget


def part_of(budgets: Sequence[DraftBudget], parts: int) -> list[DraftBudget]:
    """Return each of ``parts`` drafters' share of the budgets: all depths, a part of the nodes."""
    return [
        budget._replace(nodes=max(min(budget.depth, budget.nodes), budget.nodes // parts))
        for budget in budgets
    ]


def merged(names: Sequence[str], drafts: Sequence[Draft], budgets: Sequence[DraftBudget]) -> Draft:
    """Return trees that hold the nodes of all drafts, each once; earlier drafts go first.

    Args:
        names: of the drafters; a node's source is the first that proposed it.
        drafts: theirs, for the same sequences.
        budgets: nodes beyond them are left out.
    """
    trees = [_Tree() for _ in budgets]
    for index, (tree, budget) in enumerate(zip(trees, budgets, strict=True)):
        for name, draft in zip(names, drafts, strict=True):
            tree.add(name, draft, index, budget.nodes)
    return Draft(
        [tree.tokens for tree in trees],
        [tree.parents for tree in trees],
        margins=[tree.margins for tree in trees],
        sources=[tree.sources for tree in trees],
    )


class _Tree:
    """The nodes of one sequence."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.margins: list[float] = []
        self.sources: list[str] = []
        self._known: dict[tuple[int, int], int] = {}

    def add(self, name: str, draft: Draft, index: int, most: int) -> None:
        """Take in the nodes of a draft that are not here yet, up to ``most`` in all."""
        places = {-1: -1}
        margins = draft.margins[index] if draft.margins else []
        for node, (token, parent) in enumerate(
            zip(draft.tokens[index], draft.parents[index], strict=True)
        ):
            if parent not in places:
                continue
            above = places[parent]
            place = self._known.get((above, token))
            if place is None:
                if len(self.tokens) == most:
                    continue
                place = self._known[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.margins.append(margins[node] if margins else 0.0)
                self.sources.append(name)
            places[node] = place
