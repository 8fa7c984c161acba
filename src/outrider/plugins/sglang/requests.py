"""Requests as SGLang takes them in: their seeds, and options that lose the rule."""

from collections.abc import Callable
from typing import Any

import torch

from ..common.draws import seed_of, signed

speculates = False  # true if this server drafts
NEUTRAL = {
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "min_new_tokens": 0,
}
"""Options that SGLang counts by steps under speculation, and their values without effect."""


def verify(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``SamplingParams.verify`` that refuses what would depend on drafts."""

    def verify(self: Any, vocab_size: int) -> None:
        original(self, vocab_size)
        if self.sampling_seed is not None and (self.n or 1) > 1:
            raise ValueError(
                f"seed {self.sampling_seed} with n={self.n} would give n equal samples in SGLang; "
                "send a request for each seed."
            )
        for name, neutral in NEUTRAL.items() if speculates else ():
            value = getattr(self, name)
            if value != neutral:
                raise ValueError(
                    f"{name}={value} depends on the drafts in SGLang, which counts the last token "
                    "of each step only; leave it out, or serve without speculation."
                )

    return verify


def from_schedule_batch(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``SamplingBatchInfo.from_schedule_batch`` that gives a seed to every request.

    One without a seed gets it from its id, which all ranks know; SGLang's ``--random-seed`` may
    differ between hosts and has no part in it.
    """

    def from_schedule_batch(cls: Any, batch: Any, vocab_size: int) -> Any:
        info = original(cls, batch, vocab_size)
        seeds = [
            signed(seed_of(each.rid, each.sampling_params.sampling_seed, 0)) for each in batch.reqs
        ]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64).to(
            batch.device, non_blocking=True
        )
        return info

    return from_schedule_batch
