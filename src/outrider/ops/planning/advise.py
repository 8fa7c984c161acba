"""Should I speculate, and how? A verdict, with the figures behind it."""

from __future__ import annotations

from dataclasses import replace

from ...base.methods import BY_NAME, LOOKUPS
from ...base.tables import told
from ...errors import ConfigError
from .acceptance import P90, per_token
from .advice import Advice, At, BatchRange, Candidate, Sensitivity, Trip, deployment_of
from .catalogue import Fitting, Shape, data, find_device, find_shape, fitting
from .figure import ASSUMED, MODELLED, Figure, modelled, ranged
from .forecast import Forecast, forecast, judged, median_size
from .placement import AHEAD, TOGETHER, Cpus, Pair, placements
from .rules import LEAVE, USE, decide, facts, judge, stack
from .situation import PlannedDrafter, Situation

SENSITIVITY_CHANCES = tuple(i / 20 for i in range(21))
ALERT_MINUTES = 5
USUAL_K = 5
"""Draft length for which acceptance is shown if nothing else chooses one."""
USUAL_RATIO = 0.03
"""A rule of thumb: the best ratio of a drafter's parameters to the target's."""


def verdict_of(outlook: Forecast, batches: list[int]) -> str:
    """Return the verdict for the batch sizes of the traffic."""
    wins = {batch: outlook.chosen(batch) > 0 for batch in batches}
    if all(wins.values()):
        return USE
    if not any(wins.values()):
        return LEAVE
    spans = [(first, last) for first, last, k, _ in outlook.ranges(batches) if k]
    joined: list[tuple[int, int]] = []
    for first, last in spans:
        if joined and joined[-1][1] == first - 1:
            first = joined.pop()[0]
        joined.append((first, last))
    if len(joined) == 1 and joined[0][0] == 1:
        return f"only below batch {joined[0][1] + 1}"
    most = max(outlook.limit, *batches)
    words = [f"from {a} on" if b >= most else f"{a} to {b}" for a, b in joined]
    return f"only at batch {', '.join(words)}"


def advise(situation: Situation) -> Advice:
    """Return whether speculation is worth it, with which drafter and draft lengths, and why.

    With priority throughput, the batch that fills the machine is judged. Without a drafter, the
    advice is for the catalogue's best one. Raises ConfigError, ModelError: see ``Situation``.
    """
    target = situation.target_shape()
    if situation.drafter is None:
        return _best(situation, target)
    drafter = situation.find_drafter(target)
    outlook = forecast(situation, target, drafter)
    known = facts(situation, target, drafter)
    if outlook is None:
        return _by_rules(situation, target, drafter, known)
    shares = judged(situation, outlook)
    batch = median_size(shares)
    k = outlook.chosen(batch) or outlook.best(batch)[0]
    verdict = verdict_of(outlook, sorted(shares))
    halved = outlook.halved(batch, k)
    limiting = max(halved, key=halved.__getitem__)
    reason = _reason(outlook, batch, k, limiting, halved[limiting])
    if outlook.memory is not None and outlook.memory.speculative < 1:
        limiting, gigabytes = "memory", outlook.memory.drafter / 1e9
        reason = f"the drafter takes {gigabytes:.1f} GB (modelled) and does not fit with the target"
    if situation.priority == "memory" and (extra := outlook.extra(batch)):
        verdict, limiting = LEAVE, "memory"
        reason = (
            f"memory has priority, and speculation takes {extra / 1e9:.2f} GB more; without that "
            f"priority, {reason}"
        )
    ranges = outlook.ranges(sorted(shares))
    even = outlook.break_even(batch, k)
    return Advice(
        verdict, reason, "the model", target.name, drafter_name(situation, drafter),
        deployment_of(situation, target, drafter, outlook, verdict != LEAVE),
        _acceptance(outlook, k), outlook.acceptance.source, k,
        judge(known, verdict, outlook, batch, max(shares)), stack(situation.priority),
        _notes(outlook, situation, drafter.prior, shares), limiting,
        halved={name: modelled(value, "times") for name, value in halved.items()},
        speedup=ranged(outlook.range_of(shares), "times"),
        ranges=[BatchRange(a, b, n, modelled(least, "times")) for a, b, n, least in ranges],
        schedule=[(a, b, n) for a, b, n, _ in ranges],
        at=[_at(outlook, situation, size, share) for size, share in shares.items()],
        ttft=_ttft(outlook, k), memory=_memory(outlook, batch),
        cost=_cost(outlook, situation, shares),
        break_even=_even(even, k), trips=_trips(outlook, batch, k, even),
        sensitivity=_sensitivity(outlook, sorted({1, batch, *shares})),
        tuned=_tuned(outlook, shares) if situation.fine_tune else {},
    )  # fmt: skip


