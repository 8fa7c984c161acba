"""Prices: the acceptance probabilities above which a drafter's pass, and a target row, pay."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, chain, repeat
from math import inf
from operator import mul

from ...base.trees import is_chain
from ...base.types import DraftNodes
from ...native.rates import DEPTHS, MARGINS, RANKS
from .choices import Choice, Knowledge
from .trials import Review

ABOVE_ALL_CHANCES = 1.1  # a probability that no node has


class Prices:
    """The prices of passes and rows in tokens, as of the last review."""

    def __init__(self, known: Knowledge) -> None:
        self._costs, self._survival, self._methods, self._tuning = known
        self._review = Review()
        self._tables: dict[tuple[str, str], list[list[list[float]]]] = {}
        self._enough: dict[tuple[Choice, str], float] = {}

    def renew(self, review: Review) -> None:
        """Use the figures of another review."""
        self._review = review
        self._tables.clear()
        self._enough.clear()

    def least(self, choice: Choice, workload: str, sequences: int) -> float:
        """Return the acceptance probability above which a node is worth another drafter's pass.

        The pass must bring what the batch emits while it runs, see ``least_chance``. A row has the
        mean price of a whole draft's rows, since it is not known which of them it will be.
        """
        method, context = self._methods[choice.method], self._review.context
        passed = method.seconds(self._costs, [sequences] * 2)
        passed -= method.seconds(self._costs, [sequences])
        rows, verify = sequences * method.nodes(choice.depth), self._costs.verify
        row = verify(sequences + rows, context) - verify(sequences, context)
        children = self._survival.children(choice.method, workload)
        value = self._review.tokens_per_second
        price = value * passed / (sequences * method.width)
        return min(self._tuning.sure_chance, least_chance(children, price, value * row / rows))

    def enough(self, choice: Choice, workload: str) -> float:
        """Return the accepted tokens above which a free draft is better than a choice.

        Both are for one sequence alone, with equally many rows to verify.
        """
        key = choice, workload
        enough = self._enough.get(key)
        if enough is None:
            name, depth = choice
            tokens = 1 + sum(self._survival.curve(name, workload, depth))
            passes = self._survival.fill(name, workload, depth)
            drafting = self._methods[name].seconds(self._costs, passes)
            rows = 1 + round(sum(passes))
            verifying = self._costs.verify(rows, self._review.context) + self._costs.host(1)
            enough = tokens * verifying / (verifying + drafting) - 1
            self._enough[key] = enough
        return enough

    def worth(self, survivals: Sequence[float], rows: int, sequences: int, spent: float) -> float:
        """Return the acceptance probability above which a node is worth its row in the target.

        A row must bring what the batch emits while it runs, at the best speed that cutting nodes
        reaches. In a batch of several it is ``together_price`` times that, since a sequence that
        ends early hardly speeds up the others. ``survivals`` are the nodes' P(accepted with all
        before); the step has ``rows`` other rows, and ``spent`` seconds on drafting.
        """
        order = sorted(survivals, reverse=True)
        context, fixed = self._review.context, spent + self._costs.host(sequences)
        dear = self._tuning.together_price if sequences > 1 else 1.0
        tokens = [*accumulate((chance / dear for chance in order), initial=float(sequences))]
        best, most = 0.0, 0
        cuts, verify = self._tuning.cuts, self._costs.verify
        for count in (*cuts[: bisect_left(cuts, len(order))], len(order)):
            speed = tokens[count] / (verify(rows + count, context) + fixed)
            if speed >= best:
                best, most = speed, count
        # If all nodes stay, the price is that of the last row in use, not of one beyond.
        last = rows + most + (most < len(order))
        row = dear * (verify(last, context) - verify(last - 1, context))
        # The price also cuts later drafts; these are cut exactly here.
        cut = order[most] + self._tuning.tiny_chance if most < len(order) else 0.0
        least_likely_kept = order[most - 1] if most else ABOVE_ALL_CHANCES
        return min(least_likely_kept, max(cut, best * row))

    def survivals(self, nodes: DraftNodes, method: str, workload: str) -> list[float]:
        """Return for each node of a draft the probability that it and all before are accepted."""
        table = self._tables.get((method, workload))
        if table is None:
            table = self._survival.rates(method, workload).table.tolist()
            self._tables[method, workload] = table
        parents, margins = nodes.parents, nodes.margins
        if is_chain(parents):
            first = chain([level[0] for level in table], repeat(table[-1][0]))
            rates = zip(first, margins, strict=False)
            return [*accumulate([rate[bisect_right(MARGINS, m)] for rate, m in rates], mul)]
        survivals: list[float] = []
        depths: list[int] = []
        children = [0] * (len(parents) + 1)
        for parent, margin in zip(parents, margins, strict=True):
            depth = 0 if parent < 0 else depths[parent] + 1
            rank = children[parent + 1]
            children[parent + 1] += 1
            rate = table[min(depth, DEPTHS - 1)][min(rank, RANKS - 1)]
            before = 1.0 if parent < 0 else survivals[parent]
            survivals.append(before * rate[bisect_right(MARGINS, margin)])
            depths.append(depth)
        return survivals


def without(nodes: DraftNodes, survivals: Sequence[float], worth: float) -> DraftNodes:
    """Return a draft without the nodes whose survivals are below ``worth``."""
    kept = [node for node, survival in enumerate(survivals) if survival >= worth]
    most = len(kept)
    if not most or kept[-1] == most - 1:
        return nodes._replace(tokens=nodes.tokens[:most], parents=nodes.parents[:most])
    place = {-1: -1} | {node: place for place, node in enumerate(kept)}
    return nodes._replace(
        tokens=[nodes.tokens[node] for node in kept],
        parents=[place[nodes.parents[node]] for node in kept],
    )


def least_chance(children: Sequence[tuple[float, float]], passed: float, row: float) -> float:
    """Return the survival of a node above which a pass that drafts its child pays.

    The child is verified if its margin makes it worth a row. Survivals only fall from node to node,
    so looking one pass ahead is enough (optimal stopping in the monotone case: Chow, Robbins and
    Siegmund, "Great expectations", 1971, chapter 3). ``children`` has by margin how often a child
    has it, and P(accepted) then; ``passed`` and ``row`` are the prices of a pass and a row, tokens.
    """
    often = accepted = 0.0
    least = inf
    for share, rate in sorted(children, key=lambda child: -child[1]):
        often += share
        accepted += share * rate
        least = min(least, (passed + row * often) / accepted)  # those so far are verified
    return least
