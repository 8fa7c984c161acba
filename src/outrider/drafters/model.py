"""A smaller checkpoint as drafter, with a cache of its own under the target's page ids."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

from ..errors import RequestError
from ..models.base import Model
from ..models.families import Architecture
from ..models.native import NativeTransformer
from ..models.rows import Segment
from ..native.laws import NativeLaw, NativeNoise
from ..sampling.draws import Noise
from ..sampling.law import NEVER
from ..types import Draft, Lawgiving, Row, Scheduled, Verdict


@dataclass
class _State:
    """What of a sequence is in the drafter's cache.

    The first ``num_computed`` entries, which are the sequence's tokens up to ``base`` and then the
    tokens ``drafted`` after them.
    """

    num_computed: int = 0
    base: int = 0
    drafted: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class _Input:
    """Rows to run for sequence ``index`` of the batch; ``draws`` says that a token follows."""

    index: int
    start: int
    tokens: list[int]
    draws: bool


class ModelDrafter:
    """Drafts with a smaller model, token by token, with the target's noise and processors.

    x = argmax(log q + g): the coupled draw from the drafter's own law, so that x equals the
    target's y as often as two laws with shared noise can agree.

    Args:
        model: the drafter's model; its tokenizer is the target's.
        num_pages, page_size: those of the target's pool, whose page ids it uses.
        max_rows: rows that a sequence may catch up with in one step; the target's prefill chunk.
        max_length: longest draft.
        keeps_laws: whether drafts carry the laws that they were drawn from, for the ratio rules.
    """

    name = "model"
    target_layers: tuple[int, ...] = ()

    def __init__(
        self,
        model: Model,
        num_pages: int,
        page_size: int,
        max_rows: int,
        max_length: int,
        keeps_laws: bool = False,
    ) -> None:
        self.model = model
        self.max_length = self.max_nodes = max_length
        self._store = model.new_store(num_pages, page_size)
        self._max_rows = max_rows + 1  # a chunk, and the token drawn after it
        shape = model.shape
        self._reach = shape.reach if isinstance(shape, Architecture) else None
        self._keeps_laws = keeps_laws
        self._states: dict[str, _State] = {}

    def propose(self, batch: Sequence[Scheduled], lengths: Sequence[int], noise: Noise) -> Draft:
        drafts: list[list[int]] = [[] for _ in batch]
        laws: list[list[torch.Tensor]] = [[] for _ in batch]
        inputs = []
        for i, (item, length) in enumerate(zip(batch, lengths, strict=True)):
            if item.samples and not length:
                continue  # nothing to draft: catching up can wait
            tokens = item.sequence.tokens
            state = self._states.setdefault(item.sequence.id, _State())
            start, stop = state.num_computed, item.start + item.count
            if self._reach is not None:
                # Nothing that is still to be drafted depends on what lies before.
                start = max(start, len(tokens) - self._reach)
            behind = tokens[start : min(stop, start + self._max_rows)]
            if behind and max(behind) >= self.model.shape.vocab_size:
                continue  # the target has said what this model has no embedding for
            state.num_computed = start + len(behind)
            state.base, state.drafted = len(tokens), drafts[i]
            draws = length > 0 and state.num_computed == len(tokens)
            if behind:
                inputs.append(_Input(i, start, behind, draws))
        if inputs and self._runs_whole(batch, inputs, noise):
            self._run_whole(batch, inputs, drafts, lengths)
            return Draft.chains(drafts)
        while inputs:
            drawing = [r.index for r in inputs if r.draws]
            tokens, z = self._run(batch, inputs, drafts, noise)
            for i, token, law in zip(drawing, tokens, z, strict=True):
                drafts[i].append(token)
                laws[i].append(law)
            inputs = []
            for i in drawing:
                if len(drafts[i]) < lengths[i]:
                    state = self._states[batch[i].sequence.id]
                    inputs.append(_Input(i, state.num_computed, drafts[i][-1:], True))
                    state.num_computed += 1
        draft = Draft.chains(drafts)
        if self._keeps_laws:
            draft = replace(draft, laws=[torch.stack(z) if z else None for z in laws])
        return draft

    def _runs_whole(self, batch: Sequence[Scheduled], inputs: list[_Input], noise: Noise) -> bool:
        """Whether the native step can make all drafts without coming back."""
        return (
            isinstance(self.model, NativeTransformer)
            and isinstance(noise, NativeNoise)
            and not self._keeps_laws
            and all(_is_static(batch[r.index].sequence.law) for r in inputs if r.draws)
        )

    def _run_whole(
        self,
        batch: Sequence[Scheduled],
        inputs: list[_Input],
        drafts: list[list[int]],
        lengths: Sequence[int],
    ) -> None:
        """Make all ``drafts`` in one call."""
        assert isinstance(self.model, NativeTransformer)
        drawing = [r.index for r in inputs if r.draws]
        laws = []
        for i in drawing:
            law = batch[i].sequence.law
            assert isinstance(law, NativeLaw)
            law.know(batch[i].sequence.tokens)
            laws.append(law)
        sizes = [(len(batch[i].sequence.tokens), lengths[i]) for i in drawing]
        pages = [batch[i].sequence.pages for i in drawing]
        found = self.model.draft(self._segments(batch, inputs), self._store, laws, sizes, pages)
        for i, tokens in zip(drawing, found, strict=True):
            drafts[i] += tokens
            self._states[batch[i].sequence.id].num_computed += max(0, len(tokens) - 1)

    @staticmethod
    def _segments(batch: Sequence[Scheduled], inputs: list[_Input]) -> list[Segment]:
        return [
            Segment(
                tokens=r.tokens,
                start=r.start,
                pages=batch[r.index].sequence.pages,
                logits=int(r.draws),
                prompt_length=batch[r.index].sequence.prompt_length,
                key=batch[r.index].sequence.id,
            )
            for r in inputs
        ]

    def _run(
        self,
        batch: Sequence[Scheduled],
        inputs: list[_Input],
        drafts: list[list[int]],
        noise: Noise,
    ) -> tuple[list[int], Sequence[torch.Tensor]]:
        """Run the inputs' rows and draw a token for each input that wants one: tokens and laws."""
        logits = self.model.run(self._segments(batch, inputs), self._store).logits
        if logits is None:
            return [], ()
        # Padded or cut to the target's vocabulary, which its options speak of.
        z = F.pad(logits, (0, noise.vocab_size - logits.shape[1]), value=NEVER)
        keys = []
        for j, i in enumerate(r.index for r in inputs if r.draws):
            sequence = batch[i].sequence
            request, ahead = sequence.request, len(drafts[i])
            with suppress(RequestError):  # the target will meet it too, and say so
                sequence.law.apply(z[j : j + 1], sequence.tokens, [drafts[i]])
            base, greedy = len(sequence.tokens), request.params.greedy
            keys.append(
                Row(sequence.id, request.seed, sequence.sample_index, base + ahead, greedy, base)
            )
        return noise.draw(z, keys)[0], z.unbind()

    def observe(self, batch: Sequence[Scheduled], verdict: Verdict) -> None:
        """Keep what was drafted and committed alike; the rest is computed anew when needed."""
        for item in batch:
            state = self._states.get(item.sequence.id)
            if state is None:
                continue
            committed = item.sequence.tokens[state.base :]
            alike = 0
            for drafted, token in zip(state.drafted, committed, strict=False):
                if drafted != token:
                    break
                alike += 1
            state.num_computed = min(state.num_computed, state.base + alike)

    def release(self, seq_id: str) -> None:
        self._states.pop(seq_id, None)
        self._store.release(seq_id)


def _is_static(law: Lawgiving) -> bool:
    return isinstance(law, NativeLaw) and law.static
