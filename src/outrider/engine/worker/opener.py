"""Opens what is loaded later: a drafter for the target of a worker."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ...errors import ModelError, OutriderError, shown
from ..setup import EngineSetup, set_up
from ..successor import check_room
from .messages import WorkerSpec

logger = logging.getLogger("outrider")


class Opener:
    """Reads drafters' checkpoints, except weights; ``folders`` are those of the present ones."""

    def __init__(self, spec: WorkerSpec, setup: EngineSetup) -> None:
        self._spec, self._codec = spec, setup.codec
        self.folders = setup.folders

    def open(self, drafter: Path) -> EngineSetup | OutriderError:
        """Return the parts of an engine with a drafter, or why it cannot be used."""
        spec = self._spec
        try:
            setup = set_up(spec.model, spec.drafter, spec.options, drafter)
            check_room(drafter)
        except Exception as error:
            return as_refusal(error)
        return replace(setup, codec=self._codec)  # whose tokenizer may have been built


def as_refusal(error: Exception) -> OutriderError:
    """Return why a drafter cannot be loaded, as an error for whoever wants it."""
    if isinstance(error, OutriderError):
        return error.with_traceback(None)  # which would hold its frames, and they weights
    logger.error("a drafter cannot be loaded", exc_info=error)
    return ModelError(f"the drafter cannot be loaded: {shown(error)}.")
