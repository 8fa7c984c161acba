"""What ``advise`` answers: a verdict, and the figures that it rests on."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator

from ...base.limits import LARGEST_DRAFT
from ...base.outside.documents import parse_json, read_json
from ...base.outside.models import DataPart, checked
from ...base.outside.text import printable
from ...engine.control.schedules import Range, check_ranges
from ...errors import ConfigError, shown
from .checks import OneLine
from .deployment import Deployment
from .figure import Figure, Report
from .rank import Candidate
from .rules import LEAVE, Rule

VERSION = 1
"""Version of the document that an advice is saved as."""
LARGEST = 1 << 20
"""Most bytes of a document; an advice has about 20,000."""
WRITE = "write one with outrider ops advise --out FILE"


@dataclass(frozen=True)
class At(DataPart):
    """The figures at one batch size of the traffic; ``k`` = 0 is plain decoding."""

    batch: int
    share: Figure
    k: int
    speedup: Figure
    tpot: Figure
    plain_tpot: Figure
    tokens_per_second: Figure
    plain_tokens_per_second: Figure
    break_even: Figure | None
    """Acceptance at which the best draft length neither wins nor loses; None where none would."""
    meets: dict[str, bool]
    """Service levels, with speculation and without, as far as they were given."""


@dataclass(frozen=True)
class BatchRange(DataPart):
    """Batch sizes with one draft length, and the least speedup among them."""

    first: int
    last: int
    k: int
    speedup: Figure


@dataclass(frozen=True)
class Line(DataPart):
    """The speedup at one batch size, by acceptance."""

    batch: int
    k: int
    acceptance: list[Figure]
    speedup: list[Figure]


@dataclass(frozen=True)
class Trip(DataPart):
    """An alert: where ``metric`` is ``when`` the value for some minutes, do what it says."""

    metric: str
    when: str
    value: Figure
    action: str


@dataclass(frozen=True)
class Advice(DataPart, Report):
    """The result of ``advise``; without costs, only what rules of thumb say.

    ``verdict`` is use, do not, or only at some batch sizes; ``decided_by`` the model or rules of
    thumb. ``acceptance`` is accepted / drafted at ``k``, the draft length at the traffic's median
    batch size. ``deploy render``, ``alerts rules``, ``roi`` and the guard read it as JSON.
    """

    verdict: OneLine
    reason: str
    decided_by: str
    target: OneLine
    drafter: OneLine
    deployment: Deployment
    acceptance: dict[str, Figure]
    acceptance_source: str
    k: int
    rules: list[Rule]
    stack: dict[str, Any]
    notes: list[str]
    limiting: str = ""
    halved: dict[str, Figure] = field(default_factory=dict)
    """The speedup if half of each cost, or half of the refused tokens, were gone."""
    speedup: dict[str, Figure] = field(default_factory=dict)
    """P10, P50, P90 over the traffic: tokens per second with and without, prompts included."""
    ranges: list[BatchRange] = field(default_factory=list)
    schedule: Annotated[list[Range], AfterValidator(check_ranges)] = field(default_factory=list)
    """First and last batch size and K: vLLM's num_speculative_tokens_per_batch_size."""
    at: list[At] = field(default_factory=list)
    ttft: dict[str, Figure] = field(default_factory=dict)
    memory: dict[str, Figure] = field(default_factory=dict)
    cost: dict[str, Figure] = field(default_factory=dict)
    """Dollars for a million tokens, where a price was given."""
    break_even: Figure | None = None
    """Acceptance at ``k`` at which speculation neither wins nor loses; None where none would."""
    trips: list[Trip] = field(default_factory=list)
    sensitivity: list[Line] = field(default_factory=list)
    tuned: dict[str, Figure] = field(default_factory=dict)
    """The speedup with a drafter tuned on the traffic, where that was asked."""
    candidates: list[Candidate] = field(default_factory=list)
    """The catalogue's drafters that fit, the best first, if none was named."""
    version: int = VERSION


def load_advice(file: Path, option: str = "--advice") -> Advice:
    """Return the advice in a file; ``option`` names it in messages. See ``read_advice``."""
    name = f"{option} {printable(file)}"
    return _advice(read_json(file, name, limit=LARGEST), name)


def read_advice(text: str, source: str) -> Advice:
    """Return the advice in a text, the output of ``Advice.to_json`` as JSON.

    Raises ConfigError: it is not an advice, of another version, or damaged; the message says where.
    """
    return _advice(parse_json(text, source, limit=LARGEST, unique=True), source)


def _advice(document: Any, source: str) -> Advice:
    if not isinstance(document, dict) or not {"version", "verdict"} <= document.keys():
        raise ConfigError(f"{source} is JSON, but not an advice with a version; {WRITE}.")
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise ConfigError(
            f"{source} is an advice of version {shown(document['version'])}, but this Outrider "
            f"reads version {VERSION}; {WRITE} again."
        )
    advice = checked(Advice, document, source)
    if not 0 <= advice.k <= LARGEST_DRAFT or (advice.k == 0 and advice.verdict != LEAVE):
        raise ConfigError(
            f"{source}: k is {advice.k}; give a draft length from 1 to {LARGEST_DRAFT}."
        )
    if (even := advice.break_even) is not None and not 0 <= even.value <= 1:
        raise ConfigError(f"{source}: break_even is {even.value:g}; give a share from 0 to 1.")
    return advice