def _best(situation: Situation, target: Shape) -> Advice:
    """Return the advice for the catalogue's best drafter, with all candidates that fit."""
    candidates = rank(situation, target)
    advice = advise(replace(situation, drafter=candidates[0].drafter))
    heads = [each.drafter for each in candidates if BY_NAME[each.method].head]
    holds = {
        "by_rules": candidates[0].speedup is None,
        "small": candidates[0].method == "draft_model" and heads,
        "lookups": all(each.drafter in LOOKUPS for each in candidates),
    }
    notes = told(data("notes")["best"], holds, {"heads": heads, "target": target.name})
    notes += advice.notes
    return replace(advice, candidates=candidates, notes=notes)


def rank(situation: Situation, target: Shape) -> list[Candidate]:
    """Return the drafters that fit the target; the one fastest on the traffic comes first."""
    if situation.acceptance is not None:
        raise ConfigError("an acceptance belongs to one drafter; name it as drafter.")
    known = [each for each in fitting(str(situation.target), target) if _shared(situation, each)]
    if situation.profile is not None:
        measured = situation.costs().drafters  # measured costs of draft_model do not name the model
        known = [each for each in known if each.drafter in measured]
        if not known:
            raise ConfigError(
                f"the profile measured {', '.join(measured) or 'no drafter'}; name one as drafter."
            )
    candidates = [_candidate(situation, target, each) for each in known]
    return sorted(candidates, key=_worth)


def _worth(candidate: Candidate) -> tuple[float, ...]:
    order = data("rules")["order"]
    place = order.index(candidate.method) if candidate.method in order else len(order)
    if candidate.speedup is not None:
        return -candidate.speedup["p50"].value, place
    return place, abs(candidate.ratio.value - USUAL_RATIO)


def _shared(situation: Situation, each: Fitting) -> bool:
    """Return whether engines can split a drafter over the target's devices."""
    if each.method != "draft_model" or situation.placement != "same":
        return True
    return find_shape(each.drafter).heads % situation.tensor_parallel == 0


def _candidate(situation: Situation, target: Shape, each: Fitting) -> Candidate:
    own = replace(situation, drafter=each.drafter)
    drafter = own.find_drafter(target)
    share = drafter.shape.parameters / target.parameters if drafter.shape else 0.0
    ratio = modelled(share, "share")
    if (outlook := forecast(own, target, drafter)) is None:
        return Candidate(*each, ratio)
    shares = judged(situation, outlook)
    batch = median_size(shares)
    taken = None if outlook.memory is None else modelled(outlook.extra(batch), "bytes")
    speedup = ranged(outlook.range_of(shares), "times")
    return Candidate(*each, ratio, outlook.chosen(batch), speedup, taken)


