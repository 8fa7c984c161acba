"""The race of settings against an oracle of known speeds, and what a tuning says to engines."""

from __future__ import annotations

import random
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.base.types import Counts
from outrider.bench.intervals import student
from outrider.bench.race import (
    FEWEST_ROUNDS,
    PLAIN_SETTING,
    Race,
    RaceRun,
    Setting,
    hopeful,
    promises,
    race,
    sample,
)
from outrider.bench.tune import tune
from outrider.bench.tuned import Tuned, TuningResult
from outrider.bench.workload import Workload
from outrider.engine.control.schedules import limit, sglang, tensorrt, vllm
from outrider.errors import ConfigError, OutriderError
from outrider.ops.deploy.render import render
from outrider.ops.deploy.spec import parse

Measure = Callable[[Setting, int], RaceRun]
LENGTHS = range(1, 11)
STEPS = 1000
PLAIN = 1000.0
"""Tokens per second."""


class Oracle:
    """Settings of known speed: drafters by chance per token, seconds a row and a drafted token.

    A run's time has noise that all runs of a round share, and noise of its own.
    """

    def __init__(
        self,
        drafters: Mapping[str, tuple[float, float, float]],
        seed: int = 0,
        shared: float = 0.0,
        own: float = 0.0,
    ) -> None:
        self.drafters, self.own = drafters, own
        self.random = random.Random(seed)
        self.shifts = [self.random.gauss(0, shared) for _ in range(99)]
        self.calls: list[tuple[Setting, int]] = []

    def counts(self, setting: Setting) -> Counts:
        """Return what came of the drafts of ``STEPS`` steps, in the proportions expected."""
        chance, length = self.drafters.get(setting.drafter, (0, 0, 0))[0], setting.length
        counts = Counts()
        for accepted in range(length + 1):
            share = chance**accepted * (1 - chance if accepted < length else 1)
            for _ in range(round(STEPS * share)):
                counts.record(length, length, accepted, accepted + 1)
        return counts

    def speed(self, setting: Setting) -> float:
        """Return the true speed, tokens per second."""
        if not setting.length:
            return PLAIN
        _, row, draft = self.drafters[setting.drafter]
        counts = self.counts(setting)
        return counts.emitted / counts.steps / (1 / PLAIN + (row + draft) * setting.length)

    def __call__(self, setting: Setting, number: int) -> RaceRun:
        self.calls.append((setting, number))
        counts = self.counts(setting)
        if not setting.length:
            counts.record(0, 0, 0, 1)
        noise = exp(self.shifts[number] + self.random.gauss(0, self.own))
        return RaceRun(counts.emitted, counts.emitted / self.speed(setting) * noise, counts)


DRAFTERS = {
    "model": (0.8, 2e-5, 1e-4),
    "ngram": (0.5, 2e-5, 1e-5),
    "suffix": (0.6, 2e-5, 2e-5),
}
FAMILIES = dict.fromkeys(DRAFTERS, LENGTHS)
ALL = [PLAIN_SETTING, *(Setting(name, k) for name in DRAFTERS for k in LENGTHS)]


def test_two_lengths_promise_every_length_between() -> None:
    oracle = Oracle(DRAFTERS)
    for name in DRAFTERS:
        found = promises({k: oracle(Setting(name, k), 0) for k in (1, 10)}, LENGTHS)
        for length, speed in found.items():
            assert speed == pytest.approx(oracle.speed(Setting(name, length)), rel=0.01)


def test_a_length_of_its_own_promises_what_it_ran() -> None:
    run = Oracle(DRAFTERS)(Setting("model", 4), 0)
    assert promises({4: run}, [4]) == pytest.approx({4: run.speed})


def test_a_step_that_costs_more_from_a_length_on_shows_in_promises() -> None:
    oracle = Oracle(DRAFTERS)
    runs = {k: oracle(Setting("model", k), 0) for k in (1, 4, 7, 10)}
    runs[10] = runs[10]._replace(seconds=2 * runs[10].seconds)
    found = promises(runs, LENGTHS)
    for length in range(1, 8):
        assert found[length] == pytest.approx(oracle.speed(Setting("model", length)), rel=0.01)
    assert found[10] == pytest.approx(oracle.speed(Setting("model", 10)) / 2, rel=0.01)


