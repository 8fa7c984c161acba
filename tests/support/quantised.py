"""Quantised safetensors made of tiny checkpoints, by the formats' definitions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider.checkpoints.dtypes import FLOAT32
from outrider.checkpoints.quantize import Quantized
from outrider.models.tensors import as_array, as_tensor

Array = NDArray[Any]
Tensors = dict[str, Array]


Writer = Callable[[str, Quantized], Tensors]


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def quantised(out: int, width: int, bits: int, group: int, zeros: bool, seed: int) -> Quantized:
    """A random matrix near the scale of one that works; scales are fp16's."""
    g = torch.Generator().manual_seed(seed)
    groups, top = -(-width // group), 1 << bits
    scales = (torch.rand(out, groups, generator=g) + 0.5) * 4 / (top * width**0.5)
    drawn = torch.randint(top, (out, groups), generator=g, dtype=torch.uint8)
    return Quantized(
        as_array(torch.randint(top, (out, width), generator=g, dtype=torch.uint8)),
        as_array(scales.half().float()),
        as_array(drawn) if zeros else None,
        bits,
        group,
    )


def middle(matrix: Quantized) -> Array:
    """The zeros [out, groups], written out."""
    if matrix.zeros is not None:
        return matrix.zeros.astype(np.int32)
    return np.full(matrix.scales.shape, 1 << (matrix.bits - 1), np.int32)


def pack(codes: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Non-negative codes [rows, n] into int32 words, as the formats' definitions say."""
    count = 32 // bits
    rows = []
    for row in codes.tolist():
        row += [0] * (-len(row) % count)
        words = []
        for start in range(0, len(row), count):
            word = 0
            for place, item in enumerate(order or range(count)):
                word |= row[start + item] << (place * bits)
            words.append(word - (1 << 32) if word >> 31 else word)
        rows.append(words)
    return np.array(rows, np.int32)


def projections(tensors: Tensors) -> list[str]:
    return [name for name in tensors if name.endswith("_proj.weight")]


def write(
    source: Path,
    folder: Path,
    options: dict[str, Any],
    writer: Writer,
    make: Callable[..., Quantized],
    but: str = "nothing",
) -> tuple[Path, Path, dict[str, Quantized]]:
    """``source`` with its projections quantised, the same dequantised, and the matrices."""
    config = json.loads((source / "config.json").read_text())
    tensors = {name: as_array(t) for name, t in load_file(source / "model.safetensors").items()}
    stored, plain, matrices = dict(tensors), dict(tensors), {}
    for seed, name in enumerate(projections(tensors)):
        if but in name:
            continue
        matrix = matrices[name] = make(*tensors[name].shape, seed)
        stored |= writer(stored and name, matrix)
        plain[name] = matrix.dequantized(FLOAT32)
        if name not in writer(name, matrix):
            del stored[name]
    for place, held, more in (("q", stored, {"quantization_config": options}), ("p", plain, {})):
        (folder / place).mkdir(parents=True)
        whole = {name: as_tensor(np.asarray(each, order="C")) for name, each in held.items()}
        save_file(whole, folder / place / "model.safetensors", metadata={"format": "pt"})
        (folder / place / "config.json").write_text(json.dumps({**config, **more}))
    return folder / "q", folder / "p", matrices


def gptq(less: int = 1, index: Callable[[int, int], Array] | None = None) -> Writer:
    def writer(name: str, m: Quantized) -> Tensors:
        base, ones = name.removesuffix("weight"), {4: 0x11111111, 8: 0x01010101}[m.bits]
        order = index or (lambda n, group: np.arange(n) // group)
        return {
            f"{base}qweight": pack(m.codes, m.bits).T,
            f"{base}qzeros": pack(middle(m).T, m.bits) - less * ones,
            f"{base}scales": m.scales.T.astype(np.float16),
            f"{base}g_idx": order(m.shape[1], m.group).astype(np.int32),
        }

    return writer


def awq(name: str, m: Quantized) -> Tensors:
    base = name.removesuffix("weight")
    return {
        f"{base}qweight": pack(m.codes.T, 4, AWQ_ORDER),
        f"{base}qzeros": pack(middle(m).T, 4, AWQ_ORDER),
        f"{base}scales": m.scales.T.astype(np.float16),
    }


def packed(name: str, m: Quantized) -> Tensors:
    found = {
        f"{name}_packed": pack(m.codes, m.bits),
        f"{name}_scale": m.scales.astype(np.float16),
        f"{name}_shape": np.array(m.shape),
    }
    if m.zeros is not None:
        found[f"{name}_zero_point"] = pack(m.zeros.T, m.bits).T
    return found


def integers(name: str, m: Quantized) -> Tensors:
    found = {name: (m.codes ^ 128).view(np.int8), f"{name}_scale": m.scales.astype(np.float16)}
    if m.zeros is not None:
        found[f"{name}_zero_point"] = (m.zeros ^ 128).view(np.int8)
    return found


def gptq_options(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, **more}


def compressed_options(form: str, bits: int, group: int, **more: Any) -> dict[str, Any]:
    strategy = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    weights = {"num_bits": bits, "type": "int", "symmetric": True, **strategy}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "config_groups": {"group_0": scheme},
        "ignore": ["lm_head"],
        **more,
    }


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}


CASES: dict[str, tuple[dict[str, Any], Writer, int, int, bool]] = {
    "gptq-4": (gptq_options(4, 16), gptq(), 4, 16, False),
    "gptq-4-zeros": (gptq_options(4, 16, sym=False), gptq(), 4, 16, True),
    "gptq-8": (gptq_options(8, 32), gptq(), 8, 32, False),
    "gptq-8-zeros": (gptq_options(8, 16, sym=False), gptq(), 8, 16, True),
    "gptq-v2": (gptq_options(4, 16, checkpoint_format="gptq_v2"), gptq(0), 4, 16, True),
    "gptq-channel": (gptq_options(4, -1), gptq(), 4, 0, False),
    "awq": (AWQ, awq, 4, 16, True),
    "awq-channel": ({**AWQ, "group_size": -1}, awq, 4, 0, True),
    "packed-4": (compressed_options("pack-quantized", 4, 16), packed, 4, 16, False),
    "packed-4-zeros": (compressed_options("pack-quantized", 4, 16), packed, 4, 16, True),
    "packed-4-short": (compressed_options("pack-quantized", 4, 24), packed, 4, 24, False),
    "packed-4-channel": (compressed_options("pack-quantized", 4, 0), packed, 4, 0, False),
    "packed-8": (compressed_options("pack-quantized", 8, 32), packed, 8, 32, False),
    "integers": (compressed_options("int-quantized", 8, 0), integers, 8, 0, False),
    "integers-zeros": (compressed_options("naive-quantized", 8, 16), integers, 8, 16, True),
}


def eighths(out: int, width: int, seed: int) -> Array:
    noise = torch.randn(out, width, generator=torch.Generator().manual_seed(seed))
    return as_array(noise.to(torch.float8_e4m3fn))


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}
