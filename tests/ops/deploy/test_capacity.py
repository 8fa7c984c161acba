"""``outrider ops deploy plan``: the queue beside closed forms, fleets by hand, and bad input."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from math import exp, factorial
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.engine.control.costs import Costs, Curve, DraftCosts
from outrider.errors import ConfigError, OutriderError
from outrider.ops.deploy.capacity import LARGEST_LOAD, Capacity, capacity_markdown, plan
from outrider.ops.deploy.demand import Demand, parse_demand
from outrider.ops.deploy.queueing import QueueRun, Replica, percentile, simulate
from outrider.ops.planning import Situation, of_positions
from tests.support import REPOSITORY

MANY = 20_000
STEP = 0.02
TOML = """
[model]
target = "llama-3.1-8b"
drafter = "eagle3"
hardware = "h100"

[traffic]
peak = 60

[slo]
ttft = 1
tpot = 0.02
"""


def exponential(mean: float) -> Any:
    return lambda source: source.expovariate(1 / mean)


def mean(run: QueueRun, level: str) -> float:
    return fmean(getattr(each, level) for each in run.done)


def erlang_c(servers: int, offered: float) -> float:
    """The chance to wait in M/M/c, where ``offered`` is arrivals over the rate of one server."""
    busy = offered**servers / factorial(servers) * servers / (servers - offered)
    return busy / (sum(offered**n / factorial(n) for n in range(servers)) + busy)


@pytest.mark.parametrize(("servers", "load"), [(1, 0.5), (1, 0.8), (4, 0.7), (16, 0.85)])
def test_slots_of_one_speed_are_an_m_m_c_queue(servers: int, load: float) -> None:
    tokens, token = 50.0, 0.02  # a second for each request
    rate = load * servers
    run = simulate(Replica(0.0, (token,) * servers), rate, exponential(tokens), MANY)
    chance = erlang_c(servers, rate)
    waited = fmean(each.wait > 0 for each in run.done)
    assert waited == pytest.approx(chance, abs=0.03)
    assert mean(run, "wait") == pytest.approx(chance / (servers - rate), rel=0.12)
    assert run.running == pytest.approx(rate, rel=0.03)
    # P(wait > t) falls as an exponential.
    beyond = fmean(each.wait > 0.5 for each in run.done)
    assert beyond == pytest.approx(chance * exp(-0.5 * (servers - rate)), rel=0.12)


@pytest.mark.parametrize("load", [0.3, 0.7])
def test_prompts_alone_are_an_m_d_1_queue(load: float) -> None:
    run = simulate(Replica(1.0, (1.0,)), load, lambda _: 0.0, MANY)
    assert mean(run, "wait") == pytest.approx(load / (2 * (1 - load)), rel=0.05)
    assert all(each.ttft == pytest.approx(each.wait + 1) for each in run.done)
    assert all(each.e2e == each.ttft and each.tpot == 0 for each in run.done)


@pytest.mark.parametrize("work", [exponential(10.0), lambda _: 10.0], ids=["exponential", "equal"])
def test_shared_speed_is_a_processor_sharing_queue(work: Any) -> None:
    # Mean time of service / (1 - load), whatever the distribution of the work.
    run = simulate(Replica(0.0, tuple(0.1 * n for n in range(1, 500))), 0.6, work, MANY)
    assert mean(run, "e2e") == pytest.approx(1 / (1 - 0.6), rel=0.06)
    assert mean(run, "wait") == 0


def test_a_request_alone_takes_its_prompt_and_its_tokens() -> None:
    run = simulate(Replica(0.5, (0.1, 0.2)), 1e-6, lambda _: 20.0, 50)
    for each in run.done:
        assert each == pytest.approx((0.0, 0.5, 0.1, 2.5), abs=1e-4)


def test_prompts_hold_up_those_who_run() -> None:
    # Two at once: 1 s of prompt each, 10 tokens at 0.1 s; the second prompt stops the first.
    class Together(Random):
        times = iter([1.0, 0.0])

        def expovariate(self, lambd: float = 1.0) -> float:
            return next(self.times, 1e9)

    import outrider.ops.deploy.queueing as queueing

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queueing, "Random", Together)
        run = simulate(Replica(1.0, (0.1, 0.1)), 1.0, lambda _: 10.0, 2)
    first, second = sorted(run.done)
    assert first == pytest.approx((0.0, 1.0, 0.2, 3.0))
    assert second == pytest.approx((1.0, 2.0, 0.1, 3.0))


def test_what_is_simulated_is_the_same_each_time_and_obeys_little() -> None:
    replica = Replica(0.05, tuple(0.01 + 0.001 * n for n in range(32)))
    run = simulate(replica, 3.0, exponential(100.0), 5_000, seed=3)
    assert run == simulate(replica, 3.0, exponential(100.0), 5_000, seed=3)
    assert run != simulate(replica, 3.0, exponential(100.0), 5_000, seed=4)
    long = simulate(replica, 3.0, exponential(100.0), MANY)
    inside = fmean(each.e2e - each.wait for each in long.done)
    assert long.running == pytest.approx(3.0 * inside, rel=0.02)


def test_what_a_replica_sustains() -> None:
    # 99 tokens of 0.02 s beside 4 sequences, and a prompt of 0.1 s: 0.595 s a request.
    assert Replica(0.1, (0.02,) * 4).limit(99) == pytest.approx(1 / 0.595)
    # More at once may be slower in all.
    assert Replica(0.0, (0.1, 0.3)).limit(10) == pytest.approx(1.0)
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.5) == 2.0
    assert percentile([3.0, 1.0, 2.0, 4.0], 0.95) == 4.0
    assert percentile([7.0], 0.5) == 7.0


def by_hand(**changes: Any) -> Demand:
    """Steps of 20 ms whatever their rows; every one of 4 drafted tokens is accepted."""
    flat = Curve((1, 2), (STEP, STEP))
    costs = Costs(flat, {"suffix": DraftCosts(None, 0.0, 0.0)}, 0.0, 0.0, 0.0)
    situation = Situation(
        "llama-3.1-8b", "suffix", profile=costs, tensor_parallel=2, input_tokens=100,
        output_tokens=100, acceptance=of_positions([1.0] * 4), longest=4, price=2.0,
    )  # fmt: skip
    demand = Demand(situation, (10.0,), {"e2e": 1000.0}, max_num_seqs=4)
    return replace(demand, **changes)


def test_fleets_worked_by_hand() -> None:
    found = plan(by_hand())
    # A request holds a replica for its prompt, 20 ms, and a quarter of 99 tokens.
    plain = LARGEST_LOAD / (STEP + 99 * STEP / 4)
    fast = LARGEST_LOAD / (STEP + 99 * STEP / 5 / 4)
    assert found.plain.per_replica.value == pytest.approx(plain)
    assert found.speculative.per_replica.value == pytest.approx(fast)
    assert (plain, fast) == (pytest.approx(1.748, abs=1e-3), pytest.approx(7.563, abs=1e-3))
    assert found.plain.limited_by == found.speculative.limited_by == "load"
    assert found.plain.k == 0
    assert found.speculative.k == 4
    # ceil(10 / 1.748) = 6 and ceil(10 / 7.563) = 2; a spare each, a standby, two devices each.
    assert found.plain.replicas.value == 6
    assert found.plain.devices.value == (6 + 1) * 2
    assert found.speculative.replicas.value == 2
    assert found.speculative.standby.value == 1
    assert found.speculative.devices.value == (2 + 1 + 1) * 2
    assert found.plain.device_hours_a_day["fixed"].value == 14 * 24
    assert found.plain.dollars_a_day["fixed"].value == 14 * 24 * 2.0
    rollback = {name: each.value for name, each in found.rollback.items()}
    assert rollback == {"needed": 6, "there": 3, "missing": 3}


def test_standby_and_spares_are_counted() -> None:
    found = plan(by_hand(standby=0.5, spare=2))
    assert found.speculative.standby.value == 3  # 5 requests/s of 1.748
    assert found.speculative.devices.value == (2 + 2 + 3) * 2
    assert found.plain.devices.value == (6 + 2) * 2
    assert plan(by_hand(standby=1.0)).rollback["missing"].value == 0
    assert plan(by_hand(spare=0)).plain.devices.value == 12


def test_the_least_traffic_needs_a_replica() -> None:
    found = plan(by_hand(by_hour=(1e-9,)))
    assert found.plain.replicas.value == found.speculative.replicas.value == 1


def test_hours_have_the_replicas_that_they_need() -> None:
    rates = (0.0,) * 12 + (3.0,) * 8 + (10.0,) * 4
    found = plan(by_hand(by_hour=rates))
    hours = [each.value for each in found.plain.hours]
    assert hours == [1] * 12 + [2] * 8 + [6] * 4
    # The fixed fleet of 14 devices, less those that 20 hours do not need.
    scaled = 14 * 24 - 2 * (12 * 5 + 8 * 4)
    assert found.plain.device_hours_a_day["scaled"].value == scaled


def test_a_level_that_binds_is_kept_and_named() -> None:
    loose, tight = plan(by_hand()), plan(by_hand(slo={"e2e": 12.0, "ttft": 0.3}))
    assert tight.plain.per_replica.value < loose.plain.per_replica.value
    assert tight.plain.limited_by == "ttft"
    assert tight.plain.times["ttft"]["p95"].value <= 0.3
    assert tight.plain.times["e2e"]["p95"].value <= 12.0
    stricter = plan(by_hand(slo={"e2e": 12.0, "ttft": 0.3}, percentile=0.99))
    assert stricter.plain.per_replica.value < tight.plain.per_replica.value
    assert stricter.plain.times["ttft"]["p99"].value <= 0.3


def test_a_level_that_only_speculation_keeps() -> None:
    found = plan(by_hand(slo={"tpot": 0.015}))
    assert found.plain is None
    assert found.speculative is not None
    assert found.rollback == {}
    text = capacity_markdown(found)
    assert "plain decoding does not meet the service levels" in text


def catalogue(**changes: Any) -> Capacity:
    return plan(replace(parse_demand(TOML, "it"), **changes))


@pytest.fixture(scope="module")
def usual() -> Capacity:
    return catalogue()


def test_less_acceptance_needs_no_fewer_replicas(usual: Capacity) -> None:
    assert usual.cautious.value >= usual.speculative.replicas.value
    assert usual.speculative.k > 0
    more = catalogue(by_hour=(240.0,))
    assert more.plain.per_replica == usual.plain.per_replica
    assert more.plain.replicas.value > 3 * usual.plain.replicas.value


def test_a_drafter_on_its_own_device_is_counted() -> None:
    document = TOML.replace('"eagle3"', '"llama-3.2-1b"\nplacement = "own"')
    found = plan(parse_demand(document, "it"))
    side = found.speculative
    assert side.devices.value == 2 * (side.replicas.value + 1) + side.standby.value


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every number of plain objects that is not the value of a figure."""
    if isinstance(value, dict):
        if set(value) == {"value", "unit", "evidence"}:
            assert value["evidence"] in ("measured", "modelled", "assumed"), path
            return
        for key, each in value.items():
            yield from numbers(each, f"{path}.{key}")
    elif isinstance(value, list):
        for each in value:
            yield from numbers(each, path)
    elif isinstance(value, int | float):
        yield path, value


