"""The work that a worker does between requests.

It keeps packed weights, measures what steps cost, and searches for sublayers to skip.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator
from queue import Empty, SimpleQueue

from ...models.native import NativeTransformer
from ..engine import Engine

logger = logging.getLogger("outrider")

IDLE_SECONDS = 2.0
"""Seconds without a request before such work begins."""
PAUSE_SECONDS = 0.02
"""Seconds between two steps of it. A step is one forward, which a request may have to wait for."""
NICE = 19
"""Niceness of the thread that writes weights: any other work goes first."""


class SpareTime:
    """Waits for calls, and does an engine's other work while there are none."""

    def __init__(self, engine: Engine) -> None:
        self._steps = _steps(engine)
        self._done = False

    def wait(self, inbox: SimpleQueue[Callable[[], None]]) -> Callable[[], None]:
        """Return the next call of ``inbox``."""
        patience = IDLE_SECONDS
        while not self._done:
            try:
                return inbox.get(timeout=patience)
            except Empty:
                self._step()
                patience = PAUSE_SECONDS
        return inbox.get()

    def _step(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._done = True
        except Exception:  # this work is optional
            logger.exception("the engine could not use its spare time")
            self._done = True


def _steps(engine: Engine) -> Iterator[None]:
    models = [engine.model, *(drafter.model for drafter in engine.drafting.drafters.values())]
    packed = [each for each in models if isinstance(each, NativeTransformer)]
    if any(each.kept is not None for each in packed):
        threading.Thread(target=_keep, args=(packed,), name="outrider-keep", daemon=True).start()
    if engine.later is not None:
        yield from engine.later


def _keep(models: list[NativeTransformer]) -> None:
    if hasattr(os, "setpriority"):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    for model in dict.fromkeys(models):
        model.keep()