def test_lookups_that_draft_less_than_they_may_promise_what_they_draft() -> None:
    counts = Counts()
    for _ in range(100):
        counts.record(2, 2, 1, 2)
        counts.record(0, 0, 0, 1)
    runs = {k: RaceRun(300, 0.3, counts) for k in (2, 8)}
    assert promises(runs, [2, 5, 8]) == pytest.approx({2: 1000, 5: 1000, 8: 1000})


@pytest.mark.parametrize(
    ("lengths", "few"),
    [
        (range(1, 11), [1, 4, 7, 10]),
        ([3], [3]),
        ([1, 8], [1, 8]),
        ([2, 4, 6, 8, 12], [2, 4, 8, 12]),
    ],
)
def test_the_ends_and_some_between_are_screened(lengths: Sequence[int], few: list[int]) -> None:
    assert sample(lengths) == few


def test_without_noise_the_best_wins_after_the_fewest_rounds() -> None:
    oracle = Oracle(DRAFTERS)
    found = race(oracle, FAMILIES)
    best = max(ALL, key=oracle.speed)
    assert found.winner == best
    assert {len(runs) for runs in found.runs.values()} == {FEWEST_ROUNDS}
    assert found.loss == 0
    assert len(oracle.calls) < len(ALL) * FEWEST_ROUNDS * 0.6
    assert [s for s, number in oracle.calls if not number] == list(found.screened)


def test_settings_that_are_surely_slower_leave_the_race() -> None:
    found = race(Oracle(DRAFTERS, own=0.03, shared=0.1, seed=4), FAMILIES, rounds=12)
    lengths = {each: len(runs) for each, runs in found.runs.items()}
    assert max(lengths.values()) > FEWEST_ROUNDS
    left = [each for each in found.runs if each not in found.contenders]
    assert left
    assert all(lengths[each] < max(lengths.values()) for each in left if each != PLAIN_SETTING)


def test_noise_makes_a_race_long_and_its_claim_weak() -> None:
    quiet, noisy = (race(Oracle(DRAFTERS, own=own, seed=1), FAMILIES) for own in (0.005, 0.2))
    assert sum(map(len, noisy.runs.values())) > sum(map(len, quiet.runs.values()))
    assert noisy.loss > 0.03 >= quiet.loss


def test_what_all_runs_of_a_round_share_is_no_noise() -> None:
    found = race(Oracle(DRAFTERS, shared=0.3, own=0.001, seed=3), FAMILIES)
    assert found.loss <= 0.01
    assert len(found.runs[found.winner]) == FEWEST_ROUNDS


def test_plain_decoding_wins_where_drafts_cost_more_than_they_bring() -> None:
    found = race(Oracle({"model": (0.3, 2e-4, 1e-3)}, own=0.01), {"model": LENGTHS})
    assert found.winner == PLAIN_SETTING
    assert list(found.runs) == [PLAIN_SETTING]
    assert found.loss == 0


def test_settings_that_nothing_else_tells_of_are_run_themselves() -> None:
    tree = Setting("model", 4, nodes=12)
    oracle = Oracle({"model": (0.95, 1e-6, 1e-6)})
    found = race(oracle, {}, [tree])
    assert (found.winner, set(found.runs)) == (tree, {PLAIN_SETTING, tree})


@pytest.mark.parametrize("own", [0.01, 0.04])
def test_the_claim_holds_in_19_of_20_races(own: float) -> None:
    broken, lost = 0, 0
    for seed in range(60):
        rng = random.Random(seed)
        drafters = {
            name: (min(0.95, chance + rng.gauss(0, 0.08)), row * rng.random() * 3, draft)
            for name, (chance, row, draft) in DRAFTERS.items()
        }
        oracle = Oracle(drafters, seed, 0.05, own)
        found = race(oracle, FAMILIES)
        speeds = {each: oracle.speed(each) for each in found.runs}
        broken += max(speeds.values()) / speeds[found.winner] - 1 > found.loss
        lost += oracle.speed(found.winner) < 0.97 * max(map(oracle.speed, ALL))
    assert broken <= 3
    assert lost <= 3


