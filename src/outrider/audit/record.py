"""Contexts recorded from a pair, for testing acceptance rules where there is power.

Raw logits of target and drafter along every continuation that the target can say within two
tokens. A request's top_k keeps supports small, so that each node's ids can be numbered anew: the
target's by falling probability, then those that only the drafter has. Laws stay what they were,
and a rule that runs on them is the engine's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ..models.base import Model
from ..models.rows import Segment
from ..native.laws import sequence_law
from ..sampling import oracle
from ..sampling.law import NEVER, RequestLaw, SequenceLaw
from ..sampling.oracle import Law
from ..types import Request, SamplingParams

TOP = 4
WIDTH = 2 * TOP
"""Ids of a node: the target's and the drafter's."""
LONGEST_PATH = 2
PAGE_SIZE = 16
EDGE = 1e-5
"""A law that changes when top_p or min_p moves by this share stands on an edge, and is left out."""
LAW_ERROR = 1e-4
"""Total variation between a processed law and the oracle's that fp32 does not explain."""
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
    """One context in local ids, and what the oracle says should come out.

    ``target`` and ``drafter`` hold z after no, one and two tokens: fp32 [W], [W, W], [W, W, W]
    (the drafter's without the last). ``joint`` float64 [W, W, W] is the law of the next three
    tokens from raw logits in float64. ``certain`` is a draft of two tokens that nobody drew.
    """

    target: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    drafter: tuple[torch.Tensor, torch.Tensor] | None
    joint: Law
    certain: tuple[int, int]


class Contexts:
    """Token sequences in a cache of their own, and logits after short paths behind them."""

    def __init__(self, model: Model, contexts: Sequence[Sequence[int]]) -> None:
        self._model = model
        self._contexts = contexts
        each = (max(len(c) for c in contexts) + LONGEST_PATH) // PAGE_SIZE + 1
        self._pages = [range(1 + i * each, 1 + (i + 1) * each) for i in range(len(contexts))]
        self._store = model.new_store(1 + each * len(contexts), PAGE_SIZE)
        self.root = self._run(contexts, 0)

    def _run(self, tokens: Sequence[Sequence[int]], start: int | None) -> torch.Tensor:
        segments = [
            Segment(row, len(c) if start is None else start, pages, 1, len(c), key=f"{pages}")
            for row, c, pages in zip(tokens, self._contexts, self._pages, strict=True)
        ]
        logits = self._model.run(segments, self._store).logits
        assert logits is not None  # every segment wants a row of them
        return logits

    def after(self, paths: Sequence[Sequence[int]]) -> torch.Tensor:
        """Logits after each context and its path of a token or two: fp32 [contexts, vocabulary]."""
        return self._run(paths, None)


@dataclass
class _Node:
    """The laws after one path: local ``ids``, z in them, and the oracle's law in float64."""

    ids: list[int]
    target: torch.Tensor
    drafter: torch.Tensor | None
    exact: Law
    wrong: float
    usable: bool


