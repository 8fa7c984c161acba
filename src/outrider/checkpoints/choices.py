"""Reads Medusa's choices: the tree that its heads draft, as their authors write it.

Cai et al., "Medusa: Simple LLM inference acceleration framework with multiple decoding heads",
2024.
"""

from __future__ import annotations

from ..base.fields import Fields
from ..errors import ModelError, shown

MOST_CHOICES, TOP_K = 256, 10
"""Nodes of a tree of Medusa's, and draws behind a node, which is what its authors take."""
Paths = tuple[tuple[int, ...], ...]


def read_choices(values: Fields, heads: int) -> Paths | None:
    """Return the tree in ``medusa_choices``; None where it is missing.

    A tree is a list of paths, [0, 2] for the third likeliest token behind the likeliest one.
    """
    name = "medusa_choices"
    if name not in values:
        return None
    paths = values.listed(name, list)
    if not 1 <= len(paths) <= MOST_CHOICES:
        raise values.refuse(name, f"a list of 1 to {MOST_CHOICES} paths")
    for path in paths:
        if not path or not all(type(rank) is int and 0 <= rank < TOP_K for rank in path):
            raise ModelError(
                f"{values.where}: {name} holds {shown(path)}; a list of ranks from 0 to "
                f"{TOP_K - 1} is needed."
            )
        if len(path) > heads:
            raise ModelError(
                f"{values.where}: {name} holds {shown(path)}, which is {len(path)} tokens deep, "
                f"but there are {heads} heads; leave it out."
            )
    known = {tuple(path) for path in paths}
    for path in sorted(known):
        if path[:-1] and path[:-1] not in known:
            raise ModelError(
                f"{values.where}: {name} holds {[*path]} without {[*path[:-1]]}, which it goes on "
                "from; add that."
            )
    if len(known) < len(paths):
        raise values.refuse(name, "a list in which each path stands once")
    return tuple(sorted(known))
