"""Which peers there are, and how each is started."""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import setup
from .setup import call, home, say

OWN = "outrider"
DTYPES = ("float32", "bfloat16", "int8", "int4")
MODES = ("plain", "draft", "ngram")
FOLDER = Path(__file__).parent


def run_module(python: str | Path, name: str) -> tuple[str, ...]:
    """The command that runs a script of ``runners`` in that Python (3.11 or later)."""
    return (str(python), "-P", "-m", f"runners.{name}")


@dataclass(frozen=True)
class Peer:
    """An engine to measure.

    Args:
        name: as reports say it.
        command: starts its runner.
        converter: a script of ``runners`` in the Python given, called with a checkpoint, an output
            folder and a dtype; None for a peer that reads checkpoints as they are.
        environment: variables that the runner needs.
        dtypes: which it has.
        missing: why it cannot run here, None if it can.
    """

    name: str
    command: tuple[str, ...]
    converter: tuple[str, ...] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    missing: Callable[[], str | None] = lambda: None

    def variables(self) -> dict[str, str]:
        """Variables of its processes: they see the runners, and Outrider only for its own."""
        inherited = os.environ.get("PYTHONPATH", "") if self.name == OWN else ""
        path = os.pathsep.join(part for part in (str(FOLDER), inherited) if part)
        return {**self.environment, "PYTHONPATH": path}

    def convert(self, checkpoint: Path, dtype: str) -> Path:
        """The checkpoint in the peer's own format: converted once, then found again.

        Raises:
            SetupError: the converter failed.
        """
        if self.converter is None:
            return checkpoint
        folder = converted(checkpoint) / f"{self.name}-{dtype}"
        done = folder / "done"
        if not done.exists():
            say(f"{self.name}: converting {checkpoint} to {dtype}")
            folder.mkdir(parents=True, exist_ok=True)
            variables = [f"{name}={value}" for name, value in self.variables().items()]
            words = (str(checkpoint), str(folder), dtype)
            call("env", *variables, *self.converter, *words, log=folder / "log")
            done.touch()
        return folder


def converted(checkpoint: Path) -> Path:
    """Where conversions of that checkpoint lie: another folder when its weights change."""
    about = [str(checkpoint.resolve())]
    for file in sorted(checkpoint.glob("*.safetensors")):
        stat = file.stat()
        about.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
    return home() / "converted" / hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]


def peers() -> dict[str, Peer]:
    """Every peer by name, Outrider itself first."""
    lcpp, ov, vllm = setup.LLAMA_CPP.python, setup.OPENVINO.python, setup.VLLM.python
    export = setup.EXPORT.python
    server = {"PEER_SERVER": str(setup.program("llama-server"))}
    quantize = {"PEER_QUANTIZE": str(setup.program("llama-quantize"))}
    found = (
        Peer(OWN, run_module(sys.executable, "own"), dtypes=DTYPES),
        Peer("transformers", run_module(sys.executable, "transformers")),
        Peer(
            "llama.cpp", run_module(lcpp, "llamacpp"), run_module(lcpp, "llamacpp_convert"),
            {**server, **quantize}, DTYPES, lambda: setup.missing("llama.cpp"),
        ),
        Peer(
            "openvino", run_module(ov, "openvino"), run_module(export, "openvino_convert"),
            {}, DTYPES, lambda: setup.missing("openvino"),
        ),
        Peer("vllm", run_module(vllm, "vllm"), missing=lambda: setup.missing("vllm")),
    )  # fmt: skip
    return {peer.name: peer for peer in found}
