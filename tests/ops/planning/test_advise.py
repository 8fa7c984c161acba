"""``ops.planning.advise``: verdicts, rules of thumb, stacks, and the evidence of figures."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider.engine.control.costs import Costs, Curve, DraftCosts
from outrider.engine.control.kept_costs import write_costs
from outrider.errors import ConfigError, OutriderError
from outrider.ops.planning import Advice, Situation, advise, of_positions, of_rate
from outrider.ops.planning.advice import advice_markdown, advice_plot, advice_summary
from outrider.ops.planning.catalogue import data, eagle1_head, find_shape

COUNTS = {"batch", "first", "last", "k", "schedule"}
"""What says where a figure stands; batch sizes and draft lengths are no figures."""


def asked(target: str = "llama-3.1-8b", drafter: str | None = "eagle3", **options: Any) -> Advice:
    return advise(Situation(target, drafter, **{"hardware": "h100", **options}))


def rules(advice: Advice) -> dict[str, Any]:
    return {rule.name: rule for rule in advice.rules}


def profile(folder: Path, **drafters: DraftCosts) -> Path:
    """Write measured costs: a row is 1 ms for the first four, then 0.5 ms each."""
    rows = (1, 2, 4, 8, 16, 32, 64, 128, 256)
    target = Curve(rows, tuple(1e-3 * (1 + 0.5 * max(0, row - 4)) for row in rows))
    file = folder / "costs.json"
    write_costs(file, Costs(target, drafters, 1e-9))
    return file


# Verdicts


def test_a_small_batch_of_a_large_model_speculates() -> None:
    found = asked("llama-3.1-70b", "llama-3.2-1b", tensor_parallel=4)
    assert found.verdict == "use"
    assert found.decided_by == "the model"
    assert found.speedup["p10"].value < found.speedup["p50"].value < found.speedup["p90"].value
    assert found.k == found.ranges[0].k > 2
    assert found.reason.startswith("at batch 1, the best draft has")
    assert found.limiting in found.reason
    assert found.halved[found.limiting] == max(found.halved.values())


def test_a_slow_drafter_is_not_used() -> None:
    found = asked("llama-3.1-8b", "llama-3.1-8b", acceptance=of_rate(0.5, 5))
    assert found.verdict == "do not"
    assert found.limiting == "drafting"
    assert found.speedup["p50"].value < 1
    assert all(each.k == 0 for each in found.at)


def test_some_traffic_is_below_the_batch_that_still_wins() -> None:
    found = asked(
        "llama-3.1-8b", "llama-3.2-1b", hardware="a100", concurrency={1: 0.5, 256: 0.5},
        acceptance=of_rate(0.45, 4),
    )  # fmt: skip
    words, _, batch = found.verdict.rpartition(" ")
    assert words == "only below batch"
    last = max(each.last for each in found.ranges if each.k)
    assert int(batch) == last + 1
    by_batch = {each.batch: each for each in found.at}
    assert by_batch[1].k > 0 == by_batch[256].k
    assert by_batch[256].speedup.value == 1


def test_single_tokens_and_short_answers_gain_little() -> None:
    short, long = (asked(output_tokens=n).speedup["p50"].value for n in (16, 512))
    assert short < long
    one = asked(output_tokens=1)
    assert one.verdict == "do not"
    assert rules(one)["single-token task"].says == "do not"


def test_a_drafter_that_does_not_fit_is_not_used() -> None:
    found = asked("llama-3.1-8b", "llama-3.1-70b")
    assert found.verdict == "do not"
    assert found.memory["concurrency"].value == 0
    assert found.break_even is None
    large = asked("llama-3.1-70b", "llama-2-70b", tensor_parallel=2)
    assert large.reason == "the drafter takes 138.0 GB (modelled) and does not fit with the target"
    rule = rules(large)["target above 30B, latency-sensitive"]
    assert (rule.says, rule.model) == ("use", "do not")
    assert "does not fit" in rule.reason


def test_what_speculation_takes_of_memory_is_told() -> None:
    found = asked("llama-3.1-8b", "llama-3.2-1b", concurrency={8: 1.0})
    memory = {name: each.value for name, each in found.memory.items()}
    assert memory["drafter"] == pytest.approx(1.236e9 * 2, rel=0.01)
    assert memory["cache_per_sequence"] == 32_768 * (512 + 256)
    assert memory["buffers"] == 8 * 9 * 128_256 * 4
    assert memory["lost_concurrency"] == memory["plain_concurrency"] - memory["concurrency"] > 0


def test_costs_follow_from_speed_and_price() -> None:
    found = asked("llama-3.1-70b", "llama-3.2-1b", tensor_parallel=4, price=4.0)
    (at,) = found.at
    for name, speed in (
        ("plain", at.plain_tokens_per_second),
        ("speculative", at.tokens_per_second),
    ):
        dollars = 4 * 4.0 / (speed.value * 3600) * 1e6
        assert found.cost[name].value == pytest.approx(dollars)
    own = asked("llama-3.1-70b", "llama-3.2-1b", tensor_parallel=4, price=4.0, placement="own")
    dollars = 5 * 4.0 / (own.at[0].tokens_per_second.value * 3600) * 1e6
    assert own.cost["speculative"].value == pytest.approx(dollars)


def test_first_tokens_come_later_with_a_model_that_reads_the_prompt() -> None:
    assert asked(drafter="llama-3.2-1b").ttft["change"].value > 0.05
    assert asked(drafter="suffix").ttft["change"].value == 0


def test_service_levels_are_checked_both_ways() -> None:
    found = asked("llama-3.1-70b", "llama-3.2-1b", tensor_parallel=4, max_tpot=0.01, max_ttft=9.0)
    assert found.at[0].meets == {
        "plain tpot": False, "plain ttft": True, "speculative tpot": True, "speculative ttft": True,
    }  # fmt: skip


def test_a_tuned_drafter_brings_more() -> None:
    found = asked(fine_tune=True)
    assert found.speedup["p50"].value < found.tuned["low"].value < found.tuned["high"].value
    assert asked().tuned == {}


def test_alerts_trip_at_break_even() -> None:
    found = asked(concurrency={32: 1.0})
    assert found.trips[1].value == found.break_even
    assert found.trips[0].value.value > found.break_even.value
    assert found.trips[-1].value == found.at[0].plain_tpot


def test_another_tokenizer_is_noticed() -> None:
    other = asked("llama-3-70b", "qwen2-7b", tensor_parallel=4)
    assert "another vocabulary" in other.acceptance_source
    assert any("retokenize" in note for note in other.notes)
    assert "another" not in asked("qwen2.5-14b", "qwen2.5-0.5b").acceptance_source  # padded


def test_the_throughput_priority_judges_the_batch_that_fills_the_machine() -> None:
    found = asked(priority="throughput", concurrency={1: 1.0})
    assert [each.batch for each in found.at] == [512]
    assert any("512" in note for note in found.notes)


def test_the_memory_priority_counts_what_is_taken() -> None:
    found = asked(priority="memory")
    assert found.verdict == "do not"
    assert found.limiting == "memory"


# What costs and acceptance rest on


def test_measured_costs_stand_in_for_the_roofline(tmp_path: Path) -> None:
    passes = Curve((1, 256), (1e-4, 1e-3))
    file = profile(tmp_path, model=DraftCosts(passes, 2e-5), suffix=DraftCosts(None, 2e-5, 5e-6))
    options = {"hardware": None, "profile": file, "output_tokens": 10_000, "input_tokens": 1}
    known = of_positions([0.8, 0.6, 0.5, 0.4], evidence="measured")
    found = asked(drafter="llama-3.2-1b", acceptance=known, **options)
    host, context = 1.2e-4, 1e-9 * (1 + 5000)
    plain = 1e-3 + context + host
    speeds = [
        known.tokens(k) / (plain + 5e-4 * max(0, k - 3) + 2e-5 + k * 1e-4)
        for k in range(1, 9)
    ]  # fmt: skip
    assert found.k == 1 + speeds.index(max(speeds)) == 3
    assert found.at[0].plain_tpot.value == pytest.approx(plain)
    assert found.at[0].tpot.value == pytest.approx(1 / max(speeds))
    assert found.acceptance["p50"].evidence == "measured"
    lookup = asked(drafter="suffix", acceptance=known, **options)
    assert lookup.speedup["p50"].value > found.speedup["p50"].value
    with pytest.raises(ConfigError, match="has no drafter 'ngram'; it has model, suffix"):
        asked(drafter="ngram", **options)


def test_what_is_given_goes_before_the_prior() -> None:
    assert asked().acceptance["p50"].evidence == "assumed"
    assert "prior" in asked().acceptance_source
    measured = of_positions([0.8, 0.6], "measured: x", "measured", 1000)
    found = asked(acceptance=measured, longest=2)
    assert found.acceptance["p50"].value == pytest.approx(0.7)
    assert found.acceptance["p50"].evidence == "measured"
    assert found.acceptance_source == "measured: x"


def numbers(value: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the paths of numbers that no evidence stands beside."""
    if isinstance(value, dict):
        if "evidence" in value:
            assert value["evidence"] in ("measured", "modelled", "assumed")
            assert set(value) == {"value", "unit", "evidence"}
            return []
        return [p for key, each in value.items() for p in numbers(each, (*path, key))]
    if isinstance(value, list):
        return [p for each in value for p in numbers(each, path)]
    counts = not COUNTS.isdisjoint(path)
    return (
        [path]
        if isinstance(value, int | float) and not isinstance(value, bool | str) and not counts
        else []
    )


