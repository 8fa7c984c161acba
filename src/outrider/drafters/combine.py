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
    """Return trees with the nodes of the drafts of ``names``, each once, within the budgets.

    Earlier drafts go first; a node's source is the first drafter that proposed it.
    """
    trees = Draft()
    for each, budget in zip(zip(*drafts, strict=True), budgets, strict=True):
        tokens, parents, margins, sources = list[int](), list[int](), list[float](), list[str]()
        known: dict[tuple[int, int], int] = {}
        for name, nodes in zip(names, each, strict=True):
            places = {-1: -1}
            for node, (token, parent) in enumerate(zip(nodes.tokens, nodes.parents, strict=True)):
                if parent not in places:
                    continue
                above = places[parent]
                place = known.get((above, token))
                if place is None:
                    if len(tokens) == budget.nodes:
                        continue
                    place = known[above, token] = len(tokens)
                    tokens.append(token)
                    parents.append(above)
                    margins.append(nodes.margins[node] if nodes.margins else 0.0)
                    sources.append(name)
                places[node] = place
        trees.append(DraftNodes(tokens, parents, margins=margins, sources=sources))
    return trees
