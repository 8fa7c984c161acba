"""The code of the pull request that docs/upstream drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider.plugins.vllm import v2
from tests.support import REPOSITORY

PATCH = REPOSITORY / "docs/upstream/vllm-strict.patch"


def strict_sample() -> Any:
    """The function that the patch adds, with Outrider's draw for vLLM's."""
    added = [line[1:] for line in PATCH.read_text(encoding="utf-8").splitlines() if line[:1] == "+"]
    begin = added.index("def strict_sample(")
    end = next(i for i in range(begin, len(added)) if added[i].startswith("    return "))
    scope: dict[str, Any] = {"torch": torch, "gumbel_sample": v2.gumbel_sample}
    exec("\n".join(added[begin : end + 1]), scope)
    return scope["strict_sample"]


@pytest.mark.parametrize("steps", [1, 4])
def test_strict_verification_keeps_the_tokens_of_plain_decoding(steps: int) -> None:
    generator = torch.Generator().manual_seed(steps)
    temperature, seed = torch.tensor([0.0, 0.8, 1.0]), torch.tensor([4, 5, -6])
    sample, kept = strict_sample(), 0
    for _ in range(30):
        counts = torch.randint(0, steps + 1, (3,), generator=generator)
        cu = torch.cat((torch.zeros(1, dtype=torch.int64), (counts + 1).cumsum(0)))
        owner = torch.arange(3).repeat_interleave(counts + 1)
        pos = torch.arange(len(owner)) * 3 + 7
        logits = torch.randn(len(owner), 17, generator=generator)
        plain = v2.gumbel_sample(logits, owner, temperature, seed, pos, apply_temperature=False)
        drafts = torch.full((len(owner),), -1)
        drafts[1:] = plain[:-1]  # right, but for some
        drafts[torch.rand(len(owner), generator=generator) < 0.3] = -1
        tokens, number = sample(
            logits, drafts.int(), cu.int(), pos, owner, temperature, seed, steps
        )
        expected, wanted = v2.rejection_sample(
            logits, None, drafts, cu.int(), pos, torch.arange(3), owner, torch.empty(0),
            temperature, seed, steps,
        )  # fmt: skip
        assert number.tolist() == wanted.tolist()
        for row, count in enumerate(number.tolist()):
            assert tokens[row, :count].tolist() == expected[row, :count].tolist()
            assert tokens[row, :count].tolist() == plain[cu[row] : cu[row] + count].tolist()
            kept += count - 1
    assert kept > 20
