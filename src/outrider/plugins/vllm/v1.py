"""Outrider's rule in vLLM's V1 runner, which its CPU runner inherits.

``GPUModelRunner._sample`` says which requests and positions a step draws for. Inside it vLLM calls
three of the functions below where it would draw: behind the logits processors of plain rows and of
bonus rows, and twice for rows that are verified. Outside of it (warm-up) they are vLLM's own.
Behind it a drafter that is a model draws, with the noise of the tokens that it guesses.
"""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..common.draws import draw, follow, seed_of, signed, truncate
from ..common.start import stop

OTHER_DRAFTS = ("parallel_drafting", "use_heterogeneous_vocab", "use_local_argmax_reduction")
"""Attributes of a proposer that draws all at once, from another vocabulary, or without logits."""


class SampledStep:
    """The rows that one call of ``_sample`` draws for; nothing was drafted without metadata."""

    def __init__(self, runner: Any, metadata: Any) -> None:
        batch = runner.input_batch
        device = runner.positions.device
        self.metadata = metadata
        engine_seed = runner.vllm_config.model_config.seed
        seeds = [
            signed(seed_of(name, runner.requests[name].sampling_params.seed, engine_seed))
            for name in batch.req_ids
        ]
        self.seeds = torch.tensor(seeds, dtype=torch.int64).to(device, non_blocking=True)
        if metadata is None:
            last = runner.query_start_loc.gpu[1 : len(seeds) + 1] - 1
            self.positions = runner.positions[last] + 1
        else:
            rows = runner.positions[metadata.logits_indices] + 1
            self.positions = rows[metadata.bonus_logits_indices]
            self.verified = rows[metadata.target_logits_indices]
            self.counts = torch.tensor(metadata.num_draft_tokens).to(device, non_blocking=True)
        self.last = self.positions  # the position of each request's last token, once it is drawn
        self.drafted = 0  # tokens that were drafted behind it
        self.drew_plain = self.drew_verified = False

    def of_each(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of requests, repeated for each of their verified rows."""
        return values.repeat_interleave(self.counts, output_size=len(self.verified))


_step: SampledStep | None = None
_behind: SampledStep | None = None  # the step that ended last
last_runner: weakref.ref[Any] | None = None
"""The runner that sampled last: vLLM tells a proposer of its own class no request ids."""


def sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``GPUModelRunner._sample`` with Outrider's rule."""

    def _sample(self: Any, logits: torch.Tensor | None, spec_decode_metadata: Any) -> Any:
        global _step, _behind, last_runner
        last_runner = weakref.ref(self)
        _take_over(self.sampler)
        # Nobody draws with these; on CPUs vLLM fails to turn one back in the middle of a prompt.
        self.input_batch.generators.clear()
        step = SampledStep(self, spec_decode_metadata)
        _step = step
        try:
            output = original(self, logits, spec_decode_metadata)
        finally:
            _step, _behind = None, step
        greedy = self.input_batch.sampling_metadata.all_greedy
        verified = spec_decode_metadata is None or step.drew_verified
        if not verified or not (greedy or step.drew_plain):
            stop(
                "vLLM drew tokens without Outrider's rule, in a way that its release has not; "
                "install the release, or unset OUTRIDER_VLLM."
            )
        return output

    _sample.outrider = True  # type: ignore[attr-defined]
    return _sample


def _take_over(sampler: Any) -> None:
    """Draw by our rule where vLLM's sampler draws behind top_k and top_p."""
    final = sampler.topk_topp_sampler
    if getattr(final, "outrider", False):
        return
    original = final.forward

    def forward(
        logits: torch.Tensor, generators: Any, k: torch.Tensor | None, p: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if _step is None:
            drawn: tuple[torch.Tensor, torch.Tensor | None] = original(logits, generators, k, p)
            return drawn
        _step.drew_plain = True
        z = truncate(logits, k, p)
        shown = None
        if final.logprobs_mode == "processed_logits":
            shown = z
        elif final.logprobs_mode == "processed_logprobs":
            shown = z.log_softmax(-1, dtype=torch.float32)
        return draw(z, _step.seeds, _step.positions, None), shown

    final.forward = forward
    final.outrider = True


def apply_sampling_constraints(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's function without its expansion of options, wrong on CPUs (issue 55005)."""

    def apply_sampling_constraints(
        logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any
    ) -> Any:
        if _step is None:
            return original(logits, cu_num_draft_tokens, sampling_metadata)
        if sampling_metadata.all_greedy:
            return logits
        temperature = _step.of_each(sampling_metadata.temperature)
        logits.div_(temperature.masked_fill(temperature == 0, 1)[:, None])
        k, p = sampling_metadata.top_k, sampling_metadata.top_p
        k, p = (None if each is None else _step.of_each(each) for each in (k, p))
        return truncate(logits, k, p)

    return apply_sampling_constraints


def rejection_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return vLLM's function of that name by our rule; the drafts' probabilities are not used."""

    def rejection_sample(
        draft_token_ids: torch.Tensor,
        num_draft_tokens: list[int],
        max_spec_len: int,
        cu_num_draft_tokens: torch.Tensor,
        draft_probs: torch.Tensor | None,
        target_logits: torch.Tensor,
        bonus_token_ids: torch.Tensor,
        sampling_metadata: Any,
        *others: Any,
        **named: Any,
    ) -> Any:
        if _step is None:
            return original(
                draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs,
                target_logits, bonus_token_ids, sampling_metadata, *others, **named,
            )  # fmt: skip
        _step.drew_verified = True
        drawn = _verified_tokens(_step, target_logits, sampling_metadata)
        return _accepted(_step, drawn, draft_token_ids, bonus_token_ids, max_spec_len)

    return rejection_sample


def _verified_tokens(step: SampledStep, z: torch.Tensor, metadata: Any) -> torch.Tensor:
    """Return the target's token of each verified row, int64 [rows]."""
    if metadata.all_greedy or not len(z):
        return z.argmax(-1) if len(z) else z.new_empty(0, dtype=torch.int64)
    greedy = None if metadata.all_random else step.of_each(metadata.temperature) == 0
    return draw(z, step.of_each(step.seeds), step.verified, greedy)


def _accepted(
    step: SampledStep,
    drawn: torch.Tensor,
    draft_token_ids: torch.Tensor,
    bonus_token_ids: torch.Tensor,
    most: int,
) -> torch.Tensor:
    """Return the tokens of each request, int32 [requests, most + 1], -1 behind its last."""
    if not most:
        return bonus_token_ids.to(torch.int32)
    starts = step.counts.cumsum(0) - step.counts
    column = torch.arange(most, device=drawn.device)
    index = (starts[:, None] + column).clamp(max=len(drawn) - 1)
    tokens = torch.cat((drawn[index], drawn.new_zeros(len(index), 1)), 1)
    tokens.scatter_(1, step.counts[:, None], bonus_token_ids.to(tokens.dtype))
    tokens, number = follow(tokens, draft_token_ids[index], step.counts)
    step.last = step.positions - step.counts + number - 1
    return tokens.to(torch.int32)


def sample_draft_tokens(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a proposer's ``_sample_draft_tokens`` that draws with the target's noise.

    vLLM calls it for one token of each request after another; where it does not, and where the
    drafter has other tokens than the target, it stays vLLM's.
    """

    def _sample_draft_tokens(self: Any, hidden_states: torch.Tensor, metadata: Any) -> Any:
        step, count = _behind, len(hidden_states)
        if (
            step is None
            or metadata.all_greedy
            or count != len(step.seeds)
            or count != len(metadata.temperature)
            or any(getattr(self, name, False) for name in OTHER_DRAFTS)
        ):
            return original(self, hidden_states, metadata)
        step.drafted += 1
        hot = metadata.temperature
        z = self.model.compute_logits(hidden_states).to(torch.float32)
        z = truncate(z / hot.masked_fill(hot == 0, 1)[:, None], metadata.top_k, metadata.top_p)
        greedy = None if metadata.all_random else hot == 0
        return draw(z, step.seeds, step.last + step.drafted, greedy), None

    return _sample_draft_tokens