def _by_rules(
    situation: Situation, target: Shape, drafter: PlannedDrafter, known: dict[str, float]
) -> Advice:
    """Return the advice by rules of thumb, for use when the cost of steps is unknown."""
    rules = judge(known, None, None, 1, 1)
    verdict, reason = decide(rules)
    acceptance = situation.expected(drafter)
    rate = Figure(acceptance.rate(USUAL_K), _unit(USUAL_K), acceptance.evidence)
    return Advice(
        verdict, reason, "rules of thumb", target.name, drafter_name(situation, drafter),
        deployment_of(situation, target, drafter, None, verdict != LEAVE), {"p50": rate},
        acceptance.source, USUAL_K, rules, stack(situation.priority),
        ["without hardware or a profile, there are no figures; give one."],
    )  # fmt: skip


def drafter_name(situation: Situation, drafter: PlannedDrafter) -> str:
    """Return a drafter's name: that of its model, its head, or its method."""
    return drafter.shape.name if drafter.shape else drafter.name


def _unit(k: int) -> str:
    return f"accepted / drafted at K = {k}"


def _even(rate: float | None, k: int) -> Figure | None:
    return None if rate is None else modelled(rate, _unit(k))


def _reason(outlook: Forecast, batch: int, k: int, limiting: str, better: float) -> str:
    half = "with half as many rejected tokens" if limiting == "acceptance" else "at half that cost"
    return (
        f"at batch {batch}, the best draft has {k} {'token' if k == 1 else 'tokens'} and gives "
        f"{outlook.speedup(batch, k):.2f} times as many tokens per second (modelled); the main "
        f"limit is {limiting}: {half}, it would give {better:.2f} times as many"
    )


def _acceptance(outlook: Forecast, k: int) -> dict[str, Figure]:
    known = outlook.acceptance
    low, middle, high = (known.rate(k, z) for z in (-P90, 0.0, P90))
    return ranged((low, middle, high), _unit(k), known.evidence)


def _at(outlook: Forecast, situation: Situation, batch: int, share: float) -> At:
    k, best = outlook.chosen(batch), outlook.best(batch)[0]
    whole = sum(situation.concurrency.values())
    times = {"plain": outlook.tpot(batch, 0), "speculative": outlook.tpot(batch, k)}
    meets = {}
    for name, length in (("plain", 0), ("speculative", k)):
        if situation.max_tpot is not None:
            meets[f"{name} tpot"] = times[name] <= situation.max_tpot
        if situation.max_ttft is not None:
            meets[f"{name} ttft"] = outlook.ttft(length) <= situation.max_ttft
    return At(
        batch, Figure(min(share / whole, 1.0), "share of time", ASSUMED), k,
        modelled(outlook.speedup(batch, k) if k else 1.0, "times"),
        modelled(times["speculative"], "s"), modelled(times["plain"], "s"),
        modelled(outlook.speed(batch, k), "tokens/s"),
        modelled(outlook.speed(batch, 0), "tokens/s"),
        _even(outlook.break_even(batch, best), best), meets,
    )  # fmt: skip


def _ttft(outlook: Forecast, k: int) -> dict[str, Figure]:
    plain, speculative = outlook.ttft(0), outlook.ttft(k)
    return {
        "plain": modelled(plain, "s"),
        "speculative": modelled(speculative, "s"),
        "change": modelled(speculative / plain - 1, "share"),
    }


def _memory(outlook: Forecast, batch: int) -> dict[str, Figure]:
    if outlook.memory is None:
        return {}
    drafter, cache, buffers, plain, speculative = outlook.memory
    return {
        "drafter": modelled(drafter, "bytes"),
        "cache_per_sequence": modelled(cache, "bytes"),
        "buffers": modelled(buffers * outlook.batch(batch, 1), "bytes"),
        "plain_concurrency": modelled(int(plain), "sequences"),
        "concurrency": modelled(int(speculative), "sequences"),
        "lost_concurrency": modelled(int(plain) - int(speculative), "sequences"),
    }


