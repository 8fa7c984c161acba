"""The benchmark's report, what it says of repeats, and the telling of ties from violations."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from benchmarks import host
from outrider import LLM, SamplingParams, pocket
from outrider.audit.ties import Difference, compare
from outrider.base.types import Origin
from outrider.bench import report as reporting
from outrider.bench.offline import Bench, BenchOptions, drafter_names
from outrider.bench.record import Pass, run_all
from outrider.bench.repeats import DecodeStep, fresh_acceptance_length, repeats, steps
from outrider.bench.workload import Workload
from outrider.cli import app, beliefs
from outrider.errors import ConfigError, ModelError
from outrider.models.base import Output, Store
from outrider.models.rows import Segment
from outrider.native.choice import library
from outrider.sampling.noise import gumbel
from outrider.sampling.pipeline import Logits
from tests.support.pages import check_engine

A, B, P = Origin.ACCEPTED, Origin.BONUS, Origin.PLAIN
CPUS = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
PROMPTS = ["def greet(name):", "for word in ("]
KEYS = {
    "drafter": str,
    "target": str,
    "num_speculative_tokens": int,
    "temperature": float,
    "batch_size": int,
    "sequence_length": int,
    "num_samples": int,
    "tokens_per_second": float,
    "latency_per_token_ms": float,
    "speedup": float,
    "acceptance_rate": float,
    "acceptance_length": float,
    "acceptance_by_position": list,
    "peak_memory_bytes": int,
    "utilisation": float,
    "outputs_identical": bool,
    "numerical_ties": int,
    "workload": str,
    "structured_outputs": bool,
    "categories": dict,
    "tokens_per_second_interval": list,
    "latency_per_token_ms_interval": list,
    "speedup_interval": list,
}
FIGURES = ("tokens_per_second", "latency_per_token_ms", "speedup")
ACCEPTANCE = ("acceptance_rate", "acceptance_length", "acceptance_by_position")


def bench(model: Path, *args: object) -> Result:
    small = ("--max-tokens", 6, "--num-prompts", 2, "--dtype", "float32")
    return CliRunner().invoke(app, [str(a) for a in ("bench", "--model", model, *small, *args)])


@pytest.fixture
def _prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pocket, "prompts", lambda: PROMPTS)


@pytest.mark.usefixtures("_prompts")
def test_the_json_keeps_its_contract(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    chosen = f"{tiny_llama},ngram"
    args = ("--drafter", chosen, "--num-speculative-tokens", "2,3", "--temperature", "0,1")
    done = bench(tiny_llama, *args, "--out", file)
    assert done.exit_code == 0, done.output
    assert "speedup" in done.stdout
    assert "without steps that continue an earlier 4-gram" in done.stdout
    assert done.stderr == ""
    report = json.loads(file.read_text())
    for key in ("cpu", "cores", "python", "torch", "platform", "dtype", "date"):
        assert report["machine"][key]
    assert report["machine"]["dtype"] == "float32"
    own = library()
    assert report["machine"]["instruction_set"] == (own.isa if own else "off")
    assert report["rounds"] == 7
    assert report["intervals"]["confidence"] == pytest.approx(0.984, abs=1e-3)
    runs = report["runs"]
    order = [(r["temperature"], r["drafter"], r["num_speculative_tokens"]) for r in runs]
    variants = [("none", 0), *((d, k) for d in (str(tiny_llama), "ngram") for k in (2, 3))]
    assert order == [(t, d, k) for t in (0, 1) for d, k in variants]
    for run in runs:
        for key, kind in KEYS.items():
            # ngram may have found nothing to draft, and then has no ratios.
            ratio = key in ACCEPTANCE[:2] and run["drafter"] == "ngram"
            plain = key in ACCEPTANCE and run["drafter"] == "none"
            if plain or (ratio and run[key] is None):
                assert run[key] is None
            else:
                assert isinstance(run[key], kind), key
        assert run["outputs_identical"]
        assert run["numerical_ties"] == 0
        assert (run["batch_size"], run["num_samples"]) == (1, 2)
        assert run["tokens_per_second"] == pytest.approx(1000 / run["latency_per_token_ms"])
        assert run["tokens_per_second"] > 0
        for key in FIGURES:
            low, high = run[f"{key}_interval"]
            assert low <= run[key] <= high
        assert run["speedup_interval"] == [f(run["speedup_by_round"]) for f in (min, max)]
        assert run["replay"] is None
        assert run["peak_memory_bytes"] > 2**20
        assert run["utilisation"] > 0
        assert len(run["speedup_by_round"]) == 7
        if run["drafter"] == "none":
            assert run["speedup"] == 1.0
        if run["drafter"] == str(tiny_llama):  # its own drafter: always right
            k = run["num_speculative_tokens"]
            assert run["acceptance_rate"] == 1.0
            assert run["acceptance_by_position"] == [1.0] * k
            assert 1 < run["acceptance_length"] <= 1 + k


@pytest.mark.usefixtures("_prompts")
def test_json_on_stdout_is_alone_there(tiny_llama: Path, tiny_drafter: Path) -> None:
    args = ("--drafter", "ngram", "--drafter", tiny_drafter, "--temperature", 0.7)
    done = bench(tiny_llama, *args, "--batch-size", "1,2", "--json")
    assert done.exit_code == 0, done.output
    runs = json.loads(done.stdout)["runs"]
    names = ["none", "ngram", str(tiny_drafter)]
    assert [(r["batch_size"], r["drafter"]) for r in runs] == [
        (b, n) for b in (1, 2) for n in names
    ]
    assert all(r["outputs_identical"] for r in runs)
    assert "speedup" in done.stderr


@pytest.mark.usefixtures("_prompts")
def test_explain_says_what_the_engine_believes(tiny_llama: Path, tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    args = ("--drafter", "auto,ngram", "--temperature", "0,1", "--out", file)
    done = bench(tiny_llama, *args, "--explain")
    assert done.exit_code == 0, done.output
    runs = json.loads(file.read_text())["runs"]
    assert [r["drafter"] for r in runs if r["controller"] is not None] == ["auto", "auto"]
    said = " ".join(done.stdout.split())
    for run in (run for run in runs if run["controller"] is not None):
        known, temperature = run["controller"], f"{run['temperature']:g}"
        expected = f"{known['tokens_per_second']:.0f} tokens/s expected, plain decoding"
        assert f"auto, T = {temperature}, batch 1, K up to 4: {expected}" in said
        assert all(name in said for name in known["draft_ms"])
        assert f"1: {known['verify_ms']['1']:.2f}, 2: {known['verify_ms']['2']:.2f}" in said
    assert said.count("chosen: ") >= said.count("pauses: ") == 2
    done = bench(tiny_llama, "--drafter", "ngram", "--temperature", "0", "--explain")
    assert "no drafter left the choices to the engine; --drafter auto does." in done.stdout


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"method": "none", "depth": 0, "sequences": 1}, "plain decoding, for 1 sequence"),
        ({"method": "suffix", "depth": 1, "sequences": 2}, "suffix, 1 token deep, for 2 sequences"),
    ],
)
def test_a_choice_is_said_in_words(found: dict[str, Any], said: str) -> None:
    assert beliefs.choice(found) == said


def test_pauses_are_said_in_words() -> None:
    assert beliefs.pauses({"pauses": {}}) == "none"
    said = beliefs.pauses({"pauses": {"1": 192, "4": 7}})
    assert said.endswith("for 192 steps from 1 sequence on, 7 steps from 4 sequences on")


@pytest.mark.usefixtures("_prompts")
def test_a_violation_fails_and_a_tie_is_counted(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Difference(9, (1, 2), 0.5, 0.0, False)

    def parted(llm: LLM, prompt: list[int], params: SamplingParams, *_: Any, seed: int) -> Any:
        return found if params.greedy and seed == 1 else None

    monkeypatch.setattr(reporting, "compare", parted)
    done = bench(tiny_llama, "--drafter", "ngram", "--temperature", "0,1", "--json")
    assert done.exit_code == 1
    assert done.stderr.endswith("more than numerical ties.\n")
    runs = json.loads(done.stdout)["runs"]
    assert [r["outputs_identical"] for r in runs] == [False, False, True, True]
    assert [r["numerical_ties"] for r in runs] == [0, 0, 0, 0]
    found = replace(found, gap=0.0, is_tie=True)
    done = bench(tiny_llama, "--drafter", "ngram", "--temperature", "0,1", "--json")
    assert done.exit_code == 0
    runs = json.loads(done.stdout)["runs"]
    assert all(r["outputs_identical"] for r in runs)
    assert [r["numerical_ties"] for r in runs] == [1, 1, 0, 0]


def test_rounds_turn_the_order_and_keep_conditions_together(tiny_llama: Path) -> None:
    options = BenchOptions(
        model=tiny_llama, target="tiny", drafters=("ngram",), lengths=(1, 2),
        temperatures=(0.0, 1.0), batch_sizes=(1, 2), max_tokens=4,
    )  # fmt: skip
    engines = Bench(options, Workload.of_prompts("code", PROMPTS))
    orders = [list(engines.order(i)) for i in range(12)]
    assert all(sorted(map(str, o)) == sorted(map(str, engines.cells)) for o in orders)
    assert len({o[0] for o in orders}) == 12
    for order in orders:
        for i in range(0, 12, 3):
            assert len({c.conditions for c in order[i : i + 3]}) == 1


def test_fresh_engines_have_learned_nothing_yet(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = BenchOptions(
        model=tiny_llama, target="tiny", drafters=("auto",), temperatures=(0.0,), max_tokens=4,
        rounds=2, fresh=True,
    )  # fmt: skip
    engines = Bench(options, Workload.of_prompts("code", PROMPTS))
    seen: list[LLM] = []

    def watched(llm: LLM, *args: object) -> Pass:
        assert llm.engine.counts.steps == 0
        assert llm.engine.model is engines.plain.engine.model
        seen.append(llm)
        return run_all(llm, *args)

    monkeypatch.setattr("outrider.bench.offline.run_all", watched)
    engines.run(lambda done, total: None)
    assert len({*map(id, seen)}) == 2 * (1 + options.rounds)


@pytest.mark.skipif(len(CPUS) < 2, reason="one CPU, or no affinity on this system")
@pytest.mark.skipif(library() is None, reason="the native step is off")
def test_cpus_of_a_drafter_are_taken_from_engines_that_have_it_alone(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    own = {"drafter_cpus": str(CPUS[-1]), "draft_ahead": 2}
    options = BenchOptions(
        model=tiny_llama, target="tiny", drafters=(str(tiny_drafter), "ngram"), max_tokens=4,
        engine=own,
    )  # fmt: skip
    workload = Workload.of_prompts("code", PROMPTS)
    cpus = {
        n: llm.engine.config.drafter_cpus for n, llm in Bench(options, workload).engines.items()
    }
    assert cpus == {"none": None, str(tiny_drafter): own["drafter_cpus"], "ngram": None}
    with pytest.raises(ConfigError, match="has no passes of a checkpoint of its own"):
        Bench(replace(options, drafters=("ngram",)), workload)


def test_the_models_own_drafter_is_the_default(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    assert list(drafter_names(BenchOptions(model=tiny_llama, target="t"))) == ["ngram", "auto"]
    shutil.copytree(tiny_llama, tmp_path / "m")
    shutil.copytree(tiny_drafter, tmp_path / "m" / "drafter")
    options = BenchOptions(model=tmp_path / "m", target="t")
    assert list(drafter_names(options)) == ["model", "ngram", "auto"]
    bundled = BenchOptions(model="pocket", target="t")
    heads = ["eagle3", "medusa"] if library() else []  # which nothing else runs
    assert drafter_names(bundled) == [*heads, "model", "ngram", "auto"]
    half = replace(bundled, engine={"dtype": "float16"})
    assert drafter_names(half) == ["model", "ngram", "auto"]
    only = replace(options, drafters=("none", "auto"))
    assert list(drafter_names(only)) == ["auto"]


def test_steps_are_rebuilt_from_origins() -> None:
    assert steps([P, A, A, B, B, P, A]) == [
        DecodeStep(0, 0, False),
        DecodeStep(1, 2, True),
        DecodeStep(4, 0, True),
        DecodeStep(5, 0, False),
        DecodeStep(6, 1, True),
    ]
    assert steps([]) == []


def test_what_was_there_before_is_a_repeat() -> None:
    assert repeats([1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6]) == [False] * 4 + [True, False]
    assert repeats([1], [1, 1, 1, 1, 1]) == [False] * 4 + [True]
    prompt, output = [1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 6, 7]
    # The second step begins with the 5 that followed 1 2 3 4 before; the first does not.
    origins = [P, A, A, B, A, A, B]
    assert fresh_acceptance_length([(prompt, output, origins)]) == 3.0
    origins = [P, A, A, B, A, B, B]
    assert fresh_acceptance_length([(prompt, output, origins)]) == (1 + 2 / 2)
    assert fresh_acceptance_length([(prompt, output, [P] * 7)]) is None


@contextmanager
def planted(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, change: Callable[[Logits, int], None]
) -> Iterator[None]:
    """Let ``change(logits, rows)`` alter every forward's logits."""
    forward = llm.engine.model.run

    def altered(segments: Sequence[Segment], store: Store) -> Output:
        output = forward(segments, store)
        if output.logits is None:
            return output
        logits = output.logits.copy()
        change(logits, sum(len(s.tokens) + len(s.nodes) for s in segments))
        return Output(logits, output.hidden)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model, "run", altered)
        yield