def test_every_number_has_its_evidence() -> None:
    found = json.loads(json.dumps(asked(price=3.0, fine_tune=True, max_tpot=0.1).to_json()))
    assert found.pop("stack")["claims"]  # claims, which say so themselves
    assert found.pop("version") == 1
    assert found.pop("deployment")["tensor_parallel"] == 1  # what was asked, as it was given
    for rule in found["rules"]:
        rule.pop("value")  # what was given
    assert numbers(found) == []


# Without a drafter


def test_the_drafters_that_fit_are_ranked_by_forecast() -> None:
    found = asked("llama-3.3-70b", None, tensor_parallel=4, concurrency={1: 0.5, 64: 0.5})
    names = [each.drafter for each in found.candidates]
    assert set(names) == {"eagle3", "llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-3-8b",
                          "suffix", "ngram"}  # fmt: skip
    medians = [each.speedup["p50"].value for each in found.candidates if each.speedup]
    assert medians == sorted(medians, reverse=True)
    best = found.candidates[0]
    assert found.speedup == best.speedup
    assert found == replace(
        asked("llama-3.3-70b", best.drafter, tensor_parallel=4, concurrency={1: 0.5, 64: 0.5}),
        candidates=found.candidates, notes=found.notes,
    )  # fmt: skip
    text = advice_markdown(found)
    assert f"Best: {best.drafter}, {best.speedup['p50']}" in text
    assert "yuhuili/EAGLE3-LLaMA3.3-Instruct-70B" in text
    assert ("also measure eagle3" in text) == (best.method == "draft_model")


