"""Penalties, computed from counts of the tokens in a sequence."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..base.types import SamplingParams

FIRST_SLOTS = 64


class History:
    """Counts of a sequence's distinct tokens; the prompt's count for the repetition penalty only.

    Penalties touch these tokens only, so their cost grows with the text, not with the vocabulary.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int]) -> None:
        self._params = params
        self._num_counted = len(prompt)
        self._slots: dict[int, int] = {}  # token id -> its column below
        self._ids = np.zeros(FIRST_SLOTS, np.int64)
        self._counts = np.zeros(FIRST_SLOTS, np.float32)  # times in the output
        for token in prompt:
            self._slot(token)
        self._in_prompt = len(self._slots)  # columns of the prompt's tokens come first

    def _slot(self, token: int) -> int:
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        return slot

    def penalise(
        self, logits: NDArray[np.float32], tokens: Sequence[int], paths: Sequence[Sequence[int]]
    ) -> None:
        """Apply the penalties in place, in vLLM's order and scopes.

        Repetition (prompt and output; Keskar et al., "CTRL", 2019, section 4.1: positive logits are
        divided, negative ones multiplied), then frequency, then presence (output alone). Arguments
        are those of ``SequencePipeline.apply``; the committed ``tokens`` only grow.
        """
        for token in tokens[self._num_counted :]:
            slot = self._slot(token)  # may move the counts
            self._counts[slot] += 1
        self._num_counted = len(tokens)
        ahead = [[self._slot(token) for token in path] for path in paths]
        size = len(self._slots)
        # times each token occurs in the output, fp32 [rows, tokens that occur]
        times = np.repeat(self._counts[None, :size], len(paths), 0)
        for row, path in enumerate(ahead):
            for slot in path:
                times[row, slot] += 1
        params, ids = self._params, self._ids[:size]
        z = logits[:, ids]
        if params.repetition_penalty != 1:
            strength = np.where(times > 0, np.float32(params.repetition_penalty), np.float32(1))
            strength[:, : self._in_prompt] = params.repetition_penalty
            z = np.where(z > 0, z / strength, z * strength)
        if params.frequency_penalty or params.presence_penalty:
            off = params.frequency_penalty * times + params.presence_penalty * (times > 0)
            z -= off.astype(np.float32, copy=False)
        logits[:, ids] = z
