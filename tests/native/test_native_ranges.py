"""Numbers on their way into C++: each arrives as it is, or is refused by its name."""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider.base.types import Request, SamplingParams
from outrider.errors import ModelError
from outrider.models.native import NativeTransformer
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.native._interface import PARAMETERS, ffi
from outrider.native.checks import Room, as_float32
from outrider.native.interface import Config, Options, QuantizedData
from outrider.native.library import Library, _refused
from outrider.native.native_sampling import NativePipeline
from outrider.sampling.logprobs import Asked
from outrider.sampling.pipeline import RequestPipeline
from tests.support.loading import native_model, torch_model
from tests.support.native_steps import native_noise

found = native.library()
pytestmark = pytest.mark.skipif(found is None, reason="the native step is off")
CPU = "cpu"
WIDTH = 300
MakeCheckpoint = Callable[..., Path]

EDGES: list[Any] = [
    *(0, 1, -1, 2**31 - 1, 2**31, 2**31 + 1, -(2**31) - 1, 2**32 - 1, 2**32, 2**32 + 3),
    *(2**53, 2**63 - 1, 2**63, 2**63 + 1, 2**64 - 1, 2**64, 10**19, 10**4000, True),
    *(1e38, -1e38, 1e39, 1e308, 5e-324, 1e-40, math.nan, math.inf, -math.inf),
]


@pytest.fixture(scope="module")
def step() -> Library:
    assert found is not None
    return found