def test_family_tokenizer_ratio_and_devices_decide_what_fits() -> None:
    def fits(target: str, **options: Any) -> set[str]:
        return {each.drafter for each in asked(target, None, **options).candidates}

    lookups = {"suffix", "ngram"}
    assert fits("mixtral-8x7b", tensor_parallel=2) == {"eagle", *lookups}  # not TinyLlama's
    assert "qwen3-30b-a3b" not in fits("qwen3-32b", tensor_parallel=4)  # by all parameters
    assert fits("qwen3-30b-a3b") == {"eagle3", "qwen3-0.6b", *lookups}  # by active parameters
    qwen = {"qwen2.5-0.5b", "qwen2.5-1.5b", "qwen2.5-3b", "qwen2.5-7b"}
    assert fits("qwen2.5-32b", tensor_parallel=2) == qwen | lookups
    # 14 heads of the smallest cannot be shared by four devices, nor 28 by eight.
    assert fits("qwen2.5-32b", tensor_parallel=4) == qwen - {"qwen2.5-0.5b"} | lookups
    assert "llama-2-drafter-115m" not in fits("llama-2-70b", tensor_parallel=4)  # unpublished


def test_where_nothing_fits_lookups_are_named() -> None:
    found = asked("mistral-7b", None)
    assert {each.drafter for each in found.candidates} == {"suffix", "ngram"}
    assert found.notes[0].startswith("the catalogue has no drafter for mistral-7b")
    assert found.deployment.method in ("suffix", "ngram")


