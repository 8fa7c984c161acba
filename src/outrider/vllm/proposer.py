"""Outrider's lookups as proposers of vLLM, by ``method="custom_class"``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..drafters.ngram_index import LOOKUP_WINDOW, NgramIndex
from ..drafters.suffix_indices import new_index
from . import v1
from .plugin import VARIABLE, active, stop


class _Text:
    """A request's tokens, and the indices over them."""

    def __init__(self, ngram: tuple[int, int] | None, suffix: bool) -> None:
        self.tokens: list[int] = []
        self._ngram = NgramIndex(*ngram, LOOKUP_WINDOW) if ngram else None
        self._suffix = new_index(LOOKUP_WINDOW + 1) if suffix else None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self.tokens.extend(tokens)
        if self._suffix is not None:
            self._suffix.extend(tokens)

    def draft(self, length: int) -> list[int]:
        """Return up to ``length`` tokens: the suffix index's, else those of the longest n-gram."""
        if self._suffix is not None:
            drafted = self._suffix.draft(None, length, length).tokens
            if drafted:
                return list(drafted)
        if self._ngram is None:
            return []
        self._ngram.extend(self.tokens)
        return self._ngram.propose(self.tokens, length)


class Proposer:
    """Suffix decoding, and prompt lookup where that finds nothing.

    ``speculative_config`` names it: ``{"method": "custom_class", "model":
    "outrider.vllm.Proposer", "num_speculative_tokens": 8}``, with ``prompt_lookup_min`` and
    ``prompt_lookup_max`` (2 and 4 unless given) where n-grams are looked up.

    Args:
        vllm_config: vLLM's.
    """

    _ngram, _suffix = True, True

    def __init__(self, vllm_config: Any) -> None:
        if not active():
            stop(
                f"outrider.vllm's proposers go with Outrider's rule; set {VARIABLE}=1, "
                "or choose a method of vLLM's."
            )
        config = vllm_config.speculative_config
        self._length: int = config.num_speculative_tokens
        self._limit: int = vllm_config.model_config.max_model_len
        low = getattr(config, "prompt_lookup_min", None) or 2
        high = getattr(config, "prompt_lookup_max", None) or max(low, 4)
        if not 1 <= low <= high:
            stop(f"n-grams of {low} to {high} tokens are looked up; give a min up to the max.")
        self._sizes = (low, high) if self._ngram else None
        self._texts: dict[str, _Text] = {}

    def load_model(self, *args: Any, **named: Any) -> None:
        """Do nothing: there is no model."""

    def propose(
        self,
        sampled_token_ids: list[list[int]],
        num_tokens_no_spec: NDArray[np.int32],
        token_ids_cpu: NDArray[np.int32],
        **named: Any,
    ) -> list[list[int]]:
        """Return a draft behind each request's last token.

        Args:
            sampled_token_ids: by request, what the step added; nothing in the middle of a prompt.
            num_tokens_no_spec: by request, how many tokens it has.
            token_ids_cpu: by request, its tokens.
            named: without meaning here.
        """
        runner: Any = v1.last_runner() if v1.last_runner else None
        assert runner is not None, "vLLM proposes after it has sampled"
        for gone in self._texts.keys() - runner.requests.keys():
            del self._texts[gone]
        drafts: list[list[int]] = []
        for row, name in enumerate(runner.input_batch.req_ids[: len(sampled_token_ids)]):
            count = int(num_tokens_no_spec[row])
            length = min(self._length, self._limit - count - 1)
            if not sampled_token_ids[row] or length < 1:
                drafts.append([])
                continue
            drafts.append(self._text(name, token_ids_cpu[row, :count]).draft(length))
        return drafts

    def _text(self, name: str, tokens: NDArray[np.int32]) -> _Text:
        """Return a request's text, brought up to date."""
        text = self._texts.get(name)
        if text is None or len(text.tokens) > len(tokens):
            text = self._texts[name] = _Text(self._sizes, self._suffix)
        text.extend(tokens[len(text.tokens) :].tolist())
        return text


class NgramProposer(Proposer):
    """Prompt lookup alone."""

    _suffix = False


class SuffixProposer(Proposer):
    """Suffix decoding alone."""

    _ngram = False
