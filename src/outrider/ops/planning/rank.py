"""Ranks the catalogue's drafters that fit a target, the fastest first."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...base.outside.models import DataPart
from ...errors import ConfigError
from .catalogue import Fitting, Shape, data, find_shape, fitting
from .figure import Figure, modelled, ranged
from .forecast import forecast, judged, median_size
from .situation import Situation

USUAL_RATIO = 0.03
"""The best ratio of a drafter's parameters to the target's, as a rule of thumb."""


@dataclass(frozen=True)
class Candidate(DataPart):
    """A drafter that fits, with its forecast if costs are known, at the median batch size."""

    drafter: str
    method: str
    checkpoint: str | None
    ratio: Figure
    k: int | None = None
    speedup: dict[str, Figure] | None = None
    memory: Figure | None = None


def rank(situation: Situation, target: Shape) -> list[Candidate]:
    """Return the drafters that fit a situation's target, the fastest over its traffic first."""
    if situation.acceptance is not None:
        raise ConfigError("an acceptance belongs to one drafter; name it as drafter.")
    known = [each for each in fitting(str(situation.target), target) if _shared(situation, each)]
    if situation.profile is not None:
        measured = situation.costs().drafters  # costs of a model drafter do not say of which model
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
    """Return whether a drafter can be split over the target's devices, as engines run it."""
    if each.method != "draft_model" or situation.placement != "same":
        return True
    return find_shape(each.drafter).heads % situation.tensor_parallel == 0


def _candidate(situation: Situation, target: Shape, each: Fitting) -> Candidate:
    own = replace(situation, drafter=each.drafter)
    drafter = own.find_drafter(target)
    share = drafter.shape.parameters / target.parameters if drafter.shape else 0.0
    ratio = modelled(share, "share")
    outlook = forecast(own, target, drafter)
    if outlook is None:
        return Candidate(each.drafter, each.method, each.checkpoint, ratio)
    shares = judged(situation, outlook)
    batch = median_size(shares)
    taken = None if outlook.memory is None else modelled(outlook.extra(batch), "bytes")
    return Candidate(
        each.drafter, each.method, each.checkpoint, ratio, outlook.chosen(batch),
        ranged(outlook.range_of(shares), "times"), taken,
    )  # fmt: skip
