"""Trees of drafted nodes, as lists of parents: -1 for the root, parents before their children."""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

CHAINS = [list(range(-1, length - 1)) for length in range(64)]
"""The parents of short chains, by length."""


def depths(parents: Iterable[int]) -> list[int]:
    """Return the depth of each node, 1 and up."""
    by_node: list[int] = []
    for parent in parents:
        by_node.append(1 if parent < 0 else by_node[parent] + 1)
    return by_node


def sizes(parents: Sequence[int]) -> list[int]:
    """Return the number of nodes at each depth."""
    if is_chain(parents):
        return [1] * len(parents)
    counts = Counter(depths(parents))
    return [counts[depth] for depth in range(1, len(counts) + 1)]


def is_chain(parents: Sequence[int]) -> bool:
    """Return True if each node is the child of the one before; False for 64 nodes or more."""
    return len(parents) < len(CHAINS) and parents == CHAINS[len(parents)]


def num_alike(first: Iterable[object], second: Iterable[object]) -> int:
    """Return the length of the common beginning of both."""
    pairs = zip(first, second, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
