"""Processed logits, draws and drafts of the native step, on every instruction set."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pytest

from outrider import LLM
from outrider.base.types import Request, Row, SamplingParams, SequenceState
from outrider.errors import ModelError
from outrider.models.decide import DraftInput, Keep, SampleInput
from outrider.models.native import NativeTransformer
from outrider.models.native_model import words_of
from outrider.models.python_step import PythonStep
from outrider.models.rows import Segment
from outrider.native import choice as native
from outrider.native.checks import LayerRoom, Room
from outrider.native.interface import DraftBudget, Planted
from outrider.native.native_sampling import NativeNoise, NativePipeline
from outrider.sampling.grammar import keep
from outrider.sampling.logprobs import Asked, measure
from outrider.sampling.noise import gumbel
from outrider.sampling.pipeline import Logits, RequestPipeline, SequencePipeline
from outrider.sampling.shared_noise import SharedNoise
from outrider.text.detokenize import Detokenizer
from tests.support.loading import native_model
from tests.support.native_steps import HERE, native_noise, step

pytestmark = pytest.mark.skipif(native.library() is None, reason="the native step is off")
WIDTH = 1003  # no multiple of a block
PROMPT = (3, 5, 3, 900)

OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "greedy": {"temperature": 0.0, "top_k": 5, "presence_penalty": 1.0},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": -0.7, "frequency_penalty": 0.4},
    "bans": {"allowed_token_ids": list(range(2, 900)), "min_tokens": 9, "stop_token_ids": [7, 8]},
    "bias": {"logit_bias": {4: 3.5, 900: -100.0}, "min_p": 0.02},
    "top": {"top_k": 40, "top_p": 0.83, "temperature": 1.4},
    "wide": {"top_k": 1000, "min_p": 1e-9},
    "mass": {"top_p": 0.1},
}


def random_logits(rows: int, width: int = WIDTH, seed: int = 0) -> Logits:
    return np.random.default_rng(seed).standard_normal((rows, width), np.float32) * 4


def room(rows: int, width: int) -> Room:
    return Room(np.empty((rows, width), np.float32))


def layer_room(rows: int, width: int, layer: int) -> LayerRoom:
    return LayerRoom(np.empty((1, rows, width), np.float32), [layer])


@pytest.mark.parametrize("isa", HERE)
def test_noise_has_the_specified_bits(isa: str) -> None:
    for seed, position, sample in ((0, 0, 0), (2**64 - 1, 2**32 - 1, 2**32 - 1), (77, 5, 2)):
        expected = gumbel([seed], [sample], [position], 70001)[0]
        assert (
            native_noise(step(isa), seed, position, sample, 70001).tobytes() == expected.tobytes()
        )


@pytest.mark.parametrize("name", OPTIONS)
def test_a_law_is_samplings(name: str) -> None:
    params = SamplingParams(**OPTIONS[name])
    pipeline = RequestPipeline(Request("r", PROMPT, params, 0, frozenset({2})), WIDTH)
    tokens = [*PROMPT, 10, 11, 10]
    paths = [[], [10], [10, 44], [10, 44, 44], [3], []]
    expected = SequencePipeline(pipeline).apply(random_logits(6), tokens, paths)
    for isa in HERE:
        mine = NativePipeline(pipeline, 0, step(isa))
        for length in (5, 7):  # committed bit by bit, and each token counted once
            z = mine.apply(random_logits(6), tokens[:length], paths)
        assert np.array_equal(z, expected)


def test_equals_at_the_edge_of_top_p_are_kept_by_id() -> None:
    pipeline = RequestPipeline(Request("r", (1,), SamplingParams(top_p=0.45), 0), WIDTH)
    z = np.full((1, WIDTH), -30.0, np.float32)
    z[0, 100:110] = 2.0
    for isa in HERE:
        kept = NativePipeline(pipeline, 0, step(isa)).apply(z.copy(), [1], [[]])[0]
        assert np.flatnonzero(np.isfinite(kept)).tolist() == list(range(100, 105))


def rows_of(kind: str, width: int, random: np.random.Generator) -> Logits:
    """Return a row of logits of a shape that a nucleus may meet."""
    z = random.standard_normal(width).astype(np.float32)
    match kind:
        case "wide":
            z *= 30
        case "narrow":  # all within a few steps of what a float can tell apart
            z = 5 + z * np.float32(1e-6)
        case "tiny":
            z *= np.float32(1e-41)
        case "equal":
            z[:] = 3
        case "few values":
            z = z.round()
        case "far":  # one ahead of many that are alike
            z[width // 2] += 13
        case "masked":
            z[random.random(width) < 0.7] = -np.inf
            z[0] = 1
        case "lowest":
            z[random.random(width) < 0.5] = np.finfo(np.float32).min
            z[-1] = 1
    return z


@pytest.mark.parametrize(
    "kind", ["usual", "wide", "narrow", "tiny", "equal", "few values", "far", "masked", "lowest"]
)
def test_a_nucleus_is_the_shortest_run_of_the_likeliest_that_reaches_its_share(kind: str) -> None:
    random = np.random.default_rng(sum(kind.encode()))
    for width in (1, 64, 65, 1000, 20_000):
        z = rows_of(kind, width, random)
        order = np.argsort(-z, kind="stable")  # the lowest id first among equals
        mass = np.exp(np.float64(z[order]) - z.max()).cumsum()
        for share in (1e-320, 1e-6, 0.3, 0.9, 0.999):
            params = SamplingParams(top_p=share)
            pipeline = RequestPipeline(Request("r", (0,), params, 0), width)
            for isa in HERE:
                kept = NativePipeline(pipeline, 0, step(isa)).apply(z[None].copy(), [0], [[]])[0]
                inside = np.isfinite(kept)
                count = int(inside.sum())
                assert inside[order[:count]].all()
                assert np.array_equal(kept[inside], z[inside])
                wanted = share * mass[-1]
                assert mass[count - 1] >= wanted * (1 - 1e-6)
                assert count == 1 or mass[count - 2] < wanted * (1 + 1e-6)


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_a_draw_is_the_argmax_over_all_noise(scale: float) -> None:
    rows = [Row("s", 2**63 + i, i % 2, 1000 * i, i % 5 == 4, 0) for i in range(20)]
    z = random_logits(20) * scale
    z[3, 10:] = -np.inf
    z[5] = z[5].round()  # ties
    expected = SharedNoise(WIDTH).draw(z, rows)
    for isa in HERE:
        assert NativeNoise(WIDTH, step(isa)).draw(z, rows) == expected
        # Each row alone, as a view whose stride says nothing.
        alone = [NativeNoise(WIDTH, step(isa)).draw(z[i][None], rows[i : i + 1]) for i in range(20)]
        assert ([t for (t,), _ in alone], [s for _, (s,) in alone]) == expected


def test_a_row_that_is_no_law_has_no_finite_score() -> None:
    z = random_logits(3)
    z[0, 999] = np.nan
    z[1] = -np.inf
    z[2, 4] = np.inf
    rows = [Row("s", 1, 0, i, greedy, 0) for i in range(3) for greedy in (False,)]
    for isa in HERE:
        scores = NativeNoise(WIDTH, step(isa)).draw(z, rows)[1]
        assert np.isnan(scores[0])
        assert scores[1:] == [-np.inf, np.inf]


def test_log_probabilities_of_a_step_are_samplings() -> None:
    """Those of all sequences in one call, to the bit those of calls for one row each."""
    z, prompt = random_logits(4), random_logits(3, seed=1)
    z[2, 50:] = -np.inf
    z[3] = z[3].round()  # ties
    asked = [
        Asked(z, [0, 2], [17, 3], 5),
        Asked(z[3:], [0], [1002], 0),
        Asked(prompt, range(1, 3), [900, 1], 20),
        Asked(prompt, [], [], 3),
        Asked(z, [1, 3], [4, 4], WIDTH + 1),
    ]
    expected = measure(asked)
    for isa in HERE:
        mine = step(isa).logprobs(asked)
        for (own, *ids, values), (wanted, *theirs, known) in zip(mine, expected, strict=True):
            assert ids == theirs  # and the rank
            np.testing.assert_allclose([own, *values], [wanted, *known], atol=2e-6)
        alone = [
            Asked(each.z, [row], [token], each.likeliest)
            for each in asked
            for row, token in zip(each.rows, each.tokens, strict=True)
        ]
        assert mine == [figures for each in alone for figures in step(isa).logprobs([each])]
        assert step(isa).logprobs([]) == []


def test_ids_past_the_vocabulary_are_refused() -> None:
    found = native.library()
    assert found is not None
    pipeline = RequestPipeline(Request("r", PROMPT, SamplingParams(presence_penalty=1.0), 0), WIDTH)
    mine = NativePipeline(pipeline, 0, found)
    with pytest.raises(ModelError, match="past the vocabulary"):
        mine.apply(random_logits(1), list(PROMPT), [[WIDTH]])
    with pytest.raises(ModelError, match="past the vocabulary"):
        found.logprobs([Asked(random_logits(1), [0], [-1], 2)])
    narrow = RequestPipeline(Request("r", PROMPT, SamplingParams(presence_penalty=1.0), 0), 100)
    with pytest.raises(ModelError, match="of a pipeline is past the vocabulary"):
        NativePipeline(narrow, 0, found)


def test_what_a_law_cannot_read_is_refused() -> None:
    found = native.library()
    assert found is not None
    request = Request("r", PROMPT, SamplingParams(presence_penalty=1.0), 0)
    mine = NativePipeline(RequestPipeline(request, WIDTH), 0, found)
    z, key = random_logits(2), (1, 0, 0, 0)
    for wrong in (z[:, :-1].copy(), z.astype(np.float64), z[:, ::2]):
        with pytest.raises(ModelError, match=r"vocabulary|cannot read"):
            found.apply_pipeline(mine.handle, wrong, 0, [[], []], False)
    for rows, keys, greedy in (
        (z.astype(np.float64), [key] * 2, [True] * 2),
        (z.T, [key] * 2, [True] * 2),
        (z, [key], [True] * 2),
        (z, [key] * 2, [True]),
    ):
        with pytest.raises(ModelError, match=r"in one piece|belong together"):
            found.draw(rows, keys, greedy)
    for asked, said in (
        ([Asked(z, [2], [1], 1)], "a row is 2"),
        ([Asked(z, [0, 1], [1], 1)], "belong together"),
        ([Asked(z, [0], [1], -2)], "count is -2"),
        ([Asked(z, [0], [1], 1), Asked(z[:, :-1].copy(), [0], [1], 1)], "cannot read"),
    ):
        with pytest.raises(ModelError, match=said):
            found.logprobs(asked)


def same_in_single_calls(
    monkeypatch: pytest.MonkeyPatch, target: Path, drafter: Path, prompts: list[Any], params: Any
) -> None:
    """Output and drafts stay the same where pipelines and draws are calls of their own."""

    def run() -> tuple[list[list[int]], list[int]]:
        llm = LLM(target, drafter=str(drafter), dtype="float32", num_speculative_tokens=5)
        drafted: list[int] = []
        propose = llm.engine.drafter.propose

        def kept(*args: Any) -> Any:
            draft = propose(*args)
            drafted.extend(t for nodes in draft for t in nodes.tokens)
            return draft

        llm.engine.drafter.propose = kept  # type: ignore[method-assign]
        return [o.outputs[0].token_ids for o in llm.generate(prompts, params)], drafted

    whole = run()
    assert whole[1]
    for name in ("decide", "draft"):
        monkeypatch.setattr(NativeTransformer, name, getattr(PythonStep, name))
        assert run() == whole


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("vocabulary", [100, 128, 150])
def test_a_draft_in_one_call_is_that_of_single_steps(
    temperature: float,
    vocabulary: int,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = make_checkpoint(tmp_path / "target", "llama")
    small = make_checkpoint(
        tmp_path / "drafter", "llama", num_hidden_layers=1, vocab_size=vocabulary
    )
    params = SamplingParams(
        temperature=temperature, max_tokens=40, ignore_eos=True, seed=5, presence_penalty=0.3
    )
    prompts = [[1, 2, 3, 4], [9] * 30, [5]]
    same_in_single_calls(monkeypatch, target, small, prompts, params)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"presence_penalty": 0.3}])
@pytest.mark.parametrize("vocabulary", [312, 320, 328])
def test_masks_of_a_grammar_in_the_call_are_those_between_calls(
    options: dict[str, Any],
    vocabulary: int,
    tiny_llama: Path,
    make_checkpoint: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    small = make_checkpoint(tmp_path, "llama", num_hidden_layers=1, vocab_size=vocabulary)
    free = SamplingParams(max_tokens=40, ignore_eos=True, seed=5, **options)
    form = {"regex": "([a-z]{1,9}[ ,;]){3,12}[.]"}
    bound = SamplingParams(max_tokens=40, seed=6, structured_outputs=form, **options)
    prompts = ["the quick", "lazy dog", "over"]
    same_in_single_calls(monkeypatch, tiny_llama, small, prompts, [bound, free, bound])


CHAIN, TREE = ([3, 4, 3], [-1, 0, 1]), ([3, 4, 5, 3], [-1, 0, 0, -1])


@pytest.mark.parametrize("options", OPTIONS)
def test_rows_decided_in_the_forwards_call_are_those_of_laws_and_draws(
    options: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    found = step(HERE[-1])
    folder = make_checkpoint(tmp_path, "llama", vocab_size=WIDTH)
    model = native_model(found, folder, "float32", 64)
    params = SamplingParams(**OPTIONS[options])
    noise = NativeNoise(WIDTH, found)
    plans: list[tuple[list[int], list[int]]] = [CHAIN, ([], []), TREE]
    sequences, segments, pipelines = [], [], []
    for i, (nodes, parents) in enumerate(plans):
        request = Request(f"{i}", (1, 2, 3), params, 11 + i, frozenset({0}))
        pipeline = NativePipeline(RequestPipeline(request, WIDTH), 0, found)
        pipelines.append(pipeline)
        tokens = [1, 2, 3, 4, 2][: 5 - i]
        sequences.append(
            SequenceState(f"{i}", request, 0, Detokenizer(None, (), ()), pipeline, tokens)
        )
        rows = 1 + len(nodes)
        segments.append(Segment(tokens, 0, [1 + i], rows, 3, nodes, parents))
    prompt = Segment([7, 8], 0, [4], 0, 9)  # wants nothing
    segments.insert(1, prompt)
    for pipeline, sequence in zip(pipelines, sequences, strict=True):
        pipeline.know(sequence.tokens)
    rng = np.random.default_rng(0)
    some = rng.integers(0, 256, (10, -(-WIDTH // 8)), np.uint8)
    masks = [mask if row % 3 else None for row, mask in enumerate(some)]

    def decide(masks: list[Any]) -> tuple[Any, Logits]:
        store, handles = (
            model.new_store(5, 16),
            array("Q", [pipeline.handle for pipeline in pipelines]),
        )
        logits = room(14, WIDTH)
        keeps = [True, False, False]
        words = words_of(segments)
        return found.decide(
            model.handle, store.handle, words, handles, 10, logits, masks, keeps
        ), logits.array[10:]

    drawn, raw = decide([])
    masked, _ = decide(masks)
    assert masked != drawn
    logits = model.run(segments, model.new_store(5, 16)).logits
    assert logits is not None
    assert np.array_equal(raw, logits[:4])
    kept = logits.copy()
    for row, mask in zip(kept, masks, strict=True):
        if mask is not None:
            keep(row, mask)
    assert tuple(map(list, drawn)) == judged(logits, sequences, plans, noise)
    assert tuple(map(list, masked)) == judged(kept, sequences, plans, noise)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_row_that_needs_python_leaves_its_neighbours_alone(
    options: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    """One batch: a pipeline in C++, one that keeps logits, a processor, a scored prompt."""
    found = step(HERE[-1])
    model = native_model(found, make_checkpoint(tmp_path, "llama", vocab_size=WIDTH), "float32", 64)
    noise = NativeNoise(WIDTH, found)
    plans = [CHAIN, CHAIN, TREE, TREE]
    keeps = [Keep.NOTHING, Keep.RAW, Keep.PROCESSED, Keep.RAW]
    inputs: list[SampleInput | None] = []
    segments: list[Segment] = []
    for i, ((nodes, parents), shown) in enumerate(zip(plans, keeps, strict=True)):
        processors = [lambda ids, logits: -abs(logits)] if i == 3 else None
        params = SamplingParams(**OPTIONS[options], logits_processors=processors)
        request = Request(f"{i}", (1, 2, 3), params, 11 + i, frozenset({0}))
        pipeline = NativePipeline(RequestPipeline(request, WIDTH), 0, found)
        sequence = SequenceState(
            f"{i}", request, 0, Detokenizer(None, (), ()), pipeline, [1, 2, 3, 4]
        )
        inputs.append(SampleInput(sequence, True, shown))
        segments.append(Segment([1, 2, 3, 4], 0, [1 + i], 1 + len(nodes), 3, nodes, parents))
    segments[0] = segments[0]._replace(logits=3, nodes=(), parents=())  # a prompt that is scored
    segments.insert(2, Segment([7, 8], 0, [6], 0, 9))  # wants nothing
    inputs.insert(2, None)
    mine = model.decide(segments, model.new_store(7, 16), inputs, noise, hidden=[-1, 0])
    theirs = PythonStep.decide(
        model, segments, model.new_store(7, 16), inputs, noise, hidden=[-1, 0]
    )
    sampled = slice(2, None)  # the two rows before are scored only
    assert list(mine.tokens)[sampled] == list(theirs.tokens)[sampled]
    assert list(mine.scores)[sampled] == list(theirs.scores)[sampled]
    for name, numbers in (("kept", {1, 3, 4}), ("scored", {0}), ("hidden", {-1, 0})):
        values, expected = getattr(mine, name), getattr(theirs, name)
        assert set(values) == set(expected) == numbers
        assert all(np.array_equal(values[n], expected[n]) for n in numbers)
    assert not mine.errors
    assert not mine.reasons


def judged(
    z: Logits,
    sequences: list[SequenceState],
    plans: list[tuple[list[int], list[int]]],
    noise: NativeNoise,
) -> tuple[list[int], list[float]]:
    """Tokens and scores by pipelines and draws in calls of their own."""
    keys = []
    for sequence, (nodes, parents) in zip(sequences, plans, strict=True):
        paths: list[list[int]] = [[]]
        for token, parent in zip(nodes, parents, strict=True):
            paths.append([*paths[parent + 1], token])
        first, base = len(keys), len(sequence.tokens)
        sequence.pipeline.apply(z[first : first + len(paths)], sequence.tokens, paths)
        seed, greedy = sequence.request.seed, sequence.request.params.greedy
        keys += [Row(sequence.id, seed, 0, base + len(p), greedy, base) for p in paths]
    return noise.draw(z, keys)


def test_what_cannot_be_decided_is_refused(
    make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    found = step(HERE[-1])
    model = native_model(found, make_checkpoint(tmp_path, "llama"), "float32", 64)
    store = model.new_store(3, 16)
    width = model.shape.vocab_size

    asked = RequestPipeline(Request("r", (1,), SamplingParams(), 0), width)
    good = NativePipeline(asked, 0, found)

    def decide(segments: list[Segment], pipelines: list[NativePipeline], **options: Any) -> None:
        rows = sum(segment.logits for segment in segments)
        options = {"logits": room(rows, width)} | options
        handles = array("Q", [pipeline.handle for pipeline in pipelines])
        found.decide(model.handle, store.handle, words_of(segments), handles, rows, **options)

    one = Segment([1], 0, [1], 1, 1)
    drafted = Segment([1], 0, [1], 2, 1, [2], [-1])
    for segment, pipelines, sentence in (
        (one, [], "as many pipelines"),
        (one, [good] * 2, "as many pipelines"),
        (drafted._replace(logits=1), [good], "not every node"),
        (one._replace(tokens=[width]), [good], "no embedding"),
        (one._replace(pages=[3]), [good], "page is not"),
        (one._replace(start=64, pages=[1] * 5), [good], "past the longest"),
    ):
        with pytest.raises(ModelError, match=sentence):
            decide([segment], pipelines)
    # Ids past the vocabulary are left out, and other ones get what was planted for them.
    planted = Planted(
        np.array([[width, -1, 3]]), np.zeros((1, 3), np.float32), -np.ones(1, np.float32), 0
    )
    out = room(1, width)
    decide([one], [good], planted=[planted], logits=out)
    assert out.array[0].tolist() == [0.0 if id == 3 else -1.0 for id in range(width)]
    short, whole = np.zeros(width // 8 - 1, np.uint8), np.full(-(-width // 8), 255, np.uint8)
    decide([one], [good], masks=[whole])
    wide = model.shape.hidden_size
    for options, sentence in (
        ({"logits": room(0, width)}, "as many as announced"),
        ({"logits": room(1, width + 1)}, "another shape"),
        ({"keeps": [True]}, "no room for logits"),
        ({"keeps": [True] * 2}, "belong together"),
        ({"masks": [None] * 2}, "belong together"),
        ({"masks": [short]}, "shorter than"),
        ({"masks": [whole, None]}, "belong together"),
        ({"planted": [None] * 2}, "belong together"),
        ({"planted": [planted._replace(z=planted.z.astype(np.float64))]}, "cannot read"),
        ({"planted": [planted._replace(rest=planted.rest[:0])]}, "cannot read"),
        ({"planted": [planted._replace(first=-1)]}, "a planted position"),
        ({"planted": [Planted(planted.ids[:0], planted.z[:0], planted.rest[:0], 0)]}, "entries is"),
        ({"hidden": layer_room(1, wide, 2)}, "no such layer"),
        ({"hidden": layer_room(1, wide, -2)}, "no such layer"),
        ({"hidden": layer_room(1, wide + 1, 0)}, "another sh"),
        ({"hidden": layer_room(1, wide, 0), "first": 1}, "as many as ann"),
        ({"hidden": layer_room(2, wide, 0), "first": -1}, "as many as ann"),
    ):
        with pytest.raises(ModelError, match=sentence):
            decide([one], [good], **options)
    for segment, pipelines, limits, sentence in (
        (one, [], [], "as many drafts"),
        (drafted._replace(logits=1), [good], [DraftBudget(1, 1)], "begins with one row"),
        (one, [good], [DraftBudget(0, 1)], "bad size"),
        (one, [good], [DraftBudget(2, 1)], "bad size"),
        (one, [good], [DraftBudget(2, 4, 0)], "bad size"),
        (one, [good], [DraftBudget(2, 4, 1, 11)], "bad size"),
        (one, [good], [DraftBudget(2**31, 2**31)], "limits of drafts"),
        (one, [good], [DraftBudget(17, 17)], "pages do not cover"),
        (one, [good], [DraftBudget(65, 65)], "past the longest"),
    ):
        handles = [pipeline.handle for pipeline in pipelines]
        with pytest.raises(ModelError, match=sentence):
            found.draft(model.handle, store.handle, words_of([segment]), width, handles, limits)

    def fail(path: list[int]) -> NoReturn:
        raise KeyError(path)

    byte = np.zeros(1, np.uint8)
    for mask, size, error, sentence in (
        (lambda path: byte, 1, ModelError, "shorter than the vocabulary"),
        (lambda path: byte, 2**31, ModelError, "mask_bytes is 2147483648"),
        (lambda path: byte, -(-width // 8), ModelError, "none of this vocabulary"),
        (lambda path: np.zeros(width, np.int64), -(-width // 8), ModelError, "none of this voc"),
        (lambda path: np.zeros(width, np.uint8)[::2], -(-width // 8), ModelError, "none of this"),
        (fail, -(-width // 8), KeyError, r"\[\]"),
    ):
        with pytest.raises(error, match=sentence):
            found.draft(
                *(model.handle, store.handle, words_of([one]), width, [good.handle]),
                [DraftBudget(3, 3)],
                masks={0: mask},
                mask_bytes=size,
            )
    for wrong in (np.empty((2, 2)), np.empty((2, 2), np.float32).T[:1]):
        with pytest.raises(ModelError, match="cannot read"):
            Room(wrong)
    sequence = SequenceState("r", asked.request, 0, Detokenizer(None, (), ()), good, [1])
    with pytest.raises(ModelError, match="a draft's length is 4294967297"):
        model.draft(
            [one],
            store,
            [DraftInput(sequence, DraftBudget(2**32 + 1, 2**32 + 1))],
            NativeNoise(width, found),
        )
