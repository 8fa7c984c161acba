"""The functions that V2's runner gets, on tensors."""

from __future__ import annotations

import torch

from outrider.plugins.vllm import v2
from outrider.sampling.noise import gumbel

VOCABULARY = 41


def token(z: torch.Tensor, seed: int, position: int, temperature: float) -> int:
    """The rule, for one row of logits that are not yet divided."""
    if not temperature:
        return int(z.argmax())
    g = torch.from_numpy(gumbel([seed % 2**64], [0], [position], VOCABULARY))[0]
    return int((z / temperature + g).argmax())


def state() -> tuple[torch.Tensor, torch.Tensor]:
    """Temperatures and seeds by request."""
    return torch.tensor([0.7, 0.0, 1.0, 1.4]), torch.tensor([3, 9, -(2**63), 2**62])


def test_plain_rows_and_drafts_draw_the_rule_s_tokens() -> None:
    temperature, seed = state()
    logits = torch.randn(6, VOCABULARY, generator=torch.Generator().manual_seed(0)) * 2
    requests, pos = torch.tensor([2, 0, 1, 3, 0, 2]), torch.tensor([5, 9, 0, 77, 10, 2**31 - 2])
    expected = [
        token(logits[i], int(seed[r]), int(pos[i]) + 1, float(temperature[r]))
        for i, r in enumerate(requests.tolist())
    ]
    for drafting in (False, True):
        got = v2.gumbel_sample(
            logits, requests, temperature, seed, pos, True, drafting, logits_cache=None
        )
        assert got.tolist() == expected
    hot = temperature[requests].masked_fill(temperature[requests] == 0, 1)
    got = v2.gumbel_sample(
        logits / hot[:, None], requests.int(), temperature, seed, pos.int(), apply_temperature=False
    )
    assert got.tolist() == expected


def test_verified_rows_follow_the_drafts() -> None:
    temperature, seed = state()
    steps = 3
    generator = torch.Generator().manual_seed(1)
    stood = void = 0
    for _ in range(40):
        counts = torch.randint(0, steps + 1, (3,), generator=generator).tolist()
        requests = [2, 1, 0]
        cu = torch.tensor([0, *torch.tensor([c + 1 for c in counts]).cumsum(0).tolist()])
        rows = int(cu[-1])
        logits = torch.randn(rows, VOCABULARY, generator=generator)
        pos, drafts, owner, expected = [], [-7] * rows, [], []
        for request, count, start in zip(requests, counts, cu.tolist(), strict=False):
            tokens: list[int] = []
            open_ = True
            for i in range(count + 1):
                row = start + i
                pos.append(11 * request + i)
                owner.append(request)
                hot = float(temperature[request])
                z = logits[row] * (hot or 1)
                y = token(z, int(seed[request]), pos[-1] + 1, hot)
                if open_:
                    tokens.append(y)
                if i < count:
                    pick = int(torch.randint(0, 4, (1,), generator=generator))
                    drafts[row + 1] = -1 if pick == 0 else y if pick > 1 else (y + 1) % VOCABULARY
                    stood += open_ and drafts[row + 1] == y
                    void += open_ and drafts[row + 1] == -1
                    open_ = open_ and drafts[row + 1] == y
            expected.append(tokens)
        sampled, number = v2.rejection_sample(
            # as processed logits, which are divided: times hot and over hot may differ in a bit
            torch.stack(
                [
                    logits[i] * (float(temperature[r]) or 1) / (float(temperature[r]) or 1)
                    for i, r in enumerate(owner)
                ]
            ),
            None,
            torch.tensor(drafts),
            cu.int(),
            torch.tensor(pos),
            torch.tensor(requests),
            torch.tensor(owner),
            None,
            temperature,
            seed,
            steps,
            None,
            use_fp64=False,
            fly_window_size=0,
        )
        assert sampled.shape == (3, steps + 1)
        assert [row[:n] for row, n in zip(sampled.tolist(), number.tolist(), strict=True)] == (
            expected
        )
    assert stood > 20
    assert void > 10


def test_truncation_takes_the_arguments_of_every_version() -> None:
    z = torch.tensor([[3.0, 2.0, 1.0]])
    kept = torch.tensor([[3.0, 2.0, -torch.inf]])
    k = torch.tensor([2])
    assert torch.equal(v2.apply_top_k_top_p(z.clone(), k, None), kept)
    assert torch.equal(v2.apply_top_k_top_p(z.clone(), k, None, has_topp_only_rows=False), kept)