@dataclass(frozen=True)
class _Asked:
    """A context as a request: what options it has, and what of its ``tokens`` is the prompt."""

    params: SamplingParams
    tokens: list[int]
    law: SequenceLaw

    @staticmethod
    def of(tokens: Sequence[int], options: dict[str, Any], model: Model) -> _Asked:
        params = SamplingParams(top_k=TOP, **options)
        request = Request("audit", tuple(tokens[: -(-len(tokens) // 2)]), params, 0)
        law = sequence_law(RequestLaw(request, model.shape.vocab_size, model.device))
        return _Asked(params, list(tokens), law)

    def z(self, raw: torch.Tensor, path: Sequence[int]) -> torch.Tensor:
        """The law after ``path`` as the engine makes it of raw logits: fp32 [vocabulary]."""
        return self.law.apply(raw[None].clone(), self.tokens, [list(path)])[0]

    def logits(self, raw: Law, path: Sequence[int]) -> Law:
        """Raw logits as the oracle has them before `oracle.law`."""
        penalties = {name: getattr(self.params, name) for name in PENALTIES}
        prompt = -(-len(self.tokens) // 2)
        output = [*self.tokens[prompt:], *path]
        return oracle.processed(raw, self.tokens[:prompt], output, **penalties)


def _node(
    asked: _Asked, path: Sequence[int], raw: torch.Tensor, drafted: torch.Tensor | None
) -> _Node:
    """Local laws after ``path`` from raw logits [vocabulary] of the target and the drafter."""
    params = asked.params
    options = (params.temperature, params.top_k)
    precise = asked.logits(raw.double().cpu().numpy(), path)
    exact = oracle.law(precise, *options, params.top_p, params.min_p)
    usable = True
    for share in (1 - EDGE, 1 + EDGE):
        moved = oracle.law(precise, *options, min(1.0, params.top_p * share), params.min_p * share)
        usable = usable and bool(((moved > 0) == (exact > 0)).all())
    z = asked.z(raw, path)
    z_q = None if drafted is None else asked.z(drafted, path)
    law = z.double().softmax(-1).cpu().numpy()
    order = np.argsort(-exact, kind="stable")
    ids = [int(i) for i in order[: int((exact > 0).sum())]]
    for other in (z, z_q):
        if other is not None:
            ids += sorted(set((other > NEVER).nonzero()[:, 0].tolist()) - set(ids))
    wrong = oracle.total_variation(exact, law) if usable else 0.0
    local = np.zeros(WIDTH)
    local[: len(ids[:WIDTH])] = exact[ids[:WIDTH]]
    drawn = None if z_q is None else _local(z_q, ids)
    return _Node(ids, _local(z, ids), drawn, local, wrong, usable and len(ids) <= WIDTH)


def _local(z: torch.Tensor, ids: list[int]) -> torch.Tensor:
    """z [vocabulary] at local ids, -inf where there are fewer: fp32 [WIDTH]."""
    out = torch.full((WIDTH,), NEVER)
    known = [i for i in ids[:WIDTH] if i < len(z)]
    out[: len(known)] = z[known].cpu()
    return out


@torch.inference_mode()
def record(
    target: Model,
    drafter: Model | None,
    contexts: Sequence[Sequence[int]],
    rng: np.random.Generator,
) -> tuple[list[Recorded], float]:
    """Record contexts, options dealt out over them by turns.

    Args:
        target, drafter: models of one vocabulary; None where only certain drafts are wanted.
        contexts: token ids, one at least each.
        rng: chooses the certain drafts.

    Returns:
        What was recorded, contexts on the edge of a truncation left out, and the largest total
        variation between a law as the engine processes it and the oracle's.
    """
    requests = [
        _Asked.of(tokens, OPTIONS[i % len(OPTIONS)], target) for i, tokens in enumerate(contexts)
    ]
    models = [Contexts(m, contexts) for m in (target, drafter) if m is not None]
    width = models[0].root.shape[1]

    def nodes(paths: Sequence[Sequence[int]] | None, drafted: bool = True) -> list[_Node]:
        found = [m.root if paths is None else m.after(paths) for m in models[: 1 + drafted]]
        q: Sequence[torch.Tensor | None] = [None] * len(contexts)
        if len(found) > 1:
            q = F.pad(found[1], (0, width - found[1].shape[1]), value=NEVER).unbind()
        taken = paths or [[] for _ in contexts]
        return [_node(*of) for of in zip(requests, taken, found[0], q, strict=True)]

    trees: list[dict[tuple[int, ...], _Node]] = [{(): node} for node in nodes(None)]
    for first in range(TOP):
        # Where the support is smaller its last id is run again, to no use.
        rows = [min(first, _size(tree[()]) - 1) for tree in trees]
        ones = [tree[()].ids[a] for tree, a in zip(trees, rows, strict=True)]
        for tree, a, node in zip(trees, rows, nodes([[one] for one in ones]), strict=True):
            tree[(a,)] = node
        for second in range(TOP):
            places = [(a, min(second, _size(tree[(a,)]) - 1))
                      for tree, a in zip(trees, rows, strict=True)]  # fmt: skip
            twos = [tree[(a,)].ids[b] for tree, (a, b) in zip(trees, places, strict=True)]
            behind = nodes([list(path) for path in zip(ones, twos, strict=True)], drafted=False)
            for tree, place, node in zip(trees, places, behind, strict=True):
                tree[place] = node
    usable = [tree for tree in trees if all(node.usable for node in tree.values())]
    wrong = max(node.wrong for tree in trees for node in tree.values())
    return [_recorded(tree, drafter is not None, rng) for tree in usable], wrong


def _size(node: _Node) -> int:
    """How many ids the target can say, ``TOP`` at most."""
    return min(TOP, int((node.exact > 0).sum()))


def _recorded(
    tree: dict[tuple[int, ...], _Node], drafted: bool, rng: np.random.Generator
) -> Recorded:
    """Lay the nodes out as tables; what the target never says is followed by equal weights."""
    target = tuple(torch.zeros((WIDTH,) * (n + 1)) for n in range(3))
    drafter = tuple(torch.zeros((WIDTH,) * (n + 1)) for n in range(2))
    joint = np.zeros((WIDTH,) * 3)
    for path, node in tree.items():
        target[len(path)][path] = node.target
        if node.drafter is not None:
            drafter[len(path)][path] = node.drafter
        if len(path) == 2:
            a, b = path
            joint[a, b] = tree[()].exact[a] * tree[(a,)].exact[b] * node.exact
    first, second = (int(rng.integers(0, TOP)) for _ in range(2))
    pair = (drafter[0], drafter[1]) if drafted else None
    return Recorded((target[0], target[1], target[2]), pair, joint, (first, second))
