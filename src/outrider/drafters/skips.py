"""The search, during decoding, for sublayers that a target can skip.

Candidate sets are scored on text generated before, by one forward over a window of it (Xia et al.,
"SWIFT: On-the-fly self-speculative decoding", 2024). Sublayers are ranked by the effect of skipping
each alone, sets are built in that order, and the best set is changed by a sublayer or two.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from operator import mul
from random import Random

import numpy as np

from ..base.types import Row, SequenceState
from ..cache.store import Store
from ..checkpoints.architecture import Architecture
from ..models.native import NativeTransformer
from ..models.rows import Segment
from ..sampling.arrays import highest, softmax
from ..sampling.pipeline import Logits
from ..sampling.shared_noise import Noise

ROWS = 32
"""Most rows of a window; all decide tokens of the output, not of the prompt."""
FEWEST_ROWS = 16
"""Least rows of a window."""
WINDOW_SCORES = 8
"""Candidates that a window scores."""
COMPARED_IDS = 64
"""Likeliest tokens of a row whose probabilities are compared."""
GREEDY_TEMPERATURE = 0.5
"""Temperature at which the probabilities of greedy rows are compared."""
ROW_COST = 0.05
"""Cost of one more row of a verifying forward, in forwards of one row, until it is measured."""
MOST_SKIPPED = 0.45
"""Largest share of the sublayers between the first and the last layer that is skipped."""
COMPARED_SIZES = 6
"""Sizes of sets that are compared."""
ENOUGH_AGREEMENT = 0.95
"""Agreement at which the search ends with a set of the greatest size."""
IDLE_CHANGES = 16
"""Changes without a gain after which it ends."""
MOST_EVALUATIONS = 400
"""Evaluations after which it ends in any case."""
LEAST_GAIN = 1.005
"""Expected speed, relative to the best set's, at which a changed set replaces it."""
CHANGE_AMONG = 3
"""Sublayers drawn at random, of which the one whose rank fits best is changed."""
AGREEMENT_ERROR = 0.05
"""By how much the true agreement may exceed that of one window."""
HOPELESS_SPEED = 0.95
"""Expected speed of the best size below which changing a few sublayers will not make a set pay."""

Skips = frozenset[int]


