"""``python -m outrider.engine.probe [MODEL [DRAFTER]]``: facts on torch and checkpoints, as JSON.

``outrider ops doctor`` runs it as a process of its own: a torch that cannot be imported, or kernels
that this CPU cannot run, must not end the doctor.
"""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from typing import Any

from ..base.config import EngineConfig
from ..base.threads import allowed_threads
from ..checkpoints.architecture import Architecture, Mixture
from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.dtypes import choose_dtype, native_dtype
from ..checkpoints.files import Files
from ..checkpoints.folders import find_folder
from ..checkpoints.mtp import has_mtp, lacking, num_layers, promised, why_none
from ..checkpoints.tokenizers import has_tokenizer, read_codec
from ..errors import OutriderError
from ..models.native import is_native
from ..native.choice import available, library
from .memory import seat_bytes, usual_pages, working_bytes

LANES = 16
"""The native step's cache pads slots of a block and elements of a head to a multiple of this."""


def footprint(checkpoint: Checkpoint, native: bool, drafts: bool) -> dict[str, int]:
    """Return the bytes that a loaded checkpoint takes with the default options of a server.

    ``weights`` are bytes in memory (a drafter's have 8 bits in the native step), ``working`` those
    of a step, ``page`` those of each of the cache's ``usual`` pages, ``states`` those of a
    sequence. The last three are 0 if transformers runs the model: its cache grows as needed.
    """
    config, shape, architecture = EngineConfig(), checkpoint.shape, checkpoint.architecture
    step = library() if native else None
    if step is None:
        size = choose_dtype("auto", shape.dtype).itemsize
    else:
        size = native_dtype("auto", shape.dtype, step.isa).itemsize
    few = drafts and step is not None and not checkpoint.quantised
    held = checkpoint.tensors.held(1 if few else size, step is not None)
    if architecture is not None and architecture.tied:
        held.pop("lm_head.weight", None)  # a stored head is not loaded
    weights = sum(held.values())
    hidden = page = usual = states = 0
    if architecture is not None:
        if step is None:  # torch dequantises all weights
            weights = max(weights, size * num_weights(architecture))
        hidden, heads = architecture.hidden_size, architecture.num_kv_heads
        pads = LANES if step is not None else 1
        slots, width = (-(-n // pads) * pads for n in (config.page_size, architecture.head_dim))
        page = 2 * len(architecture.attending) * heads * slots * width * size
        states = 4 * architecture.state_size(config.max_draft_length)
        usual = usual_pages(config, config.model_length(shape.context), ())
    seats = seat_bytes(shape) if step is not None else 0
    working = working_bytes(config, shape.vocab_size, hidden, (), per_row=seats)
    return {
        "weights": weights, "working": working, "page": page, "usual": usual, "states": states,
    }  # fmt: skip


def num_weights(architecture: Architecture) -> int:
    """Return the elements of a model's matrices."""
    a = architecture
    heads = a.hidden_size * a.head_dim * 2 * (a.num_heads + a.num_kv_heads)
    dense = 3 * a.hidden_size * a.intermediate_size
    mixture = a.mixture or Mixture(0, 0, 0)
    experts = mixture.experts * (3 * mixture.width + 1) + 3 * mixture.shared
    experts *= a.hidden_size
    layers = sum(heads + (experts if sparse else dense) for sparse in a.sparse)
    return layers + a.vocab_size * a.hidden_size * (1 if a.tied else 2)


def machine() -> dict[str, Any]:
    """Return threads, the native step's instruction sets, and torch's version and GPUs."""
    try:
        chosen = library()
        isa, trouble = (None if chosen is None else chosen.isa), ""
    except OutriderError as error:
        isa, trouble = None, str(error)
    return {
        **torch_and_gpus(),
        "threads": allowed_threads(),
        "isas": list(available()),
        "isa": isa,
        "isa_error": trouble,
    }


def torch_and_gpus() -> dict[str, Any]:
    """Return torch's version and the GPUs that it can use; None and no GPU if it is missing."""
    if find_spec("torch") is None:
        return {"torch": None, "cuda_build": None, "cuda": []}
    import torch  # a broken one must be reported

    return {
        "torch": torch.__version__,
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

    ``bytes`` are those of its files. ``footprint`` adds others, of a drafter if it ``drafts``.
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
        "dtype": str(shape.dtype),
        "context": shape.context,
        "vocabulary": shape.vocab_size,
        "largest_id": largest,
        "bytes": opened.tensors.file_bytes,
        "mtp": num_layers(files) if has_mtp(files) else 0,
        "no_mtp": _lost(files, opened.architecture),
        **takes,
    }


def _lost(files: Files, target: Architecture | None) -> str | None:
    """Return what a checkpoint lacks of the MTP layers that it promises; None if nothing."""
    if not has_mtp(files):
        return why_none(files) if promised(files) else None
    wrong = {} if target is None else lacking(files, target)
    return f"tensor {next(iter(wrong))} is {next(iter(wrong.values()))}" if wrong else None


def main() -> None:
    """Print the facts on this machine and on the named checkpoints."""
    told = machine()
    for name, path in zip(("model", "drafter"), sys.argv[1:], strict=False):
        told[name] = checkpoint(path, drafts=name == "drafter")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
