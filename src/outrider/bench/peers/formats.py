"""A checkpoint in the peers' formats of few bits, for ``outrider bench quality`` to read.

``python -m outrider.bench.peers.formats MODEL FOLDER`` prints a line a format: bits per weight, and
where it is. MODEL is "pocket" or a checkpoint; peers must be installed (``make peers``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ...errors import OutriderError
from . import known, setup
from .pairs import find_pair


def write(checkpoint: Path, folder: Path) -> dict[str, tuple[float | None, Path]]:
    """By name, the bits per weight and what ``bench quality`` takes.

    llama.cpp's are its own files, which are repacked exactly; OpenVINO's are dequantised by itself
    to float32.

    Raises:
        OutriderError: a peer is not installed, or its converter failed.
    """
    found = {}
    for name in ("llama.cpp", "openvino"):
        peer = known.peers()[name]
        if reason := peer.missing():
            raise OutriderError(f"{name}: {reason}.")
        for dtype in ("int8", "int4"):
            made = peer.convert(checkpoint, dtype)
            bits = peer.bits_per_weight(checkpoint, dtype)
            if name == "llama.cpp":
                found[f"{name} {dtype}"] = bits, made / "model.gguf"
                continue
            out = folder / f"{name}-{dtype}"
            command = known.run_module(setup.EXPORT.python, "openvino_dequantise")
            words = (str(made), str(checkpoint), str(out))
            path = f"PYTHONPATH={known.FOLDER}"
            setup.call("env", path, *command, *words, log=setup.home() / "logs" / "dequantise")
            found[f"{name} {dtype}"] = bits, out
    return found


def main() -> None:
    """Write them and say where they are."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.peers.formats")
    parser.add_argument("model")
    parser.add_argument("folder", type=Path)
    given = parser.parse_args()
    for name, (bits, path) in write(find_pair(given.model).target, given.folder).items():
        print(f"{name}: {bits:.3f} bits per weight: {path}")


if __name__ == "__main__":
    main()
