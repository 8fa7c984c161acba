"""Costs of layers with states, on random weights of the shapes of published hybrids.

Nothing is read from disk: matrices are random, in bf16 or in codes of 4 bits (a table's of 8), with
activations of 16 bits beside them or, with -a8, of 8. A step's time stands beside what the machine
needs to read the weights and to read and write the states; a draft's beside a plain step's; a
prompt's beside that of the same model whose layers with states have MLPs only. The speedup of `mtp`
follows from the times of its passes and of the target's rows, at an agreement of 0.8 per position.
Cells take turns; figures are medians over rounds.
"""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Annotated, Any

import ml_dtypes
import numpy as np
import typer

from outrider.checkpoints.architecture import Architecture
from outrider.checkpoints.checkpoint import Checkpoint
from outrider.checkpoints.configs import LINEAR, plain_config
from outrider.checkpoints.dtypes import BFLOAT16, Array
from outrider.checkpoints.families import read_shape
from outrider.checkpoints.files import Files, save_file
from outrider.checkpoints.mtp import USUAL, shapes_of
from outrider.checkpoints.quantize import Quantized
from outrider.cli.common import Out
from outrider.errors import ConfigError
from outrider.models.native import NativeTransformer
from outrider.models.native_mtp import NativeMtp
from outrider.models.rows import Segment
from outrider.native import choice as native

from .common import Rounds, in_turns, named, report

PAGE, READ_BYTES, GROUP = 16, 256 << 20, 128
AGREEMENT = 0.8
BEHIND = 32
"""Tokens that steps stand behind."""
_QWEN = {
    "model_type": "qwen3_5_text", "vocab_size": 248320, "tie_word_embeddings": True,
    "head_dim": 256, "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
    "linear_num_key_heads": 16, "rope_parameters": {"rope_theta": 1e7},
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3.5-0.8b": _QWEN | {
        "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24,
        "num_attention_heads": 8, "num_key_value_heads": 2, "linear_num_value_heads": 16,
    },
    "qwen3.5-4b": _QWEN | {
        "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32,
        "num_attention_heads": 16, "num_key_value_heads": 4, "linear_num_value_heads": 32,
    },
    "lfm2-1.2b": {
        "model_type": "lfm2", "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    },
    "granite-4.0-h-1b": {
        "model_type": "granitemoehybrid", "vocab_size": 100352, "hidden_size": 1536,
        "shared_intermediate_size": 4096, "num_hidden_layers": 40, "num_attention_heads": 12,
        "num_key_value_heads": 4, "num_local_experts": 0, "mamba_n_heads": 48, "mamba_d_head": 64,
        "mamba_d_state": 128, "tie_word_embeddings": True, "layer_types": [
            "full_attention" if i in (5, 15, 25, 35) else LINEAR for i in range(40)
        ],
    },
}  # fmt: skip
DTYPES = ("bf16", "int4", "int4-a8")


