"""The guard's observations, memory and decisions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, Field

from ...base.limits import LARGEST_DRAFT, LARGEST_INT
from ...base.outside.models import checked
from ...errors import ConfigError


class Level(StrEnum):
    """An engine's drafting: as its operator set it, shorter, or none."""

    OWN = "own"
    REDUCED = "reduced"
    PLAIN = "plain"


class Place(StrEnum):
    """The route of traffic: the operator's, partly or wholly to the standby, or on probation."""

    OWN = "own"
    RELIEVED = "relieved"
    STANDBY = "standby"
    PROBING = "probing"


LATEST = 1e11
"""Latest accepted time, in seconds since the epoch; the year 5138."""
Time = Annotated[float, Field(ge=0, le=LATEST)]
Mode = Literal["normal", "reduced", "plain", "relieved", "standby", "probing"]
MODES: tuple[Mode, ...] = get_args(Mode)
"""The values of the label of ``outrider_guard_state``."""


def _printable(text: str) -> str:
    if not text.isprintable():
        raise ValueError("is not printable")
    return text


@dataclass(frozen=True)
class Side:
    """Figures of one server over the window; None if the source has none.

    ``up`` is False if the source cannot reach it. ``requests`` counts those that ended, ``errors``
    is the share of them that failed. ``p99`` is in seconds from arrival to end; it is infinite if
    requests run and nothing comes out. ``memory`` is the share of KV cache pages in use,
    ``acceptance`` accepted / drafted tokens. ``draft_length`` is 0 while nothing is drafted.
    """

    up: bool | None = None
    requests: float | None = None
    errors: float | None = None
    p99: float | None = None
    memory: float | None = None
    acceptance: float | None = None
    drafted: float | None = None
    speedup: float | None = None
    draft_length: float | None = None


@dataclass(frozen=True)
class DraftingState:
    """The run-time switch as an engine reports it; ``length`` is None if the engine chooses K."""

    enabled: bool
    length: Annotated[int, Field(ge=0, le=LARGEST_DRAFT)] | None
    in_use: Annotated[int, Field(ge=0, le=LARGEST_DRAFT)]


Weight = Annotated[int, Field(ge=0, le=LARGEST_INT)]
Weights = tuple[Weight, Weight]
"""The weight of the engine and that of the standby."""


@dataclass(frozen=True)
class GuardView:
    """Everything that one evaluation observes.

    ``trouble`` says why the source gives no figures. ``drafting`` and ``weights`` are what the
    switches report; None if there is no switch or it does not answer, and their troubles say why.
    ``warm`` and ``answers`` say whether the models of standby and engine answered just now;
    ``answers`` is None if the engine was not asked.
    """

    engine: Side = Side()
    standby: Side = Side()
    trouble: str | None = None
    drafting: DraftingState | None = None
    drafting_trouble: str | None = None
    weights: Weights | None = None
    traffic_trouble: str | None = None
    warm: bool = False
    answers: bool | None = None


@dataclass(frozen=True)
class GuardTrack:
    """One thing that the guard changes: drafting, or traffic.

    It has its ``level``, a ``Level`` or a ``Place``, since the time ``since``, because of the
    signal ``cause``. The next try to go back is at ``retry_at``, after ``wait`` seconds. ``stage``
    is the stage of a probation, or 1 while drafting is tried again; ``errors`` is the share of
    failed requests when traffic left.
    """

    level: str = Level.OWN
    since: Time = 0.0
    cause: Annotated[str, AfterValidator(_printable)] = ""
    wait: Time = 0.0
    retry_at: Time = 0.0
    stage: Annotated[int, Field(ge=0, le=LARGEST_INT)] = 0
    errors: Time = 0.0


@dataclass(frozen=True)
class State:
    """The guard's memory between evaluations and across restarts.

    It belongs to the engine at address ``engine``. ``pending`` says since when each signal is
    beyond its threshold, ``forced`` the mode that a person set. ``own_drafting`` and
    ``own_weights`` are the switches as they were before the guard changed them, ``reduced_to`` is K
    while drafting is reduced. ``noted`` means that weak drafting, which the engine handles itself,
    was recorded. ``seen`` is the time of the last evaluation.
    """

    engine: str = ""
    drafting: GuardTrack = GuardTrack()
    traffic: GuardTrack = GuardTrack()
    pending: Mapping[str, Time] = field(default_factory=dict)
    forced: Mode | None = None
    own_drafting: DraftingState | None = None
    own_weights: Weights | None = None
    reduced_to: Annotated[int, Field(ge=1, le=LARGEST_DRAFT)] = 1
    noted: bool = False
    seen: Time = 0.0

    @property
    def mode(self) -> str:
        """One of ``MODES``: where traffic is if it moved, else how the engine drafts."""
        if self.traffic.level != Place.OWN:
            return self.traffic.level
        return "normal" if self.drafting.level == Level.OWN else self.drafting.level

    def to_json(self) -> dict[str, Any]:
        """Return the state for a file."""
        return asdict(self)


@dataclass(frozen=True)
class GuardEvent:
    """Something that the guard did or noted; ``action`` and ``signal`` are labels of metrics.

    ``track`` is what it changes, traffic or drafting; "" if it only notes.
    """

    action: str
    signal: str
    text: str
    track: str = "traffic"


@dataclass(frozen=True)
class Decision:
    """The new state, the events that led to it, alerts by name, and a text on each signal."""

    state: State
    events: tuple[GuardEvent, ...] = ()
    alerts: Mapping[str, str] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


def carried_over(state: State, now: float, longest: float) -> State:
    """Return a state whose times fit a clock that shows ``now``.

    The clock may have been set back, or be another machine's. Times are shifted so that the last
    evaluation is not in the future, and no wait is longer than ``longest`` seconds.
    """
    ahead = max(0.0, state.seen - now)

    def at(time: float, latest: float) -> float:
        return max(0.0, min(time - ahead, latest))

    def moved(track: GuardTrack) -> GuardTrack:
        wait = min(track.wait, longest)
        return replace(
            track, since=at(track.since, now), wait=wait, retry_at=at(track.retry_at, now + wait)
        )

    pending = {name: at(since, now) for name, since in state.pending.items()}
    return replace(
        state, drafting=moved(state.drafting), traffic=moved(state.traffic), pending=pending,
        seen=min(state.seen, now),
    )  # fmt: skip


def of_json(document: Any, where: str) -> State:
    """Return the state in the document of a file. Raises ConfigError: it is not a state."""
    try:
        state = checked(State, document, where)
        whole = json.loads(json.dumps(state.to_json())) == document
        levels = state.drafting.level in set(Level) and state.traffic.level in set(Place)
    except ConfigError:
        whole = levels = False
    if not whole or not levels:
        raise ConfigError(f"{where} holds no state of a guard; remove it to start again.")
    return state


STATUS: dict[str, tuple[type, ...]] = {
    "time": (int, float), "engine": (str,), "mode": (str,), "forced": (str, type(None)),
    "dry_run": (bool,), "runtime_switch": (bool,), "alerts": (dict,), "reasons": (dict,),
}  # fmt: skip
"""Required entries of a status, by name."""


def check_status(document: Any, where: str) -> dict[str, Any]:
    """Return ``document`` if it is a status that a guard wrote. Raises ConfigError: it is not."""
    good = isinstance(document, dict) and all(
        isinstance(document.get(name), kinds) for name, kinds in STATUS.items()
    )
    if not good or not 0 <= document["time"] <= LATEST:
        raise ConfigError(
            f"{where} is damaged; remove it, and the guard writes it again at its next evaluation."
        )
    return dict(document)
