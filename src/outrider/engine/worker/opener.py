"""Opens drafters that are loaded later, for the target of a worker."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

from ...errors import ModelError, OutriderError, shown
from ..engine import Engine
from ..setup import EngineSetup, set_up
from ..successor import Opened, opened
from .messages import WorkerSpec

logger = logging.getLogger("outrider")


class Opener:
    """Reads drafters' checkpoints; ``folders`` are those of the drafters in use."""

    def __init__(self, spec: WorkerSpec, setup: EngineSetup) -> None:
        self._spec, self._codec = spec, setup.codec
        self.folders = setup.folders

    def open(self, drafter: Path, engine: Engine) -> Opened | OutriderError:
        """Return a drafter for the target of an engine, or why it cannot be used."""
        spec = self._spec
        try:
            setup = set_up(spec.model, spec.drafter, spec.options, drafter)
            # Keep the first setup's codec, whose tokenizer may be built already.
            return opened(replace(setup, codec=self._codec), engine)
        except Exception as error:
            return as_refusal(error)


def as_refusal(error: Exception) -> OutriderError:
    """Return why a drafter cannot be loaded, as an error for the caller of the load."""
    if isinstance(error, OutriderError):
        return error.with_traceback(None)  # whose frames would hold weights
    logger.error("a drafter cannot be loaded", exc_info=error)
    return ModelError(f"the drafter cannot be loaded: {shown(error)}.")