class RandomTensors:
    """Weights that are drawn when they are asked for; ``Tensors`` of no file."""

    note = None

    def __init__(self, codes: bool) -> None:
        self.folder, self._codes, self._rng = Path("random"), codes, np.random.default_rng(0)

    def __contains__(self, name: str) -> bool:
        """Return whether experts are one tensor: each is asked for."""
        return False

    def is_float8(self, name: str) -> bool:
        """Return whether a tensor is stored as 8-bit floats: none is."""
        return False

    def get(self, name: str, shape: tuple[int, ...], dtype: np.dtype[Any] | None = None) -> Array:
        """Return a norm near 1, or another small tensor near 0."""
        drawn = self._rng.standard_normal(shape, np.float32) * 0.1
        return (drawn + (1 if name.endswith("norm.weight") else 0)).astype(dtype or np.float32)

    def matrix(
        self, name: str, shape: tuple[int, int], dtype: np.dtype[Any] | None
    ) -> Array | Quantized:
        """Return a matrix of normal numbers, or of codes as a recipe has them."""
        spread = shape[1] ** -0.5
        if not self._codes:
            part = self._rng.standard_normal((min(shape[0], 4096), shape[1]), np.float32) * spread
            rows = np.resize(part.astype(ml_dtypes.bfloat16), shape)  # drawing all takes long
            return rows.astype(dtype or BFLOAT16)
        bits, group = (8, shape[1]) if "embed" in name else (4, GROUP)
        codes = self._rng.integers(1, 1 << bits, shape, np.uint8)  # around 0
        scales = np.full((shape[0], -(-shape[1] // group)), spread / (1 << bits - 2), np.float32)
        return Quantized(codes, scales, None, bits, group)

    def kept(self, name: str) -> str | None:
        """Return what codes a matrix has."""
        return "int4" if self._codes else None


def architecture_of(options: dict[str, Any]) -> tuple[Any, Architecture]:
    """Return config and architecture of a shape."""
    config = plain_config(options | {"dtype": "bfloat16"}, "shape")
    assert config is not None
    shape = read_shape(config, Path("shape"))
    assert isinstance(shape, Architecture)
    return config, shape


def build(options: dict[str, Any], dtype: str, states: bool = True) -> NativeTransformer:
    """Return a model of random weights; without ``states`` those layers have MLPs only."""
    config, shape = architecture_of(options)
    if not states:
        mixers = tuple("attention" if m == "attention" else "none" for m in shape.mixers)
        shape = replace(shape, mixers=mixers, linear=None)  # type: ignore[arg-type]
    library = native.library()
    if library is None:
        raise ConfigError("this measures the native step, which is off.")
    tensors = RandomTensors(dtype != "bf16")
    made = Checkpoint(Path("shape"), config, shape, tensors)  # type: ignore[arg-type]
    return NativeTransformer(library, made, BFLOAT16, 4096, coarse=dtype.endswith("-a8"))


class Steps:
    """Times forwards of one sequence behind ``BEHIND`` tokens."""

    def __init__(self, model: NativeTransformer) -> None:
        self.model, self.vocabulary = model, model.shape.vocab_size

    def _segment(self, ids: Sequence[int], start: int, logits: int = 1, **more: Any) -> Segment:
        return Segment(ids, start, range(1, 1 + 64), logits, 512, key="it", **more)

    def step(self, drafted: int) -> float:
        """Return the seconds of a step of one committed row and ``drafted`` ones, all accepted."""
        store = self.model.new_store(66, PAGE)
        self.model.run([self._segment([1 + i for i in range(BEHIND)], 0)], store)
        seconds = []
        for i in range(3):  # the first takes no draft in
            start = BEHIND + i * (1 + drafted)
            nodes = [7 + n for n in range(drafted)]
            segment = self._segment(
                [5], start, logits=1 + drafted, nodes=nodes, parents=range(-1, drafted - 1)
            )
            begin = perf_counter()
            self.model.run([segment], store)
            seconds.append(perf_counter() - begin)
        return min(seconds[1:])

    def prompt(self, length: int) -> float:
        """Return the seconds of a prompt."""
        store = self.model.new_store(66, PAGE)
        segment = self._segment([1 + i % 999 for i in range(length)], 0)
        begin = perf_counter()
        self.model.run([segment], store)
        return perf_counter() - begin


def products(shape: Architecture) -> int:
    """Return the elements of the matrices that multiply each row of a prompt."""
    a, heads = shape, (2 * shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    heads += a.num_heads * a.head_dim if a.layout.gated else 0
    each = {"attention": heads * a.hidden_size, "none": 0, "conv": 4 * a.hidden_size**2}
    if a.linear is not None:
        linear = a.linear
        rates = (1 if linear.mamba else 2) * linear.value_heads
        each["linear"] = (linear.conv_width + 2 * linear.values + rates) * a.hidden_size
    mlps = sum(a.mlps) * 3 * a.hidden_size * a.intermediate_size
    return mlps + sum(each[mixer] for mixer in a.mixers)


def mtp_of(target: NativeTransformer, folder: Path) -> NativeMtp:
    """Return an MTP layer of random weights for a target; its files are written to ``folder``."""
    rng = np.random.default_rng(1)
    tensors = {
        f"{USUAL.begins}{module.removeprefix('model.')}.weight": (
            rng.standard_normal(shape, np.float32) * 0.03
        ).astype(BFLOAT16)
        for module, shape in shapes_of(target.shape, 1).items()
    }
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3_5_text"}))
    return NativeMtp(Files(folder), target, 4096, "auto")


def pass_seconds(model: NativeMtp, likely: int) -> float:
    """Return the seconds of one pass of an MTP layer, with the head's rows of ``likely`` ids."""
    store = model.new_store(66, PAGE)
    states = np.ones((1, model.hidden_size), np.float32)
    row = Segment([7], 1, range(1, 65), 1, 512, first=1, states=states)
    begin = perf_counter()
    model.forward([row], store, None, (model.hidden_layers,), vocabulary=likely)
    return perf_counter() - begin


def speedup(times: dict[int, float], one_pass: float) -> tuple[int, float]:
    """Return the best draft length, and how many plain steps' time it saves: tokens a step."""
    found = {}
    for drafted, seconds in times.items():
        tokens = (1 - AGREEMENT ** (drafted + 1)) / (1 - AGREEMENT)
        found[drafted] = tokens * times[0] / (seconds + drafted * one_pass)
    best = max(found, key=found.__getitem__)
    return best, found[best]


def measure(name: str, dtype: str, rounds: int, length: int) -> dict[str, Any]:
    """Return the figures of a shape in one dtype."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is not known; give some of {', '.join(DTYPES)}.")
    model, bare = (build(SHAPES[name], dtype, states) for states in (True, False))
    whole, without = Steps(model), Steps(bare)
    memory = np.ones(READ_BYTES, np.uint8)
    shape, drafted = model.shape, (0, 1, 2, 3, 4)
    with tempfile.TemporaryDirectory() as folder:
        mtp = mtp_of(model, Path(folder)) if shape.family == "qwen3_5_text" else None
    likely = 32768
    if mtp is not None:
        mtp.library.set_likely(mtp.handle, likely, range(likely), range(likely))

    def run(cell: object, _: int) -> float:
        if cell == "read":
            begin = perf_counter()
            model.library.read(memory)
            return perf_counter() - begin
        if cell == "mtp":
            assert mtp is not None
            return pass_seconds(mtp, likely)
        if cell in ("prompt", "bare prompt"):
            return (whole if cell == "prompt" else without).prompt(length)
        assert isinstance(cell, int)
        return whole.step(cell)

    cells: list[object] = ["read", "prompt", "bare prompt", *drafted, *(["mtp"] if mtp else [])]
    took = {cell: median(each) for cell, each in in_turns(cells, run, rounds).items()}
    machine = READ_BYTES / took["read"]
    weights = model.added_bytes(None)
    states = 4 * shape.state_size(0)
    times = {each: took[each] for each in drafted}
    rates = [products(m.shape) / took[c] for m, c in ((model, "prompt"), (bare, "bare prompt"))]
    found = {
        "shape": name, "dtype": dtype, "weights_mib": round(weights / 2**20),
        "states_mib": round(states / 2**20, 1), "machine_gb_per_s": round(machine / 1e9, 1),
        "plain_ms": round(1e3 * times[0], 2),
        "of_bandwidth": round((weights + 2 * states) / machine / times[0], 3),
        "draft_of_4": round(times[4] / times[0], 3),
        "prompt_tokens_per_s": round(length / took["prompt"]),
        "prompt_of_bare": round(rates[0] / rates[1], 3),
    }  # fmt: skip
    if mtp is not None:
        best, gain = speedup(times, took["mtp"])
        found |= {"mtp_pass_ms": round(1e3 * took["mtp"], 2), "mtp_k": best}
        found["mtp_speedup"] = round(gain, 2)
    return found


def main(
    shapes: Annotated[str, typer.Option(help="Shapes, with commas.")] = ",".join(SHAPES),
    dtypes: Annotated[str, typer.Option(help="Some of bf16, int4 and int4-a8.")] = ",".join(DTYPES),
    prompt: Annotated[int, typer.Option(min=1, max=1000, help="Tokens of a prompt.")] = 512,
    rounds: Rounds = 5,
    out: Out = None,
) -> None:
    """Measure the costs of layers with states."""
    found = [
        measure(name, dtype, rounds, prompt)
        for name in named(shapes, SHAPES)
        for dtype in dtypes.split(",")
    ]
    report(found, out)
