"""The messages between the frontend and the engine's process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ...base.config import EngineConfig
from ...base.types import Event, Folder, Request
from ...checkpoints.unread import UnreadCodec
from ...errors import OutriderError
from ...text.codec import TextCodec
from ..control.switch import SpeculationState

if TYPE_CHECKING:
    from ...drafters.base import DrafterSpec


@dataclass(frozen=True)
class WorkerSpec:
    """The arguments of ``setup.set_up``, which the worker reads."""

    model: Folder
    drafter: Folder | DrafterSpec | None
    options: Mapping[str, Any]
    loaded: Path | None = None


@dataclass(frozen=True)
class Facts:
    """Facts on a checkpoint for the frontend, without torch types; ``drafter`` is the default."""

    folder: Path
    config: EngineConfig
    drafter: str
    vocab_size: int
    max_model_len: int
    eos_token_ids: frozenset[int]
    codec: TextCodec | UnreadCodec | None


class Abort(NamedTuple):
    """Command: drop a request; an unknown id is no error."""

    request_id: str


class Load(NamedTuple):
    """Command: draft with another checkpoint."""

    drafter: Path


Command = Request | Abort | SpeculationState | Load
"""From the frontend to the worker; a ``SpeculationState`` is in force from the next step on."""


class Beat(NamedTuple):
    """A sign of life: the numbers of the step and command at work, None while a thread waits.

    ``longest`` is the longest step so far, in seconds.
    """

    step: int | None = None
    command: int | None = None
    longest: float = 0.0


class Gauges(NamedTuple):
    """The engine's load, and its counts since its process, number ``generation``, started."""

    running: int = 0
    waiting: int = 0
    pages: int = 0
    pages_used: int = 0
    rows: int = 0
    counts: Mapping[str, float] = {}
    speedups: Mapping[str, float] = {}
    generation: int = 0


class Ready(NamedTuple):
    """The engine is loaded and has decoded. ``folders`` are those of drafters with a checkpoint."""

    drafters: tuple[str, ...]
    names: tuple[str, ...]
    speculation: SpeculationState
    budget: str
    num_tokens: int
    max_model_len: int
    max_draft: int
    folders: Mapping[str, str] = {}


class Loaded(NamedTuple):
    """The answer to ``Load``: the new engine, or why the old one was kept."""

    drafter: Path
    result: Ready | OutriderError


class Stepped(NamedTuple):
    """The events of a step."""

    events: list[Event]
    gauges: Gauges


class Beliefs(NamedTuple):
    """The beliefs of the engine's controller, see ``control.summary``."""

    summary: dict[str, Any]


class Left(NamedTuple):
    """A request is gone: the frontend dropped it, or ``error`` says why it cannot be served."""

    request_id: str
    gauges: Gauges
    error: OutriderError | None = None


class Logged(NamedTuple):
    """A line for the frontend's log."""

    level: int
    text: str


Message = Facts | Ready | Loaded | OutriderError | Stepped | Beliefs | Left | Beat | Logged
"""From the worker to the frontend. ``Facts`` come first; an ``OutriderError`` says why the engine
cannot be loaded."""
