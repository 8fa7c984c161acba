"""Explains one decode step of a request: what was drafted, drawn and accepted, and why.

All figures are the step's own, under the rule "coupled", except the noise, a function of (seed,
position, sample, id), which is recomputed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from ..base.types import Row, SequenceState
from ..errors import RequestError
from ..frontend.inputs import Prompt
from ..llm import LLM
from ..sampling.arrays import highest, log_sum_exp
from ..sampling.pipeline import Logits
from ..sampling.shared_noise import SharedNoise
from .watch import StepWatch, WatchedStep, watch_step

LISTED_TOKENS = 5  # likeliest tokens listed for target and drafter each


@dataclass(frozen=True)
class ExplainedToken:
    """A token id and its text, "�" if that is only part of a character."""

    id: int
    text: str


@dataclass(frozen=True)
class ExplainedCandidate(ExplainedToken):
    """The figures of one token at a position; a drafter's are None if it has no logits.

    ``p`` and ``q`` are its probabilities by the target's and the drafter's processed logits, at
    temperature 0 by the raw ones. ``noise`` is the Gumbel noise g of this position and token, None
    at temperature 0. The scores are log p + g and log q + g, without g at temperature 0, None for a
    token of probability 0; the highest score of the whole vocabulary is drawn.
    """

    p: float
    q: float | None
    noise: float | None
    target_score: float | None
    drafter_score: float | None


@dataclass(frozen=True)
class Position:
    """One position of the step, ``index`` counting from 1 within it.

    ``position`` is the token's index in prompt + output; ``draft`` the drafter's token, None at the
    bonus and in a step without a draft; ``target`` the target's draw given the text and the draft
    before it. ``outcome`` is "accepted"; "rejected", the target's token is emitted instead;
    "dropped", drafted after a rejected token; "bonus", the target's token after an accepted draft;
    "plain", the token of a step without a draft; "ended", the output ended before. ``candidates``
    are the ``LISTED_TOKENS`` likeliest tokens of target and drafter, and the two that they chose;
    the target's likeliest first.
    """

    index: int
    position: int
    draft: ExplainedToken | None
    target: ExplainedToken
    outcome: str
    why: str
    candidates: list[ExplainedCandidate]


@dataclass(frozen=True)
class Emitted(ExplainedToken):
    """A token that the step emitted; ``origin`` as in ``types.Origin``."""

    origin: str


@dataclass(frozen=True)
class Explanation:
    """One step as data; ``step`` is its number, 1 for the first after the prompt's pass.

    ``chosen`` says why this step is shown; ``text_before`` is prompt and output before it. Counts
    exclude tokens beyond the end of the output.
    """

    drafter: str
    temperature: float
    seed: int
    num_speculative_tokens: int
    step: int
    chosen: str
    text_before: str
    positions: list[Position]
    output: list[Emitted]
    drafted: int
    accepted: int
    summary: str


def _choose(watch: StepWatch, step: int | None) -> tuple[WatchedStep, str]:
    """Return the step to show, and why it is chosen. Raises RequestError: there is no such step."""
    if watch.first is None:
        raise RequestError(
            "the output ended with its first token, before there was a step to explain; "
            "give another prompt or seed."
        )
    if watch.chosen is not None:
        mixed = "It is the first in which one draft token is accepted and another rejected."
        return watch.chosen, mixed if step is None else "It is the step that was asked for."
    if step is not None:
        raise RequestError(
            f"step is {step}, but the output ended in step {watch.seen}; give 1 to {watch.seen}."
        )
    steps = f"{watch.seen} step{'s' if watch.seen > 1 else ''}"
    if watch.first_drafted is not None:
        return watch.first_drafted, (
            f"It is the first with a draft; of {steps} none has both an accepted and a rejected "
            "token."
        )
    return watch.first, f"It is the first; of {steps} none has a draft."


def label(token: ExplainedToken) -> str:
    """Return a token's text in quotes, control characters escaped, or its id if it has no text."""
    return repr(token.text) if token.text.strip("\ufffd") else f"<token {token.id}>"


def explain(
    llm: LLM, prompt: Prompt, temperature: float, seed: int, step: int | None = None
) -> Explanation:
    """Run a request up to one decode step, and return that step's explanation.

    ``llm`` must be idle and use the coupled rule. ``step`` is the number of the decode step; None
    takes the first of ``watch.SEARCHED_STEPS`` with an accepted and a rejected token, else the
    first with a draft, else the first.

    Raises ConfigError: temperature or seed is out of range; RequestError: the prompt cannot be
    served, the output ends before the step, or the draft is a tree; NumericalError.
    """
    if step is not None and step < 1:
        raise RequestError(f"step is {step}; give 1 or more.")
    watch = watch_step(llm, prompt, temperature, seed, step)
    shown, chosen = _choose(watch, step)
    assert watch.sample is not None
    view = _View(llm.decode, watch.sample, shown, watch.name)
    positions = view.positions()
    kept = len(shown.emitted)
    drafted = sum(p.draft is not None and p.outcome != "ended" for p in positions)
    accepted = min(shown.standing, kept)
    own = "bonus" if shown.draft else "plain"
    return Explanation(
        drafter=watch.name,
        temperature=0.0 if watch.sample.request.params.greedy else float(temperature),
        seed=seed,
        num_speculative_tokens=llm.config.max_draft_length,
        step=shown.number,
        chosen=chosen,
        text_before=llm.decode(shown.tokens),
        positions=positions,
        output=[
            Emitted(id, llm.decode([id]), "accepted" if i < accepted else own)
            for i, id in enumerate(shown.emitted)
        ],
        drafted=drafted,
        accepted=accepted,
        summary=_summary(drafted, accepted, kept, watch.passes_of(shown)),
    )


