"""Losses between a target's distribution p and a drafter's q, and what each rule would accept.

Arguments are log p, which may leave out ids and so sum to less than 1, and log q, [rows, ids].
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

HEAD_IDS = 64
"""Likeliest ids that the coupled rule is computed over; the others count as one."""

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of log p and log q, [rows]."""


def forward_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the cross-entropy of q under p: the forward KL divergence but for a constant."""
    return -(log_p.exp() * log_q).sum(-1)


def reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the KL divergence from q to p, with p no less than e^-20."""
    return (log_q.exp() * (log_q - log_p.clamp(min=-20))).sum(-1)


def hard(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the cross-entropy of the target's likeliest id."""
    return -log_q.gather(-1, log_p.argmax(-1, keepdim=True))[:, 0]


def overlap(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return 1 - TV = sum min(p, q), which the ratio rule accepts."""
    return torch.minimum(log_p.exp(), log_q.exp()).sum(-1)


def total_variation(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return the total variation between p and q."""
    return 1 - overlap(log_p, log_q)


def coupled_acceptance(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return what the coupled rule accepts: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i).

    See docs/exactness.md. In the order of q / p the maxima before i are p's and those behind it
    q's, so sums over beginnings give all of them. Ids but the ``HEAD_IDS`` likeliest of p count as
    one, which makes it too large by what is accepted among them by mistake: never above their mass.
    """
    count = min(HEAD_IDS, log_p.shape[-1])
    top, ids = log_p.topk(count, -1)
    p, q = top.exp(), log_q.gather(-1, ids).exp()
    rest_p, rest_q = (1 - p.sum(-1, keepdim=True)), (1 - q.sum(-1, keepdim=True))
    p = torch.cat([p, rest_p], -1).clamp(min=1e-9)
    q = torch.cat([q, rest_q], -1).clamp(min=1e-9)
    order = (q / p).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    before = p.cumsum(-1) / p
    behind = (q.sum(-1, keepdim=True) - q.cumsum(-1)) / q
    return (1 / (before + behind)).sum(-1).clamp(max=1)


def coupled(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return -log of what the coupled rule accepts."""
    return -coupled_acceptance(log_p, log_q).log()


def hybrid(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Return forward KL and, the more is accepted, -log of the coupled acceptance instead.

    The weight of the former is exp(-3 a), a being the acceptance, as in the LK losses (arXiv
    2602.23881), which take the ratio rule's.
    """
    accepted = coupled_acceptance(log_p, log_q)
    weight = (-3 * accepted.detach()).exp()
    return weight * forward_kl(log_p, log_q) - (1 - weight) * accepted.log()


LOSSES: Mapping[str, Loss] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tvd": total_variation,
    "hard": hard,
    "coupled": coupled,
    "hybrid": hybrid,
}
