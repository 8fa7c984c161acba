"""Outrider's rule in SGLang's sampler, and in the walk that verifies its trees.

SGLang's greedy verification walks a tree of drafts as long as a node is the target's argmax. Given
argmax(z + g) instead, the same walk accepts a branch as long as its nodes are the target's
tokens. Plain rows, and the first token behind a prompt, come through the sampler.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..common.draws import draw, truncate
from ..common.start import SGLANG_VARIABLE, stop

ELSEWHERE = (
    "SGLang drew tokens without Outrider's rule, in a way that its release has not; "
    f"install the release, or unset {SGLANG_VARIABLE}."
)


def tokens_of(
    logits: torch.Tensor, info: Any, positions: torch.Tensor, rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each row's token, int64, and the processed logits that it was drawn from.

    Args:
        logits: [requests * rows, vocabulary], behind penalties and masks; not changed.
        positions: [requests * rows], the index of the token before the one that is drawn.
        rows: of each request.
    """
    if info.sampling_seed is None:
        stop(ELSEWHERE)

    def each(values: torch.Tensor) -> torch.Tensor:
        values = values.view(-1)
        return values if rows == 1 else values.repeat_interleave(rows)

    size = logits.shape[-1]
    greedy = each(info.top_ks) <= 1  # SGLang's temperature 0
    z = logits.to(torch.float32)
    z = z / each(info.temperatures).masked_fill(greedy, 1)[:, None]
    top_k = each(info.top_ks).clamp(max=size) if info.need_top_k_sampling else None
    top_p = each(info.top_ps) if info.need_top_p_sampling else None
    z = truncate(z, top_k, top_p)
    if info.need_min_p_sampling:
        least = z.amax(-1, keepdim=True) + each(info.min_ps).log()[:, None]
        z = z.masked_fill_(z < least, -torch.inf)
    seeds = each(info.sampling_seed)
    return draw(z, seeds, positions.to(torch.int64) + 1, greedy), z


@dataclass
class _Call:
    """A call of the sampler, or of ``eagle_sample``: its logits, and whether it drew from them."""

    logits: torch.Tensor | None = None
    tree: Any = None
    info: Any = None
    drew: bool = False


_plain: _Call | None = None
_verified: _Call | None = None


def forward(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Sampler.forward`` by Outrider's rule."""

    def forward(self: Any, logits_output: Any, sampling_info: Any, *args: Any, **named: Any) -> Any:
        global _plain
        if sampling_info.is_all_greedy or not len(logits_output.next_token_logits):
            return original(self, logits_output, sampling_info, *args, **named)
        step = _plain = _Call()
        try:
            tokens = original(self, logits_output, sampling_info, *args, **named)
        finally:
            _plain = None
        if not step.drew:
            stop(ELSEWHERE)
        return tokens

    return forward


def preprocess_logits(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Sampler._preprocess_logits`` that keeps what it returns first in a call."""

    def _preprocess_logits(self: Any, logits: torch.Tensor, sampling_info: Any) -> Any:
        processed = original(self, logits, sampling_info)
        if _plain is not None and _plain.logits is None:
            _plain.logits = processed.clone()  # SGLang turns them into probabilities in place
        return processed

    return _preprocess_logits


def sample_from_probs(capture: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what wraps ``Sampler._sample_from_probs``; ``capture`` is SGLang's class of masks."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def _sample_from_probs(
            self: Any,
            probs: torch.Tensor,
            sampling_info: Any,
            positions: torch.Tensor,
            simple_sampling_case: bool,
        ) -> Any:
            if _plain is None or _plain.logits is None:
                return original(self, probs, sampling_info, positions, simple_sampling_case)
            tokens, z = tokens_of(_plain.logits, sampling_info, positions, 1)
            _plain.drew = True
            tokens = tokens.to(torch.int32)
            if capture is None:
                return tokens
            rows = sampling_info.sampling_mask_batch_indices
            if rows is None:
                return tokens, None
            kept = z.softmax(-1).index_select(0, rows)
            return tokens, capture(
                weights=kept, token_ids=None, selected_weight=None, batch_rows=rows
            )

        return _sample_from_probs

    return wrapper


def eagle_sample(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``eagle_sample`` by Outrider's rule."""

    def eagle_sample(
        verify_input: Any, batch: Any, logits_output: Any, *args: Any, **named: Any
    ) -> Any:
        global _verified
        if batch.forward_mode.is_idle():
            return original(verify_input, batch, logits_output, *args, **named)
        info = batch.sampling_info
        step = _verified = _Call(logits_output.next_token_logits, verify_input, info)
        greedy, info.is_all_greedy = info.is_all_greedy, True  # the walk, for every request
        try:
            result = original(verify_input, batch, logits_output, *args, **named)
        finally:
            _verified, info.is_all_greedy = None, greedy
        if not step.drew:
            stop(ELSEWHERE)
        return result

    return eagle_sample


def verify_tree_greedy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``verify_tree_greedy_func`` that walks by the target's tokens, not its argmax."""

    def verify_tree_greedy_func(*args: Any, **named: Any) -> Any:
        step = _verified
        if step is not None and step.logits is not None and "target_predict" in named:
            nodes = step.tree.draft_token_num
            tokens, _ = tokens_of(step.logits, step.info, step.tree.positions.view(-1), nodes)
            named["target_predict"] = tokens.to(named["target_predict"].dtype).view(-1, nodes)
            step.drew = True
        return original(*args, **named)

    return verify_tree_greedy_func
