"""Quantised safetensors: exact codes, the logits of their dequantised weights, clear refusals."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.base.config import Recipe
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.dtypes import FLOAT32
from outrider.checkpoints.export import export
from outrider.checkpoints.formats.shared import Tensors as StoredTensors
from outrider.checkpoints.quantize import Matrix, Quantized
from outrider.checkpoints.weights import Loader
from outrider.errors import ModelError
from outrider.models.load import load_model
from outrider.models.rows import Segment
from outrider.models.tensors import as_tensor
from tests.support.loading import torch_model
from tests.support.quantised import (
    AWQ,
    CASES,
    FP8,
    compressed_options,
    eighths,
    gptq,
    gptq_options,
    integers,
    middle,
    packed,
    projections,
    quantised,
    write,
)

MakeCheckpoint = Callable[..., Path]
PROMPT = [(5 * i) % 120 + 3 for i in range(20)]
SIZES = {"hidden_size": 32, "intermediate_size": 64}
Q = "model.layers.0.self_attn.q_proj.weight"


def checkpoint(folder: Path) -> StoredTensors:
    tensors = open_checkpoint(folder).tensors
    assert isinstance(tensors, StoredTensors)
    return tensors


def logits(folder: Path) -> NDArray[np.float32]:
    # Torch runs dequantised weights, as plain ones are run; the native step has its own kernels.
    model = torch_model(folder, "float32", "cpu", 64)
    out = model.run([Segment(PROMPT, 0, [1, 2], len(PROMPT), len(PROMPT))], model.new_store(3, 16))
    assert out.logits is not None
    return out.logits


def read(folder: Path, name: str, shape: tuple[int, int]) -> Matrix:
    return checkpoint(folder).matrix(name, shape, FLOAT32)


def same(found: Matrix, expected: Quantized) -> None:
    """Codes, scales and zeros to the bit."""
    assert isinstance(found, Quantized)
    assert (found.bits, found.group) == (expected.bits, expected.group)
    assert found.codes.dtype == np.uint8
    assert found.scales.dtype == np.float32
    assert np.array_equal(found.codes, expected.codes)
    assert np.array_equal(found.scales, expected.scales)
    if expected.zeros is None:
        assert found.zeros is None
    else:
        assert found.zeros is not None
        assert np.array_equal(found.zeros, expected.zeros)


@pytest.fixture(scope="module")
def llama(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("formats"), "llama", **SIZES)


@pytest.mark.parametrize("case", CASES)
def test_a_format_is_read_exactly(case: str, llama: Path, tmp_path: Path) -> None:
    options, writer, bits, group, zeros = CASES[case]
    folder, plain, matrices = write(
        llama,
        tmp_path,
        options,
        writer,
        lambda out, width, seed: quantised(out, width, bits, group or width, zeros, seed),
    )
    assert len(matrices) == 14
    for name, matrix in matrices.items():
        same(read(folder, name, matrix.shape), matrix)
    head = read(folder, "lm_head.weight", (128, 32))
    assert isinstance(head, np.ndarray)
    assert np.array_equal(logits(folder), logits(plain))


@pytest.mark.parametrize("case", ["gptq-4", "packed-4-zeros"])
def test_what_is_not_quantised_is_read_as_it_is(case: str, llama: Path, tmp_path: Path) -> None:
    """A stack of both kinds, too."""
    options, writer, bits, group, zeros = CASES[case]
    folder, plain, matrices = write(
        llama,
        tmp_path,
        {**options, "modules_to_not_convert": ["k_proj"]},
        writer,
        lambda out, width, seed: quantised(out, width, bits, group, zeros, seed),
        but="k_proj",
    )
    assert len(matrices) == 12
    assert np.array_equal(logits(folder), logits(plain))


def test_the_order_of_activations_is_dequantised(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def shuffled(inputs: int, group: int) -> NDArray[np.int64]:
        return (np.arange(inputs) // group)[np.random.default_rng(inputs).permutation(inputs)]

    folder, _, matrices = write(
        llama,
        tmp_path,
        gptq_options(4, 16, desc_act=True, sym=False),
        gptq(index=shuffled),
        lambda out, width, seed: quantised(out, width, 4, 16, True, seed),
    )
    with caplog.at_level(logging.WARNING, "outrider"):
        for name, m in matrices.items():
            index = shuffled(m.shape[1], 16)
            zeros = middle(m)[:, index]
            expected = (m.codes - zeros).astype(np.float32) * m.scales[:, index]
            found = read(folder, name, m.shape)
            assert isinstance(found, np.ndarray)
            assert np.array_equal(found, expected)
    said = [r.message for r in caplog.records if "order of activations" in r.message]
    assert len(said) == 1


def test_a_scheme_that_names_a_matrix_gives_its_groups(llama: Path, tmp_path: Path) -> None:
    """Where the number of groups alone would do for two sizes; zeros of one part are the middle."""
    options = compressed_options("pack-quantized", 4, 24)
    named = compressed_options("pack-quantized", 4, 16)["config_groups"]["group_0"]
    options["config_groups"]["group_1"] = {**named, "targets": ["re:.*self_attn.*"]}
    folder, plain, matrices = write(
        llama,
        tmp_path,
        options,
        packed,
        lambda out, width, seed: quantised(
            out, width, 4, 16 if width == 32 and out < 64 else 24, seed % 2 > 0, seed
        ),
    )
    attention = {name: m for name, m in matrices.items() if "self_attn" in name}
    for name, matrix in attention.items():
        same(read(folder, name, matrix.shape), matrix)
    assert {m.zeros is None for m in attention.values()} == {True, False}
    architecture = open_checkpoint(folder).architecture
    assert architecture is not None
    loader = Loader(checkpoint(folder), architecture, FLOAT32)
    stack_of_three = loader._stacked("model.layers.0.self_attn.", {"q": 32, "k": 16, "v": 16}, 32)
    assert isinstance(stack_of_three, Quantized)
    assert np.array_equal(logits(folder), logits(plain))


FLOATS: dict[str, tuple[dict[str, Any], str, tuple[int, int]]] = {
    "blocks": ({**FP8, "weight_block_size": [16, 8]}, "_scale_inv", (16, 8)),
    "default-blocks": (FP8, "_scale_inv", (128, 128)),
    "matrix": (FP8, "_scale", (0, 0)),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, "_scale", (1, 0)),
    "compressed": (compressed_options("float-quantized", 8, 0), "_scale", (1, 0)),
    "compressed-groups": (compressed_options("float-quantized", 8, 16), "_scale", (1, 16)),
}


@pytest.mark.parametrize("case", FLOATS)
def test_fp8_is_dequantised(case: str, llama: Path, tmp_path: Path) -> None:
    options, suffix, (rows, columns) = FLOATS[case]
    config = json.loads((llama / "config.json").read_text())
    stored = load_file(llama / "model.safetensors")
    plain = dict(stored)
    for seed, name in enumerate(projections(plain)):
        out, width = plain[name].shape
        high, wide = rows or out, columns or width
        grid = torch.rand(-(-out // high), -(-width // wide)) * 0.2 + 0.1
        stored[name] = as_tensor(eighths(out, width, seed))
        stored[name + suffix] = grid if rows else grid[0, 0]
        each = grid.repeat_interleave(high, 0)[:out].repeat_interleave(wide, 1)[:, :width]
        plain[name] = stored[name].float() * each
    for place, held, more in (("q", stored, {"quantization_config": options}), ("p", plain, {})):
        (tmp_path / place).mkdir()
        held = {name: tensor.contiguous() for name, tensor in held.items()}
        save_file(held, tmp_path / place / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / place / "config.json").write_text(json.dumps({**config, **more}))
    assert np.array_equal(logits(tmp_path / "q"), logits(tmp_path / "p"))
    few = [
        LLM(tmp_path / place, None, quantization="int4-g32", memory=2**24) for place in ("q", "p")
    ]
    export(tmp_path / "q", tmp_path / "few", Recipe.parse("int4-g32"))
    few.append(LLM(tmp_path / "few", None, memory=2**24))
    params = SamplingParams(max_tokens=8, seed=1, logprobs=1)
    assert len({str(llm.generate([[5, 9, 5]], params)[0].outputs) for llm in few}) == 1


def test_other_activations_are_said_once(
    llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = compressed_options("int-quantized", 8, 0)
    options["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "dynamic": True}
    folder, _, _ = write(
        llama,
        tmp_path,
        options,
        integers,
        lambda out, width, seed: quantised(out, width, 8, width, False, seed),
    )
    with caplog.at_level(logging.WARNING, "outrider"):
        logits(folder)
        logits(folder)
    said = [r.message for r in caplog.records if "only its weights are" in r.message]
    assert len(said) == 1


def test_layers_beyond_the_configs_are_ignored_and_said(
    make_checkpoint: MakeCheckpoint, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = make_checkpoint(tmp_path / "m", "llama", num_hidden_layers=4)
    options = json.loads((folder / "config.json").read_text())
    for layers, further, said in (
        (2, 0, "'model.layers.2."),
        (2, 1, "'model.layers.3."),
        (2, 2, ""),
    ):
        changed = options | {"num_hidden_layers": layers, "num_nextn_predict_layers": further}
        (folder / "config.json").write_text(json.dumps(changed))
        caplog.clear()
        logits(folder)
        found = [r.message for r in caplog.records if "layers beyond are ignored" in r.message]
        assert [said in message for message in found] == [True] * bool(said)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"quant_method": "aqlm"}, "quantised by 'aqlm' .* are not read, only by gptq, awq"),
        ({"bits": 4}, "quantised by 'an unnamed method'"),
        (gptq_options(3, 16), "GPTQ weights of 3 bits are not read"),
        (gptq_options(4, 16, checkpoint_format="marlin"), "laid out as 'marlin' are not read"),
        ({**AWQ, "version": "GEMV"}, "laid out as 'gemv' are not read"),
        ({**AWQ, "bits": 8}, "AWQ weights of 8 bits"),
        (compressed_options("nvfp4-pack-quantized", 4, 16), "'nvfp4-pack-quantized' are not"),
        (compressed_options("marlin-24", 4, 16), "'marlin-24' are not read"),
        (
            compressed_options("pack-quantized", 4, 16, sparsity_config={"format": "sparse-24"}),
            "'sparse-24' are not read",
        ),
        (
            compressed_options(
                "pack-quantized", 4, 16, transform_config={"config_groups": {"u": {}}}
            ),
            "'transforms' are not read",
        ),
        ({"quant_method": "compressed-tensors", "config_groups": {"a": 3}}, "a is 3; an object is"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {
                    "a": {"targets": ["re:("], "weights": {"group_size": 32}},
                    "b": {"targets": ["x"], "weights": {"group_size": 64}},
                },
            },
            r"targets has 're:\('; a regular expression without look-around",
        ),
        ({**FP8, "weight_block_size": [128]}, r"weight_block_size is \[128\]; a list of two whole"),
        ({**FP8, "weight_block_size": [0, 0]}, r"is \[0, 0\]; a list of two whole numbers from 1"),
        (
            {**FP8, "weight_block_size": "wide"},
            "weight_block_size is 'wide'; a list of whole numbers",
        ),
        (
            gptq_options(4, 16) | {"group_size": "abc"},
            "group_size is 'abc'; a whole number from -1",
        ),
        ({**AWQ, "group_size": [1]}, r"group_size is \[1\]; a whole number from -1"),
        (compressed_options("pack-quantized", 4, 1 << 40), "weights: group_size is 1099511627776"),
    ],
)
def test_what_cannot_be_read_is_refused(
    options: Any, sentence: str, llama: Path, tmp_path: Path
) -> None:
    config = json.loads((llama / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    with pytest.raises(ModelError, match=sentence) as error:
        open_checkpoint(tmp_path)
    assert "\n" not in str(error.value)


def cut(name: str, rows: int) -> Callable[[dict[str, torch.Tensor]], object]:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = tensors[name][:rows].clone()

    return change


BASE = Q.removesuffix("weight")


@pytest.mark.parametrize(
    ("case", "change", "sentence"),
    [
        (
            "gptq-4",
            cut(f"{BASE}qweight", 3),
            r"qweight' is \[3, 32\], which is no part of the \[32",
        ),
        ("gptq-4", cut(f"{BASE}scales", 1), r"qzeros' is \[2, 4\], but its config.json says \[1,"),
        ("gptq-4", cut(f"{BASE}g_idx", 9), r"g_idx' is \[9\], but its config.json says \[32\]"),
        ("gptq-4", lambda t: t[f"{BASE}g_idx"].add_(1), "g_idx' names more than 2 groups"),
        ("gptq-4", lambda t: t.pop(f"{BASE}qzeros"), "has no tensor '.*q_proj.qzeros'"),
        (
            "gptq-4",
            lambda t: t.update({f"{BASE}qweight": t[f"{BASE}qweight"].float()}),
            "qweight' does not hold rows of int32 words",
        ),
        ("awq", cut(f"{BASE}qweight", 3), r"qweight' is \[3, 4\], which is no part of the"),
        ("awq", cut(f"{BASE}qzeros", 1), r"qzeros' is \[1, 4\], but its config.json says \[2, 4\]"),
        ("packed-4", cut(f"{Q}_packed", 3), r"weight_packed' is \[3, 4\], which is no part of"),
        ("packed-4", cut(f"{Q}_scale", 5), r"weight_scale' is \[5, 2\], which is no part of the"),
        ("packed-4", lambda t: t[f"{Q}_shape"].add_(1), "weight_shape' is"),
        ("packed-4-zeros", cut(f"{Q}_zero_point", 1), r"zero_point' is \[1, 2\], which is no"),
        ("integers", cut(Q, 3), r"q_proj.weight' is \[3, 32\], but its config.json says"),
        (
            "integers",
            lambda t: t.update({Q: t[Q].to(torch.int16)}),
            "holds int16, which is not read",
        ),
        (
            "packed-4",
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e5m2)}),
            "weight_scale'",
        ),
        (
            "gptq-4",
            lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.int8)}),
            "holds int8, and its config.json does not say how to read that",
        ),
    ],
)
def test_damage_is_told_in_a_sentence(
    case: str,
    change: Callable[[dict[str, torch.Tensor]], object],
    sentence: str,
    llama: Path,
    tmp_path: Path,
) -> None:
    options, writer, bits, group, zeros = CASES[case]
    folder, _, _ = write(
        llama,
        tmp_path,
        options,
        writer,
        lambda out, width, seed: quantised(out, width, bits, group or width, zeros, seed),
    )
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=sentence) as error:
        logits(folder)
    assert "\n" not in str(error.value)
    assert re.search(str(folder), str(error.value))


def test_fused_and_partly_turning_heads(make_checkpoint: MakeCheckpoint, tmp_path: Path) -> None:
    source = make_checkpoint(
        tmp_path / "phi3",
        "phi3",
        rope_parameters={
            "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5
        },
    )  # fmt: skip
    folder, plain, matrices = write(
        source,
        tmp_path,
        compressed_options("pack-quantized", 4, 16),
        packed,
        lambda out, width, seed: quantised(out, width, 4, 16, True, seed),
    )
    assert any("qkv_proj" in name for name in matrices)
    assert np.array_equal(logits(folder), logits(plain))


def test_models_of_transformers_take_no_quantised_weights(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, "starcoder2")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = gptq_options(4, 16)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="for native families only, and 'starcoder2'"):
        load_model(open_checkpoint(folder), "float32", "cpu", 64)


def test_a_quantised_target_with_a_drafter(llama: Path, tmp_path: Path) -> None:
    """The same tokens as its dequantised weights, drafted for or not."""
    options, writer, bits, group, zeros = CASES["awq"]
    folder, plain, _ = write(
        llama,
        tmp_path,
        options,
        writer,
        lambda out, width, seed: quantised(out, width, bits, group, zeros, seed),
    )
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=16)
    found = [
        LLM(model, drafter=drafter, dtype="float32").generate([PROMPT], params)[0].outputs[0]
        for model, drafter in ((plain, None), (folder, None), (folder, llama))
    ]
    assert found[0].token_ids == found[1].token_ids == found[2].token_ids
