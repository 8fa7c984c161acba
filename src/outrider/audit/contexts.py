"""Contexts recorded from a pair, on which acceptance rules are tested with many draws.

A context holds the logits of target and drafter along every continuation of up to two tokens that
the target can emit. A request's top_k keeps supports small, so ids can be renumbered by node: the
target's by falling probability, then those that only the drafter has. This leaves distributions
unchanged, so the engine's own rules run on them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, product
from typing import Any

import numpy as np

from ..base.types import Request, SamplingParams
from ..models.base import Model
from ..models.rows import Segment
from ..native.native_sampling import sequence_pipeline
from ..sampling.arrays import softmax, widened
from ..sampling.pipeline import NEVER, Logits, RequestPipeline
from . import oracle
from .oracle import Distribution

SUPPORT_IDS = 4
LOCAL_IDS = 2 * SUPPORT_IDS  # local ids of a node: the target's and the drafter's
LONGEST_PATH = 2
PAGE_SIZE = 16
EDGE_SHARE = 1e-5  # contexts whose support changes if top_p or min_p moves this much are left out
LAW_ERROR = 1e-4  # total variation from the oracle that fp32 does not explain
PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": 0.4, "presence_penalty": 0.3}
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.5, "min_p": 0.02},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01},
    {"temperature": 2.0},
    {"temperature": 0.3},
    {"temperature": 1.0, **PENALTIES},
    {"temperature": 0.8, "top_p": 0.95, **PENALTIES},
)


@dataclass(frozen=True)
class Recorded:
    """One context in local ids, and the oracle's distribution of its next three tokens.

    ``target`` and ``drafter`` hold z after no, one and two tokens: fp32 [W], [W, W], [W, W, W] (the
    drafter's without the last). ``joint`` is float64 [W, W, W]; ``certain`` is a draft of two
    tokens that was not sampled.
    """

    target: tuple[Logits, Logits, Logits]
    drafter: tuple[Logits, Logits] | None
    joint: Distribution
    certain: tuple[int, int]


class Contexts:
    """Token sequences in their own cache, and logits after short paths that follow them."""

    def __init__(self, model: Model, contexts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._contexts = contexts
        each = (max(len(c) for c in contexts) + LONGEST_PATH) // PAGE_SIZE + 1
        self._pages = [range(1 + i * each, 1 + (i + 1) * each) for i in range(len(contexts))]
        self._store = model.new_store(1 + each * len(contexts), PAGE_SIZE)

    def after(self, paths: Sequence[Sequence[int]] | None) -> Logits:
        """Return logits [contexts, vocabulary] after contexts and paths; first call with None."""
        rows, again = paths or self._contexts, paths is None or self._model.shape.stateful
        segments = [
            Segment(
                [*c, *row] if paths and again else row,
                0 if again else len(c),
                *(pages, 1, len(c)),
                key=f"{pages}",
            )
            for row, c, pages in zip(rows, self._contexts, self._pages, strict=True)
        ]
        logits = self._model.run(segments, self._store).logits
        assert logits is not None  # every segment asks for logits
        return logits


@dataclass
class _ContextNode:
    """Processed logits after one path in local ``ids``, and the oracle's distribution."""

    ids: list[int]
    target: Logits
    drafter: Logits | None
    exact: Distribution
    wrong: float
    usable: bool


_Tree = dict[tuple[int, ...], _ContextNode]


class _Request:
    """A context as a request with options; the first half of its ``tokens`` is the prompt."""

    def __init__(self, tokens: Sequence[int], options: dict[str, Any], model: Model) -> None:
        self.params = SamplingParams(top_k=SUPPORT_IDS, **options)
        self.tokens = list(tokens)
        self.prompt = tuple(tokens[: -(-len(tokens) // 2)])
        request = Request("audit", self.prompt, self.params, 0)
        self.pipeline = sequence_pipeline(RequestPipeline(request, model.shape.vocab_size))

    def z(self, raw: Logits, path: Sequence[int]) -> Logits:
        """Return raw logits after ``path`` as the engine processes them: fp32 [vocabulary]."""
        z: Logits = self.pipeline.apply(raw[None].copy(), self.tokens, [list(path)])[0]
        return z


def _node(
    request: _Request, path: Sequence[int], raw: Logits, drafted: Logits | None
) -> _ContextNode:
    """Return the node after ``path`` from raw logits [vocabulary] of the target and the drafter."""
    params = request.params
    options = {name: getattr(params, name) for name in ("temperature", *oracle.TRUNCATIONS)}
    shares = [name for name, value in oracle.TRUNCATIONS.items() if isinstance(value, float)]
    penalties = {name: getattr(params, name) for name in PENALTIES}
    output = [*request.tokens[len(request.prompt) :], *path]
    precise = oracle.processed(raw, request.prompt, output, **penalties)
    exact = oracle.distribution(precise, **options)
    usable = True
    for share in (1 - EDGE_SHARE, 1 + EDGE_SHARE):
        near = {name: min(1.0, options[name] * share) for name in shares}
        moved = oracle.distribution(precise, **{**options, **near})
        usable = usable and bool(((moved > 0) == (exact > 0)).all())
    z = request.z(raw, path)
    z_q = None if drafted is None else request.z(drafted, path)
    distribution = softmax(z.astype(np.float64))
    order = np.argsort(-exact, kind="stable")
    ids = [int(i) for i in order[: int((exact > 0).sum())]]
    for other in (z, z_q):
        if other is not None:
            ids += sorted(set(np.flatnonzero(other > NEVER).tolist()) - set(ids))
    wrong = oracle.total_variation(exact, distribution) if usable else 0.0
    local = np.zeros(LOCAL_IDS)
    local[: len(ids[:LOCAL_IDS])] = exact[ids[:LOCAL_IDS]]
    drawn = None if z_q is None else _local(z_q, ids)
    return _ContextNode(ids, _local(z, ids), drawn, local, wrong, usable and len(ids) <= LOCAL_IDS)


def _local(z: Logits, ids: list[int]) -> Logits:
    """Return z [vocabulary] at local ids, -inf past their end: fp32 [LOCAL_IDS]."""
    local = np.full(LOCAL_IDS, NEVER, np.float32)
    ids = [i for i in ids[:LOCAL_IDS] if i < len(z)]
    local[: len(ids)] = z[ids]
    return local


def record(
    target: Model,
    drafter: Model | None,
    contexts: Sequence[Sequence[int]],
    rng: np.random.Generator,
) -> tuple[list[Recorded], float]:
    """Return contexts, each with the next of ``OPTIONS``, and the largest error.

    Target and drafter have one vocabulary; without a drafter only certain drafts, which ``rng``
    chooses, are tested. Contexts on the edge of a truncation are left out. The error is the total
    variation between the engine's processed logits and the oracle.
    """
    requests = [
        _Request(tokens, OPTIONS[i % len(OPTIONS)], target) for i, tokens in enumerate(contexts)
    ]
    models = [Contexts(m, contexts) for m in (target, drafter) if m is not None]

    def nodes(paths: Sequence[Sequence[int]] | None, drafted: bool = True) -> list[_ContextNode]:
        raw = [model.after(paths) for model in models[: 1 + drafted]]
        q: Sequence[Logits | None] = [None] * len(contexts)
        if len(raw) > 1:
            q = list(widened(raw[1], raw[0].shape[1]))
        taken = paths or [[] for _ in contexts]
        return [_node(*row) for row in zip(requests, taken, raw[0], q, strict=True)]

    trees: list[_Tree] = [{(): node} for node in nodes(None)]
    for ranks in chain(*(product(range(SUPPORT_IDS), repeat=n) for n in (1, 2))):
        places, paths = zip(*(_place(tree, ranks) for tree in trees), strict=True)
        for tree, place, node in zip(trees, places, nodes(paths, len(ranks) == 1), strict=True):
            tree[place] = node
    usable = [tree for tree in trees if all(node.usable for node in tree.values())]
    wrong = max(node.wrong for tree in trees for node in tree.values())
    return [_recorded(tree, drafter is not None, rng) for tree in usable], wrong


def _place(tree: _Tree, ranks: Sequence[int]) -> tuple[tuple[int, ...], list[int]]:
    """Return the place and the ids of a path; a smaller support repeats its last id."""
    place, ids = tuple[int, ...](), list[int]()
    for rank in ranks:
        node = tree[place]
        place += (min(rank, int((node.exact > 0).sum()) - 1),)
        ids.append(node.ids[place[-1]])
    return place, ids


def _recorded(tree: _Tree, drafted: bool, rng: np.random.Generator) -> Recorded:
    """Return the nodes as tables; after tokens that the target never emits, weights are equal."""
    target = [np.zeros((LOCAL_IDS,) * (n + 1), np.float32) for n in range(3)]
    drafter = [np.zeros((LOCAL_IDS,) * (n + 1), np.float32) for n in range(2)]
    joint = np.zeros((LOCAL_IDS,) * 3)
    for path, node in tree.items():
        target[len(path)][path] = node.target
        if node.drafter is not None:
            drafter[len(path)][path] = node.drafter
        if len(path) == 2:
            a, b = path
            joint[a, b] = tree[()].exact[a] * tree[(a,)].exact[b] * node.exact
    first, second = (int(rng.integers(0, SUPPORT_IDS)) for _ in range(2))
    pair = (drafter[0], drafter[1]) if drafted else None
    return Recorded((target[0], target[1], target[2]), pair, joint, (first, second))
