"""Costs of mixtures of experts, on random weights of the shapes of published models.

Nothing is read from disk: codes of 4 bits are random, and tokens go to experts as if they were
strangers to each other. A step's time stands beside what the machine needs to read its weights:
those that every row meets, and each expert that a row goes to, once. With ``--layers`` a shape has
fewer of them. Cells take turns; figures are medians over rounds.
"""

from collections.abc import Sequence
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import numpy as np
import typer

from outrider.checkpoints.architecture import Mixture
from outrider.cli.common import Out
from outrider.models.native import NativeTransformer
from outrider.models.native_store import NativeStore
from outrider.models.rows import Segment

from .common import Rounds, in_turns, named, report
from .hybrids import BEHIND, PAGE, READ_BYTES, build

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048,
        "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": True, "max_position_embeddings": 32768,
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss", "num_hidden_layers": 24, "num_local_experts": 32,
        "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
    },
    "olmoe-1b-7b": {"model_type": "olmoe", "intermediate_size": 1024},
}  # fmt: skip
"""Of Qwen3-30B-A3B half of the layers: all experts of these in 4 bits take 8 GB."""
BATCHES = (8, 32)
DRAFTS = (1, 2, 3, 4)
EACH = 512 // PAGE
"""Pages of a sequence."""


class Steps:
    """Times forwards of a mixture and counts the experts that they read."""

    def __init__(self, model: NativeTransformer) -> None:
        self.model = model
        self.read: dict[object, float] = {}

    def _run(self, cell: object, segments: Sequence[Segment], store: NativeStore) -> float:
        before, begin = store.experts, perf_counter()
        self.model.run(segments, store)
        seconds = perf_counter() - begin
        self.read[cell] = store.experts - before
        return seconds

    def _token(self, number: int) -> int:
        return 1 + number * 7919 % (self.model.shape.vocab_size - 1)

    def step(self, drafted: int, round_: int) -> float:
        """Return the seconds of a step of one row and ``drafted`` more."""
        store = self.model.new_store(1 + EACH, PAGE)
        pages, tokens = range(1, 1 + EACH), [self._token(i) for i in range(BEHIND)]
        self.model.run([Segment(tokens, 0, pages, 1, 512)], store)
        own = [self._token(100 + round_ * 8 + i) for i in range(1 + drafted)]
        segment = Segment(
            own[:1], BEHIND, pages, 1 + drafted, 512, nodes=own[1:], parents=range(-1, drafted - 1)
        )
        return self._run(drafted, [segment], store)

    def batch(self, size: int, round_: int) -> float:
        """Return the seconds of a step of so many sequences."""
        store = self.model.new_store(1 + size, PAGE)
        segments = [
            Segment([self._token(round_ * size + i)], 0, range(1 + i, 2 + i), 1, 16)
            for i in range(size)
        ]
        return self._run(f"batch {size}", segments, store)

    def prompt(self, length: int) -> float:
        """Return the seconds of a prompt."""
        store = self.model.new_store(2 + length // PAGE, PAGE)
        tokens = [self._token(i) for i in range(length)]
        pages = range(1, 2 + length // PAGE)
        return self._run("prompt", [Segment(tokens, 0, pages, 1, length)], store)


def of_one(model: NativeTransformer) -> tuple[float, float]:
    """Return the bytes that every step reads, and those of one expert."""
    shape, mixture = model.shape, model.shape.mixture
    assert isinstance(mixture, Mixture)
    weights = model.added_bytes(None)
    elements = 3 * mixture.width * shape.hidden_size
    experts = shape.sparse.count(True) * mixture.experts
    # All matrices but the embedding have codes of 4 bits: a share of the bytes by elements, with
    # the embedding and the head (8 bits), which are known.
    ends = shape.vocab_size * shape.hidden_size * (1 if shape.tied else 2)
    heads = (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim * shape.hidden_size
    others = heads * len(shape.attending)
    per_element = (weights - ends) / (experts * elements + others)
    expert = per_element * elements
    always = weights - experts * expert - (0 if shape.tied else ends / 2)
    return always, expert


def measure(name: str, dtype: str, layers: int | None, rounds: int, length: int) -> dict[str, Any]:
    """Return the figures of a shape."""
    options = SHAPES[name] | ({} if layers is None else {"num_hidden_layers": layers})
    model = build(options, dtype)
    steps, memory = Steps(model), np.ones(READ_BYTES, np.uint8)
    turn = dict.fromkeys((0, *DRAFTS, *BATCHES), 0)

    def run(cell: Any, _: int) -> float:
        if cell == "read":
            begin = perf_counter()
            model.library.read(memory)
            return perf_counter() - begin
        if cell == "prompt":
            return steps.prompt(length)
        turn[cell] += 1
        return (steps.batch if cell in BATCHES else steps.step)(cell, turn[cell])

    cells = ["read", "prompt", 0, *DRAFTS, *BATCHES]
    took = {cell: median(each) for cell, each in in_turns(cells, run, rounds).items()}
    machine = READ_BYTES / took["read"]
    always, expert = of_one(model)
    sparse = model.shape.sparse.count(True)
    needed = always + steps.read[0] * expert
    found = {
        "shape": name, "layers": model.shape.num_layers, "dtype": dtype,
        "weights_mib": round(model.added_bytes(None) / 2**20),
        "machine_gb_per_s": round(machine / 1e9, 1), "plain_ms": round(1e3 * took[0], 2),
        "read_mib": round(needed / 2**20),
        "of_bandwidth": round(needed / machine / took[0], 3),
    }  # fmt: skip
    for drafted in DRAFTS:
        found[f"rows_{1 + drafted}"] = round(took[drafted] / took[0], 3)
        found[f"experts_{1 + drafted}"] = round(steps.read[drafted] / sparse, 1)
    for size in BATCHES:
        found[f"batch_{size}_tokens_per_s"] = round(size / took[size], 1)
        found[f"batch_{size}_experts"] = round(steps.read[f"batch {size}"] / sparse, 1)
    return found | {"prompt_tokens_per_s": round(length / took["prompt"], 1)}


def main(
    shapes: Annotated[str, typer.Option(help="Shapes, with commas.")] = ",".join(SHAPES),
    dtype: Annotated[str, typer.Option(help="int4, int4-a8 or bf16.")] = "int4-a8",
    layers: Annotated[int | None, typer.Option(min=1, help="Layers; those of the shape.")] = None,
    prompt: Annotated[int, typer.Option(min=1, max=4096, help="Tokens of a prompt.")] = 512,
    rounds: Rounds = 5,
    out: Out = None,
) -> None:
    """Measure the costs of mixtures of experts."""
    found = [measure(name, dtype, layers, rounds, prompt) for name in named(shapes, SHAPES)]
    report(found, out)
