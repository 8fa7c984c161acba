"""The native step: the torch path's model on every instruction set, and what it refuses."""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.errors import ModelError
from outrider.models.base import Model, Output
from outrider.models.load import load_model
from outrider.models.native import NativeTransformer
from outrider.models.native_model import step_config
from outrider.models.rows import Segment
from outrider.models.transformer import Transformer
from outrider.native import choice as native
from outrider.native.checks import Room
from tests.support.loading import native_model, torch_model
from tests.support.native_steps import HERE, step

CPU = "cpu"
PAGE = 16
MakeCheckpoint = Callable[..., Path]

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
    "mistral": {"sliding_window": 20, "head_dim": 24, "hidden_size": 40, "intermediate_size": 52},
    "qwen2": {"tie_word_embeddings": True, "vocab_size": 211},
    "qwen3": {"head_dim": 16, "num_attention_heads": 6},
    "granite": {"embedding_multiplier": 3.0, "residual_multiplier": 0.5, "logits_scaling": 2.0},
    "gemma2": {
        "head_dim": 24, "sliding_window": 20, "query_pre_attn_scalar": 20, "vocab_size": 211,
        "attn_logit_softcapping": 1.5, "final_logit_softcapping": 4.0,
    },
    "gemma3_text": {
        "head_dim": 16, "sliding_window": 20, "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "olmo2": {"hidden_size": 40, "num_key_value_heads": 1, "attention_bias": True},
    "exaone4": {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 20,
        "num_key_value_heads": 1,
    },
    "smollm3": {"no_rope_layers": [1, 0], "num_key_value_heads": 4},
    "phi3": {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "short_factor": [1.0, 1.5], "long_factor": [2.0, 5.0],
            "original_max_position_embeddings": 48,
        },
    },
    "ministral3": {
        "head_dim": 16, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "original_max_position_embeddings": 16,
            "llama_4_scaling_beta": 0.3,
        },
    },
    "lfm2": {
        "layer_types": ["conv", "full_attention"], "hidden_size": 48, "conv_bias": True,
        "block_multiple_of": 8,
    },
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "head_dim": 16,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
        "linear_value_head_dim": 32,
    },
    "granitemoehybrid": {
        "num_local_experts": 0, "mamba_n_heads": 4, "shared_intermediate_size": 52,
        "layer_types": ["full_attention"] * 2, "attention_multiplier": 0.3,
    },
}  # fmt: skip


