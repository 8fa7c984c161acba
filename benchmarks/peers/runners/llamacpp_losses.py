"""Mean nats of windows of ids under a model that llama.cpp runs: FOLDER WINDOWS.json OUT.json.

It speaks to the library, in LLAMA_CPP_LIB_PATH, by the declarations of llama-cpp-python, whose
source lies in PEER_SOURCE.
"""

import importlib
import json
import os
import sys
import tarfile
import tempfile
import types
import typing
from pathlib import Path
from typing import Any

import numpy as np

FILES = ("llama_cpp.py", "_ctypes_extensions.py")


def declarations() -> Any:
    """Return llama-cpp-python's module of C functions alone: the package itself needs more."""
    with tempfile.TemporaryDirectory() as place, tarfile.open(os.environ["PEER_SOURCE"]) as source:
        for member in source.getmembers():
            parts = Path(member.name).parts
            if parts[1:] and parts[1] == "llama_cpp" and parts[-1] in FILES and len(parts) == 3:
                member.name = parts[-1]
                source.extract(member, place, filter="data")
        package = types.ModuleType("llama_cpp")
        package.__path__ = [place]
        sys.modules["llama_cpp"] = package
        sys.modules.setdefault("typing_extensions", typing)  # it wants names that Python has
        return importlib.import_module("llama_cpp.llama_cpp")


def losses(c: Any, context: Any, vocabulary: int, window: list[int]) -> float:
    """Return the mean nats of a window, read at once."""
    count = len(window) - 1
    c.llama_memory_clear(c.llama_get_memory(context), True)
    batch = c.llama_batch_init(count, 0, 1)
    for i, token in enumerate(window[:-1]):
        batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, i, 1, 1
        batch.seq_id[i][0] = 0
    batch.n_tokens = count
    if c.llama_decode(context, batch):
        raise SystemExit("llama_decode failed")
    logits = np.ctypeslib.as_array(c.llama_get_logits(context), (count, vocabulary)).astype(float)
    c.llama_batch_free(batch)
    top = logits.max(-1)
    sums = top + np.log(np.exp(logits - top[:, None]).sum(-1))
    return float((sums - logits[np.arange(count), window[1:]]).mean())


def main() -> None:
    """Write a number for each window."""
    folder, windows, out = map(Path, sys.argv[1:])
    read = json.loads(windows.read_text(encoding="utf-8"))
    c = declarations()
    c.llama_backend_init()
    file = str(folder / "model.gguf").encode()
    model = c.llama_model_load_from_file(file, c.llama_model_default_params())
    options = c.llama_context_default_params()
    options.n_ctx = options.n_batch = options.n_ubatch = max(map(len, read))
    options.n_threads = options.n_threads_batch = len(os.sched_getaffinity(0))
    context = c.llama_init_from_model(model, options)
    vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(model))
    found = [losses(c, context, vocabulary, window) for window in read]
    out.write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