@pytest.fixture(scope="module")
def llm(tiny_llama: Path) -> LLM:
    return LLM(tiny_llama, drafter=None, dtype="float32", max_num_seqs=1)


PROMPT = [40, 41, 42, 43, 44, 45, 46]
OUTPUT = [50, 51, 52]


def judge(llm: LLM, params: SamplingParams, tokens: tuple[int, int], seed: int = 5) -> Difference:
    expected, got = ([*OUTPUT, token, 60] for token in tokens)
    found = compare(llm, PROMPT, params, expected, got, seed=seed)
    assert found is not None
    assert (found.position, found.tokens) == (len(PROMPT) + len(OUTPUT), tokens)
    return found


def gap_of(gap: float, noise: float) -> Callable[[Logits, int], None]:
    """Token 8 leads, and 9 is ``gap`` behind, or less by ``noise`` with an odd number of rows."""

    def change(logits: Logits, rows: int) -> None:
        logits[:] = -5.0
        logits[:, 8] = 4.0
        logits[:, 9] = 4.0 - gap + noise * (rows % 2)

    return change


@pytest.mark.parametrize(("gap", "noise", "tie"), [(0.2, 0.15, True), (0.3, 0.1, False)])
def test_a_tie_is_a_gap_within_what_row_counts_move(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, gap: float, noise: float, tie: bool
) -> None:
    with planted(llm, monkeypatch, gap_of(gap, noise)):
        found = judge(llm, SamplingParams(temperature=0), (8, 9))
    assert found.measured == pytest.approx(noise, abs=1e-5)
    # Plain decoding has one row a step, an odd number.
    assert found.gap == pytest.approx(gap - noise, abs=1e-5)
    assert found.is_tie == tie