def test_every_number_has_its_evidence(usual: Capacity) -> None:
    bare = dict(numbers(usual.to_json()))
    assert set(bare) == {".plain.k", ".speculative.k"}
    assert usual.peak.evidence == "assumed"
    assert usual.plain.replicas.evidence == "modelled"


def run(text: str, *arguments: str) -> Any:
    return CliRunner().invoke(app, ["ops", "deploy", "plan", "-", *arguments], input=text)


def test_the_command_writes_markdown_or_json(
    usual: Capacity, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = run(TOML, "--out", str(tmp_path / "plan.json"))
    assert done.exit_code == 0, done.output
    assert done.stdout == capacity_markdown(usual)
    as_json = {
        "model": {"target": "llama-3.1-8b", "drafter": "eagle3", "hardware": "h100"},
        "traffic": {"peak": 60}, "slo": {"ttft": 1, "tpot": 0.02},
    }  # fmt: skip
    asked: list[Demand] = []

    def planned(demand: Demand) -> Capacity:
        asked.append(demand)
        return usual

    monkeypatch.setattr("outrider.ops.deploy.capacity.plan", planned)
    same = run(json.dumps(as_json), "--json")
    assert asked == [parse_demand(TOML, "-")]
    assert json.loads(same.stdout) == json.loads((tmp_path / "plan.json").read_text("utf-8"))
    assert json.loads(same.stdout) == json.loads(json.dumps(usual.to_json()))


def test_the_exit_code_says_that_nothing_keeps_the_levels() -> None:
    done = run(TOML.replace("tpot = 0.02", "tpot = 0.0001"))
    assert done.exit_code == 1
    assert "with any number of replicas" in done.stdout


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("peak = 60", "peak = 0", "above 0"),
        ("peak = 60", "peak = -1", "peak|per second"),
        ("peak = 60", "peak = nan", "traffic.peak is nan; give a finite"),
        ("peak = 60", 'peak = "many"', "per second"),
        ("peak = 60", "", "peak or by_hour"),
        ("peak = 60", "peak = 6\nby_hour = [1]", "peak or by_hour"),
        ("peak = 60", "by_hour = [1, 2]", "24"),
        ("peak = 60", "by_hour = 3", "list"),
        ("peak = 60", "peek = 60", "did you mean 'peak'"),
        ("peak = 60", "peak = 60\ninput_tokens = 0", "input_tokens"),
        ("peak = 60", "peak = 60\ntasks = 3", "tasks"),
        ("[slo]", "[slos]", "did you mean 'slo'"),
        ("ttft = 1\ntpot = 0.02", "", "no service level"),
        ("ttft = 1", "ttft = 0", "nothing keeps"),
        ("ttft = 1", "ttft = true", "ttft"),
        ("ttft = 1", "percentile = 0.2", "0.5"),
        ("ttft = 1", "percentile = 1", "percentile"),
        ('hardware = "h100"', "", "model.hardware"),
        ('hardware = "h100"', 'hardware = "h1000"', "h100"),
        ('hardware = "h100"', "hardware = 3", "text"),
        ('hardware = "h100"', 'hardware = "h100"\nacceptance = "2@3"', "share"),
        ('hardware = "h100"', 'hardware = "h100"\nprofile = "no-such-file"', "no-such-file"),
        ('target = "llama-3.1-8b"', "", "target"),
        ('target = "llama-3.1-8b"', 'target = "llama-3.1-70b"', "GB"),
        ("[model]", "[model]\ntensor_parallel = 3", "does not divide the target's 32"),
        ("[model]", "model = 3\n[fleet]", "table"),
        ("[model]", "[fleet]\nspare = -1\n[model]", "spare"),
        ("[model]", "[fleet]\nstandby = 2\n[model]", "standby"),
        ("[model]", "[fleet]\nmax_num_seqs = 0\n[model]", "max_num_seqs"),
        ("[model]", "[fleet]\nprice = -1\n[model]", "price"),
        ("[model]", "[[[", "cannot be read as TOML"),
        ("[model]", "{", "cannot be read as JSON"),
    ],
)
def test_bad_input_gets_a_sentence(old: str, new: str, said: str) -> None:
    assert old in TOML
    done = run(TOML.replace(old, new))
    assert done.exit_code == 2, done.output
    words = " ".join(done.stderr.split())
    assert any(each in words for each in said.split("|")), words
    assert "Traceback" not in done.stderr


def test_the_answer_in_the_docs_is_that_of_the_example() -> None:
    repository = REPOSITORY
    docs = (repository / "docs" / "production.md").read_text("utf-8")
    example = str(repository / "deploy" / "examples" / "demand.toml")
    done = CliRunner().invoke(app, ["ops", "deploy", "plan", example])
    told = docs.split("<!-- outrider ops deploy plan deploy/examples/demand.toml -->\n")[1]
    assert done.stdout == told.split("<!-- end -->")[0].replace("\n### ", "# ", 1)


def test_a_file_that_is_not_there() -> None:
    done = CliRunner().invoke(app, ["ops", "deploy", "plan", "no-such-file"])
    assert done.exit_code == 2
    assert "no-such-file" in done.stderr


def test_python_refuses_what_the_file_may_not_say() -> None:
    with pytest.raises(ConfigError, match="no option 'latency'"):
        by_hand(slo={"latency": 1.0})
    with pytest.raises(OutriderError):
        by_hand(by_hour=())
