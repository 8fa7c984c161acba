"""The rules for drafters that are loaded later: one at a time, and each on trial at first."""

from __future__ import annotations

import asyncio
import time
from typing import NamedTuple

from ...errors import ConfigError, OutriderError
from ..control.switch import SpeculationState
from .messages import WorkerSpec

TRIAL_SECONDS = 60.0
"""A loaded drafter is given up if the engine dies within this time of starting to use it."""


class Drafting(NamedTuple):
    """The drafters that a worker starts with, and the switch."""

    spec: WorkerSpec
    speculation: SpeculationState | None


class Loads:
    """The load that is under way, and what to fall back to after the last one."""

    def __init__(self) -> None:
        self._under_way: asyncio.Future[OutriderError | None] | None = None
        self._before: Drafting | None = None
        self._since = 0.0  # when an engine began to draft with what was loaded last

    @property
    def under_way(self) -> bool:
        """True while a drafter is being loaded."""
        return self._under_way is not None

    def begin(self) -> None:
        """Begin a load. Raises ConfigError if another one is under way."""
        if self._under_way is not None:
            raise ConfigError("a drafter is being loaded; load another one afterwards.")
        self._under_way = asyncio.get_running_loop().create_future()

    async def end(self) -> OutriderError | None:
        """Wait for the end of the load that is under way; return why it failed."""
        return None if self._under_way is None else await asyncio.shield(self._under_way)

    def ended(self, error: OutriderError | None) -> None:
        """End the load that is under way, if there is one."""
        if self._under_way is not None:
            self._under_way.set_result(error)
            self._under_way = None

    def replaced(self, before: Drafting) -> None:
        """Record that an engine uses the loaded drafter, and ``before`` to fall back to."""
        self._before = before
        self.started()

    def started(self) -> None:
        """Record that an engine is ready."""
        self._since = time.monotonic()

    def way_back(self, *, ready: bool) -> Drafting | None:
        """Return what to fall back to after an engine died; each load has it only once.

        None if nothing was loaded, or if the engine had been ``ready`` for longer than the trial.
        """
        if ready and time.monotonic() - self._since >= TRIAL_SECONDS:
            return None
        before, self._before = self._before, None
        return before