@dataclass(frozen=True)
class Space:
    """The sets of up to ``most`` of the ``candidates`` to skip, and what such drafting brings.

    Times are in forwards: an attention takes ``attention``, an MLP ``mlp``, and one more row adds
    ``row``. Drafts have up to ``longest`` tokens.
    """

    layers: int
    candidates: tuple[int, ...]
    most: int
    attention: float
    mlp: float
    longest: int
    row: float = ROW_COST

    @staticmethod
    def of(shape: Architecture, min_layers: int, longest: int) -> Space:
        """Return the sets of a target of which ``min_layers`` layers' worth of sublayers run."""
        a = shape
        layers, heads = a.num_layers, (2 * a.num_heads + 2 * a.num_kv_heads) * a.head_dim
        attention, mlp = a.hidden_size * heads, 3 * a.hidden_size * a.intermediate_size
        whole = layers * (attention + mlp) + a.hidden_size * a.vocab_size
        candidates = tuple(range(2, 2 * layers - 2))
        most = min(int(MOST_SKIPPED * len(candidates)), 2 * (layers - min_layers))
        return Space(layers, candidates, max(0, most), attention / whole, mlp / whole, longest)

    def cost(self, skips: Iterable[int]) -> float:
        """Return the share of a forward's time that one without ``skips`` takes."""
        return 1.0 - sum(self.mlp if sublayer % 2 else self.attention for sublayer in skips)

    def needed(self, skips: Iterable[int]) -> float:
        """Return the agreement above which drafting without ``skips`` pays; above 1 it never does.

        A draft of one token costs a pass and one more row of the target. Tokens of longer drafts
        are accepted less often, so longer drafts pay only where that one does.
        """
        return self.cost(skips) + self.row

    def cheapest(self, size: int) -> Skips:
        """Return the ``size`` sublayers that save most time if they are skipped."""
        dearest = self.mlp > self.attention
        order = sorted(self.candidates, key=lambda each: (each % 2 == 1) != dearest)
        return frozenset(order[:size])

    def hope(self, alone: Mapping[int, float]) -> float:
        """Return an upper bound on the expected speed of every set.

        A set agrees at most as often as its worst sublayer ``alone``, as far as that was measured.
        """
        agreement = (min(1.0, alone.get(each, 1.0) + AGREEMENT_ERROR) for each in self.candidates)
        falling = sorted(agreement, reverse=True)
        sizes = range(1, self.most + 1)
        return max(self.speed(self.cheapest(size), falling[size - 1]) for size in sizes)

    def told(self, skips: Skips | None) -> str:
        """Return in words above which acceptance a set pays; None is the best possible set."""
        if skips is None:
            least, sublayers = self.needed(self.cheapest(self.most)), f"up to {self.most}"
        else:
            least, sublayers = self.needed(skips), str(len(skips))
        return (
            f"without {sublayers} of {2 * self.layers} sublayers a drafted token takes "
            f"{least - self.row:.2f} of a plain one at best, and pays where more than {least:.2f} "
            "of them are accepted"
        )

    def speed(self, skips: Iterable[int], agreement: float) -> float:
        """Return how many times as fast as plain decoding drafts of the best length would be."""
        cost = self.needed(skips)
        accepted: Iterable[float] = accumulate(
            accumulate(repeat(min(agreement, 1.0), self.longest), mul)
        )
        return max((1 + tokens) / (1 + length * cost) for length, tokens in enumerate(accepted, 1))

    def kept(self, skips: Skips) -> tuple[int, ...]:
        """Return the sublayers that run, rising."""
        return tuple(s for s in range(2 * self.layers) if s not in skips)

    def spread(self) -> Skips:
        """Return as many candidates as may be skipped, evenly spread."""
        count = len(self.candidates)
        return frozenset(self.candidates[i * count // self.most] for i in range(self.most))


@dataclass
class Search:
    """The search for one workload; it starts from ranking and choice of another, ``like``."""

    space: Space
    like: Search | None = None
    chosen: Skips = field(init=False)
    """The best set so far."""
    agreement: float | None = field(init=False, default=None)
    """The best set's, over all windows, newer ones weighing more; None while nothing is known."""
    pays: bool | None = field(init=False, default=None)
    """True if drafts that skip the best set are expected to save time; None if unknown."""
    sublayers: tuple[int, ...] = field(init=False)
    """The sublayers that run then; empty if it does not pay."""
    wants: Skips | None = field(init=False)
    """The set to score next, None when the search has ended."""
    evaluations: int = field(init=False, default=0)
    rank: dict[int, int] = field(init=False, default_factory=dict)
    """Places of the candidates by the harm that skipping each does for the time it saves."""

    def __post_init__(self) -> None:
        self._here, self._renewed = 0.0, False
        self._rng = Random(0)
        self.chosen = self.space.spread()
        if self.like is not None:
            self.chosen, self.rank = self.like.chosen, self.like.rank
            self.like = None
        self._steps = self._run()
        self.wants = next(self._steps, None)
        if self.wants is None:
            self.pays = False
        self.sublayers = self.space.kept(self.chosen) if self.pays is None else ()

    def scored(self, agreement: float, renewed: bool) -> None:
        """Take in the score of the set in ``wants``; ``renewed`` if it is a window's first one."""
        self.evaluations += 1
        self._renewed |= renewed
        try:
            self.wants = self._steps.send(agreement)
        except StopIteration:
            self.wants = None
        self.pays = self.space.speed(self.chosen, self.agreement or 0.0) > 1
        self.sublayers = self.space.kept(self.chosen) if self.pays else ()

    def _run(self) -> Generator[Skips, float, None]:
        """Yield the sets to score; ends early once no set can pay."""
        alone: dict[int, float] = {}
        if self.space.hope(alone) <= 1:
            return
        yield from self._again()
        if not self.rank:
            for each in self.space.candidates:
                alone[each] = yield frozenset({each})
                if self.space.hope(alone) <= 1:
                    return
            harm = {each: (1 - a) / (1 - self.space.cost({each})) for each, a in alone.items()}
            order = sorted(harm, key=harm.__getitem__)
            self.rank = {sublayer: place for place, sublayer in enumerate(order)}
        order = sorted(self.rank, key=self.rank.__getitem__)
        yield from self._again()
        for size in sorted(
            {-(-self.space.most * n // COMPARED_SIZES) for n in range(1, COMPARED_SIZES + 1)}
        ):
            yield from self._against(frozenset(order[:size]))
        if self.space.speed(self.chosen, self.agreement or 0.0) < HOPELESS_SPEED:
            return
        idle = 0
        while idle < IDLE_CHANGES and self.evaluations < MOST_EVALUATIONS and not self._done():
            if self._renewed:
                yield from self._again()
            won = yield from self._against(self._changed())
            idle = 0 if won else idle + 1

    def _done(self) -> bool:
        known = self.agreement or 0.0
        return known >= ENOUGH_AGREEMENT and len(self.chosen) == self.space.most

    def _again(self) -> Generator[Skips, float, None]:
        """Score the best set on the window that the others are scored on."""
        self._here = yield self.chosen
        self._renewed = False
        known = self.agreement
        self.agreement = self._here if known is None else (known + self._here) / 2

    def _against(self, skips: Skips) -> Generator[Skips, float, bool]:
        """Let a set take the best one's place if it beats it; return whether it did."""
        if skips == self.chosen:
            return False
        agreement = yield skips
        if self._renewed:  # by this score: score the best set on the same window
            yield from self._again()
        before = self.space.speed(self.chosen, self._here)
        if self.space.speed(skips, agreement) < LEAST_GAIN * before:
            return False
        self.chosen, self.agreement, self._here = skips, agreement, agreement
        return True

    def _changed(self) -> Skips:
        """Return the best set with one more sublayer, one less, or another one."""
        inside = sorted(self.chosen)
        outside = sorted({*self.space.candidates} - self.chosen)
        adds = len(inside) < self.space.most and self._rng.random() < 0.5
        removes = not adds or self._rng.random() < 0.3
        changed = set(inside)
        if removes and len(inside) > 1:
            some = self._rng.sample(inside, min(CHANGE_AMONG, len(inside)))
            changed.remove(max(some, key=self.rank.__getitem__))
        if adds or len(inside) == self.space.most or self._rng.random() < 0.5:
            some = self._rng.sample(outside, min(CHANGE_AMONG, len(outside)))
            changed.add(min(some, key=self.rank.__getitem__))
        return frozenset(changed)


class ScoredWindow:
    """The last output tokens of a sequence, ``FEWEST_ROWS`` or more, to score candidates on.

    The rows' entries are on pages from ``scratch`` on; the sequence's own pages are only read. The
    reference is what the whole target draws there with the request's temperature and noise.
    """

    def __init__(
        self,
        target: NativeTransformer,
        store: Store,
        scratch: int,
        sequence: SequenceState,
        noise: Noise,
    ) -> None:
        self._target, self._store, self._noise = target, store, noise
        self.sequence, self.scored = sequence, 0
        tokens, size, request = sequence.tokens, store.page_size, sequence.request
        stop = len(tokens) - 1
        start = stop - min(ROWS, sequence.num_output)
        shared = start // size
        pages = [*sequence.pages[:shared], *range(scratch, scratch + scratch_pages(size))]
        self._head = sequence.pages[shared], scratch, start % size
        count, length = stop - start, sequence.prompt_length
        self._segment = Segment(tokens[start:stop], start, pages, count, length, key=sequence.id)
        params = request.params
        self._heat = 1.0 if params.greedy else params.temperature
        warm = (GREEDY_TEMPERATURE if params.greedy else params.temperature) / self._heat
        self._rows = [
            Row(sequence.id, request.seed, sequence.sample_index, place, params.greedy, place)
            for place in range(start + 1, stop + 1)
        ]
        z = self._logits(range(2 * target.shape.num_layers))
        self._written, _ = noise.draw(z, self._rows)
        self._ids = highest(z, min(COMPARED_IDS, z.shape[1]))
        self._warm = warm
        self._chances = self._chances_of(z)

    def score(self, sublayers: Iterable[int]) -> float:
        """Return how likely a draw with these sublayers equals the whole target's.

        It is the mean of the counted share and one computed from the two distributions, which
        distinguishes sets where the count does not.
        """
        z = self._logits(sublayers)
        self.scored += 1
        drawn, _ = self._noise.draw(z, self._rows)
        alike = sum(a == b for a, b in zip(drawn, self._written, strict=True)) / len(drawn)
        shared = np.minimum(self._chances, self._chances_of(z)).sum(-1)
        reckoned = float(np.nan_to_num(shared / (2 - shared)).mean())
        return (alike + reckoned) / 2

    def _logits(self, sublayers: Iterable[int]) -> Logits:
        page, scratch, count = self._head
        size = self._store.page_size
        if count:  # the page in which the window begins
            self._store.move(
                [page * size + i for i in range(count)], [scratch * size + i for i in range(count)]
            )
        z = self._target.forward([self._segment], self._store, tuple(sublayers)).logits
        assert z is not None
        if self._heat != 1:
            z /= self._heat
        return z

    def _chances_of(self, z: Logits) -> Logits:
        return softmax(np.take_along_axis(z, self._ids, 1) / self._warm)


def scratch_pages(page_size: int) -> int:
    """Return how many pages a window needs."""
    return -(-(ROWS + page_size - 1) // page_size)
