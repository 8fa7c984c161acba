"""A drafter that looks at the last tokens only: the same output, for less work."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
from typer.testing import CliRunner

from outrider import LLM, SamplingParams
from outrider.base.config import PRESETS, EngineConfig
from outrider.base.types import Draft, DraftBudget, Request, Scheduled, SequenceState
from outrider.bench.offline import Bench, BenchOptions
from outrider.bench.workload import Workload
from outrider.cli import app
from outrider.drafters.base import DrafterContext
from outrider.drafters.model import ModelDrafter
from outrider.drafters.ngram import NgramSpec
from outrider.errors import ConfigError, ModelError
from outrider.models.native import NativeTransformer
from outrider.models.rows import Segment
from outrider.models.transformer import Transformer
from outrider.native.choice import library
from outrider.sampling.pipeline import Logits
from outrider.sampling.shared_noise import SharedNoise
from tests.support.loading import native_model, opened, torch_model
from tests.support.tiny import MakeCheckpoint

CPU = "cpu"
Paths: TypeAlias = Transformer | NativeTransformer
Run = Callable[[Sequence[int], int, int], Logits]
LENGTH = 150
PARAMS = SamplingParams(temperature=0.8, max_tokens=20, seed=5, ignore_eos=True)
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
WAYS = [
    pytest.param(GREEDY, id="greedy"),
    pytest.param(PARAMS, id="sampled", marks=pytest.mark.engine),
]


def ids_of(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(3, 128) for _ in range(length)]


PROMPTS = [ids_of(LENGTH), ids_of(7, 1), ids_of(61, 2)]


@pytest.fixture(scope="module")
def target(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture(scope="module")
def drafter(make_checkpoint: MakeCheckpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("drafter"), "llama", num_hidden_layers=3)


def windowed(folder: Path, place: Path, window: int) -> Path:
    """The same weights under a config that has the window: a Mistral's."""
    copy = Path(shutil.copytree(folder, place))
    config = json.loads((copy / "config.json").read_text(encoding="utf-8"))
    config |= {"model_type": "mistral", "sliding_window": window}
    config["architectures"] = ["MistralForCausalLM"]
    (copy / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return copy


def open_llm(target: Path, drafter: Path | str | None, **options: Any) -> LLM:
    given: dict[str, Any] = {
        "dtype": "float32",
        "max_num_batched_tokens": 32,
        "num_speculative_tokens": 4,
    }
    given |= options
    return LLM(target, drafter=drafter, max_model_len=256, **given)


def said(llm: LLM, params: SamplingParams) -> list[list[int]]:
    return [out.outputs[0].token_ids for out in llm.generate(PROMPTS, params)]


def drafts(llm: LLM, params: SamplingParams, monkeypatch: pytest.MonkeyPatch) -> list[Draft]:
    """Every draft while the prompts run one after the other, twice over."""
    found: list[Draft] = []
    propose = llm.engine.drafter.propose

    def noted(*args: Any) -> Draft:
        found.append(propose(*args))
        return found[-1]

    monkeypatch.setattr(llm.engine.drafter, "propose", noted)
    for prompt in PROMPTS * 2:
        llm.generate([prompt], params)
    return found


@pytest.mark.parametrize("params", WAYS)
@pytest.mark.parametrize("window", [1, 5, 40])
def test_the_output_is_plain_decodings(
    target: Path, drafter: Path, window: int, params: SamplingParams
) -> None:
    plain = said(open_llm(target, None), params)
    for side in (drafter, "ngram"):
        assert said(open_llm(target, side, drafter_window=window), params) == plain


def test_what_a_window_lets_through_is_the_configs(
    target: Path, drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = windowed(drafter, tmp_path / "own", 9)
    given = drafts(open_llm(target, drafter, drafter_window=9), PARAMS, monkeypatch)
    assert given == drafts(open_llm(target, own), PARAMS, monkeypatch)
    assert given != drafts(open_llm(target, drafter), PARAMS, monkeypatch)


@pytest.mark.parametrize("params", WAYS)
def test_what_no_draft_depends_on_is_not_run(
    target: Path, drafter: Path, params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int] = []

    def counted(llm: LLM) -> LLM:
        model = llm.engine.drafter.model
        assert model is not None
        draft = model.draft

        def count(segments: list[Segment], *args: Any) -> Any:
            rows.append(sum(len(segment.tokens) for segment in segments))
            return draft(segments, *args)

        monkeypatch.setattr(model, "draft", count)
        return llm

    # Whole prompts at once, or the drafter would need some steps to catch up.
    options = {"drafter_window": 6, "max_num_batched_tokens": 256, "enable_prefix_caching": False}
    llm = counted(open_llm(target, drafter, **options))
    quick = drafts(llm, params, monkeypatch)
    run, reach = sum(rows), 1 + 3 * 5
    rows.clear()
    full = counted(open_llm(target, drafter, **options))
    assert isinstance(full.engine.drafter, ModelDrafter)
    assert full.engine.drafter._reach == reach
    full.engine.drafter._reach = None
    assert drafts(full, params, monkeypatch) == quick
    # The first draft follows the first token of the output.
    assert sum(rows) - run == 2 * sum(max(0, len(p) + 1 - reach) for p in PROMPTS)


def open_window(
    path: str, folder: Path, dtype: str, window: int
) -> Transformer | NativeTransformer:
    if path == "torch":
        return torch_model(folder, dtype, CPU, 256, None, window)
    step = library()
    if step is None:
        pytest.skip("the native step is off")
    return native_model(step, folder, dtype, 256, None, window)


def runner(model: Paths) -> Run:
    """Runs tokens from a position on over pages of 8, the last so many rows to logits."""
    store, pages = model.new_store(40, 8), [3, 7, 4, *range(8, 39)]

    def run(tokens: Sequence[int], start: int, wanted: int) -> Logits:
        segment = Segment(tokens, start, pages, wanted, LENGTH)
        logits = model.run([segment], store).logits
        assert logits is not None
        return logits

    return run


@pytest.mark.engine
@pytest.mark.parametrize("window", [1, 2, 20])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("path", ["torch", "native"])
def test_a_row_depends_on_its_reach_alone(
    drafter: Path, path: str, dtype: str, window: int
) -> None:
    model = open_window(path, drafter, dtype, window)
    reach = 1 + 3 * (window - 1)
    assert model.shape.reach == reach
    run, ids = runner(model), PROMPTS[0]
    whole = run(ids, 0, 1)
    run(ids_of(LENGTH, 9), 0, 1)  # what lies before is another's now
    assert np.array_equal(run(ids[-reach:], LENGTH - reach, 1), whole)
    if reach > 1:
        run(ids_of(LENGTH, 9), 0, 1)
        assert not np.array_equal(run(ids[1 - reach :], LENGTH - reach + 1, 1), whole)


@pytest.mark.engine
@pytest.mark.parametrize("path", ["torch", "native"])
def test_what_is_no_number_harms_no_row_beyond_its_reach(drafter: Path, path: str) -> None:
    model = open_window(path, drafter, "float32", 3)
    native = isinstance(model, NativeTransformer)
    embedding = model.embedding if native else model.weights.embedding
    assert embedding is not None
    embedding[1] = float("nan")
    run = runner(model)
    logits = run([1, *ids_of(20)], 0, 21)
    assert np.isnan(logits[:7]).all()
    # The native step marks every row that this made no number, the last of which is row 6.
    assert np.isfinite(logits[13:]).all()
    assert np.isnan(run([5], 6, 1)).all()
    assert np.isfinite(run([5], 21, 1)).all()


def test_the_narrower_window_counts(drafter: Path, tmp_path: Path) -> None:
    own = windowed(drafter, tmp_path / "own", 9)
    for folder, window, expected in (
        (drafter, None, None), (drafter, 4, 4), (own, None, 9), (own, 4, 4), (own, 12, 9),
    ):  # fmt: skip
        found = opened(folder, window).architecture
        assert found is not None
        assert found.windows == (expected,) * 3
        assert found.reach == (None if expected is None else 1 + 3 * (expected - 1))


def test_prompt_lookup_has_the_window() -> None:
    tokens = [1, 2, *range(10, 20), 1, 2]
    request = Request("a", tuple(tokens), SamplingParams(), 0)
    sequence = SequenceState("a/0", request, 0, text=None, pipeline=None, tokens=tokens)  # type: ignore[arg-type]
    budget = DraftBudget(1, 1)
    batch = [Scheduled(sequence, len(tokens) - 1, 1, True, "ngram", budget)]
    for window, expected in ((None, [10]), (12, [10]), (11, [])):
        config = EngineConfig(drafter_window=window)
        context = DrafterContext(None, None, config, 64)  # type: ignore[arg-type]
        made = NgramSpec().make(context)
        (nodes,) = made.propose(batch, [budget], SharedNoise(32))
        assert nodes.tokens == expected


def test_a_preset_is_a_window_for_each_kind() -> None:
    config = EngineConfig(preset="long-context")
    assert {name: config.window_of(name) for name in ("model", "ngram", "none")} == {
        **PRESETS["long-context"].windows,
        "none": None,
    }
    assert EngineConfig(preset="long-context", drafter_window=7).window_of("model") == 7
    assert EngineConfig().window_of("model") is None


@pytest.mark.parametrize("window", [0, -1, True, 1.5, "8"])
def test_a_window_that_is_none_is_refused(window: Any) -> None:
    with pytest.raises(ConfigError, match=r"drafter_window is .*; give 1 to 16777216"):
        EngineConfig(drafter_window=window)


def test_a_preset_that_is_none_is_refused() -> None:
    with pytest.raises(
        ConfigError, match="preset is 'long'; give one of chat, code, agents, long-context"
    ):
        EngineConfig(preset="long")


def test_a_drafter_of_transformers_cannot_have_one(
    target: Path, make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    other = make_checkpoint(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match="only native models can be given a window"):
        open_llm(target, other, preset="long-context")


def test_the_commands_take_both(tiny_llama: Path, tiny_drafter: Path) -> None:
    def run(*args: object) -> Any:
        options = ("--drafter", tiny_drafter, "--temperature", 0, "--max-tokens", 12)
        given = ["generate", tiny_llama, "--prompt", "def greet(name):", *options, *args]
        return CliRunner().invoke(app, [str(a) for a in given])

    plain = run()
    assert plain.exit_code == 0
    assert run("--drafter-window", 2).stdout == run("--preset", "long-context").stdout
    assert run("--drafter-window", 2).stdout == plain.stdout
    bad = run("--drafter-window", 0)
    assert (bad.exit_code, bad.stderr.count("\n")) == (2, 1)
    assert "drafter_window is 0; give 1 to 16777216 tokens" in bad.stderr
    assert "preset is 'x'" in run("--preset", "x").stderr
    chosen = {"drafter_window": 3, "preset": "long-context"}
    options = BenchOptions(model=tiny_llama, target="tiny", max_tokens=4, engine=chosen)
    config = Bench(options, Workload.of_prompts("code", ["def greet(name):"])).plain.config
    assert (config.drafter_window, config.preset) == (3, "long-context")
