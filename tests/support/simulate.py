"""Runs a chooser on known costs and survival with a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from outrider.engine.control.choices import PLAIN, Choice, Method, Stream, counts_by_depth
from outrider.engine.control.controller import Controller
from outrider.engine.control.costs import Costs
from outrider.engine.control.tuning import USUAL

Truth = Callable[[int, str, int], float]
"""P(accepted | parent accepted) at a step, of a method, at a depth."""


@dataclass(frozen=True)
class Step:
    """One simulated step: true expected tokens and seconds, chosen and plain."""

    tokens: float
    seconds: float
    plain: float
    best: float


def work(
    methods: Mapping[str, Method], choices: Sequence[Choice]
) -> tuple[int, dict[str, list[int]]]:
    """Return the target's rows of a step, and what each drafter drafts by depth."""
    drafts = [(methods[name], depth) for name, depth in choices if depth]
    rows = len(choices) + sum([method.nodes(depth) for method, depth in drafts])
    parts = ((n, depth, m.width) for m, depth in drafts for n in m.parts)
    return rows, counts_by_depth(parts)


def expected(
    costs: Costs,
    methods: Mapping[str, Method],
    rates: Mapping[str, Sequence[float]],
    choices: Sequence[Choice],
    context: int,
) -> tuple[float, float]:
    """Return the expected tokens and the seconds of a step."""
    tokens = 0.0
    for name, depth in choices:
        tokens += 1 + sum(accumulate(rates[name][:depth], mul)) if depth else 1
    rows, drafting = work(methods, choices)
    seconds = costs.target.at(rows) + costs.per_context * context
    seconds += sum(costs.drafters[name].at(by_depth) for name, by_depth in drafting.items())
    return tokens, seconds


def _plain_and_best(
    costs: Costs,
    methods: Mapping[str, Method],
    rates: Mapping[str, Sequence[float]],
    batch: int,
    context: int,
) -> tuple[float, float]:
    """Return the expected tokens per second of plain decoding, and of the best choice for all."""
    choices = [Choice(n, depth) for n, m in methods.items() for depth in range(1, m.max_depth + 1)]
    speeds = [
        tokens / seconds
        for each in [PLAIN, *choices]
        for tokens, seconds in [expected(costs, methods, rates, [each] * batch, context)]
    ]
    return speeds[0], max(speeds)


def simulate(
    controller: Controller,
    truth: Costs,
    survival: Truth,
    batch: int,
    steps: int,
    seed: int = 0,
    spikes: float = 0.0,
    jitter: float = 0.05,
    reviewing: float = 0.0,
) -> list[Step]:
    """Return the steps of ``batch`` sequences under a chooser; one workload.

    A step takes ``reviewing`` seconds more where the controller compares its choices.
    """
    rng = random.Random(seed)
    methods = controller.methods
    names = tuple(methods)
    streams = [Stream(str(i), "", 256, names) for i in range(batch)]
    context = 256 * batch
    known: dict[str, list[float]] = {}
    plain = best = 0.0
    simulated: list[Step] = []
    for number in range(steps):
        rates = {
            name: [survival(number, name, i + 1) for i in range(method.max_depth)]
            for name, method in methods.items()
        }
        reviewed = controller.reviewed
        choices = controller.decide(streams)
        tokens, seconds = expected(truth, methods, rates, choices, context)
        own = reviewing * (controller.reviewed != reviewed)
        seconds += own
        emitted = 0
        for stream, (name, depth) in zip(streams, choices, strict=True):
            accepted = 0
            while accepted < depth and rng.random() < rates[name][accepted]:
                accepted += 1
            controller.survival.observe(name, stream.workload, stream.id, depth, accepted)
            emitted += 1 + accepted
        noise = rng.uniform(1 - jitter, 1 + jitter) * (2.0 if rng.random() < spikes else 1.0)
        rows, drafting = work(methods, choices)
        took = 0.0
        for name, by_depth in drafting.items():
            spent = truth.drafters[name].at(by_depth) * noise
            controller.costs.observe_draft(name, by_depth, spent)
            took += spent
        verify = (truth.target.at(rows) + truth.per_context * context) * noise
        controller.costs.observe_host(batch, 0.0)
        controller.costs.observe_verify(rows, context, verify)
        controller.trials.observe(took + verify, emitted)
        drafted = bool(drafting) and not controller.tries
        controller.observe(batch, emitted, (took + verify) * drafted, took + verify + own)
        if rates != known:
            known, plain, best = rates, *_plain_and_best(truth, methods, rates, batch, context)
        simulated.append(Step(tokens, seconds, plain, best))
    return simulated


def simulate_requests(
    controller: Controller,
    truth: Costs,
    requests: Sequence[float],
    batch: int,
    tokens: int,
    shadow_steps: int,
    seed: int = 0,
) -> list[float]:
    """Return by request its speed over plain decoding's; they come one after the other.

    A request has ``batch`` sequences of ``tokens`` tokens, of whose drafts a share is accepted.
    Each ``shadow_steps``, one sequence without a draft has a shadow of four tokens.
    """
    rng, speeds = random.Random(seed), list[float]()
    (method,) = controller.methods
    costs, survival, depth = controller.costs, controller.survival, USUAL.shadow_depth

    def accepted(rate: float, most: int) -> int:
        return next((i for i in range(most) if rng.random() >= rate), most)

    for number, rate in enumerate(requests):
        left = {f"{number}-{i}": tokens for i in range(batch)}
        seconds = plain = 0.0
        step = 0
        while left:
            streams = [Stream(id, "", 256, (method,), 8) for id in left]
            choices, emitted = controller.decide(streams), 0
            shadow = step // shadow_steps % len(streams) if step % shadow_steps == 0 else None
            for place, (stream, choice) in enumerate(zip(streams, choices, strict=True)):
                got = accepted(rate, choice.depth)
                if choice.depth:
                    survival.observe(method, "", stream.id, choice.depth, got)
                elif place == shadow:
                    survival.observe(method, "", stream.id, depth, accepted(rate, depth))
                emitted += 1 + got
                left[stream.id] -= 1 + got
            rows, drafting = work(controller.methods, choices)
            verify = truth.target.at(rows)
            own = sum(map(truth.drafters[method].at, drafting.values()))
            costs.observe_verify(rows, 0, verify)
            costs.observe_host(len(streams), 0.0)
            controller.observe(len(streams), emitted, (verify + own) * bool(drafting), verify + own)
            seconds += verify + own
            plain += truth.target.at(len(streams)) * emitted / len(streams)
            step += 1
            for id in [id for id, more in left.items() if more <= 0]:
                del left[id]
                controller.release(id)
        speeds.append(plain / seconds)
    return speeds