def test_a_folder_is_told_by_its_sizes(tmp_path: Path) -> None:
    config = dict(data("models")["model"]["llama-3.1-8b"])
    folder = tmp_path / "my-tune"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    found = asked(str(folder), None)
    assert "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B" in [e.checkpoint for e in found.candidates]
    assert found.deployment.target.checkpoint == str(folder)
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 30}))
    names = {each.drafter for each in asked(str(folder), None).candidates}
    assert names == {"llama-3.2-1b", "suffix", "ngram"}  # its vocabulary is Llama 3's, its head not
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 99_999}))
    assert {e.drafter for e in asked(str(folder), None).candidates} == {"suffix", "ngram"}


def test_without_costs_the_order_is_that_of_rules_of_thumb(tmp_path: Path) -> None:
    found = asked("llama-3.3-70b", None, hardware=None)
    assert [each.drafter for each in found.candidates[:2]] == ["eagle3", "llama-3.2-1b"]
    assert found.candidates[0].speedup is None
    assert "give hardware" in found.notes[0]
    assert "Best by rules of thumb: the eagle3 head yuhuili/" in advice_markdown(found)
    passes = Curve((1, 256), (1e-4, 1e-3))
    file = profile(tmp_path, model=DraftCosts(passes, 2e-5), suffix=DraftCosts(None, 2e-5, 5e-6))
    measured = asked("llama-3.3-70b", None, hardware=None, profile=file)
    assert [each.drafter for each in measured.candidates] == ["suffix"]  # model is not told which
    only = profile(tmp_path, model=DraftCosts(passes, 2e-5))
    with pytest.raises(ConfigError, match="profile measured model; name one"):
        asked("llama-3.3-70b", None, hardware=None, profile=only)


def test_acceptance_of_no_drafter_is_refused() -> None:
    with pytest.raises(ConfigError, match="belongs to one drafter; name it"):
        asked("llama-3.3-70b", None, tensor_parallel=4, acceptance=of_rate(0.7, 5))


@pytest.mark.parametrize("name", ["EAGLE-3", "nGram", "eagle", "yuhuili/EAGLE-LLaMA3-Instruct-8B"])
def test_drafters_have_the_names_of_the_one_table(name: str) -> None:
    found = asked("llama-3-8b", name)
    method = name.lower().replace("-", "") if "/" not in name else "eagle"
    assert found.deployment.method == method


@pytest.mark.parametrize("name", ["mtp", "draft_model", "dflash", "none"])
def test_a_method_that_costs_what_its_checkpoint_costs_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="name does not tell its costs"):
        asked("llama-3-8b", name)


def test_an_eagle_head_has_its_published_size() -> None:
    for target, billions in (("llama-3-70b", 0.99), ("llama-3-8b", 0.25)):
        assert eagle1_head(find_shape(target)).parameters / 1e9 == pytest.approx(billions, abs=0.01)


# Rules of thumb


