"""Prints as JSON what the phases of an engine's start take: ``start_phases MODEL DRAFTER``.

It does what a worker does, in this process. A phase's time is that of the functions named, without
that of phases within it.
"""

import json
import sys
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

PHASES = {
    "headers": ("outrider.checkpoints.files", "open_gguf"),
    "configs": ("outrider.engine.setup", "open_checkpoint"),
    "vocabularies compared": ("outrider.engine.setup", "differences"),
    "target's weights": ("outrider.engine.build", "load_target"),
    "drafter's weights": ("outrider.drafters.model", "load_model"),
    "costs": ("outrider.engine.build", "find_costs"),
    "tokenizer (frontend)": ("outrider.checkpoints.unread", "gguf_tokenizer"),
}
"""Phases by name: the module and function that are timed, as that module calls it."""


class Clock:
    """Sums wall and CPU seconds up by phase, the outer one resting while an inner one runs."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}
        self._running: list[str] = []
        self._last = time.perf_counter(), time.process_time()

    def _charge(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._running:
            spent = self.spent.setdefault(self._running[-1], [0.0, 0.0])
            for i, (after, before) in enumerate(zip(now, self._last, strict=True)):
                spent[i] += after - before
        self._last = now

    def run(self, phase: str, work: Callable[[], Any]) -> Any:
        """Return what ``work`` does, which is a phase."""
        self._charge()
        self._running.append(phase)
        try:
            return work()
        finally:
            self._charge()
            self._running.pop()

    def wrap(self, phase: str, module: str, name: str) -> None:
        """Make a function a phase wherever its module calls it."""
        owner = import_module(module)
        function = getattr(owner, name)
        setattr(owner, name, lambda *a, **k: self.run(phase, lambda: function(*a, **k)))


def main(model: str, drafter: str) -> list[dict[str, Any]]:
    """Return each phase with its seconds."""
    clock = Clock()
    worker = clock.run("imports", lambda: import_module("outrider.engine.worker.worker"))
    for phase, (module, name) in PHASES.items():
        clock.wrap(phase, module, name)
    setup = clock.run("rest of the setup", lambda: worker.set_up(model, drafter, {}))
    inputs = import_module("outrider.frontend.inputs")
    clock.run("tokenizer (frontend)", lambda: inputs.InputProcessor(setup.facts))
    engine = clock.run("rest of the engine", lambda: worker.build_engine(setup))
    started = worker.Worker(engine, None, None, None, 0)
    clock.run("first tokens", started.warm_up)
    return [{"phase": name, "wall": s[0], "cpu": s[1]} for name, s in clock.spent.items()]


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:]), sys.stdout)
