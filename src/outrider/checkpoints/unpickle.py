"""Writes pickled tensors as safetensors: a program of its own, with a limit on its memory.

    python unpickle.py BYTES OUT FILE...

Pickles can run code, so torch reads only tensors (``weights_only``), in a process that nothing
depends on. It imports nothing of Outrider. A refusal goes to stderr, with status 1.
"""

import pickle
import re
import resource
import sys
from typing import Any

import torch
from safetensors.torch import save_file

NESTED = ("state_dict", "model", "module")
"""Names under which training code puts the tensors."""


class Refused(Exception):
    """The file is refused; the message may be shown to users."""


def read(file: str) -> Any:
    """Return the content of a file, tensors and plain containers, or raise ``Refused``.

    torch's own message advises to load it without checks, so it is not shown.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError as error:
        raise Refused(f"{file} cannot be read: {error.strerror or 'it is damaged'}") from None
    except MemoryError:
        raise Refused(f"{file} needs more memory than its size allows") from None
    except Exception as error:
        other = re.search(r"GLOBAL ([\w.]{1,80})", str(error))
        if isinstance(error, pickle.UnpicklingError) and other:
            raise Refused(f"{file} holds more than tensors: {other[1]}") from None
        raise Refused(f"{file} is damaged, or holds more than tensors; fetch it again") from None


def tensors_in(loaded: Any, file: str) -> dict[str, torch.Tensor]:
    """Return the tensors of an unpickled object by name; refuse anything but a table of tensors."""
    for name in NESTED:
        if isinstance(loaded, dict) and isinstance(loaded.get(name), dict):
            loaded = loaded[name]
    if not isinstance(loaded, dict) or not loaded:
        raise Refused(f"{file} holds no table of tensors")
    for name, tensor in loaded.items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise Refused(f"{file} holds more than tensors by name ({name!r})")
    return {name: tensor.detach().contiguous().clone() for name, tensor in loaded.items()}


def main(limit: str, out: str, *files: str) -> int:
    """Write the tensors of all files to ``out``; return the exit status."""
    resource.setrlimit(resource.RLIMIT_AS, (int(limit), int(limit)))
    tensors: dict[str, torch.Tensor] = {}
    try:
        for file in files:
            tensors |= tensors_in(read(file), file)
        save_file(tensors, out, {"format": "pt"})
    except Exception as error:
        what = error if isinstance(error, Refused) else f"writing failed: {error!r}"
        print(" ".join(str(what).split())[:300], file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