def test_lengths_of_one_drafter_do_not_crowd_out_the_others() -> None:
    promised = {Setting("suffix", k): 100.0 + k for k in LENGTHS}
    promised |= {Setting("model", k): 90.0 + k for k in LENGTHS}
    promised |= {PLAIN_SETTING: 105, Setting("ngram", 1): 80.0, Setting("auto", 10): 100.0}
    names = [str(each) for each in hopeful(promised)]
    assert names == [
        "suffix K=10",
        "suffix K=9",
        "suffix K=8",
        "model K=10",
        "auto K=10",
        "model K=9",
    ]


def test_progress_counts_runs() -> None:
    said: list[tuple[int, int]] = []
    oracle = Oracle(DRAFTERS)
    race(oracle, FAMILIES, told=lambda done, total: said.append((done, total)))
    assert [done for done, _ in said] == list(range(1, len(oracle.calls) + 1))
    assert all(done <= total for done, total in said)


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 4.303), (4, 2.776), (6, 2.447), (12, 2.179), (60, 2.0)]
)
def test_students_quantile(freedom: int, quantile: float) -> None:
    assert student(freedom) == pytest.approx(quantile, rel=0.02)


def test_vllm_has_a_range_for_each_length() -> None:
    assert vllm([(1, 5), (4, 5), (16, 2), (64, 0)]) == [[1, 15, 5], [16, 63, 2], [64, 4096, 0]]
    assert vllm([(8, 3)]) == [[1, 4096, 3]]


def test_tensorrt_has_both_ends_of_ranges() -> None:
    assert tensorrt([[1, 15, 5], [16, 63, 2], [64, 4096, 0]]) == {1: 5, 15: 5, 16: 2, 63: 2, 64: 0}
    assert tensorrt([[1, 4096, 3]]) == {1: 3, 4096: 3}
    assert tensorrt([[1, 4096, 0]]) == {}
    assert tensorrt([[1, 7, 2], [8, 4096, 3]]) is None


SIZES = st.lists(st.integers(2, 200), unique=True, max_size=5).map(
    lambda sizes: [1, *sorted(sizes)]
)


