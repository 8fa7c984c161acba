"""Losses and what the rules accept, beside their definitions."""

from __future__ import annotations

import pytest
import torch

from outrider.training.losses import (
    HEAD_IDS,
    LOSSES,
    Likeliest,
    coupled_acceptance,
    forward_kl,
    overlap,
    reverse_kl,
)


def pair(rows: int, ids: int, near: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    z = torch.randn(rows, ids, generator=generator) * 2
    other = z + near * torch.randn(rows, ids, generator=generator)
    return z.log_softmax(-1), other.log_softmax(-1)


@pytest.mark.parametrize("near", [0.0, 0.3, 3.0])
def test_the_coupled_rule_is_its_double_sum(near: float) -> None:
    log_p, log_q = pair(5, HEAD_IDS, near)
    p, q = log_p.double().exp(), log_q.double().exp()
    ratios = torch.maximum(p[:, None] / p[:, :, None], q[:, None] / q[:, :, None])
    expected = (1 / ratios.sum(-1)).sum(-1)
    torch.testing.assert_close(
        coupled_acceptance(Likeliest.among_all(log_p), log_q).double(), expected, rtol=1e-4, atol=0
    )


def test_the_coupled_rule_lies_between_its_bounds() -> None:
    log_p, log_q = pair(64, 500, 1.0)
    kept = overlap(Likeliest.among_all(log_p), log_q)
    accepted = coupled_acceptance(Likeliest.among_all(log_p), log_q)
    tail = 1 - log_p.exp().topk(HEAD_IDS, -1).values.sum(-1)
    assert (accepted <= kept + tail + 1e-5).all()
    assert (accepted >= kept / (2 - kept) - 1e-5).all()


def test_what_is_accepted_is_what_shared_noise_gives() -> None:
    log_p, log_q = pair(1, 12, 0.8)
    noise = -(-torch.rand(200_000, 12, generator=torch.Generator().manual_seed(1)).log()).log()
    same = ((log_p + noise).argmax(-1) == (log_q + noise).argmax(-1)).double().mean()
    assert coupled_acceptance(Likeliest.among_all(log_p), log_q).item() == pytest.approx(
        same.item(), abs=0.005
    )


@pytest.mark.parametrize("name", LOSSES)
def test_every_loss_falls_along_its_gradient_and_ends_at_the_target(name: str) -> None:
    log_p, _ = pair(8, 40, 0.0)
    z = torch.randn(8, 40, generator=torch.Generator().manual_seed(2)).requires_grad_()
    optimiser = torch.optim.Adam([z], lr=0.1)
    losses = []
    for _ in range(300):
        loss = LOSSES[name](Likeliest.among_all(log_p), z.log_softmax(-1)).mean()
        optimiser.zero_grad()
        loss.backward()
        assert z.grad.isfinite().all()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    accepted = coupled_acceptance(Likeliest.among_all(log_p), z.detach().log_softmax(-1))
    best = (log_p.argmax(-1) == z.argmax(-1)).float().mean()
    assert best > 0.9 if name == "hard" else accepted.mean() > 0.9


def test_divergences_are_those_of_torch() -> None:
    log_p, log_q = pair(6, 30, 1.0)
    entropy = -(log_p.exp() * log_p).sum(-1)
    kl = torch.nn.functional.kl_div(log_q, log_p, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(forward_kl(Likeliest.among_all(log_p), log_q) - entropy, kl)
    back = torch.nn.functional.kl_div(log_p, log_q, reduction="none", log_target=True).sum(-1)
    torch.testing.assert_close(reverse_kl(Likeliest.among_all(log_p), log_q), back)


def test_of_ids_that_are_not_known_reverse_kl_takes_the_last_known() -> None:
    log_p, log_q = pair(6, 30, 1.0)
    whole = Likeliest.among_all(log_p)
    few = Likeliest(whole.ids[:, :10], whole.log_p[:, :10])
    rest = torch.ones_like(log_p).scatter(-1, few.ids, 0.0).bool()
    filled = torch.where(rest, few.log_p[:, -1:], log_p)
    expected = (log_q.exp() * (log_q - filled)).sum(-1)
    torch.testing.assert_close(reverse_kl(few, log_q), expected)