@pytest.fixture(scope="module")
def model(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = make_checkpoint(tmp_path_factory.mktemp("ranges"), "llama")
    assert found is not None
    return native_model(found, folder, "float32", 64)


def tried(call: Callable[..., Any], *values: Any, **named: Any) -> tuple[Any, str]:
    """What a call gives, and "", or None and the sentence that refuses it."""
    try:
        return call(*values, **named), ""
    except (ModelError, OverflowError) as error:
        told = str(error)
    assert 0 < len(told) < 400
    return None, told


@pytest.mark.parametrize("kind", [Config, Options, QuantizedData])
def test_a_field_holds_what_it_was_given_or_refuses_it(kind: Any) -> None:
    """Not one bit is cut; a float may be rounded."""
    for name, field in ffi.typeof(kind.__name__).fields:
        ctype = field.type
        if ctype.kind == "pointer":
            continue
        for value in EDGES:
            fields, told = tried(kind, **{name: value})
            if told:
                assert told.startswith(f"{name} is ")
                continue
            held = getattr(fields, name)
            assert math.isclose(held, value, rel_tol=1e-6, abs_tol=1e-38), (name, value, held)
            assert ctype.cname in ("float", "double") or held == value


def test_an_argument_arrives_as_it_is_or_is_refused(step: Library) -> None:
    """Every number of every function, so that a new one is checked as well."""
    for name, parameters in PARAMETERS.items():
        kinds = ffi.typeof(getattr(step._c, f"outrider_{name}")).args
        assert len(kinds) == len(parameters)
        for i, kind in enumerate(kinds):
            if kind.kind != "primitive":
                assert kind.kind in ("pointer", "function"), f"{name} takes a {kind.cname}"
                continue
            for value in EDGES:
                error = _refused(kinds[i : i + 1], [value], parameters[i : i + 1])
                if error is None:
                    assert ffi.new(f"{kind.cname} *", value)[0] == value
                else:
                    assert str(error).startswith(f"{parameters[i].replace('_', ' ')} is ")


def float32s(values: list[Any]) -> list[float]:
    return [as_float32("numbers", value) for value in values]


def int32s(values: list[Any]) -> list[int]:
    error = _refused([ffi.typeof("int32_t *")], [values], ["numbers"])
    if error:
        raise error
    return ffi.unpack(ffi.new("int32_t[]", values), len(values))


@pytest.mark.parametrize("make", [int32s, float32s])
def test_an_array_holds_what_it_was_given_or_refuses_it(make: Any) -> None:
    for value in EDGES:
        held, told = tried(make, [value])
        if told:
            assert told.startswith("numbers")
        else:
            assert math.isclose(held[0], value, rel_tol=1e-6, abs_tol=1e-38), value


def test_top_k_above_the_vocabulary_is_the_vocabulary(step: Library) -> None:
    for top_k in (WIDTH, WIDTH + 1, 2**31 - 1):
        params = SamplingParams(top_k=top_k, temperature=0.7)
        pipeline = NativePipeline(RequestPipeline(Request("r", (1,), params, 0), WIDTH), 0, step)
        z = np.random.default_rng(0).normal(size=(1, WIDTH)).astype(np.float32)
        assert np.isfinite(pipeline.apply(z.copy(), [1], [[]])).all()
    made = RequestPipeline(Request("r", (1,), SamplingParams(), 0), WIDTH)
    object.__setattr__(made.params, "top_k", 2**31)  # what a door let through
    assert np.isfinite(NativePipeline(made, 0, step).apply(z.copy(), [1], [[]])).all()


def test_options_that_no_field_can_hold_are_refused(step: Library) -> None:
    for name, value in (
        ("min_tokens", 2**31),
        ("temperature", 1e39),
        ("presence_penalty", math.nan),
        ("frequency_penalty", 1e39),
        ("repetition_penalty", math.inf),
    ):
        request = RequestPipeline(Request("r", (1,), SamplingParams(), 0), WIDTH)
        object.__setattr__(request.params, name, value)
        with pytest.raises(ModelError, match=name.partition("_p")[0]):
            NativePipeline(request, 0, step)


def test_a_law_has_no_number_below_its_least(step: Library) -> None:
    for name in ("top_k", "min_tokens", "sample", "prompt_length", "vocabulary"):
        options = Options(**{"vocabulary": WIDTH, name: -1})
        with pytest.raises(ModelError, match="below its least"):
            step.new_pipeline(options, None, (), {}, ())
    with pytest.raises(ModelError, match="token ids has a number"):
        step.new_pipeline(Options(vocabulary=WIDTH), None, (), {}, (2**31,))
    with pytest.raises(ModelError, match="logit_bias is"):
        step.new_pipeline(Options(vocabulary=WIDTH), None, (), {3: 1e39}, ())


def test_sizes_that_wrap_are_refused_by_name(step: Library, model: NativeTransformer) -> None:
    for page in (2**31 - 1, 2**30 + 1, 2**32 + 16, 0, -16):
        with pytest.raises(ModelError, match="page"):
            model.page_bytes(page)
        with pytest.raises(ModelError, match="page"):
            step.new_store(model.handle, 3, page)
    for pages in (2**32 + 3, 2**27, 0):
        with pytest.raises(ModelError, match="pages"):
            step.new_store(model.handle, pages, 16)
    with pytest.raises(ModelError, match="window is 4294967299"):
        step.set_layer(model.handle, 0, 0, True, 2**32 + 3, 0)
    with pytest.raises(ModelError, match="window below 0"):
        step.set_layer(model.handle, 0, 0, True, -1, 0)
    with pytest.raises(ModelError, match="threads is 0"):
        step.start(0)
    with pytest.raises(ModelError, match="position is 4294967296"):
        native_noise(step, 0, 2**32, 0, 8)


def test_models_of_sizes_whose_products_wrap_are_refused(step: Library) -> None:
    sizes = {
        **dict.fromkeys(("layers", "hidden", "inner", "heads", "kv_heads", "vocabulary"), 1),
        "head_dim": 2,
        "max_length": 8,
    }
    for name, value in (
        ("layers", 2**31 - 1),
        ("hidden", 2**31 - 1),
        ("inner", 2**30),
        ("heads", 2**29),
        ("vocabulary", 2**31 - 1),
        ("max_length", 2**31 - 1),
    ):
        with pytest.raises(ModelError, match="no model of these sizes"):
            step.new_model(Config(**{**sizes, name: value}), None)


def test_segments_of_numbers_that_wrap_are_refused(model: NativeTransformer) -> None:
    store = model.new_store(2, 16)
    for segment in (
        Segment([2**31], 0, [1], 1, 1),
        Segment([1], 2**32, [1], 1, 1),
        Segment([1], 0, [2**33], 1, 1),
        Segment([1], 0, [1], 2, 1, [2**31], [-1]),
    ):
        with pytest.raises(ModelError, match="not of 32 bits"):
            model.run([segment], store)
    with pytest.raises(ModelError, match="past the longest"):
        model.run([Segment([1], 2**31 - 2, [1] * 2**20, 1, 1)], model.new_store(1, 2**11))
    with pytest.raises(ModelError, match="slots has a number"):
        store.move([2**31], [0])


def test_a_group_that_wraps_reads_no_scales_beyond_their_end(model: NativeTransformer) -> None:
    width, out = model.shape.hidden_size, model.shape.vocab_size
    codes, scales = np.zeros((out, width), np.uint8), np.ones((out, 1), np.float32)
    with pytest.raises(ModelError, match="group is 4294967297"):
        model.library.set_quantized(
            model.handle, 0, "head", codes, scales, None, 8, 2**32 + 1, None
        )


@pytest.mark.parametrize("window", [64, 2**31 - 1])
def test_a_window_beyond_every_sequence_hides_nothing(
    window: int, step: Library, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    wide = make_checkpoint(tmp_path, "mistral", sliding_window=window)
    segment = Segment(list(range(40)), 0, [1, 2, 3], 40, 40)
    expected = torch_model(wide, "float32", CPU, 64)
    mine = native_model(step, wide, "float32", 64)
    np.testing.assert_allclose(
        mine.run([segment], mine.new_store(4, 16)).logits,
        expected.run([segment], expected.new_store(4, 16)).logits,
        atol=1e-4,
        rtol=0,
    )


def test_rotary_tables_are_as_long_as_the_cache(
    step: Library, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    """A context of a million positions costs what the cache can hold of it; bits stay the same."""
    folder = make_checkpoint(tmp_path, "llama", max_position_embeddings=1 << 24)
    long, short = (native_model(step, folder, "float32", n) for n in (1 << 24, 64))
    segment = Segment(list(range(40)), 20, [1, 2, 3, 4], 40, 60)
    first = Segment(list(range(20)), 0, [1, 2, 3, 4], 0, 60)
    outputs = []
    for model, pages in ((short, 5), (long, 5), (long, 9)):
        store = model.new_store(pages, 16)
        outputs.append(model.run([first, segment], store).logits)
    assert np.array_equal(outputs[0], outputs[1])
    assert np.array_equal(outputs[0], outputs[2])
    with pytest.raises(ModelError, match="past the longest"):
        long.run([Segment([1], 144, [1] * 10, 1, 145)], store)


numbers = st.sampled_from(EDGES) | st.integers(-(2**70), 2**70)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.data())
def test_no_mix_of_numbers_harms_the_process(data: st.DataObject) -> None:
    """Functions with whole numbers at random: an answer or a sentence."""
    assert found is not None
    small = st.integers(-2, 4) | numbers
    options = {
        name: data.draw(numbers if field.type.cname in ("float", "double") else small)
        for name, field in ffi.typeof("Options").fields
    }
    ids = data.draw(st.lists(st.integers(0, WIDTH - 1) | numbers, max_size=5))
    rows = data.draw(st.lists(st.integers(0, 2) | numbers, max_size=3))
    count = data.draw(small)
    z = np.random.default_rng(0).normal(size=(3, WIDTH)).astype(np.float32)
    calls: list[Callable[[], object]] = [
        lambda: found.logprobs([Asked(z, rows, ids[: len(rows)], count)]),
        lambda: found.draw(z[: len(rows)], [(a, count, 0, a) for a in rows], [False] * len(rows)),
        lambda: apply_pipeline(found, options, ids, count, z),
    ]
    for call in calls:
        tried(call)


def apply_pipeline(
    step: Library, options: dict[str, Any], ids: list[int], output: int, z: NDArray[np.float32]
) -> None:
    pipeline = step.new_pipeline(Options(**{**options, "vocabulary": WIDTH}), None, ids, {}, ids)
    try:
        step.count(pipeline, ids)
        step.apply_pipeline(pipeline, z, output, [[], ids, ids[:1]], False)
    finally:
        step.free("pipeline", pipeline)


def test_a_call_has_rows(step: Library, model: NativeTransformer) -> None:
    store = model.new_store(1, 16)
    room = Room(np.empty((0, model.shape.vocab_size), np.float32))
    with pytest.raises(ModelError, match="no rows"):
        step.decide(model.handle, store.handle, array("i"), array("Q"), 0, room)
