"""The faults that the drill inflicts on the speculative server."""

from __future__ import annotations

import os
import signal
import threading
from contextlib import AbstractContextManager, suppress
from pathlib import Path

import numpy as np

from outrider import pocket
from outrider.checkpoints.files import TYPES, read_header, save_file

from ..served import Served

RUN_SECONDS, STOP_SECONDS = 0.02, 0.25
KILL_SECONDS = 2.0


def noise_drafter(folder: Path) -> Path:
    """Save the pocket drafter with weights of noise; its tokens mean nothing then."""
    source = pocket.PATH / "drafter"
    for file in source.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    draw = np.random.default_rng(0)
    noise = {
        name: (0.05 * draw.standard_normal(entry.shape)).astype(TYPES[entry.type])
        for name, entry in read_header(source / "model.safetensors").items()
    }
    save_file(noise, folder / "model.safetensors", {"format": "pt"})
    return folder


class Fault(AbstractContextManager["Fault", None]):
    """Does something to a server's engine again and again, in a thread, until its end."""

    def __init__(self, server: Served) -> None:
        self.server = server
        self.over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Fault:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.over.is_set():
            with suppress(OSError):
                self.strike()

    def strike(self) -> None:
        """Do it once."""
        raise NotImplementedError


class Slow(Fault):
    """Stops the engine's process most of the time, so that every token takes longer."""

    def strike(self) -> None:
        """Stop it for a moment, and let it run for a shorter one."""
        engine = self.server.engine()
        if engine is None:
            self.over.wait(STOP_SECONDS)
            return
        os.kill(engine, signal.SIGSTOP)
        try:
            self.over.wait(STOP_SECONDS)
        finally:
            os.kill(engine, signal.SIGCONT)
        self.over.wait(RUN_SECONDS)


class Crashing(Fault):
    """Kills the engine's process whenever there is one; its server answers 503 until it is back."""

    def strike(self) -> None:
        """Kill it once."""
        self.server.kill_engine()
        self.over.wait(KILL_SECONDS)
