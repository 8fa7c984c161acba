"""The draw and the acceptance that vLLM's runners get, against Outrider's own."""

from __future__ import annotations

import random

import pytest
import torch

from outrider.base.types import Row
from outrider.params import SamplingParams
from outrider.plugins.common import draws
from outrider.sampling.noise import gumbel
from outrider.sampling.pipeline import truncate as truncate_own
from outrider.sampling.shared_noise import SharedNoise

CPU = torch.device("cpu")
GOLDEN = [  # seed, position, token id, bits of g: those of sample 0 and stream 0 in test_noise
    (0, 0, 0, 0x3F2CC259),
    (0, 0, 3, 0x3D946D1A),
    (0, 1, 0, 0xBFA3658A),
    (1, 0, 0, 0xBF4AF6B1),
    (1234, 17, 8191, 0x3C917F32),
]


def tensors(a: list[int], b: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(a, dtype=torch.int64), torch.tensor(b, dtype=torch.int64)


@pytest.mark.parametrize(("seed", "position", "token", "bits"), GOLDEN)
def test_noise_has_the_golden_bits(seed: int, position: int, token: int, bits: int) -> None:
    g = draws.noise(*tensors([seed], [position]), token + 1)
    assert g.view(torch.int32)[0, token].item() & 0xFFFFFFFF == bits


def test_noise_of_tensors_is_the_noise_of_numbers() -> None:
    from outrider.plugins.common.gumbel import gumbel_of_tensors

    seeds = [0, 1, 2**32, 2**53 - 1, 2**63, 2**64 - 1]
    positions = [0, 7, 2**20, 2**31, 2**32 - 1, 3]
    signed = [draws.signed(seed) for seed in seeds]
    expected = torch.from_numpy(gumbel(seeds, [0] * 6, positions, 1003))
    assert torch.equal(draws.noise(*tensors(signed, positions), 1003), expected)
    assert torch.equal(gumbel_of_tensors(*tensors(signed, positions), 1003), expected)


@pytest.mark.parametrize("native", [True, False])
def test_draws_are_those_of_outriders_sampler(
    native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not native:
        monkeypatch.setattr(draws, "_native", lambda: None)
    elif draws._native() is None:
        pytest.skip("there is no native step")
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(40, 301, generator=generator) * 2
    seeds, positions = [i % 5 for i in range(40)], list(range(7, 47))
    greedy = [i % 3 == 0 for i in range(40)]
    rows = [
        Row("s", seed, 0, position, one, 0)
        for seed, position, one in zip(seeds, positions, greedy, strict=True)
    ]
    expected = SharedNoise(301).draw(z.numpy(), rows)[0]
    got = draws.draw(z, *tensors(seeds, positions), torch.tensor(greedy))
    assert got.tolist() == expected
    rows = [row._replace(greedy=False) for row in rows]
    expected = SharedNoise(301).draw(z.numpy(), rows)[0]
    assert draws.draw(z, *tensors(seeds, positions), None).tolist() == expected
    z[:, 3:] = -torch.inf  # masked ids, equal scores, columns of a wider tensor
    z[:5, :3] = 0.0
    seeds = [-1, -(2**63), 2**63 - 1, *range(37)]
    wide = torch.cat((z, z), 1)[:, :301]
    g = draws.noise(*tensors(seeds, positions), 301)
    assert (
        draws.draw(wide, *tensors(seeds, positions), None).tolist() == (z + g).argmax(-1).tolist()
    )
    cold = torch.ones(40, dtype=torch.bool)
    assert draws.draw(z, *tensors(seeds, positions), cold).tolist() == z.argmax(-1).tolist()


def test_a_greedy_draw_leaves_the_logits_alone() -> None:
    z = torch.randn(3, 17)
    before = z.clone()
    draws.draw(z, *tensors([1, 2, 3], [4, 5, 6]), torch.tensor([True, False, True]))
    assert torch.equal(z, before)


@pytest.mark.parametrize("ties", [False, True])
def test_truncation_has_the_bits_of_outriders(ties: bool) -> None:
    rng = random.Random(1)
    z = torch.randn(60, 97, generator=torch.Generator().manual_seed(1)) * 3
    if ties:
        z = z.round()
    options = [
        (rng.choice([0, 1, 5, 50, 97]), rng.choice([1.0, 0.9, 0.5, 1e-6])) for _ in range(60)
    ]
    expected = torch.cat(
        [
            torch.from_numpy(
                truncate_own(row[None].numpy().copy(), SamplingParams(top_k=k, top_p=p))
            )
            for row, (k, p) in zip(z, options, strict=True)
        ]
    )
    k = torch.tensor([k or 97 for k, _ in options], dtype=torch.int32)
    p = torch.tensor([p for _, p in options])
    assert torch.equal(draws.truncate(z.clone(), k, p), expected)
    only_k = draws.truncate(z.clone(), k, None)
    assert torch.equal(only_k, draws.truncate(z.clone(), k, torch.ones(60)))
    only_p = draws.truncate(z.clone(), None, p)
    assert torch.equal(only_p, draws.truncate(z.clone(), torch.full((60,), 97), p))


def test_no_rows() -> None:
    none = torch.empty(0)
    assert draws.truncate(torch.empty(0, 5), none.int(), None).shape == (0, 5)
    assert draws.draw(torch.empty(0, 5), none.long(), none.long(), None).tolist() == []


def follow_plainly(drawn: list[int], drafts: list[int]) -> list[int]:
    out = []
    for token, draft in zip(drawn, drafts, strict=False):
        out.append(token)
        if draft != token:
            return out
    return [*out, drawn[len(drafts)]]


def test_drafts_stand_as_far_as_they_are_the_drawn_tokens() -> None:
    rng = random.Random(2)
    for most in (0, 1, 4):
        counts = [rng.randint(0, most) for _ in range(200)]
        drawn = [[rng.randrange(2) for _ in range(most + 1)] for _ in counts]
        drafts = [[rng.choice([-1, 0, 1, 1, 0]) for _ in range(most)] for _ in counts]
        tokens, number = draws.follow(
            torch.tensor(drawn), torch.tensor(drafts).reshape(200, most), torch.tensor(counts)
        )
        for i, count in enumerate(counts):
            expected = follow_plainly(drawn[i], drafts[i][:count])
            assert tokens[i].tolist() == expected + [-1] * (most + 1 - len(expected))
            assert number[i] == len(expected)


def test_seeds() -> None:
    assert draws.seed_of("a", 7, 0) == 7
    assert draws.seed_of("a", -1, 0) == 2**64 - 1  # any 64 bits are a seed
    assert draws.signed(2**64 - 1) == -1
    assert draws.signed(2**63 - 1) == 2**63 - 1
    drawn = {draws.seed_of(name, None, seed) for name in ("a", "b", "0_a") for seed in (0, 1)}
    assert len(drawn) == 6
    assert draws.seed_of("a", None, 0) == 6624576025097387  # an answer stays what it was
