"""The share of a figure that comes from text that repeats itself.

A small greedy model decodes in loops, which any drafter continues. A step repeats if the last 4
tokens of prompt + output before it occurred earlier, followed by the same token that the step emits
first.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..base.types import Origin

GRAM = 4


@dataclass(frozen=True)
class DecodeStep:
    """One decode step: its first token's index in the output, and the result of its draft."""

    first: int
    accepted: int
    drafted: bool


def steps(origins: Sequence[Origin]) -> list[DecodeStep]:
    """Return the steps of an output: each ends with a bonus or plain token, or the output."""
    listed: list[DecodeStep] = []
    first = 0
    for i, origin in enumerate(origins):
        if origin is not Origin.ACCEPTED or i == len(origins) - 1:
            accepted = i - first + (origin is Origin.ACCEPTED)
            listed.append(DecodeStep(first, accepted, origin is not Origin.PLAIN))
            first = i + 1
    return listed


def repeats(prompt: Sequence[int], output: Sequence[int]) -> list[bool]:
    """Return for each output token whether it followed the same 4 tokens before."""
    tokens = [*prompt, *output]
    seen: set[tuple[int, ...]] = set()
    again = []
    for i in range(GRAM, len(tokens)):
        gram = tuple(tokens[i - GRAM : i + 1])
        again.append(gram in seen)
        seen.add(gram)
    again = [False] * (len(tokens) - len(again)) + again
    return again[len(prompt) :]


def fresh_acceptance_length(
    samples: Iterable[tuple[Sequence[int], Sequence[int], Sequence[Origin]]],
) -> float | None:
    """Return 1 + accepted / drafts over steps with a draft that do not repeat; None without any.

    ``samples`` have prompt ids, output ids and origins each.
    """
    accepted = drafts = 0
    for prompt, output, origins in samples:
        again = repeats(prompt, output)
        for step in steps(origins):
            if step.drafted and not again[step.first]:
                accepted, drafts = accepted + step.accepted, drafts + 1
    return 1 + accepted / drafts if drafts else None
