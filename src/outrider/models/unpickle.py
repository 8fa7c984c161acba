"""Writes pickled tensors as safetensors: a program of its own, with a limit on its memory.

    python unpickle.py BYTES OUT FILE...

Pickles can run code, so torch reads tensors and nothing else (``weights_only``), in a process that
nobody depends on. It imports nothing of Outrider. A reason to refuse goes to stderr, with status 1.
"""

import resource
import sys
from typing import Any

import torch
from safetensors.torch import save_file

NESTED = ("state_dict", "model", "module")
"""Names under which training code puts the tensors."""


def tensors_in(loaded: Any, file: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an unpickled object by name.

    Raises:
        ValueError: it is no table of tensors.
    """
    for name in NESTED:
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
    if not isinstance(loaded, dict) or not loaded:
        raise ValueError(f"{file} holds no table of tensors")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ValueError(f"{file} holds more than tensors by name ({name!r})")
    return {name: tensor.detach().contiguous().clone() for name, tensor in loaded.items()}


def main(limit: str, out: str, *files: str) -> int:
    """Write the tensors of all files to ``out``; return the exit status."""
    resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    found: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            found |= tensors_in(torch.load(file, map_location="cpu", weights_only=True), file)
        save_file(found, out, {"format": "pt"})
    except Exception as error:
        text = str(error) or type(error).__name__
        print(" ".join(text.split("\n\n")[0].split())[:300], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
