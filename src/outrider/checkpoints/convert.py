"""Converts checkpoints with pickled weights to safetensors, the only format that serving reads."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

from ..base.extras import need_torch
from ..base.fields import read_object
from ..base.outside.text import printable
from ..errors import ConfigError, ModelError
from .files import INDEX, Files, new_folder, read_header, save_file, usual_mode, weight_files
from .formats.gguf import is_gguf
from .formats.shared import NAMED

PICKLED = (".bin", ".pt", ".pth")
NOT_COPIED = (*PICKLED, ".index.json", ".safetensors", ".h5", ".msgpack")
SECONDS = 3600
ROOM = 8 << 30
"""Bytes of address space for the converting process, in addition to four times the files' size."""
PREFIX = "medusa_head."
"""Beginning of the names of tensors that Medusa's training saved."""


def convert(folder: Path, out: Path) -> int:
    """Write the checkpoint in ``folder`` with safetensors to the new folder ``out``.

    A file of weights stands for the folder that it is in. Other files are copied. Pickled weights
    are read in a separate process, as tensors only and with limited memory. Returns the number of
    tensors.
    """
    if is_gguf(folder):
        raise ConfigError(f"{folder} needs no conversion; give it as it is, as model or drafter.")
    if folder.suffix in PICKLED and folder.is_file():
        folder = folder.parent
    if not folder.is_dir():
        raise ModelError(f"{folder} is not a folder; give a checkpoint's.")
    for file in folder.iterdir():
        if not (file.is_file() or file.is_dir()):
            raise ModelError(f"{file} is not a regular file; remove it, or fetch it again.")
    plain = weight_files(folder)
    pickled = [] if plain else _pickled(folder)
    if not plain and not pickled:
        raise ModelError(f"{folder} has no weights: neither .safetensors nor {', '.join(PICKLED)}.")
    others = [f for f in folder.iterdir() if f.is_file() and not f.name.endswith(NOT_COPIED)]
    index = [folder / INDEX] if plain and (folder / INDEX).is_file() else []
    with new_folder(out) as new:
        for file in (*others, *plain, *index):
            shutil.copyfile(file, new / file.name)
        if pickled:
            _unpickle(pickled, new / "model.safetensors")
        return _named(new)


def _pickled(folder: Path) -> list[Path]:
    """Return the files with pickled weights: those in an index, else those with such names."""
    for index in sorted(folder.glob("*.bin.index.json")):
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in names.values()
        ):
            raise ModelError(f"{index} is damaged; fetch the checkpoint again.")
        return sorted({folder / name for name in names.values()})
    files = [file for file in sorted(folder.iterdir()) if file.suffix in PICKLED]
    # Optimizer states and training arguments may be beside weights.
    return [file for file in files if file.stem.startswith(NAMED)] or files


def _unpickle(files: list[Path], out: Path) -> None:
    """Write pickled tensors as safetensors."""
    need_torch(f"{files[0]} is a pickled file; to read it")
    try:
        size = sum(file.stat().st_size for file in files)
    except OSError as error:
        name = printable(error.filename)
        raise ModelError(f"{name} cannot be read ({error.strerror}).") from None
    program = Path(__file__).with_name("unpickle.py")
    command = [sys.executable, "-I", str(program), str(4 * size + ROOM), str(out), *map(str, files)]
    try:
        with usual_mode(out):
            done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        raise ModelError(f"{files[0]} was not read in {SECONDS} s.") from None
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        reason = printable(lines[-1]) if lines else f"its reader ended with {done.returncode}"
        raise ModelError(f"{files[0].parent} cannot be converted ({reason.rstrip('.')}).")


def _named(folder: Path) -> int:
    """Give tensors the names that readers expect; return how many there are."""
    tensors = Files(folder).tensors
    if tensors and all(name.startswith(PREFIX) for name in tensors):
        for file in weight_files(folder):
            loaded = {n.removeprefix(PREFIX): e.read() for n, e in read_header(file).items()}
            save_file(loaded, file, {"format": "pt"})
        index = folder / INDEX
        if index.is_file():
            whole = json.loads(index.read_text())
            names = whole["weight_map"]
            whole["weight_map"] = {n.removeprefix(PREFIX): f for n, f in names.items()}
            index.write_text(json.dumps(whole, indent=2) + "\n")
    return len(tensors)
