"""The ways to draft, the choices among them, and the sequences that they are for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, Protocol

from ...base.limits import LARGEST_INT
from ...base.methods import OTHERWISE, TOGETHER
from .costs import CostModel
from .survival import Survival
from .tuning import USUAL, Tuning

TREE_SUFFIX = " tree"  # ends the name of a method that drafts trees


class DrafterView(Protocol):
    """The attributes of a drafter that choices read, see ``drafters.base.Drafter``."""

    name: str
    max_length: int
    max_nodes: int
    catching_up: bool
    ahead_share: float

    def ready(self, workload: str) -> bool: ...


class Method(NamedTuple):
    """A way to draft: one drafter or several together, in chains or in trees.

    ``width`` is the number of nodes that a drafter may propose at each depth, ``max_depth`` the
    depth of a draft, and ``max_nodes`` the most nodes of a draft. If ``otherwise``, the first
    drafter is a lookup, and the second drafts where the lookup promises less.
    """

    drafters: tuple[str, ...]
    max_depth: int
    width: int = 1
    max_nodes: int = LARGEST_INT
    otherwise: bool = False

    @property
    def drafter(self) -> str:
        """The name of its drafter, or of several together."""
        return (OTHERWISE if self.otherwise else TOGETHER).join(self.drafters)

    @property
    def merges(self) -> bool:
        """True if drafts of several are merged."""
        return len(self.drafters) > 1 and not self.otherwise

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of its time: its drafters, and merging."""
        return (*self.drafters, self.drafter) if self.merges else self.drafters

    def parts_of(self, source: str) -> tuple[str, ...]:
        """Return the parts that took time for a draft which ``source`` made."""
        lookup_alone = self.otherwise and source == self.drafters[0]
        return self.drafters[:1] if lookup_alone else self.parts

    def scored(self, source: str) -> str | None:
        """Return the name whose rates by margin score a draft of ``source``; None: the method's."""
        return source if self.otherwise else None

    def nodes(self, depth: int) -> int:
        """Return the nodes that a draft of that depth may have."""
        together = len(self.drafters) if self.merges else 1
        return min(self.max_nodes, depth * self.width * together)

    def seconds(self, costs: CostModel, by_depth: Sequence[float]) -> float:
        """Return the seconds of drafts if ``by_depth[i]`` sequences draft at depth i + 1."""
        if self.width > 1:
            rows = [count * self.width for count in by_depth]
            return sum([costs.draft(name, rows) for name in self.parts])
        return sum([costs.draft(name, by_depth) * costs.waited(name) for name in self.parts])

    def seconds_up_to(self, costs: CostModel, by_depth: Sequence[float]) -> list[float]:
        """Return the seconds of drafts that end after 0, 1, ... depths of ``by_depth``."""
        rows = by_depth if self.width == 1 else [count * self.width for count in by_depth]
        return [*map(sum, zip(*(costs.drafts(name, rows) for name in self.parts), strict=True))]


class Knowledge(NamedTuple):
    """The basis of choices: expected costs and acceptance, methods by name, and constants."""

    costs: CostModel
    survival: Survival
    methods: Mapping[str, Method]
    tuning: Tuning


class Choice(NamedTuple):
    """The name of a method, and how many tokens deep it drafts."""

    method: str
    depth: int


PLAIN = Choice("none", 0)


class Freedom(NamedTuple):
    """The choices that a request and the switch leave open.

    ``methods`` may draft, up to ``max_depth`` tokens; ``fixed`` is the choice if it is not open.
    """

    methods: tuple[str, ...]
    max_depth: int
    fixed: Choice | None = None


class Stream(NamedTuple):
    """A decoding sequence of ``context`` tokens that may emit ``left`` more, with its freedom."""

    id: str
    workload: str
    context: int
    methods: tuple[str, ...] = ()
    max_depth: int = USUAL.depths[-1]
    fixed: Choice | None = None
    left: int = USUAL.horizon


class StreamGroup(NamedTuple):
    """Sequences that are expected to fare alike: of one workload and freedom.

    ``levels`` say for each method how these sequences differ from the workload: the power of two of
    their odds of acceptance; empty if they do not differ.
    """

    workload: str
    levels: tuple[int, ...]
    methods: tuple[str, ...]
    max_depth: int
    fixed: Choice | None


def methods_of(
    drafters: Mapping[str, DrafterView],
    max_depth: int,
    together: Sequence[tuple[str, ...]],
    trees: bool,
    otherwise: Sequence[tuple[str, str]] = (),
) -> dict[str, Method]:
    """Return the methods of an engine by name; ``trees`` is True if the target can verify them.

    Drafts of ``together`` are merged; ``otherwise`` are pairs of a lookup and another drafter.
    """
    methods: dict[str, Method] = {}
    for name, drafter in drafters.items():
        depth = min(max_depth, drafter.max_length)
        if not depth:
            continue
        methods[name] = Method((name,), depth)
        if trees and drafter.max_nodes > depth:
            nodes = drafter.max_nodes
            methods[name + TREE_SUFFIX] = Method((name,), depth, -(-nodes // depth), nodes)
    for names in together if trees else ():
        method = Method(names, min(methods[name].max_depth for name in names))
        methods[method.drafter] = method
    for names in otherwise:
        method = Method(names, max(methods[n].max_depth for n in names), otherwise=True)
        methods[method.drafter] = method
    return methods


def counts_by_depth(drafts: Iterable[tuple[str, int, int]]) -> dict[str, list[int]]:
    """Return by name the total drafted at each depth, from (name, depth, count at each depth)."""
    drafting: dict[str, list[int]] = {}
    for name, depth, count in drafts:
        if depth:
            by_depth = drafting.setdefault(name, [])
            by_depth += [0] * (depth - len(by_depth))
            for i in range(depth):
                by_depth[i] += count
    return drafting
