"""Decoding behind long contexts: one token's forward by context and dtype of the cache.

A prompt of ``PREFILL`` tokens is read once, and its keys and values are copied to all positions, so
that a step reads as much memory as behind a real text of that length. Cells take turns; figures are
medians over rounds. "Attention" is a forward's time beyond that of the shortest context, "GB/s" the
cache it reads over that, beside what the machine reads.
"""

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

from outrider.cli.common import Out, numbers, write_json
from outrider.errors import ConfigError
from outrider.llm import LLM
from outrider.models.native import NativeTransformer
from outrider.models.native_store import NativeStore
from outrider.models.rows import Segment

from .common import POCKET, Model, Rounds, in_turns

PREFILL = 256
COLUMNS = ("cache", "context", "forward ms", "attention ms", "cache MiB", "GB/s", "machine GB/s")
READ_BYTES = 256 << 20


class Context:
    """A model with a cache that is full of one prompt's keys and values, again and again."""

    def __init__(self, model: str, dtype: str, length: int, page_size: int) -> None:
        llm = LLM(model, None, max_num_seqs=1, kv_cache_dtype=dtype)
        found = llm.engine.model
        if not isinstance(found, NativeTransformer):
            raise ConfigError(f"{model} runs without the native step, which this measures.")
        if length >= found.max_length:
            raise ConfigError(f"a context of {length} is longer than {model} knows; give less.")
        self.model, self.size = found, page_size
        pages = -(-(length + 1) // page_size)
        self.pages = range(1, 1 + pages)
        store = found.new_store(1 + pages, page_size)
        assert isinstance(store, NativeStore)
        self.store = store
        ids = [1 + i % 100 for i in range(PREFILL)]
        found.run([Segment(ids, 0, self.pages, 0, PREFILL, key="it")], store)
        done = PREFILL
        while done < length:
            count = min(done, length - done)
            store.move(self._slots(0, count), self._slots(done, count))
            done += count

    def _slots(self, first: int, count: int) -> list[int]:
        return [self.size + i for i in range(first, first + count)]

    def seconds(self, length: int) -> float:
        """Return what the forward of one token behind ``length`` others takes."""
        segment = Segment([7], length, self.pages, 1, length, key="it")
        begin = perf_counter()
        self.model.run([segment], self.store)
        return perf_counter() - begin


def measure(
    model: str, lengths: Sequence[int], dtypes: Sequence[str], rounds: int, page_size: int = 16
) -> list[dict[str, Any]]:
    """Return a figure for every dtype and length; the first length is the shortest."""
    lengths = sorted({PREFILL, *lengths})
    if lengths[0] < PREFILL:
        raise ConfigError(f"a context of {lengths[0]} is too short; give {PREFILL} or more.")
    contexts = {dtype: Context(model, dtype, lengths[-1], page_size) for dtype in dtypes}
    library = next(iter(contexts.values())).model.library
    memory = np.ones(READ_BYTES, np.uint8)

    def run(cell: tuple[str, int] | None, _: int) -> float:
        if cell is None:
            begin = perf_counter()
            library.read(memory)
            return perf_counter() - begin
        return contexts[cell[0]].seconds(cell[1])

    cells = [None, *((dtype, length) for length in lengths for dtype in dtypes)]
    took = {cell: median(all_) for cell, all_ in in_turns(cells, run, rounds).items()}
    machine = READ_BYTES / took[None] / 1e9
    found = []
    for cell, seconds in took.items():
        if cell is None:
            continue
        dtype, length = cell
        read = contexts[dtype].model.page_bytes(page_size) / page_size * length
        base = PREFILL * read / length
        attention = seconds - took[dtype, PREFILL]
        found.append({
            "kv_cache_dtype": dtype, "context": length, "forward_ms": round(1e3 * seconds, 2),
            "attention_ms": round(1e3 * attention, 2), "cache_mib": round(read / 2**20, 1),
            "gb_per_s": round((read - base) / attention / 1e9, 1) if attention > 0 else None,
            "machine_gb_per_s": round(machine, 1),
        })  # fmt: skip
    return found


def main(
    model: Model = POCKET,
    lengths: Annotated[str, typer.Option(help="Contexts, with commas.")] = "1024",
    kv_cache_dtype: Annotated[str, typer.Option(help="auto, int8 or both.")] = "auto,int8",
    rounds: Rounds = 7,
    out: Out = None,
) -> None:
    """Measure one token's forward behind long contexts."""
    found = measure(model, numbers(lengths, int, "--lengths"), kv_cache_dtype.split(","), rounds)
    write_json(found, out)
    if out != "-":
        for row in (COLUMNS, *(each.values() for each in found)):
            print(" ".join(f"{value!s:>12}" for value in row))