def test_a_real_difference_is_a_violation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    for params in (SamplingParams(temperature=0), SamplingParams(temperature=1)):
        assert not judge(llm, params, (70, 80)).is_tie
    with planted(llm, monkeypatch, gap_of(0.3, 0.0)):
        found = judge(llm, SamplingParams(temperature=0), (8, 9))
    assert (found.gap, found.measured, found.is_tie) == (pytest.approx(0.3), 0.0, False)
    with planted(llm, monkeypatch, gap_of(0.0, 0.1)):
        # Neither of the two is what the target says.
        assert not judge(llm, SamplingParams(temperature=0), (10, 11)).is_tie


def test_the_gap_is_measured_under_the_shared_noise(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    g = gumbel([5], [0], [len(PROMPT) + len(OUTPUT)], 320)[0]

    def change(logits: Logits, rows: int) -> None:
        logits[:] = -50.0
        logits[:, 8] = -float(g[8])
        logits[:, 9] = 0.01 * (rows % 2) - 0.005 - float(g[9])

    with planted(llm, monkeypatch, change):
        assert judge(llm, SamplingParams(temperature=1), (8, 9)).is_tie
        assert not judge(llm, SamplingParams(temperature=1), (8, 9), seed=6).is_tie
        assert not judge(llm, SamplingParams(temperature=0.3), (8, 9)).is_tie


def test_a_token_on_the_edge_of_a_mask_is_a_tie_if_it_flips(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(logits: Logits, rows: int) -> None:
        logits[:] = -50.0
        logits[:, 8] = 10.0
        logits[:, 9] = 10.0 + 1e-3 * (rows % 2) - 0.5e-3

    # top_k=1 keeps one of the two, by turns.
    params = SamplingParams(temperature=1, top_k=1)
    with planted(llm, monkeypatch, change):
        assert judge(llm, params, (8, 9)).is_tie
        assert judge(llm, params, (8, 10)).gap == float("inf")


def test_equal_outputs_and_outputs_of_unequal_length(llm: LLM) -> None:
    params = SamplingParams(temperature=0)
    assert compare(llm, PROMPT, params, OUTPUT, OUTPUT, seed=0) is None
    found = compare(llm, PROMPT, params, OUTPUT, OUTPUT[:2], seed=0)
    assert found is not None
    assert (found.position, found.tokens, found.is_tie) == (9, (52, None), False)


def test_replays_agree_with_the_engine_and_leave_it_alone(llm: LLM) -> None:
    params = SamplingParams(temperature=0.7, seed=11, max_tokens=20, ignore_eos=True)
    output = llm.generate(PROMPT, params)[0].outputs[0].token_ids
    found = compare(llm, PROMPT, params, output, [*output[:12], (output[12] + 1) % 320], seed=11)
    assert found is not None
    assert found.gap > found.measured
    # fp32 is row-invariant here, so the replays measure nothing at all.
    assert found.measured == 0.0
    check_engine(llm.engine)
    assert not llm.engine.has_work


def test_host_time_is_a_step_without_its_native_calls(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    if library() is None:
        with pytest.raises(ModelError, match="native step is off"):
            host.measure(str(tiny_llama), PROMPTS, [1], 2, 6, 1, 0.0)
        return
    folder = shutil.copytree(tiny_llama, tmp_path / "pair")
    shutil.copytree(tiny_drafter, folder / "drafter")
    runs = host.measure(str(folder), PROMPTS, [1, 3], 2, 6, 1, ["greedy"])
    modes = ("plain", "ngram", "suffix", "prediction", "model", "model+suffix", "auto")
    places = [(mode, batch) for batch in (1, 3) for mode in modes]
    assert [(run["mode"], run["batch_size"]) for run in runs] == places
    for run in runs:
        assert run["host_us"] > run["around_us"] > 0
        assert run["native_us"] > 0
        assert 1 <= run["tokens_per_step"] <= 3
        assert (run["controller_us"] > 0) == (run["mode"] == "auto")
    plain = runs[0]
    assert (plain["steps"], plain["tokens_per_step"]) == (4, 1)  # no first step, no last one


def test_host_time_needs_steps(tiny_llama: Path) -> None:
    if library() is not None:
        with pytest.raises(ConfigError, match="more tokens"):
            host.measure(str(tiny_llama), PROMPTS, [1], 2, 1, 1, ["greedy"])