@given(SIZES, st.data())
def test_both_readings_of_tensorrts_schedule_are_the_same(sizes: list[int], data: Any) -> None:
    lengths = sorted((data.draw(st.integers(0, 9)) for _ in sizes), reverse=True)
    ranges = vllm(list(zip(sizes, lengths, strict=True)))
    schedule = tensorrt(ranges)
    assert schedule is not None
    keys = list(schedule)
    assert keys == sorted(keys)
    for first, last, length in ranges:
        for size in {first, (first + last) // 2, last}:
            upper, lower = bisect_left(keys, size), bisect_right(keys, size) - 1
            assert (schedule[keys[upper]] if upper < len(keys) else 0) == length
            assert (schedule[keys[lower]] if keys else 0) == length


def test_sglangs_tiers_begin_at_batch_sizes() -> None:
    assert sglang([(2, [4, 5]), (8, [2]), (32, [0])]) == {
        "speculative_adaptive": True,
        "speculative_eagle_topk": 1,
        "speculative_num_steps": 5,
        "speculative_num_draft_tokens": 6,
        "speculative_adaptive_config": {
            "1": {"candidate_steps": [4, 5]},
            "8": {"candidate_steps": [2]},
            "32": {"candidate_steps": [0]},
        },
    }
    assert sglang([(1, [0]), (8, [0])]) is None


def test_a_batch_grows_as_long_as_speed_rises_and_nobody_waits_too_long() -> None:
    points = [(1, 100.0, 0.010), (4, 300.0, 0.013), (16, 310.0, 0.052)]
    assert limit(points) == 4
    assert limit(points[:2]) is None
    assert limit(points[:2], max_tpot=0.012) == 1
    assert limit(points, max_tpot=0.001) == 1
    assert limit(points[:1]) is None


def cell(
    size: int, raced: Mapping[Setting, float], others: Mapping[Setting, float] | None = None
) -> Tuned:
    """What was found at a batch size: speeds of raced settings, and promises of others."""
    runs = {s: [RaceRun(round(1e6 * speed), 1e6, Counts())] * 3 for s, speed in raced.items()}
    best = max(raced.values())
    contenders = [s for s, v in raced.items() if s == PLAIN_SETTING or v > 0.97 * best]
    found = Race(promised={**raced, **(others or {})}, runs=runs, contenders=contenders, loss=0.01)
    passes = {s: [SimpleNamespace(latency=size / v, counts=Counts())] for s, v in raced.items()}
    return Tuned(size, found, passes)  # type: ignore[arg-type]


def tuning(cells: Sequence[Tuned], **changes: Any) -> TuningResult:
    options: dict[str, Any] = {
        "model": "org/target", "names": {}, "folders": {"model": "org/drafter"}, "auto": "auto",
        "cells": cells, "max_tpot": None, "setting": {"workload": "code"},
    }  # fmt: skip
    return TuningResult(**{**options, **changes})


AUTO = Setting("auto", 10)
MODEL = {k: Setting("model", k) for k in LENGTHS}
NGRAM = {k: Setting("ngram", k) for k in LENGTHS}


def test_one_setting_that_wins_everywhere_is_served() -> None:
    cells = [cell(n, {PLAIN_SETTING: n, MODEL[4]: 2.0 * n, AUTO: 1.9 * n}) for n in (1, 2)]
    found = tuning(cells)
    assert (found.best, found.kept) == (MODEL[4], {1: 1, 2: 1})
    assert found.serve == {"drafter": "model", "num_speculative_tokens": 4}
    named = tuning(cells, names={"model": "org/other"})
    assert named.serve["drafter"] == "org/other"


def test_weights_that_were_measured_are_those_that_are_served() -> None:
    setting = Setting("model", 4)
    engine = {"dtype": "bfloat16", "quantization": "int4", "drafter_quantization": "int8"}
    found = tuning([cell(1, {PLAIN_SETTING: 100, setting: 200})], engine=engine)
    assert found.serve == {"drafter": "model", "num_speculative_tokens": 4, **engine}
    assert found.deploy["target"] == {
        "model": "org/target", "dtype": "bfloat16", "quantization": "int4",
    }  # fmt: skip
    text = render(parse({**found.deploy, "engine": "outrider"})).text()
    assert "--quantization int4" in text
    assert "--drafter-quantization int8" in text
    with pytest.raises(ConfigError, match=r"target\.quantization is 'int4'"):
        render(parse({**found.deploy, "engine": "vllm"}))


def test_what_keeps_most_is_served_where_winners_differ() -> None:
    small = {PLAIN_SETTING: 100, MODEL[5]: 200, AUTO: 180}
    large = {PLAIN_SETTING: 300, MODEL[5]: 150, AUTO: 290}
    found = tuning([cell(1, small), cell(8, large)])
    assert found.best == AUTO
    assert found.kept == pytest.approx({1: 0.9, 8: 290 / 300})
    assert found.serve == {"drafter": "auto", "num_speculative_tokens": 10}
    slow = tuning([cell(1, {**small, AUTO: 110}), cell(8, {**large, AUTO: 120})])
    assert slow.best == PLAIN_SETTING
    assert slow.serve == {"drafter": "none"}


def test_other_engines_get_one_drafter_and_its_lengths() -> None:
    merged = Setting("model+suffix", 6)
    cells = [
        cell(1, {PLAIN_SETTING: 100, merged: 250, MODEL[5]: 240, MODEL[6]: 239, NGRAM[3]: 130}),
        cell(4, {PLAIN_SETTING: 300, NGRAM[1]: 330, MODEL[2]: 310}),
        cell(16, {PLAIN_SETTING: 900, NGRAM[1]: 910}, {MODEL[1]: 700}),
    ]
    found = tuning(cells)
    assert found.portable == "model"
    assert found.lengths == [(1, 5), (4, 2), (16, 0)]
    assert found.tiers == [(1, [5]), (4, [2]), (16, [0])]
    assert found.deploy == {
        "target": {"model": "org/target"},
        "drafter": {
            "method": "draft_model", "model": "org/drafter", "num_speculative_tokens": 5,
            "schedule": [[1, 3, 5], [4, 15, 2], [16, 4096, 0]],
        },
    }  # fmt: skip
    for engine in ("vllm", "trtllm", "sglang", "outrider", "llamacpp", "triton"):
        document = {**found.deploy, "engine": engine}
        assert "org/target" in render(parse(document), "command").text()


def test_lengths_that_were_not_told_apart_are_sglangs_tier() -> None:
    heads = {k: Setting("eagle3", k) for k in LENGTHS}
    raced = {PLAIN_SETTING: 100, heads[3]: 198, heads[4]: 200, heads[7]: 150}
    large = cell(8, {PLAIN_SETTING: 500, heads[3]: 400}, {heads[4]: 390})
    found = tuning([cell(1, raced), large])
    assert found.tiers == [(1, [3, 4]), (8, [0])]
    flags = found.report()["sglang"]
    assert flags["speculative_num_steps"] == 4
    assert flags["speculative_adaptive_config"]["1"] == {"candidate_steps": [3, 4]}


def test_where_nothing_pays_nothing_drafts() -> None:
    found = tuning([cell(1, {PLAIN_SETTING: 100, MODEL[1]: 90})])
    report = found.report()
    assert (found.best, report["serve"]) == (PLAIN_SETTING, {"drafter": "none"})
    assert report["deploy"]["drafter"] == {"method": "none"}
    assert (report["sglang"], report["tensorrt_llm"]) == (None, {})
    assert report["vllm"] == [[1, 4096, 0]]


def test_nothing_beats_a_point_of_the_front() -> None:
    rng = random.Random(5)
    cells = [
        cell(n, {PLAIN_SETTING: 100 * n**0.7, **{MODEL[k]: rng.uniform(90, 200) for k in LENGTHS}})
        for n in (1, 2, 4)
    ]
    found = tuning(cells)
    points = [(c.latency(s), c.speed(s)) for c in cells for s in c.race.runs]
    front = [(e["latency_per_token_ms"] / 1e3, e["tokens_per_second"]) for e in found.pareto()]
    beaten = [p for p in points if any(q != p and q[0] <= p[0] and q[1] >= p[1] for q in points)]
    assert sorted(front) == sorted(set(points) - set(beaten))


PROMPTS = Workload.of_prompts("two", ["def greet(name):", "for word in ("])


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"lengths": [0, 2]}, "lengths is 0, 2; give from 1"),
        ({"lengths": []}, "lengths is"),
        ({"lengths": [10**6]}, "lengths is 1000000; give from 1"),
        ({"batch_sizes": [0]}, "batch_sizes is 0; give 1 or more"),
        ({"rounds": 2}, "rounds is 2; give 3 or more"),
        ({"max_tokens": 1}, "max_tokens is 1; give 2 or more"),
        ({"max_tpot": -1.0}, "max_tpot is -1; give seconds, more than 0"),
        ({"max_tpot": float("nan")}, "max_tpot is nan"),
        ({"drafter": "ngram"}, "give auto, or auto\\+ and others"),
        ({"drafter": "auto+nowhere"}, "nowhere"),
        ({"trees": [(0, 2)]}, "trees is 0"),
        ({"num_prompts": 3}, "num_prompts is 3, but workload 'two' has 2"),
        ({"temperature": -1.0}, "temperature"),
        ({"max_tokens": 10**6}, "max_tokens|context|max_model_len"),
    ],
)
def test_bad_input_gets_a_sentence(
    tiny_llama: Path, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises((ConfigError, OutriderError), match=sentence) as caught:
        tune(tiny_llama, PROMPTS, **{"lengths": [1], "batch_sizes": [1], **options})
    assert "\n" not in str(caught.value)


def test_a_tuning_of_a_tiny_model(tiny_llama: Path) -> None:
    said: list[tuple[int, int, int]] = []
    found = tune(
        tiny_llama, PROMPTS, lengths=[1, 3], batch_sizes=[2, 1], max_tokens=8, rounds=3,
        told=lambda *each: said.append(each), dtype="float32",
    )  # fmt: skip
    assert [each.batch_size for each in found.cells] == [1, 2]
    assert {size for size, _, _ in said} == {1, 2}
    for each in found.cells:
        assert each.best in each.race.runs
        outputs = [p.outputs for passes in each.passes.values() for p in passes]
        assert all(output == outputs[0] for output in outputs)
        rows = each.rows()
        assert rows[0]["verdict"] == "best"
        assert {row["drafter"] for row in rows} >= {"none", "auto", "ngram", "suffix"}
    assert found.best in found.cells[0].race.promised
