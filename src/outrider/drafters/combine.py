"""Merges the drafts of several drafters into one tree for each sequence."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.types import Draft, DraftBudget, DraftNodes


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
    trees = Draft()
    for each, budget in zip(zip(*drafts, strict=True), budgets, strict=True):
        tree = _Tree(budget.nodes)
        for name, nodes in zip(names, each, strict=True):
            tree.add(name, nodes)
        whole = DraftNodes(tree.tokens, tree.parents, margins=tree.margins, sources=tree.sources)
        trees.append(whole)
    return trees


class _Tree:
    """The nodes of one sequence, ``most`` of them."""

    def __init__(self, most: int) -> None:
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.margins: list[float] = []
        self.sources: list[str] = []
        self._most = most
        self._known: dict[tuple[int, int], int] = {}

    def add(self, name: str, nodes: DraftNodes) -> None:
        """Take in the nodes of a draft that are not here yet."""
        places, margins = {-1: -1}, nodes.margins
        for node, (token, parent) in enumerate(zip(nodes.tokens, nodes.parents, strict=True)):
            if parent not in places:
                continue
            above = places[parent]
            place = self._known.get((above, token))
            if place is None:
                if len(self.tokens) == self._most:
                    continue
                place = self._known[above, token] = len(self.tokens)
                self.tokens.append(token)
                self.parents.append(above)
                self.margins.append(margins[node] if margins else 0.0)
                self.sources.append(name)
            places[node] = place
