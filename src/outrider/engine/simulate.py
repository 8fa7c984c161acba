"""Runs a controller on known costs and survival with a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .controller import Controller
from .costs import Costs
from .outlook import PLAIN, Choice, Stream, counts_by_depth

Truth = Callable[[int, str, int], float]
"""P(accepted | parent accepted) at a step, of a method, at a depth; methods are single drafters."""


@dataclass(frozen=True)
class Step:
    """One simulated step: true expected tokens and seconds, chosen and plain."""

    tokens: float
    seconds: float
    plain: float
    best: float


def expected(
    costs: Costs, rates: Mapping[str, Sequence[float]], choices: Sequence[Choice], context: int
) -> tuple[float, float]:
    """Return the expected tokens and the seconds of a step."""
    tokens, rows = 0.0, 0
    for name, depth in choices:
        survival, tokens, rows = 1.0, tokens + 1.0, rows + 1 + depth
        for i in range(depth):
            survival *= rates[name][i]
            tokens += survival
    seconds = costs.target.at(rows) + costs.per_context * context
    drafting = counts_by_depth((*choice, 1) for choice in choices)
    seconds += sum(costs.drafters[name].at(by_depth) for name, by_depth in drafting.items())
    return tokens, seconds


def simulate(
    controller: Controller,
    truth: Costs,
    survival: Truth,
    batch: int,
    steps: int,
    seed: int = 0,
    spikes: float = 0.0,
    jitter: float = 0.05,
) -> list[Step]:
    """Return the steps of ``batch`` sequences under a controller; one workload."""
    rng = random.Random(seed)
    names = tuple(controller.methods)
    streams = [Stream(str(i), "", 256, names) for i in range(batch)]
    context = 256 * batch
    found = []
    for number in range(steps):
        rates = {
            name: [survival(number, name, i + 1) for i in range(method.longest)]
            for name, method in controller.methods.items()
        }
        choices = controller.decide(streams)
        tokens, seconds = expected(truth, rates, choices, context)
        emitted = 0
        for stream, (name, depth) in zip(streams, choices, strict=True):
            accepted = 0
            while accepted < depth and rng.random() < rates[name][accepted]:
                accepted += 1
            controller.survival.observe(name, stream.workload, stream.id, depth, accepted)
            emitted += 1 + accepted
        noise = rng.uniform(1 - jitter, 1 + jitter) * (2.0 if rng.random() < spikes else 1.0)
        rows = batch + sum(depth for _, depth in choices)
        took = 0.0
        for name, by_depth in counts_by_depth((*choice, 1) for choice in choices).items():
            spent = truth.drafters[name].at(by_depth) * noise
            controller.costs.observe_draft(name, by_depth, spent)
            took += spent
        verify = (truth.target.at(rows) + truth.per_context * context) * noise
        controller.costs.observe_host(batch, 0.0)
        controller.costs.observe_verify(rows, context, verify)
        drafted = any(depth for _, depth in choices)
        controller.observe(batch, emitted, (took + verify) * drafted, took + verify)
        plain = expected(truth, rates, [PLAIN] * batch, context)
        best = max(
            t / s
            for name, method in controller.methods.items()
            for depth in range(method.longest + 1)
            for t, s in [expected(truth, rates, [Choice(name, depth)] * batch, context)]
        )
        found.append(Step(tokens, seconds, plain[0] / plain[1], best))
    return found
