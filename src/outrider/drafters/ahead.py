"""Drafts ahead while the target verifies, for a drafter on CPUs of its own.

A position's noise does not depend on who draws first. So tokens drafted after a draft, as if all of
it and the token after it were accepted, are those that the next step would draft if they are. If
they are not, the tokens are dropped.
"""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from threading import Event
from typing import Any

from ..base.trees import is_chain
from ..base.types import DraftBudget, DraftNodes, SequenceState
from ..models.base import RowsModel, Store
from ..models.decide import DraftInput
from ..models.rows import Segment
from ..native.cores import Cores
from ..native.native_sampling import NativeNoise
from ..sampling.shared_noise import Noise


@dataclass
class Chain:
    """The nodes drafted after the first ``base`` tokens of a sequence, up to ``most``.

    All but the last are in the drafter's cache, on the sequence's ``pages`` as they were.
    """

    sequence: SequenceState
    base: int
    tokens: list[int]
    margins: list[float]
    pages: array[int]
    most: int
    rates: Any

    @property
    def nodes(self) -> DraftNodes:
        """The nodes as a draft."""
        tokens, margins = self.tokens, self.margins
        count = len(tokens)
        runs = [*range(count - 1), -1]
        known = margins if len(margins) == count else ()
        return DraftNodes(tokens, [*range(-1, count - 1)], runs, known)

    def segment(self) -> Segment:
        """Return the row that the next node is drawn from."""
        place, prompt = self.base + len(self.tokens) - 1, self.sequence.prompt_length
        return Segment(self.tokens[-1:], place, self.pages, 1, prompt, (), (), self.sequence.id)

    def asked(self) -> DraftInput:
        """Return the draft input of the next pass."""
        budget = DraftBudget(1, 1, rates=self.rates)
        return DraftInput(self.sequence, budget, self.base + len(self.tokens))

    def take(self, nodes: DraftNodes) -> None:
        """Take in what a pass drafted; an empty draft ends the chain."""
        if not nodes.tokens:
            self.most = 0
        self.tokens += nodes.tokens
        self.margins += nodes.margins


def may_go_on(sequence: SequenceState, nodes: DraftNodes, noise: Noise) -> bool:
    """Return True if a draft can be extended ahead, whatever is committed meanwhile.

    Penalties and grammars look at all tokens before, and those of the draft are not committed yet.
    """
    pipeline = sequence.pipeline
    return bool(
        isinstance(noise, NativeNoise)
        and nodes.tokens
        and is_chain(nodes.parents)
        and pipeline.native_handle
        and not (pipeline.penalises or pipeline.has_grammar)
    )


def joined(nodes: DraftNodes, more: DraftNodes) -> DraftNodes:
    """Return a chain, in the cache except for its last node, joined with what was drafted after."""
    count, drafted = len(nodes.tokens), len(more.tokens)
    whole = count + drafted
    margins = [*nodes.margins, *more.margins]
    runs = [
        *range(count - 1),
        count - 1 if drafted else -1,
        *(r + count for r in more.runs if r >= 0),
    ]
    runs += [-1] * (whole - len(runs))
    known = margins if len(margins) == whole else ()
    return DraftNodes([*nodes.tokens, *more.tokens], [*range(-1, whole - 1)], runs, known)


def first_of(nodes: DraftNodes, depth: int) -> DraftNodes:
    """Return a chain cut to a depth."""
    tokens, parents, runs, margins, *_ = nodes
    return DraftNodes(tokens[:depth], parents[:depth], runs[:depth], margins[:depth])


def behind(nodes: DraftNodes, count: int) -> DraftNodes:
    """Return a chain without its first ``count`` nodes."""
    return DraftNodes.chain(nodes.tokens[count:])._replace(margins=nodes.margins[count:])


class Ahead:
    """Extends drafts on ``cores`` while the target verifies, until stopped or all are full."""

    def __init__(self, model: RowsModel, store: Store, cores: Cores) -> None:
        self._model, self._store, self._cores = model, store, cores
        self._chains: Sequence[Chain] = ()
        self._job: Future[None] | None = None
        self._enough = Event()

    def start(self, chains: Sequence[Chain], noise: Noise) -> None:
        """Start to extend drafts, until ``stop``."""
        if chains:
            self._enough.clear()
            self._chains = chains
            self._job = self._cores.begin(self._run, chains, noise)

    def stop(self) -> Sequence[Chain]:
        """Wait for the pass that runs, and return the drafts as they are then.

        Raises what a pass raised.
        """
        job, chains = self._job, self._chains
        self._job, self._chains = None, ()
        if job is not None:
            self._enough.set()
            job.result()
        return chains

    def _run(self, chains: Sequence[Chain], noise: Noise) -> None:
        while not self._enough.is_set():
            going = [chain for chain in chains if len(chain.tokens) < chain.most]
            if not going:
                return
            segments, inputs = [c.segment() for c in going], [c.asked() for c in going]
            drafts = self._model.draft(segments, self._store, inputs, noise)
            for chain, nodes in zip(going, drafts, strict=True):
                chain.take(nodes)


TURN = 16
"""Steps in a row with drafts ahead, or without, while they are compared."""
TURNS = 8
REST = 1024
"""Steps for which the faster kind stays, until both are compared again."""
WORTH = 1.01
"""Speedup that drafting ahead must bring."""


class Duel:
    """Steps with drafting ahead and steps without take turns; then the faster kind stays."""

    def __init__(self) -> None:
        self.on = True
        self._steps = 0
        self._tokens, self._seconds = [0, 0], [0.0, 0.0]

    @property
    def over(self) -> bool:
        """True when the two are to be compared again."""
        return self._steps == TURNS * TURN + REST

    def observe(self, tokens: int, seconds: float) -> None:
        """Take in a step, of the kind that ``on`` says."""
        self._tokens[self.on] += tokens
        self._seconds[self.on] += seconds
        self._steps += 1
        if self._steps < TURNS * TURN:
            self.on = self._steps // TURN % 2 == 0
        elif self._steps == TURNS * TURN:
            without, ahead = (n / s for n, s in zip(self._tokens, self._seconds, strict=True))
            self.on = ahead > WORTH * without


class Duels:
    """A duel for each power of two of a batch's size."""

    def __init__(self) -> None:
        self._of = defaultdict[int, Duel](Duel)

    def on(self, streams: int) -> bool:
        """Return whether to draft ahead in a batch of so many sequences."""
        return self._of[streams.bit_length()].on

    def observe(self, streams: int, tokens: int, seconds: float) -> None:
        """Take in a step of so many sequences."""
        size = streams.bit_length()
        self._of[size].observe(tokens, seconds)
        if self._of[size].over:
            del self._of[size]
