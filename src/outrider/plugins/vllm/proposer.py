"""Outrider's lookups as proposers of vLLM, by ``method="custom_class"``."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...drafters.ngram_index import LOOKUP_WINDOW, NgramIndex
from ...drafters.suffix_index import new_index
from ..common.lengths import Lengths, StepDraft
from ..common.patching import patched
from ..common.start import VLLM_VARIABLE, active, stop
from . import v1
from .hooks import PATCHES


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
        if self._suffix and (drafted := self._suffix.draft(None, length, length).tokens):
            return list(drafted)
        if self._ngram is None:
            return []
        self._ngram.extend(self.tokens)
        return self._ngram.propose(self.tokens, length)


class _Last(NamedTuple):
    """The last proposal for a request: behind how many tokens, of how many asked."""

    size: int
    asked: int
    draft: list[int]


class Proposer:
    """Suffix decoding, and prompt lookup where that finds nothing.

    The controller says how far, up to ``num_speculative_tokens``.

    ``speculative_config`` names it: ``{"method": "custom_class", "model":
    "outrider.plugins.vllm.Proposer", "num_speculative_tokens": 8}``, with ``prompt_lookup_min`` and
    ``prompt_lookup_max`` (2 and 4 unless given) where n-grams are looked up.
    """

    _ngram, _suffix = True, True

    def __init__(self, vllm_config: Any) -> None:
        if not active(VLLM_VARIABLE):
            stop(
                f"outrider.plugins.vllm's proposers go with Outrider's rule; set "
                f"{VLLM_VARIABLE}=1, or choose a method of vLLM's."
            )
        if not patched(PATCHES):
            stop(
                f"{VLLM_VARIABLE} is 1, but vLLM did not load Outrider's plugin; name outrider in "
                "VLLM_PLUGINS, or unset that."
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
        self._lengths = Lengths(self._length, "suffix" if self._suffix else "ngram")
        self._last: dict[str, _Last] = {}
        self._time = 0.0

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

        By request: ``sampled_token_ids`` are what the step added, nothing in the middle of a
        prompt; the first ``num_tokens_no_spec`` of ``token_ids_cpu`` are its tokens.
        """
        runner: Any = v1.last_runner() if v1.last_runner else None
        assert runner is not None, "vLLM proposes after it has sampled"
        for gone in self._texts.keys() - runner.requests.keys():
            del self._texts[gone]
            self._last.pop(gone, None)
            self._lengths.release(gone)
        names = runner.input_batch.req_ids[: len(sampled_token_ids)]
        texts: dict[str, list[int]] = {}
        for row, name in enumerate(names):
            if sampled_token_ids[row]:
                count = int(num_tokens_no_spec[row])
                texts[name] = self._text(name, token_ids_cpu[row, :count]).tokens
        self._learn(texts, len(names))
        sizes = {name: len(tokens) for name, tokens in texts.items()}
        asked = dict(zip(sizes, self._lengths.choose(sizes, self._length), strict=True))
        drafts: list[list[int]] = []
        for name in names:
            length = min(asked.get(name, 0), self._limit - sizes.get(name, 0) - 1)
            drafts.append(self._texts[name].draft(length) if length > 0 else [])
            if name in sizes:
                self._last[name] = _Last(sizes[name], max(length, 0), drafts[-1])
        return drafts

    def _learn(self, texts: dict[str, list[int]], batch: int) -> None:
        """Tell the controller what came of the last drafts; ``texts`` are of requests that got
        tokens, of the ``batch`` requests of the step.
        """
        now = time.perf_counter()
        took, self._time = now - self._time, now
        seen = []
        for name, tokens in texts.items():
            last = self._last.get(name)
            if last is not None and last.size < len(tokens):
                seen.append(StepDraft(name, last.asked, len(last.draft), _stood(last, tokens)))
        alone = len(seen) == batch == len(self._last)
        self._lengths.observe(seen, took if alone else None)

    def _text(self, name: str, tokens: NDArray[np.int32]) -> _Text:
        """Return a request's text, brought up to date."""
        text = self._texts.get(name)
        if text is None or len(text.tokens) > len(tokens):
            text = self._texts[name] = _Text(self._sizes, self._suffix)
        text.extend(tokens[len(text.tokens) :].tolist())
        return text


def _stood(last: _Last, tokens: Sequence[int]) -> int:
    """Return how many tokens of a draft stand in the text that followed."""
    pairs = zip(last.draft, tokens[last.size :], strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b),
        min(len(last.draft), len(tokens) - last.size),
    )


class NgramProposer(Proposer):
    """Prompt lookup alone."""

    _suffix = False


class SuffixProposer(Proposer):
    """Suffix decoding alone."""

    _ngram = False