def _summary(drafted: int, accepted: int, emitted: int, passes: int) -> str:
    tokens = f"{emitted} token{'s' if emitted > 1 else ''} from one pass of the target"
    if not drafted:
        return f"0 drafted, {tokens}: plain decoding."
    price = f", at the price of {passes} pass{'es' if passes > 1 else ''} of the drafter"
    cost = price if passes else ""
    gain = f"instead of {emitted} passes" if emitted > 1 else "as without a draft"
    return f"{drafted} drafted, {accepted} accepted, {tokens}, {gain}{cost}."


@dataclass(frozen=True)
class _View:
    """Describes the positions of a step."""

    decode: Callable[[Sequence[int]], str]
    sample: SequenceState
    step: WatchedStep
    drafter: str

    def positions(self) -> list[Position]:
        """Return the draft's positions, and the one after it if the whole draft was accepted."""
        step = self.step
        more = step.standing == len(step.draft) and len(step.emitted) > step.standing
        return [self._position(i) for i in range(len(step.draft) + more)]

    def _position(self, index: int) -> Position:
        step, request = self.step, self.sample.request
        path, position = tuple(step.draft[:index]), len(step.tokens) + index
        draft = step.draft[index] if index < len(step.draft) else None
        row = Row(
            "", request.seed, self.sample.sample_index, position, request.params.greedy,
            len(step.tokens),
        )  # fmt: skip
        z = step.target[path]
        noise = SharedNoise(len(z))
        target = _Distribution(z, noise.scores(z[None], [row])[0])
        drafting, own = None, step.drafter.get(path)
        if draft is not None and own is not None:
            drafting = _Distribution(own, noise.scores(own[None], [row])[0])
        g = None if row.greedy else noise.of([row])[0]
        chosen = [target.drawn] if draft is None else [target.drawn, draft]
        ids = {*chosen, *target.top, *(drafting.top if drafting else ())}
        candidates = [
            ExplainedCandidate(
                id, self.decode([id]), target.p(id), drafting.p(id) if drafting else None,
                None if g is None else float(g[id]), target.score(id),
                drafting.score(id) if drafting else None,
            )
            for id in ids
        ]  # fmt: skip
        candidates.sort(key=lambda c: (-c.p, c.id))
        proposed = None if draft is None else self._token(draft)
        drawn = self._token(target.drawn)
        outcome, why = self._outcome(index, proposed, drawn, target, drafting)
        return Position(index + 1, position, proposed, drawn, outcome, why, candidates)

    def _token(self, id: int) -> ExplainedToken:
        return ExplainedToken(id, self.decode([id]))

    def _outcome(
        self,
        index: int,
        draft: ExplainedToken | None,
        drawn: ExplainedToken,
        target: _Distribution,
        drafter: _Distribution | None,
    ) -> tuple[str, str]:
        step, greedy = self.step, self.sample.request.params.greedy
        name = label(drawn)
        best = f"log p + g = {_number(target.score(drawn.id))}, the highest"
        best = "its likeliest" if greedy else best
        if draft is None and not step.draft:
            return "plain", f"{self._no_draft()} The target draws {name} ({best})."
        if draft is None:
            return "bonus", (
                "All draft tokens were accepted, and the same pass gave the next distribution: "
                f"the target draws {name} ({best})."
            )
        if step.finished and index >= len(step.emitted):
            return "ended", "The output had ended before this position."
        if index > step.standing:
            before = label(self._token(step.draft[step.standing]))
            return "dropped", f"It was drafted to come after {before}, which was rejected."
        if index < step.standing:
            return "accepted", f"The target draws {name} too ({best})."
        behind = "" if greedy else f" ({_number(target.score(draft.id))})"
        odds = f"p of {label(draft)} is {target.p(draft.id):.3f}"
        if drafter is not None:
            odds += f", the drafter's q {drafter.p(draft.id):.3f}"
        return "rejected", (
            f"The target draws {name} ({best}), not {label(draft)}{behind}, so {name} is emitted "
            f"instead; {odds}."
        )

    def _no_draft(self) -> str:
        if self.drafter == "none":
            return "There is no drafter."
        if not self.step.room:
            return "There was no room for a draft."
        if self.drafter == "ngram":
            return (
                "Nothing was drafted: the last tokens of the text do not occur earlier in this "
                "order, so ngram has nothing to copy."
            )
        return "Nothing was drafted."


class _Distribution:
    """Processed logits, and scores z + g, both as log probabilities; the order is the draw's."""

    def __init__(self, z: Logits, score: Logits) -> None:
        whole = log_sum_exp(z.astype(np.float64))
        self._log_p, self._score = z - whole, score - whole
        self.drawn = int(score.argmax())
        best = highest(z[None], min(LISTED_TOKENS, len(z)))[0].tolist()
        self.top = [i for i in best if np.isfinite(z[i])]

    def p(self, id: int) -> float:
        return math.exp(float(self._log_p[id]))

    def score(self, id: int) -> float | None:
        value = float(self._score[id])
        return value if math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "never" if value is None else f"{value:.2f}"
