"""Heads of few bits: they draft as they would be quantised at load, and are trained on."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from outrider.base.config import Recipe
from outrider.checkpoints import folders
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.dtypes import FLOAT32, Array
from outrider.checkpoints.extras import KEY
from outrider.checkpoints.folders import find_folder
from outrider.checkpoints.head_export import SAFEAILAB, SPECULATORS, export_head
from outrider.checkpoints.head_quantize import quantize_head
from outrider.checkpoints.head_tensors import (
    HeadTensors,
    check_tensors,
    drafted_ids,
    expected_tensors,
)
from outrider.checkpoints.heads import MEDUSA, Head, read_head
from outrider.drafters.check import check
from outrider.errors import ModelError
from outrider.models.native_heads import NativeHead, NativeMedusa
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.training.head_files import load_eagle3, save_eagle3
from outrider.training.medusa import load_medusa, save_medusa
from tests.support.commands import outrider
from tests.support.heads import Eagle, make_head, make_medusa, save_head
from tests.support.loading import native_model

needs_native = pytest.mark.skipif(native.library() is None, reason="the native step is off")
KINDS = ("speculators", "safeailab", "medusa")
EXTRAS = {KEY: {"recommended_tokens": {"chat": 3}, "measured": []}}
INT8 = Recipe.parse("int8")


def made(kind: str, tiny_llama: Path, folder: Path) -> Head:
    """A head with extras and a card."""
    config = AutoConfig.from_pretrained(tiny_llama)
    if kind == "medusa":
        make_medusa(folder, config.hidden_size, config.vocab_size)
        about = folder / "config.json"
        about.write_text(json.dumps(json.loads(about.read_text()) | EXTRAS))
    else:
        about = Eagle(state_normed=kind == "speculators", extra=EXTRAS)
        save_head(make_head(about, config), folder, kind, embeds=False)
    (folder / "README.md").write_text("A card.")
    return read_head(folder)


def values(head: Head) -> dict[str, Array]:
    """The tensors that a head must have, whole, in float32."""
    source, expected = HeadTensors(head.files), expected_tensors(head)
    return {n: source.get(n, s, FLOAT32) for n, s in expected.items() if n != "d2t"}


def near(found: Array, expected: Array) -> bool:
    return bool(np.abs(found - expected).max() <= 0.02 * np.abs(expected).max())


@pytest.mark.parametrize("kind", KINDS)
def test_matrices_become_codes_and_all_else_stays(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    head = made(kind, tiny_llama, tmp_path / "head")
    out = tmp_path / "out"
    done = outrider("quantize", head.folder, out, "--quantization", "int8", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["bits_per_weight"] < 12
    small = read_head(out)
    assert (small.kind, small.vocab_size, small.hidden_size) == (
        head.kind, head.vocab_size, head.hidden_size,
    )  # fmt: skip
    assert small.extras == head.extras
    assert (out / "README.md").read_text() == "A card."
    _, facts = check(out, tiny_llama)
    assert all(fact.fits for fact in facts)
    exact = values(head)
    for name, value in values(small).items():
        assert near(value, exact[name]), name
        assert value.ndim == 2 or np.array_equal(value, exact[name])
    stored, before = (load_file(next(f.glob("*.safetensors"))) for f in (out, head.folder))
    for name in before.keys() & stored.keys():
        assert torch.equal(stored[name], before[name])
        assert before[name].ndim == 1
    if kind != "medusa":
        ids = [drafted_ids(HeadTensors(each.files), each) for each in (head, small)]
        assert ids[0] == ids[1]


@needs_native
@pytest.mark.parametrize("kind", KINDS)
def test_it_drafts_as_it_would_be_quantised_at_load(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    head = made(kind, tiny_llama, tmp_path / "head")
    quantize_head(head, tmp_path / "out", INT8)
    target = native_model(native.library(), tiny_llama, "float32", 64)

    def logits(folder: Path, quantization: str) -> Array:
        own, rng = read_head(folder), np.random.default_rng(3)
        if own.kind == MEDUSA:
            medusa = NativeMedusa(own, target, quantization)
            state = rng.standard_normal((1, medusa.hidden_size), np.float32)
            store = medusa.new_store(8, 4)
            return medusa.run([medusa.segment(state, "")], store).logits
        model = NativeHead(own, target, 64, quantization)
        states = rng.standard_normal((5, model.hidden_size), np.float32)
        pages = array("i", [2, 1, 3])
        segment = Segment([5, 6, 7, 8, 9], 1, pages, 5, 5, first=1, states=states)
        return model.run([segment], model.new_store(8, 4)).logits

    small, large = tmp_path / "out", tmp_path / "head"
    assert np.array_equal(logits(small, "auto"), logits(large, "int8-a8"))
    quantize_head(head, tmp_path / "usual", Recipe.parse("int4-g32"))
    assert np.array_equal(logits(tmp_path / "usual", "auto"), logits(large, "auto"))
    found, expected = logits(small, "none"), logits(large, "none")
    kept = np.isfinite(expected)
    assert (np.isfinite(found) == kept).all()
    assert np.abs(found[kept] - expected[kept]).max() < 0.1 * np.abs(expected[kept]).max()
    assert not np.array_equal(found, expected)


@pytest.mark.parametrize("kind", KINDS)
def test_training_and_export_go_on_with_whole_matrices(
    kind: str, tiny_llama: Path, tmp_path: Path
) -> None:
    head, target = made(kind, tiny_llama, tmp_path / "head"), open_checkpoint(tiny_llama)
    quantize_head(head, tmp_path / "out", INT8)
    small = read_head(tmp_path / "out")
    expected = values(small)
    if kind == "medusa":
        save_medusa(load_medusa(small, target, 32), None, tmp_path / "trained")
    else:
        save_eagle3(load_eagle3(small, target, 32), None, tmp_path / "trained")
    layout = SAFEAILAB if kind == "safeailab" else SPECULATORS
    export_head(small, tmp_path / "exported", layout, target, None)
    for name in ("trained", "exported"):
        again = read_head(tmp_path / name)
        check_tensors(again)
        assert "quantization_config" not in again.files.config
        for tensor, value in values(again).items():
            assert np.allclose(value, expected[tensor], rtol=2**-8, atol=1e-6), tensor  # bf16
        names = load_file(tmp_path / name / "model.safetensors").keys()
        assert names - {"embed_tokens.weight"} == head.files.tensors.keys()


@pytest.mark.parametrize(
    ("out", "quantization", "said"),
    [
        ("again", "int8", "quantised already"),
        ("new", "int8-a8", "leave -a8 out"),
        ("new.gguf", "Q8_0", "is a drafter's head, which cannot be written as a .gguf file"),
    ],
)
def test_what_makes_no_sense_is_refused(
    out: str, quantization: str, said: str, tiny_llama: Path, tmp_path: Path
) -> None:
    head = made("medusa", tiny_llama, tmp_path / "head")
    quantize_head(head, tmp_path / "small", INT8)
    source = tmp_path / ("small" if out == "again" else "head")
    done = outrider("quantize", source, tmp_path / out, "--quantization", quantization)
    assert done.exit_code == 2
    assert said in " ".join(done.output.split())
    assert not (tmp_path / out).exists()


Change = Mapping[str, torch.Tensor | None]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"fc.weight_scale": None}, "fc.weight_scale' is missing"),
        ({"fc.weight_packed": torch.zeros(3, 3, dtype=torch.int32)}, "fc.weight_packed' is"),
        ({"fc.weight_packed": None}, "fc.weight' is missing"),
    ],
)
def test_damaged_codes_are_refused_before_they_are_read(
    changed: Change, said: str, tiny_llama: Path, tmp_path: Path
) -> None:
    quantize_head(made("speculators", tiny_llama, tmp_path / "head"), tmp_path / "out", INT8)
    file = tmp_path / "out" / "model.safetensors"
    tensors: dict[str, Any] = {**load_file(file), **changed}
    save_file({name: x for name, x in tensors.items() if x is not None}, file)
    with pytest.raises(ModelError, match=said):
        check_tensors(read_head(tmp_path / "out"))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (lambda t: torch.full(t.shape, 3e38), "the square of a weight is not a finite number"),
        (lambda t: torch.full(t.shape, torch.nan), "a weight is not a finite number"),
        (lambda t: torch.zeros(0, *t.shape[1:]), "has no matrix '0.1.weight'"),
    ],
)
def test_what_cannot_be_quantised_is_refused(
    values: Callable[[torch.Tensor], torch.Tensor], said: str, tmp_path: Path
) -> None:
    make_medusa(tmp_path / "head", 32, 64)
    (file,) = (tmp_path / "head").glob("*.safetensors")
    save_file({name: values(x) for name, x in load_file(file).items()}, file)
    done = outrider("quantize", tmp_path / "head", tmp_path / "out", "--quantization", "int8")
    assert done.exit_code == 1
    assert said in done.output
    assert not (tmp_path / "out").exists()


def test_bundled_drafters_have_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "BUNDLED", tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "eagle3").mkdir()
    (tmp_path / "eagle3" / "config.json").write_text("{}")
    assert find_folder("pocket/eagle3") == tmp_path / "eagle3"
    with pytest.raises(ModelError, match="no 'pocket/medusa', only pocket/eagle3; give one"):
        find_folder("pocket/medusa")
    (tmp_path / "pocket" / "medusa").mkdir(parents=True)
    assert find_folder("pocket/medusa") == Path("pocket/medusa")
