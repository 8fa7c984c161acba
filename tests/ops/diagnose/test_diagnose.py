"""``ops.diagnose.diagnose``: every rule fires on its case, and none on the healthy ones."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.errors import ConfigError, EndpointError, OutriderError
from outrider.ops.diagnose.diagnose import diagnose, look, markdown, symptoms
from outrider.ops.diagnose.endpoint import Endpoint
from outrider.ops.diagnose.facts import ORDER, check_thresholds, data, holds, names
from outrider.ops.diagnose.observation import facts_of, observe
from outrider.ops.metrics import engine_of, of_mapping, parse
from tests.support import DATA, REPOSITORY
from tests.support.guarding import http

CASES = sorted((DATA / "cases").glob("*.json"))
CONTENT = {file.stem: json.loads(file.read_text(encoding="utf-8")) for file in CASES}
RECORDED = {name for name, case in CONTENT.items() if case["origin"] == "recorded"}
MODELS = {"object": "list", "data": [{"id": "m"}]}


def shown(file: Path, **options: Any) -> list[str]:
    return [problem.symptom for problem in diagnose(file, **options)]


@pytest.mark.parametrize("file", CASES, ids=lambda file: file.stem)
def test_a_case_shows_its_symptoms(file: Path) -> None:
    fires = CONTENT[file.stem]["fires"]
    found = shown(file)
    assert set(fires) <= set(found)
    if CONTENT[file.stem]["origin"] == "synthetic" or not fires:
        assert found == fires
    likely = [cause.title for problem in diagnose(file) for cause in problem.causes if cause.likely]
    assert set(CONTENT[file.stem].get("likely", [])) <= set(likely)


def test_every_symptom_has_a_case_and_every_case_says_where_it_is_from() -> None:
    fired = {symptom for case in CONTENT.values() for symptom in case["fires"]}
    assert fired == {each["id"] for each in symptoms()}
    assert {case["origin"] for case in CONTENT.values()} == {"recorded", "synthetic"}
    assert all(case["recorded_by"] for name, case in CONTENT.items() if name in RECORDED)
    assert {"healthy", "healthy-vllm"} <= {n for n, case in CONTENT.items() if not case["fires"]}


def test_the_benchmark_records_the_cases_that_say_so() -> None:
    from benchmarks.cases import RECIPES

    assert {recipe.name for recipe in RECIPES} == RECORDED
    for recipe in RECIPES:
        assert sorted(recipe.fires) == CONTENT[recipe.name]["fires"]


def test_conditions_of_the_catalogue_can_be_read() -> None:
    limits = check_thresholds({})
    facts = data("symptoms")["fact"]
    conditions = [c for each in symptoms() for c in (*each["when"], *each.get("unless", ()))]
    conditions += [
        c for each in symptoms() for cause in each["cause"] for c in cause.get("when", ())
    ]
    conditions += [c for point in data("checklist")["point"] for c in point.get("verify", ())]
    for condition in conditions:
        name, operator, right = condition.split(" ", 2)
        assert name in facts, condition
        if operator == "is":
            assert holds(condition, {name: right}, limits) is True
            assert holds(condition, {name: "something else"}, limits) is False
        else:
            assert operator in ORDER, condition
            limit = limits[right] if right in limits else float(right)
            assert holds(condition, {name: limit}, limits) is ("=" in operator)
        assert holds(condition, {}, limits) is None
    used = " ".join(conditions).split()
    assert [name for name in limits if name not in used] == []


def test_every_symptom_has_remedies_and_evidence() -> None:
    facts = data("symptoms")["fact"]
    for each in symptoms():
        assert each["cause"], each["id"]
        assert all(cause["remedies"] for cause in each["cause"])
        assert set(each["evidence"]) <= set(facts)


def test_likely_causes_come_first_and_refuted_ones_not_at_all() -> None:
    file = CASES[0].with_name("wrong-family.json")
    [problem] = diagnose(file, facts={"same_tokenizer": "yes", "temperature": 0})
    titles = [cause.title for cause in problem.causes]
    assert titles[0] == "The drafter is from another family"
    assert not any("tokenizer" in title or "Temperature" in title for title in titles)
    likely = [cause.likely for cause in problem.causes]
    assert likely == sorted(likely, reverse=True)
    assert problem.remedies == list(dict.fromkeys(problem.remedies))
    json.dumps(problem.to_json())


def test_a_lookup_has_no_tokenizer_and_no_family(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    run = {"drafter": "ngram", "acceptance_rate": 0.3, "acceptance_by_position": [0.7, 0.3, 0.1]}
    file.write_text(json.dumps({"runs": [run]}))
    [problem] = diagnose(file)
    assert problem.causes[0].title.startswith("K is too long")
    assert not any("The drafter" in c.title or "tokenizer" in c.title for c in problem.causes)


def test_thresholds_move_a_rule() -> None:
    file = CASES[0].with_name("memory-93.json")
    assert shown(file) == ["memory-high"]
    assert shown(file, thresholds={"high_memory": 0.94}) == []
    assert shown(file, thresholds={"critical_memory": "0.9"}) == ["memory-critical"]


def test_a_report_is_diagnosed_by_run(tmp_path: Path) -> None:
    file = tmp_path / "bench.json"
    run = {"drafter": "model", "num_speculative_tokens": 4, "acceptance_rate": 0.7, "speedup": 0.8,
           "batch_size": 64, "acceptance_by_position": [0.9, 0.8, 0.6, 0.5]}  # fmt: skip
    plain = {"drafter": "none", "num_speculative_tokens": 0, "speedup": 1.0}
    good = {**run, "speedup": 2.0, "batch_size": 1}
    file.write_text(json.dumps({"machine": {"cpu": "A"}, "runs": [plain, run, good]}))
    [problem] = diagnose(file)
    assert problem.symptom == "slower-than-plain"
    assert "batch_size 64" in problem.where
    assert problem.causes[0].title.startswith("The batch is saturated")
    before = tmp_path / "before.json"
    old = {**good, "speedup": 3.0}
    before.write_text(json.dumps({"machine": {"gpu": "B"}, "runs": [plain, old, run]}))
    assert "slow-on-new-hardware" in shown(file, before=before)


def test_a_result_of_vllm_is_read_in_its_units(tmp_path: Path) -> None:
    file, plain = tmp_path / "vllm.json", tmp_path / "plain.json"
    file.write_text(json.dumps({
        "spec_decode_acceptance_rate": 30.0, "spec_decode_draft_tokens": 900, "completed": 20,
        "mean_ttft_ms": 150.0, "mean_tpot_ms": 20.0, "max_concurrency": 8,
        "spec_decode_per_position_acceptance_rates": [0.5, 0.2, 0.1],
    }))  # fmt: skip
    plain.write_text(json.dumps({"mean_ttft_ms": 100.0, "mean_tpot_ms": 24.0, "completed": 20}))
    [seen] = look(file, plain)
    assert seen.facts["acceptance"] == pytest.approx(0.3)
    assert seen.facts["ttft_ratio"] == pytest.approx(1.5)
    assert seen.facts["speedup"] == pytest.approx(1.2)
    assert shown(file, plain=plain) == ["acceptance-low", "ttft-worse"]


def test_what_is_saved_is_read_again(tmp_path: Path) -> None:
    [seen] = look(CASES[0].with_name("healthy.json"), facts={"temperature": 0.3})
    file = tmp_path / "saved.json"
    file.write_text(json.dumps(seen.saved()))
    assert look(file)[0].facts == seen.facts


@pytest.mark.parametrize(
    ("text", "engine", "facts"),
    [
        (
            'trtllm_spec_decode_num_draft_tokens_total{a="b"} 100\n'
            "trtllm_spec_decode_num_accepted_tokens_total 40\n",
            "trtllm", {"acceptance": 0.4, "drafted": 100.0},
        ),
        (
            'vllm:spec_decode_num_draft_tokens_total{engine="0"} 60\n'
            'vllm:spec_decode_num_draft_tokens_total{engine="1"} 40\n'
            'vllm:spec_decode_num_accepted_tokens_total{engine="0"} 50\n'
            'vllm:time_to_first_token_seconds_sum 3.0\nvllm:time_to_first_token_seconds_count 12\n',
            "vllm", {"acceptance": 0.5, "ttft": 0.25},
        ),
        ("tgi_queue_size 3\n", "tgi", {"waiting": 3.0, "speculation_counters": "no"}),
    ],
)  # fmt: skip
def test_each_engine_has_its_names(text: str, engine: str, facts: dict[str, Any]) -> None:
    page = parse(text)
    assert engine_of(page) == engine
    assert facts.items() <= facts_of(page).items()


def test_broken_lines_are_counted_and_numbers_that_are_none_left_out() -> None:
    page = parse(
        'vllm:num_requests_running 2\nvllm:x{a="\n???\nvllm:kv_cache_usage_perc NaN\n# x\n'
    )
    assert page.broken == 2
    assert facts_of(page)["running"] == 2.0
    assert "kv_usage" not in facts_of(page)


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=60), st.dictionaries(st.text(max_size=30), st.floats() | st.text()))
def test_no_text_and_no_names_break_the_parser(text: str, values: dict[str, Any]) -> None:
    facts_of(parse("vllm:" + text))
    facts_of(of_mapping(values))


def test_numbers_beyond_float64_are_broken_lines() -> None:
    digits = "9" * 400
    page = parse(f"a {digits}\nb -{digits}\nc 1 {digits}\nd 3\n")
    assert page.broken == 3
    assert page.total("d") == 3
    assert page.total("a") is None


def test_a_window_counts_what_is_new() -> None:
    counter, gauge = "vllm:spec_decode_num_draft_tokens_total", "vllm:num_requests_running"
    before = parse(f'{counter}{{engine="0"}} 100\n{counter}{{engine="1"}} 50\n{gauge} 9\n')
    after = parse(f'{counter}{{engine="0"}} 130\n{counter}{{engine="1"}} 20\n{gauge} 4\n')
    grown = after.since(before)
    assert grown.total(counter.removesuffix("_total")) == 30 + 20  # the second was restarted
    assert grown.total(gauge) == 4
    again = parse("\n".join(grown.lines()))
    assert facts_of(again) == facts_of(grown)


STATED = {
    ("memory_used", 0.96): "memory-very-high", ("memory_usage", "98 %"): "memory-critical",
    ("gpu_memory_percent", 93): "memory-high", ("speedup", 0.7): "slower-than-plain",
    ("Acceptance-Rate", 0.2): "acceptance-low", ("kv_cache_usage", 0.99): "kv-full",
    ("output_differs", 0.5): "output-differs", ("ttft_ratio", "1.5"): "ttft-worse",
}  # fmt: skip


@pytest.mark.parametrize(("stated", "symptom"), STATED.items(), ids=lambda each: str(each))
def test_facts_by_name_are_diagnosed_in_a_file_and_in_python(
    stated: tuple[str, Any], symptom: str, tmp_path: Path
) -> None:
    known = {} if "cceptance" in stated[0] else {"acceptance": 0.7}
    content = {**known, "same_family": True, "temperature": None, stated[0]: stated[1]}
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(content))
    assert shown(file) == [symptom]
    assert [problem.symptom for problem in diagnose(content)] == [symptom]
    assert look(file)[0].facts == look(content)[0].facts


def test_facts_beside_metrics_reports_and_what_was_saved_are_read() -> None:
    full, page = {"memory_used": 0.98}, "vllm:num_requests_running 3"
    run = {"drafter": "model", "acceptance_rate": 0.7}
    for content in (
        {"vllm:num_requests_running": 3, **full}, {"metrics": page, **full},
        {"facts": full}, {"metrics": full}, {"metrics": "no", **full}, {"runs": [{**run, **full}]},
        {"runs": [run], **full}, {"seen": [{"where": "x", "facts": full}], "problems": []},
        {"num_prompts": 8, "completed": 8, **full},
    ):  # fmt: skip
        assert "memory-critical" in [each.symptom for each in diagnose(content)], content


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"memory_usd": 0.96}, "no fact 'memory_usd'; did you mean 'memory_used'"),
        ({"acceptance": 0.7, "aceptance_rat": 1}, "did you mean 'acceptance_rate'"),
        ({"acceptance": 0.7, "wobble": 1}, "there is no fact 'wobble'; docs/diagnose.md lists"),
        ({"acceptance": 0.7, "acceptance_rate": 0.6}, "mean the same fact and differ"),
        ({"memory_used": 96}, "give a share from 0 to 1, such as 0.9 or 90%"),
        ({"memory_percent": 196}, "give 0 to 100"),
        ({"memory_used": -0.1}, "give a number from 0 on"),
        ({"memory_used": float("nan")}, "give a number from 0 on"),
        ({"memory_used": "full"}, "give a number from 0 on"),
        ({"memory_used": [0.96]}, "give a number from 0 on"),
        ({"memory_used": True}, "give a number from 0 on"),
        ({"memory_used": 10**5000}, "a value too long to be shown"),
        ({"engine": "llm"}, "give outrider, vllm"),
        ({"same_family": "perhaps"}, "give yes or no"),
        ({"facts": {"sped": 1}}, "did you mean 'speedup'"),
        ({"speedup": None}, "holds no known facts"),
        ({}, "holds no known facts"),
        ({3: 4}, "holds no known facts"),
        (None, "the source is None"),
    ],
)
def test_facts_that_are_none_get_a_sentence(content: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        diagnose(content)


def test_keys_of_results_that_nobody_knows_are_noted() -> None:
    result = {"num_prompts": 8, "completed": 8, "mean_ttft_ms": 12.0, "p99_itl_ms": 3.0,
              "rtfx": 0.0, "memory_usd": 0.96, "tp": 1, "cluster": "a", "rack": 3}  # fmt: skip
    [seen] = observe(result)
    assert seen.notes == [
        "Unknown keys were ignored: 'memory_usd', 'tp', 'cluster' and 1 more (did you mean "
        "'memory_used'?)."
    ]
    report = REPOSITORY / "benchmarks" / "results" / "bench.json"
    assert {note for each in observe(report) for note in each.notes} == set()


def test_names_of_facts_are_told_apart() -> None:
    facts = data("symptoms")["fact"]
    said = [n for each in facts.values() for n in (*each.get("also", ()), *each.get("scaled", ()))]
    assert len({*facts, *said}) == len(facts) + len(said)
    for each in facts.values():
        assert not set(each.get("values", ())) - set(map(str.lower, each.get("values", ())))


PARTS = ("facts", "metrics", "runs", "seen", "machine", "num_samples", "drafter",
         "vllm:num_requests_running", "acceptance_by_position")  # fmt: skip
KEYS = st.sampled_from([*names(), *PARTS]) | st.text(max_size=9)
LEAVES = st.none() | st.booleans() | st.integers() | st.just(10**400) | st.floats() | st.text()
HOSTILE = st.recursive(
    LEAVES, lambda each: st.lists(each, max_size=3) | st.dictionaries(KEYS, each, max_size=3)
)
OBJECTS = st.dictionaries(KEYS, HOSTILE, max_size=5)


def diagnosed_or_refused(content: Any) -> None:
    said = ""
    try:
        markdown(look(content), diagnose(content))
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said


@settings(max_examples=80, deadline=None)
@given(OBJECTS)
def test_any_object_is_diagnosed_or_refused(content: Any) -> None:
    diagnosed_or_refused(content)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(OBJECTS)
def test_very_many_objects_are_diagnosed_or_refused(content: Any) -> None:
    diagnosed_or_refused(content)


Route = dict[str, tuple[int, str]]


@contextmanager
def serving(routes: Route, text: str = "same") -> Iterator[str]:
    """A server that answers GET by path, and every completion with ``text``."""

    def answer(method: str, path: str, body: Any, headers: Any) -> tuple[int, Any]:
        completion = 200, {"choices": [{"text": text}]}
        return routes.get(path, (404, "{}")) if method == "GET" else completion

    with http(answer) as url:
        yield url


def page(ttft: float) -> Route:
    text = (
        f"vllm:time_to_first_token_seconds_sum {ttft}\nvllm:time_to_first_token_seconds_count 1\n"
    )
    return {"/v1/models": (200, json.dumps(MODELS)), "/metrics": (200, text)}


def test_two_servers_are_compared() -> None:
    with serving(page(0.3), "one") as one, serving(page(0.1), "other") as other:
        problems = {each.symptom: each for each in diagnose(f"{one}/v1", plain=other)}
        assert {"ttft-worse", "output-differs"} <= set(problems)
        assert problems["output-differs"].evidence[0].value == 1.0
        [seen] = look(one, one)
        assert seen.facts["output_differs"] == 0.0
        assert seen.facts["ttft_ratio"] == 1.0


def test_a_server_without_metrics_says_how_to_get_them() -> None:
    with serving({"/v1/models": (200, json.dumps(MODELS)), "/metrics": (501, "")}) as url:
        [problem] = diagnose(url)
    assert problem.symptom == "acceptance-invisible"
    assert problem.causes[0].title == "The server has no /metrics"


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        ({}, "is not OpenAI's"),
        ({"/v1/models": (200, "<html>")}, "is not OpenAI's"),
        ({"/v1/models": (200, '{"data": []}')}, "is not OpenAI's"),
        ({"/v1/models": (401, "")}, "API key"),
        (
            {**page(1.0), "/metrics": (200, "<html>nginx</html>")},
            "no metrics in Prometheus' format",
        ),
        ({**page(1.0), "/metrics": (200, "go_goroutines 3\n")}, "no metrics of a known engine"),
    ],
)
def test_a_server_that_is_none_gets_a_sentence(routes: Route, words: str) -> None:
    with serving(routes) as url, pytest.raises((EndpointError, ConfigError), match=words):
        diagnose(url)


def test_a_server_that_is_down_gets_a_sentence() -> None:
    with serving({}) as url:
        pass
    with pytest.raises(EndpointError, match="cannot be reached"):
        diagnose(url)


@pytest.mark.parametrize("url", ["http://", "ftp://x", "http://[", "http://h:99999999"])
def test_an_address_that_is_none_gets_a_sentence(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address"):
        observe(url)
    with pytest.raises(ConfigError, match="header"):
        Endpoint("http://h", "clé\n")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[1, 2]", "neither metrics nor a report"),
        ('{"a": 1}', "neither metrics nor a report"),
        ('{"runs": 3}', "neither metrics nor a report"),
        ('{"runs": [3, {"acceptance_rate": "high"}]}', "neither metrics nor a report"),
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "cannot be read as JSON: it is nested too deeply"),
        ('{"memory_used": 1e999}', "give a finite number"),
        ('{"memory_used": 0.9, "memory_used": 0.1}', "twice"),
        ("hello", "no metrics in Prometheus' format"),
        ("", "no metrics in Prometheus' format"),
        ('{"metrics": 5}', "neither text nor by name"),
        ('{"metrics": "", "facts": [1]}', "facts that are no object"),
        ('{"metrics": "", "facts": {"acceptance": 1.5}}', "a share from 0 to 1"),
        ('{"metrics": "x y z"}', "no metrics in Prometheus' format"),
    ],
)
def test_a_file_of_another_shape_gets_a_sentence(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "x.json"
    file.write_text(text)
    with pytest.raises(ConfigError, match=words):
        diagnose(file)


def test_texts_of_others_forge_no_line(tmp_path: Path) -> None:
    evil = "a\n# FORGED\x1b[2J\u2028"
    run = {"label": evil, "dataset": "\ud800", "acceptance_rate": 0.3, "drafter": evil, evil: 1}
    for content in (
        {"runs": [run]}, {"seen": [{"where": evil, "facts": {"acceptance": 0.3}}]},
        {"speculation_off": evil, "memory_used": 0.98}, {"acceptance": 1, evil: 1},
        {"num_prompts": 1, "acceptance": evil}, {"num_prompts": 1, evil: 3, "k": 2},
    ):  # fmt: skip
        try:
            said = markdown(look(content), diagnose(content))
        except ConfigError as error:
            said = str(error)
        assert "\n# FORGED" not in said
        assert all(letter.isprintable() for letter in said if letter != "\n")


def test_half_broken_reports_say_what_was_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    run = {"acceptance_rate": 0.3, "speedup": "fast", "spec_decode_acceptance_rate": 900,
           "acceptance_by_position": "no"}  # fmt: skip
    file.write_text(json.dumps({"runs": [run]}))
    [seen] = observe(file)
    assert seen.facts == {"acceptance": 0.3}
    assert len(seen.notes) == 3


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"facts": {"aceptance": 1}}, "did you mean 'acceptance'"),
        ({"facts": {"acceptance": "much"}}, "give a number"),
        ({"facts": {"engine": ""}}, "fact engine"),
        ({"facts": {"speedup": -1}}, "give a number"),
        ({"facts": {"speedup": float("nan")}}, "give a number"),
        ({"facts": {"speedup": 10**400}}, "give a number"),
        ({"thresholds": {"busy": "no"}}, "give a number"),
        ({"thresholds": {"bussy": 1}}, "did you mean 'busy'"),
        ({"seconds": -1}, "seconds is -1"),
    ],
)
def test_wrong_options_get_a_sentence(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        diagnose(CASES[0], **options)


@pytest.mark.parametrize("name", ["x" * 70_000, "*" * 300, "a\0b"])
def test_a_name_that_no_file_can_have_is_refused(name: str) -> None:
    with pytest.raises(OutriderError) as refused:
        diagnose(name)
    assert str(refused.value).isprintable()