def test_rules_stand_beside_the_model_with_a_reason_where_they_differ() -> None:
    found = rules(asked(concurrency={64: 1.0}, utilisation=0.9, memory_used=0.95,
                        acceptance=of_rate(0.52, 5)))  # fmt: skip
    assert set(found) == {
        "target below 10B parameters", "batch above 32", "utilisation above 80 %",
        "memory pressure", "acceptance below 0.55", "acceptance below 0.6",
        "drafter of 1/50 to 1/10 of the target",
    }  # fmt: skip
    for rule in found.values():
        assert rule.model == "use"
        assert bool(rule.reason) == (rule.says == "do not")
    assert "breaks even at" in found["acceptance below 0.6"].reason
    assert "sequences fit" in found["memory pressure"].reason
    assert "batch size 64" in found["batch above 32"].reason


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("target above 30B, latency-sensitive", {"target": "llama-3.1-70b", "tensor_parallel": 4}),
        ("draft ratio above 0.3", {"target": "qwen2-7b", "drafter": "llama-3.2-3b"}),
        ("utilisation below 50 %", {"utilisation": 0.3}),
        ("response below 100 tokens", {"output_tokens": 50}),
        ("acceptance below 0.3", {"acceptance": of_rate(0.29, 5)}),
        ("acceptance below 0.5", {"acceptance": of_rate(0.49, 5)}),
        ("drafter of 1 to 3 % of the target",
         {"target": "llama-3.1-70b", "drafter": "llama-3.2-1b", "tensor_parallel": 4}),
        ("drafter of 10 to 15 % of the target",
         {"target": "qwen2.5-14b", "drafter": "qwen2.5-1.5b"}),
        ("drafter of 100M to 1B parameters", {"drafter": "llama-3-drafter-150m"}),
        ("otherwise: will likely benefit",
         {"target": "qwen2.5-14b", "drafter": "suffix", "priority": "zero loss"}),
    ],
)  # fmt: skip
def test_each_rule_applies_where_it_should(name: str, options: dict[str, Any]) -> None:
    assert name in rules(asked(**options))
    assert (
        name not in rules(asked("llama-3.1-8b", "qwen2-7b", concurrency={8: 1.0})) or "0.3" in name
    )


def test_the_data_has_every_rule_that_is_told() -> None:
    told = data("rules")["rule"]
    limits = {(rule["fact"], rule["is"], str(rule["value"])) for rule in told}
    assert {
        ("target_billions", "<", "10"), ("latency_sensitive_billions", ">", "30"),
        ("draft_ratio", ">", "0.3"), ("batch", ">", "32"), ("utilisation", "<", "0.5"),
        ("utilisation", ">", "0.8"), ("output_tokens", "<", "100"), ("output_tokens", "<=", "1"),
        ("memory_used", ">", "0.92"), ("acceptance", "<", "0.3"), ("acceptance", "<", "0.5"),
        ("acceptance", "<", "0.55"), ("acceptance", "<", "0.6"),
        ("draft_ratio", "within", "[0.0164, 0.05]"), ("draft_ratio", "within", "[0.01, 0.03]"),
        ("draft_ratio", "within", "[0.02, 0.1]"), ("draft_ratio", "within", "[0.1, 0.15]"),
        ("drafter_billions", "within", "[0.1, 1.0]"),
    } == limits  # fmt: skip
    assert data("rules")["default"] == "use"


def test_without_costs_the_rules_decide() -> None:
    found = asked("llama-3.1-70b", "llama-3.2-1b", hardware=None)
    assert (found.verdict, found.decided_by) == ("use", "rules of thumb")
    assert not found.speedup
    against = asked("llama-3.1-70b", "llama-3.2-1b", hardware=None, concurrency={64: 1.0})
    assert against.verdict == "do not"
    assert "batch above 32" in against.reason
    nothing = asked("qwen2.5-14b", "suffix", hardware=None, priority="zero loss")
    assert nothing.verdict == "use"
    assert "will likely benefit" in nothing.reason
    assert "decided by rules of thumb" in advice_markdown(against).lower()


# Stacks


@pytest.mark.parametrize(
    ("priority", "take", "optional", "leave"),
    [
        ("latency", {"speculation", "prefix caching"}, {"flash attention", "int8"}, set()),
        ("throughput", {"continuous batching", "quantisation", "tensor parallel"}, set(),
         {"speculation"}),
        ("memory", {"int4", "distillation"}, set(), {"speculation"}),
        ("zero loss", {"speculation", "prefix caching", "flash attention"}, set(),
         {"quantisation"}),
    ],
)  # fmt: skip
def test_each_priority_has_its_stack(
    priority: str, take: set[str], optional: set[str], leave: set[str]
) -> None:
    stack = asked(priority=priority).stack
    assert (set(stack["take"]), set(stack["optional"]), set(stack["leave"])) == (
        take,
        optional,
        leave,
    )
    assert set(stack["claims"]) == take | optional | leave
    text = advice_markdown(asked(priority=priority))
    assert f"## Stack for {priority}" in text
    assert "claimed, not measured here" in text
    if priority == "latency":
        assert "measure latency with and without int8" in text


