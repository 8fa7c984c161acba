"""Losses between a target's distribution p and a drafter's q, and what each rule would accept.

They take log q of all ids, [rows, ids], and the likeliest ids of p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple, Self

import torch
from torch import Tensor

HEAD_IDS = 64
"""Number of likeliest ids in the coupled rule; all others count as one id."""


class Likeliest(NamedTuple):
    """The likeliest ids of p, as q numbers them, int64 [rows, k], and their log p, fp32 [rows, k].

    The first is the likeliest. Ids that q does not know are missing, so p may sum to less than 1.
    """

    ids: Tensor
    log_p: Tensor

    @classmethod
    def among_all(cls, log_p: Tensor) -> Self:
        """Return all ids of p, whose log p is fp32 [rows, ids]."""
        ordered = log_p.sort(-1, descending=True)
        return cls(ordered.indices, ordered.values)

    def of(self, log_q: Tensor) -> Tensor:
        """Return log q of the same ids, [rows, k]."""
        return log_q.gather(-1, self.ids)


Loss = Callable[[Likeliest, Tensor], Tensor]
"""Returns a loss for each row of p and log q, [rows]."""


def forward_kl(p: Likeliest, log_q: Tensor) -> Tensor:
    """Return the cross-entropy of q under p: forward KL divergence up to a constant."""
    return -(p.log_p.exp() * p.of(log_q)).sum(-1)


def reverse_kl(p: Likeliest, log_q: Tensor) -> Tensor:
    """Return KL(q || p); ids missing in p count as likely as its last known one."""
    floor = p.log_p[:, -1:].clamp(min=-20)
    known = (p.of(log_q).exp() * (p.log_p - floor)).sum(-1)
    return (log_q.exp() * log_q).sum(-1) - known - floor[:, 0]


def hard(p: Likeliest, log_q: Tensor) -> Tensor:
    """Return the cross-entropy of the target's likeliest id."""
    return -p.of(log_q)[:, 0]


def overlap(p: Likeliest, log_q: Tensor) -> Tensor:
    """Return the acceptance of the ratio rule, 1 - TV = sum min(p, q)."""
    return torch.minimum(p.log_p.exp(), p.of(log_q).exp()).sum(-1)


def total_variation(p: Likeliest, log_q: Tensor) -> Tensor:
    """Return the total variation between p and q."""
    return 1 - overlap(p, log_q)


def coupled_acceptance(p: Likeliest, log_q: Tensor) -> Tensor:
    """Return the acceptance of the coupled rule: sum_i 1 / sum_j max(p_j / p_i, q_j / q_i).

    See docs/exactness.md. Sorted by q / p, the maximum is p's for all j up to i, and q's for all
    later j, so cumulative sums give the inner sum. All ids but the ``HEAD_IDS`` likeliest of p
    count as one id, so the result is too large, by at most their mass.
    """
    top = Likeliest(p.ids[:, :HEAD_IDS], p.log_p[:, :HEAD_IDS])
    own, other = top.log_p.exp(), top.of(log_q).exp()
    own = torch.cat([own, 1 - own.sum(-1, keepdim=True)], -1).clamp(min=1e-9)
    other = torch.cat([other, 1 - other.sum(-1, keepdim=True)], -1).clamp(min=1e-9)
    order = (other / own).argsort(-1)
    own, other = own.gather(-1, order), other.gather(-1, order)
    before = own.cumsum(-1) / own
    behind = (other.sum(-1, keepdim=True) - other.cumsum(-1)) / other
    return (1 / (before + behind)).sum(-1).clamp(max=1)


def coupled(p: Likeliest, log_q: Tensor) -> Tensor:
    """Return -log of the coupled rule's acceptance."""
    return -coupled_acceptance(p, log_q).log()


def hybrid(p: Likeliest, log_q: Tensor) -> Tensor:
    """Return a blend: forward KL and, the more is accepted, -log of the coupled acceptance.

    The weight of the former is exp(-3 a), where a is the coupled acceptance. The LK losses (arXiv
    2602.23881) do the same with the ratio rule's.
    """
    accepted = coupled_acceptance(p, log_q)
    weight = (-3 * accepted.detach()).exp()
    return weight * forward_kl(p, log_q) - (1 - weight) * accepted.log()


LOSSES: Mapping[str, Loss] = {
    "forward-kl": forward_kl,
    "reverse-kl": reverse_kl,
    "tvd": total_variation,
    "hard": hard,
    "coupled": coupled,
    "hybrid": hybrid,
}
