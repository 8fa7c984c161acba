"""``python -m outrider.engine.probe [MODEL [DRAFTER]]``: what torch and checkpoints say, as JSON.

``outrider ops doctor`` runs it as a process of its own: a torch that cannot be imported, or kernels
that this CPU does not run, must not end the doctor.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch

from ..checkpoints.checkpoint import open_checkpoint
from ..checkpoints.families import find_folder
from ..checkpoints.files import Files
from ..checkpoints.tokenizers import has_tokenizer, read_codec
from ..errors import OutriderError
from ..models.native import is_native
from ..native.choice import available, library
from ..native.threads import allowed_threads
from .footprint import footprint


def machine() -> dict[str, Any]:
    """Return torch's version, threads, the native step's instruction sets, and GPUs."""
    try:
        chosen = library()
        isa, trouble = (None if chosen is None else chosen.isa), ""
    except OutriderError as error:
        isa, trouble = None, str(error)
    return {
        "torch": torch.__version__,
        "threads": allowed_threads(),
        "isas": list(available()),
        "isa": isa,
        "isa_error": trouble,
        "cuda_build": torch.version.cuda,
        "cuda": [
            {
                "name": gpu.name,
                "capability": f"{gpu.major}.{gpu.minor}",
                "bf16": gpu.major >= 8,
                "memory": gpu.total_memory,
            }
            for gpu in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        ],
    }


def checkpoint(model: str, drafts: bool = False) -> dict[str, Any]:
    """Return a checkpoint's family, dtype, sizes and bytes; ``error`` where it cannot be used.

    ``bytes`` are those of its files; more are told by ``footprint``, of a drafter if it ``drafts``.
    """
    try:
        files = Files(find_folder(model))
        opened = open_checkpoint(files)
        native, shape = is_native(opened), opened.shape
        takes = footprint(opened, native, drafts)
        largest = None
        if has_tokenizer(files):
            largest = max(read_codec(files).backend.get_vocab().values())
    except OutriderError as error:
        return {"error": str(error)}
    return {
        "folder": str(opened.folder.absolute()),
        "family": shape.family,
        "native": native,
        "dtype": str(shape.dtype).removeprefix("torch."),
        "context": shape.context,
        "vocabulary": shape.vocab_size,
        "largest_id": largest,
        "bytes": opened.tensors.file_bytes,
        **takes._asdict(),
    }


def main() -> None:
    """Print what torch says, and the checkpoints that are named."""
    told = machine()
    for name, path in zip(("model", "drafter"), sys.argv[1:], strict=False):
        told[name] = checkpoint(path, drafts=name == "drafter")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