# Reports


def test_the_markdown_has_the_verdict_and_evidence() -> None:
    text = advice_markdown(asked("llama-3.1-70b", "llama-3.2-1b", tensor_parallel=4, price=4.0))
    assert text.startswith("# llama-3.1-70b with llama-3.2-1b: use\n")
    for part in (
        "(modelled)",
        "(assumed",
        "num_speculative_tokens_per_batch_size",
        "per 1M tokens",
    ):
        assert part in text


@pytest.mark.parametrize("drafter", [None, "llama-3.2-1b"])
def test_the_summary_fits_on_a_screen(drafter: str | None) -> None:
    found = asked("llama-3.1-70b", drafter, tensor_parallel=4, concurrency={1: 0.5, 64: 0.5})
    text = advice_summary(found)
    assert text.startswith(f"# {found.target} with {found.drafter}: use\n")
    for part in (
        "| 1 to 47 | 8 |",
        "break-even",
        "- memory: 2.47 GB",
        "- risk: costs are modelled",
    ):
        assert part in text
    assert ("Next: " in text) == (drafter is None)
    lines = [line for each in text.splitlines() for line in textwrap.wrap(each, 80) or [""]]
    assert len(lines) < 36


def test_the_plot_stands_alone() -> None:
    found = asked(concurrency={1: 0.5, 64: 0.5})
    svg = advice_plot(found)
    assert svg.startswith("<svg ")
    assert len(found.sensitivity) == 2
    assert svg.count("http") == 1  # the name space
    assert "batch 64" in svg


# Bad input


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"hardware": "abacus"}, "no device 'abacus'"),
        ({"hardware": "h10"}, "did you mean 'h100'"),
        ({"target": "llama-3.1-405b"}, "raise the tensor parallel size"),
        ({"target": "gpt-9"}, "no model 'gpt-9'"), ({"drafter": "nobody"}, "no model 'nobody'"),
        ({"tensor_parallel": 3}, "does not divide the target's 32 attention heads"),
        ({"tensor_parallel": 0}, "tensor_parallel is 0"), ({"price": -1.0}, "price is -1"),
        ({"price": float("nan")}, "price is nan"), ({"temperature": -1}, "temperature is -1"),
        ({"dtype": "int3"}, "dtype is 'int3'"), ({"priority": "speed"}, "priority is 'speed'"),
        ({"placement": "moon"}, "placement is 'moon'"), ({"utilisation": 45}, "utilisation is 45"),
        ({"memory_used": "x"}, "memory_used is 'x'"), ({"output_tokens": 0}, "output_tokens is 0"),
        ({"input_tokens": 1.5}, "input_tokens is 1.5"), ({"longest": 65}, "longest is 65"),
        ({"concurrency": {0: 1.0}}, "concurrency is 0"), ({"concurrency": {}}, "no concurrency"),
        ({"concurrency": 8}, "concurrency is 8"), ({"tasks": "code"}, "tasks is 'code'"),
        ({"concurrency": {1: -1.0}}, r"concurrency\.1 is -1"),
        ({"concurrency": {1: 0.0}}, "no concurrency has a share"),
        ({"tasks": {"poetry": 1.0}}, "no task 'poetry'"), ({"tasks": {}}, "no task has a share"),
        ({"tasks": {"code": "x"}}, r"tasks\.code is 'x'"),
        ({"acceptance": 0.7}, "acceptance is 0.7"),
        ({"profile": Path("nowhere.json")}, "no measured costs"),
        ({"drafter_hardware": "abacus", "placement": "own", "drafter": "llama-3.2-1b"}, "abacus"),
    ],
)  # fmt: skip
def test_bad_input_gets_one_sentence(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(OutriderError, match=problem) as refused:
        asked(**options)
    assert "\n" not in str(refused.value)
