"""The acceptance rule: it accepts draft tokens and adds the bonus token."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Protocol

from ..base.types import Draft, Verdict

if TYPE_CHECKING:
    from .pipeline import StepLogits
    from .shared_noise import Noise, SharedNoise

NOT_FINITE = "the model's logits are NaN or infinite; check the checkpoint, or try dtype='float32'."
NOTHING_LEFT = (
    "the request's options leave no token to sample here; "
    "two of them contradict each other (min_tokens, allowed_token_ids, a grammar, a processor)."
)


class AcceptanceRule(Protocol):
    """Decides a step from the target's processed logits, the draft and the noise."""

    name: str
    trees: bool
    """True if drafts may branch."""
    needs_logits: bool
    """True if the rule needs processed logits, the target's and those that drafts are drawn from;
    False if the target's draws are enough."""

    def drafting(self, noise: SharedNoise) -> Noise:
        """Return the noise that drafters draw with, given the engine's shared noise."""
        ...

    def __call__(self, target: StepLogits, draft: Draft, noise: SharedNoise) -> Verdict: ...


def trouble(best: float) -> str | None:
    """Return the error of a row whose highest score is ``best``, None if there is none."""
    if math.isfinite(best):
        return None
    return NOTHING_LEFT if best == -math.inf else NOT_FINITE


class Coupled:
    """Coupled sampling: the output is always the target's token y; a draft is accepted if it is y.

    y = argmax(z + g) with noise that depends on (seed, position, sample, id) alone, so the output
    is the same whatever was drafted. Daliri, Musco, Suresh, "Coupling without communication and
    drafter-invariant speculative decoding" (2024), in its Gumbel-max form.
    """

    name = "coupled"
    trees = True
    needs_logits = False

    def drafting(self, noise: SharedNoise) -> Noise:
        return noise

    def __call__(self, target: StepLogits, draft: Draft, noise: SharedNoise) -> Verdict:
        ids, best = target.drawn or (
            noise.draw(target.logits, target.rows) if target.rows else ([], [])
        )
        known = math.isfinite(sum(best))  # else a row may have no finite score
        verdict = Verdict([], [], [])
        for first, (nodes, parents, *_) in zip(target.first, draft, strict=True):
            tokens: list[int] = []
            path: list[int] = []
            if first is not None:
                drawn = ids[first]
                tokens.append(drawn)
                last = -1
                # Parents come before their children: one pass meets every accepted node.
                for node, token in enumerate(nodes):
                    if token == drawn and parents[node] == last:
                        last = node
                        drawn = ids[first + 1 + node]
                        path.append(node)
                        tokens.append(drawn)
            verdict.tokens.append(tokens)
            verdict.path.append(path)
            error = None
            if not known and first is not None:
                rows = first, *(first + 1 + node for node in path)
                error = next(filter(None, (trouble(best[row]) for row in rows)), None)
            verdict.errors.append(error)
        return verdict