def ids_of(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(128, (length,), generator=generator).tolist()


def whole(model: Model, ids: Sequence[int]) -> Output:
    pages = list(range(1, -(-len(ids) // PAGE) + 1))
    store = model.new_store(len(pages) + 1, PAGE)
    return model.run([Segment(ids, 0, pages, len(ids), len(ids))], store)


def in_parts(model: Model, ids: Sequence[int], size: int) -> NDArray[np.float32]:
    """Return the logits of ids that are read ``size`` at a time, from pages in disorder."""
    store, parts = model.new_store(6, PAGE), []
    for start in range(0, len(ids), size):
        chunk = ids[start : start + size]
        segment = Segment(chunk, start, [5, 2, 4, 1], len(chunk), len(ids))
        logits = model.run([segment], store).logits
        assert logits is not None
        parts.append(logits)
    return np.concatenate(parts)


@pytest.fixture(scope="module")
def folder(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("native"), "llama")


@pytest.fixture(scope="module")
def model(folder: Path) -> NativeTransformer:
    found = native.library()
    assert found is not None
    return native_model(found, folder, "float32", 256)


@pytest.mark.parametrize("family", FAMILIES)
def test_it_is_the_torch_paths_model(
    family: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    checkpoint = make_checkpoint(tmp_path, family, **FAMILIES[family])
    expected = whole(torch_model(checkpoint, "float32", CPU, 256), ids_of(70)).logits
    for isa in HERE:
        mine = native_model(step(isa), checkpoint, "float32", 256)
        atol = max(1e-4, 3e-5 * float(np.abs(expected).max()))
        np.testing.assert_allclose(whole(mine, ids_of(70)).logits, expected, atol=atol, rtol=0)
        low = native_model(step(isa), checkpoint, "bfloat16", 256)
        error = whole(low, ids_of(70)).logits - expected
        assert (error**2).mean() ** 0.5 < max(0.1, 0.03 * float(expected.std()))


@pytest.mark.parametrize("family", ["olmo2", "gemma3_text", "gemma2"])
def test_a_row_that_is_no_number_harms_no_later_one(
    family: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Norms behind a product leave nothing of a row, wherever it is padded."""
    options = {**FAMILIES[family], "hidden_size": 40, "vocab_size": 128}
    checkpoint = make_checkpoint(tmp_path / "model", family, **options)
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.embed_tokens.weight"][127] = torch.nan
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    mine = native_model(step(HERE[-1]), checkpoint, "float32", 256)
    ids = [id % 127 for id in ids_of(20)]
    before, bad, after = (whole(mine, each).logits for each in (ids, [127] * 20, ids))
    assert before is not None
    assert bad is not None
    assert after is not None
    assert np.isnan(bad).all()
    assert np.array_equal(after[:, :127], before[:, :127])  # heads may be tied


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", HERE)
def test_a_rows_logits_do_not_depend_on_the_others(isa: str, dtype: str, folder: Path) -> None:
    model, ids = native_model(step(isa), folder, dtype, 256), ids_of(50)
    expected = whole(model, ids).logits
    for size in (1, 2, 5, 7, 9, 13, 16, 17, 33):
        assert np.array_equal(in_parts(model, ids, size), expected), size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", HERE)
def test_queries_of_every_number_meet_their_keys(
    isa: str, dtype: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Three heads share a key head: tiles of 3 to 15 queries."""
    thirds = make_checkpoint(tmp_path, "qwen3", **FAMILIES["qwen3"])
    model, ids = native_model(step(isa), thirds, dtype, 256), ids_of(50)
    expected = whole(model, ids).logits
    for size in (1, 2, 3, 4, 5, 7):
        assert np.array_equal(in_parts(model, ids, size), expected), size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", HERE)
def test_many_rows_go_step_by_step(
    isa: str, dtype: str, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """More rows and inputs than products take at once, and 16 rows that take another way."""
    wide = make_checkpoint(tmp_path, "llama", hidden_size=320, intermediate_size=544)
    model, ids = native_model(step(isa), wide, dtype, 512), ids_of(300)
    pages = list(range(1, 20))
    expected = whole(model, ids).logits
    assert expected is not None
    for size in (16, 31, 40, 288):
        store = model.new_store(20, PAGE)
        for start in range(0, 300, size):
            chunk = ids[start : start + size]
            found = model.run([Segment(chunk, start, pages, len(chunk), 300)], store).logits
            assert np.array_equal(found, expected[start : start + len(chunk)]), (size, start)


@pytest.mark.parametrize("page", [16, 40])
@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_sequences_of_all_lengths_together(
    family: str, page: int, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """Chains, a tree and a prompt in one forward, behind contexts of none to several chunks."""
    checkpoint = make_checkpoint(tmp_path, family, **FAMILIES[family])
    model = native_model(step(HERE[-1]), checkpoint, "auto", 1024)
    lengths = (255, 1, 256, 30, 271, 600)
    each = 700 // page + 1
    tables = [list(range(1 + each * i, 1 + each * (i + 1)))[::-1] for i in range(len(lengths))]
    store = model.new_store(each * len(lengths) + 1, page)
    segments = []
    for i, (length, table) in enumerate(zip(lengths, tables, strict=True)):
        model.run([Segment(ids_of(length, i), 0, table, 0, length)], store)
        nodes, parents = (5, 6, 7, 8), (-1, 0, 0, 2) if i % 2 else (-1, 0, 1, 2)
        tokens = ids_of(60 if i == 3 else 1, 9 + i)
        segments.append(Segment(tokens, length, table, 5, length, nodes, parents))
    together = model.run(segments, store).logits
    alone = [model.run([segment], store).logits for segment in segments]
    assert np.array_equal(together, np.concatenate(alone))
    assert together is not None
    assert np.isfinite(together).all()


def test_workers_change_no_bits(folder: Path, make_checkpoint: MakeCheckpoint) -> None:
    """Large enough to be shared, by callers that come at once."""
    wide = make_checkpoint(
        folder.parent / "wide", "llama", hidden_size=256, intermediate_size=512, vocab_size=2048
    )
    model, ids = native_model(step(HERE[-1]), wide, "float32", 256), ids_of(40)
    expected = whole(model, ids).logits
    found: list[NDArray[np.float32] | None] = []
    callers = [
        threading.Thread(target=lambda: found.append(whole(model, ids).logits)) for _ in range(3)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert all(np.array_equal(logits, expected) for logits in found)


@pytest.mark.parametrize(
    ("segment", "sentence"),
    [
        (Segment([9, 320], 0, [1], 1, 2), "token id"),
        (Segment([-1], 0, [1], 1, 1), "token id"),
        (Segment([1], 0, [9], 1, 1), "page"),
        (Segment([1] * 17, 0, [1], 1, 17), "pages do not cover"),
        (Segment([1], 255, [1] * 17, 1, 1, [5], [-1]), "past the longest"),
        (Segment([1], 0, [1], 3, 1), "more logits"),
        (Segment([1], 0, [1], 1, 1, [5, 6], [-1, 1]), "before its parent"),
        (Segment([], 0, [1], 0, 1), "bad size"),
    ],
)
def test_what_is_out_of_bounds_is_refused(
    segment: Segment, sentence: str, model: NativeTransformer
) -> None:
    with pytest.raises(ModelError, match=sentence):
        model.run([segment], model.new_store(4, PAGE))


def test_only_what_exists_can_be_moved(model: NativeTransformer) -> None:
    with pytest.raises(ModelError, match="slot"):
        model.new_store(2, PAGE).move([0], [32])


def test_memory_is_read_in_whole_pieces() -> None:
    found = native.library()
    assert found is not None
    found.read(np.ones(3 << 17, np.uint8))
    with pytest.raises(ModelError, match="pieces of 128 KiB"):
        found.read(np.ones(1000, np.uint8))


def test_a_cache_belongs_to_its_model(folder: Path, model: NativeTransformer) -> None:
    found = native.library()
    assert found is not None
    other = native_model(found, folder, "float32", 256).new_store(2, PAGE)
    with pytest.raises(ModelError, match="another model"):
        model.run([Segment([1], 0, [1], 1, 1)], other)


def test_the_environment_chooses(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(native.VARIABLE, "off")
    assert isinstance(load_model(open_checkpoint(folder), "float32", CPU, 256), Transformer)
    monkeypatch.setenv(native.VARIABLE, "portable")
    chosen = native.library()
    assert chosen is not None
    assert chosen.isa == "portable"
    assert isinstance(load_model(open_checkpoint(folder), "float32", CPU, 256), NativeTransformer)
    monkeypatch.setenv(native.VARIABLE, "sse9")
    with pytest.raises(ModelError, match="OUTRIDER_NATIVE_ISA is 'sse9'; give one of portable"):
        native.library()
    monkeypatch.setattr(native, "ISAS", ("portable", "better"))
    monkeypatch.setenv(native.VARIABLE, "better")
    monkeypatch.setattr(native, "supported", lambda: ("portable",))
    with pytest.raises(ModelError, match="is 'better', but this CPU runs portable"):
        native.library()


class FakeLibrary:
    """A library on a CPU that runs the sets whose bits are set, some of them slowly."""

    def __init__(self, isa: str, sets: int, slow: int) -> None:
        self.isa = isa
        self.sets = lambda: sets
        self.slow_sets = lambda: slow
        self.start = lambda threads: threads


@pytest.fixture
def choosing_anew() -> Iterator[None]:
    """What was found out about this CPU is forgotten, before and after."""

    def forget() -> None:
        native.supported.cache_clear()
        native.fastest.cache_clear()
        native.open_library.cache_clear()

    forget()
    yield
    forget()


@pytest.mark.usefixtures("choosing_anew")
@pytest.mark.parametrize(
    ("machine", "sets", "slow", "unbuilt", "chosen"),
    [
        ("x86_64", 0b0000111, 0, (), "avxvnni"),
        ("x86_64", 0b0000111, 0, ("avxvnni",), "avx2"),
        ("x86_64", 0b0111011, 0, (), "avx512bf16"),
        ("x86_64", 0b0111111, 0b0100000, (), "avx512vnni"),
        ("x86_64", 0b0111111, 0b0100000, ("avx512vnni",), "avx512bf16"),
        ("x86_64", 0b1111111, 0b0100000, (), "amx"),
        ("x86_64", 0b1111111, 0b0100000, ("amx",), "avx512vnni"),
        # Which lacks AVX-VNNI.
        ("x86_64", 0b0111011, 0, ("avx512bf16", "avx512vnni", "avx512"), "avx2"),
        ("x86_64", 0b0000001, 0, (), "portable"),
        ("aarch64", 0b1111, 0, (), "bf16"),
        ("aarch64", 0b0111, 0, ("dotprod",), "neon"),
        ("aarch64", 0b0011, 0, (), "neon"),
    ],
)
def test_the_fastest_set_that_the_cpu_runs_is_chosen(
    machine: str,
    sets: int,
    slow: int,
    unbuilt: tuple[str, ...],
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(native, "ISAS", native.SETS[machine])
    monkeypatch.delenv(native.VARIABLE, raising=False)
    monkeypatch.setattr(native, "_file", lambda isa: None if isa in unbuilt else Path(isa))
    monkeypatch.setattr(native, "Library", lambda isa, _: FakeLibrary(isa, sets, slow))
    found = native.library()
    assert found is not None
    assert found.isa == chosen
    for isa in unbuilt:
        if isa in native.supported():
            monkeypatch.setenv(native.VARIABLE, isa)
            with pytest.raises(ModelError, match=f"is '{isa}', which was not built; there is"):
                native.library()


def test_what_is_not_covered_takes_the_torch_path(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    gelu = make_checkpoint(tmp_path, "llama", hidden_act="gelu")
    assert isinstance(load_model(open_checkpoint(gelu), "float32", CPU, 256), Transformer)


def test_bfloat16_needs_no_instructions(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without them AVX2 is enough for the native step; torch, and "portable", take float32."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    folder = make_checkpoint(tmp_path, "llama", dtype=torch.bfloat16)
    for isa in HERE:
        monkeypatch.setenv(native.VARIABLE, isa)
        model = load_model(open_checkpoint(folder), "auto", CPU, 256)
        assert isinstance(model, NativeTransformer)
        assert model.dtype == ("float32" if isa == "portable" else "bfloat16")
    monkeypatch.setenv(native.VARIABLE, "off")
    model = load_model(open_checkpoint(folder), "auto", CPU, 256)
    assert isinstance(model, Transformer)
    assert model.dtype == np.float32


def test_float16_is_computed_in_bfloat16(
    tmp_path: Path, make_checkpoint: MakeCheckpoint, caplog: pytest.LogCaptureFixture
) -> None:
    """Unless asked otherwise, since the native step has no float16."""
    folder = make_checkpoint(tmp_path, "qwen2", dtype=torch.float16)
    model = load_model(open_checkpoint(folder), "auto", CPU, 256)
    assert isinstance(model, NativeTransformer)
    narrow = model.library.isa != "portable"
    assert model.dtype == ("bfloat16" if narrow else "float32")
    assert ("computed in bfloat16" in caplog.text) == narrow
    exact = load_model(open_checkpoint(folder), "float32", CPU, 256)
    error = whole(model, ids_of(70)).logits - whole(exact, ids_of(70)).logits
    assert (error**2).mean() ** 0.5 < 0.1  # of a spread of about 3
    assert isinstance(load_model(open_checkpoint(folder), "float16", CPU, 256), Transformer)
    assert isinstance(
        load_model(open_checkpoint(folder), "auto", CPU, 256, "int4"), NativeTransformer
    )


@pytest.mark.parametrize(
    "change", [lambda t: t.astype("bfloat16"), lambda t: t[:, :-1], lambda t: t.T]
)
def test_matrices_fit_their_model(
    change: Callable[[NDArray[Any]], NDArray[Any]], model: NativeTransformer
) -> None:
    """Read as what they are not, they would be read past their end."""
    head = np.zeros((model.shape.vocab_size, model.shape.hidden_size), np.float32)
    with pytest.raises(ModelError, match=r"dtype|shape|cannot read"):
        model.library.set_matrix(model.handle, 0, "head", change(head), None)


def floats(*shape: int) -> NDArray[np.float32]:
    return np.zeros(shape, np.float32)


def test_results_fit_their_room(model: NativeTransformer) -> None:
    step, store = model.library, model.new_store(2, PAGE)
    words, wide = array("i", [1, 0, 0, 1, 1, 0, 1, 0, 5, 1]), model.shape.vocab_size
    none = floats(0, 1, model.shape.hidden_size)
    for logits, kept in (
        (floats(1, wide - 1), none),
        (floats(1, wide).astype(np.float16), none),
        (floats(1, wide), floats(0, 1, model.shape.hidden_size - 1)),
        (floats(1, wide), floats(1, 1, model.shape.hidden_size)),
    ):
        with pytest.raises(ModelError, match=r"room|cannot read"):
            step.forward(model.handle, store.handle, words, range(4), [], logits, kept)
    with pytest.raises(ModelError, match="belong together"):
        store.move([0, 1], [0])


def test_a_model_without_its_weights_is_not_run(model: NativeTransformer) -> None:
    step, c = model.library, step_config(model.shape, model.dtype, 64, False)
    bare, words = step.new_model(c, None), array("i", [1, 0, 0, 1, 1, 0, 1, 0, 5, 1])
    store = step.new_store(bare, 2, PAGE)
    logits, kept = floats(1, c.vocabulary), floats(0, 1, c.hidden)
    with pytest.raises(ModelError, match="not complete"):
        step.forward(bare, store, words, [0, 1], [], logits, kept)
    with pytest.raises(ModelError, match="not complete"):
        step.decide(bare, store, words, array("Q"), 1, Room(logits))
    with pytest.raises(ModelError, match="not complete"):
        step.check(bare)
    step.free("store", store)
    step.free("model", bare)


@pytest.mark.usefixtures("choosing_anew")
def test_without_a_library_torch_serves(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(native, "folders", [])
    monkeypatch.delenv(native.VARIABLE, raising=False)
    with caplog.at_level(logging.WARNING, "outrider"):
        for _ in range(2):
            assert isinstance(load_model(open_checkpoint(folder), "float32", CPU, 256), Transformer)
    assert len(caplog.records) == 1
    assert "no C++ compiler" in caplog.text