def _cost(outlook: Forecast, situation: Situation, shares: dict[int, float]) -> dict[str, Figure]:
    if situation.price is None:
        return {}
    both = {}
    for name, drafts in (("plain", False), ("speculative", True)):
        speeds = (s * outlook.speed(b, outlook.chosen(b) * drafts) for b, s in shares.items())
        speed = sum(speeds) / sum(shares.values())
        own = drafts and situation.placement == "own"
        hour = (situation.tensor_parallel + own) * situation.price
        both[name] = modelled(hour / (3600 * speed) * 1e6, "$ per 1M tokens")
    return both


def _trips(outlook: Forecast, batch: int, k: int, even: float | None) -> list[Trip]:
    def trip(metric: str, when: str, value: Figure, action: str) -> Trip:
        return Trip(metric, when, value, f"for {ALERT_MINUTES} minutes: {action}")

    slow = modelled(outlook.tpot(batch, 0), "s")
    trips = [trip(f"tpot at batch {batch}", "above", slow, "use plain decoding, which is as fast")]
    if even is None:
        return trips
    loses = modelled(even, _unit(k))
    slower = "use plain decoding, because speculation is slower"
    trips.insert(0, trip("acceptance rate", "below", loses, slower))
    expected = outlook.acceptance.rate(k, -P90)
    if expected > even:
        low = Figure(expected, _unit(k), outlook.acceptance.evidence)
        action = "find out what changed, because it is below the expected P10"
        trips.insert(0, trip("acceptance rate", "below", low, action))
    return trips


def _sensitivity(outlook: Forecast, batches: list[int]) -> list[Sensitivity]:
    lines = []
    for batch in batches:
        k = outlook.chosen(batch) or outlook.best(batch)[0]
        points = [outlook.with_chance(chance) for chance in SENSITIVITY_CHANCES]
        lines.append(Sensitivity(
            batch, k,
            [Figure(each.acceptance.rate(k), _unit(k), ASSUMED) for each in points],
            [modelled(each.speedup(batch, k), "times") for each in points],
        ))  # fmt: skip
    return lines


def _tuned(outlook: Forecast, shares: dict[int, float]) -> dict[str, Figure]:
    gains = data("techniques")["fine_tuning"]["acceptance_gain"]
    tuned = {}
    for name, gain in zip(("low", "high"), gains, strict=True):
        better = replace(outlook, acceptance=outlook.acceptance.improved(1 + gain))
        tuned[name] = modelled(better.range_of(shares)[1], "times")
    return tuned


def _notes(
    outlook: Forecast, situation: Situation, prior: str, shares: dict[int, float]
) -> list[str]:
    guessed = situation.acceptance is None
    apart = _apart(outlook, situation)
    holds = {
        "apart": apart is not None,
        "retokenize": prior == "retokenize" and guessed,
        "modelled": outlook.steps.evidence == MODELLED,
        "assumed": outlook.acceptance.evidence == ASSUMED,
        "may_lose": outlook.range_of(shares)[0] < 1,
        "greedy": not situation.temperature and guessed,
        "throughput": situation.priority == "throughput",
    }
    return told(data("notes")["advise"], holds, {"largest": max(shares), "apart": apart})


def _apart(outlook: Forecast, situation: Situation) -> float | None:
    """Return the speedup of drafting ahead on own cores, over that on all cores; None on GPUs."""
    device = data("hardware")["device"].get(situation.hardware or "", {})
    if device.get("kind") != "cpu" or situation.placement != "same":
        return None
    target = situation.target_shape()
    drafter = situation.find_drafter(target)
    if drafter.method != "model" or drafter.shape is None:
        return None
    chance = per_token(outlook.acceptance.rate(USUAL_K), USUAL_K)
    pair = Pair(target, drafter.shape, chance, situation.dtype, situation.context)
    sockets = Cpus(find_device(str(situation.hardware)), 1, 1, situation.tensor_parallel)
    speedups = {placed.name: placed.speedup for placed in placements(pair, sockets)}
    return speedups[AHEAD] / speedups[TOGETHER]
