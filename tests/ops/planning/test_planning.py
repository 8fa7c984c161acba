"""The cost model of planning, its catalogue, and the roofline that fills it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

from outrider.engine.control.choices import Choice, Method
from outrider.engine.control.costs import Costs, Curve, DraftCosts
from outrider.engine.control.kept_costs import read_costs, write_costs
from outrider.engine.control.tuning import USUAL
from outrider.errors import ConfigError, ModelError
from outrider.ops.planning import Situation, advise, of_positions, of_rate
from outrider.ops.planning.catalogue import data, eagle_head, find_device, find_shape, shape_of
from outrider.ops.planning.forecast import EXPECTED, Forecast, forecast
from outrider.ops.planning.placement import (
    AHEAD,
    APART,
    SOCKET,
    TOGETHER,
    Cpus,
    Pair,
    placements,
)
from outrider.ops.planning.roofline import ACTIVATION, Machine, roofline
from tests.support import REPOSITORY
from tests.support.ggufs import SIZES, convert
from tests.support.planning_section import entries, placed, reference, spread_at
from tests.support.simulate import expected
from tests.support.tiny import MakeCheckpoint

DOCS = REPOSITORY / "docs" / "planning.md"
BLOCKED = """
import sys
class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is blocked")
sys.meta_path.insert(0, Blocker())
"""
PUBLISHED = {
    "Llama-2-7B-chat + 115M drafter (1.64 %)", "Llama-3.1-8B + 150M drafter",
    "Llama-3.1-70B + Llama-3.2-1B", "Llama-3.1-70B + Llama-3.2-1B, low rate of requests",
    "Llama-3.1-70B + Llama-3.2-3B", "Llama-3.1-8B on one A100", "Llama-2-70B + Llama-2-7B on A100",
    "Llama-3-70B + Llama-3-8B", "Llama-3-70B + Qwen2-7B (another tokenizer)",
    "Llama-3.1-405B + Llama-3.2-3B in FP8 on 4 x H200",
    "Llama-4-Maverick, EAGLE-3 head of SpecForge", "Llama-4-Scout, EAGLE-3 head of SpecForge",
    "Llama-3.3-70B, EAGLE-3 head of Red Hat", "Llama-3.3-70B, EAGLE-3 head of Red Hat, under load",
    "Qwen3-32B, EAGLE-3 head of Red Hat", "Qwen3-32B, EAGLE-3 head of Red Hat, under load",
    "Llama-4-Maverick, EAGLE-3 head of Red Hat",
    "Llama-4-Maverick, EAGLE-3 head of Red Hat, under load", "EAGLE at an acceptance of about 0.8",
    "SWIFT (the target without some layers)", "Granite-20B-code + 3B",
    "Granite-20B-code + 3B, adapted", "Qwen2.5-14B + 0.5B", "Qwen2.5-14B + 1.5B",
    "Qwen2.5-32B + 0.5B", "Qwen2.5-32B + 1.5B", "Mistral-7B", "Phi-3-mini + 50M drafter",
    "Throughput at a high batch", "Llama-3.1-8B, EAGLE-3, batch 2",
    "Llama-3.1-8B, EAGLE-3, batch 56",
}  # fmt: skip


def found(target: str = "llama-3.1-8b", drafter: str = "eagle3", **options: object) -> Forecast:
    situation = Situation(target, drafter, **{"hardware": "h100", **options})
    shape = situation.target_shape()
    return forecast(situation, shape, situation.find_drafter(shape))


def test_planning_costs_and_simulator_need_no_torch() -> None:
    code = (
        "from outrider.engine.control import controller, costs, kept_costs\n"
        "import outrider.ops.planning.roi\n"
        "from outrider.ops.planning import Situation, advise\n"
        "assert advise(Situation('llama-3.1-8b', hardware='h100')).verdict == 'use'\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", BLOCKED + code], check=True, timeout=300)


# Shapes


@pytest.mark.parametrize(
    ("name", "billions", "kv_bytes"),
    [
        ("llama-2-7b", 6.74, 524_288), ("llama-3.1-8b", 8.03, 131_072),
        ("llama-3.1-70b", 70.55, 327_680), ("llama-3.1-405b", 405.9, 516_096),
        ("llama-3.2-1b", 1.236, 32_768), ("qwen2.5-0.5b", 0.494, 12_288),
        ("mixtral-8x7b", 46.7, 131_072), ("qwen3-30b-a3b", 30.5, 98_304),
        ("phi-3-mini", 3.82, 393_216), ("llama-4-maverick", 400.7, 196_608),
    ],
)  # fmt: skip
def test_shapes_have_the_published_sizes(name: str, billions: float, kv_bytes: int) -> None:
    shape = find_shape(name)
    assert shape.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    assert shape.kv_values * ACTIVATION == kv_bytes


def test_a_gguf_file_has_the_shape_of_its_checkpoint(
    make_checkpoint: MakeCheckpoint, tmp_path: Path
) -> None:
    source = make_checkpoint(tmp_path / "source", "llama", **SIZES)
    file, _ = convert(source, tmp_path / "a.gguf", Kind.Q8_0)
    assert find_shape(str(file)).sizes == find_shape(str(source)).sizes
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(ModelError, match="damaged"):
        find_shape(str(file))


def test_a_sparse_model_reads_what_its_rows_are_routed_to() -> None:
    shape = find_shape("qwen3-30b-a3b")
    assert shape.active / 1e9 == pytest.approx(3.0, rel=0.05)
    assert shape.read(1) == pytest.approx(shape.active)
    reads = [shape.read(2**i) for i in range(14)]
    assert reads == sorted(reads)
    embedding = shape.vocabulary * shape.hidden
    assert reads[-1] == pytest.approx(shape.parameters - embedding, rel=1e-3)
    dense = find_shape("llama-3.1-8b")
    assert dense.read(1) == dense.read(512) == dense.active


def test_every_model_and_device_of_the_catalogue_can_be_used() -> None:
    for name in data("models")["model"]:
        assert find_shape(name).parameters > 1e7
    for name in data("hardware")["device"]:
        device = find_device(name.upper())
        assert device.memory > 1e10
        assert min(device.flops.values()) > device.bandwidth  # FLOP/s beyond bytes/s


def test_configs_of_other_families_are_read() -> None:
    gpt = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 100, "multi_query": True}
    shape = shape_of("x", {**gpt, "model_type": "gpt_bigcode"})
    assert (shape.inner, shape.kv_heads, shape.gated) == (256, 1, False)
    llama4 = {
        "model_type": "llama4",
        "text_config": {
            "model_type": "llama4_text", "num_hidden_layers": 48, "hidden_size": 5120,
            "intermediate_size": 8192, "intermediate_size_mlp": 16384, "num_attention_heads": 40,
            "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 202048,
            "num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1,
        },
    }  # fmt: skip
    assert shape_of("y", llama4).parameters == find_shape("llama-4-scout").parameters
    head = eagle_head(find_shape("llama-3.1-8b"))
    assert head.parameters / 1e9 == pytest.approx(0.40, rel=0.1)


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"hidden_size": None}, "no hidden_size"), ({"hidden_size": "64"}, "give a size"),
        ({"num_hidden_layers": -1}, "give a size"), ({"vocab_size": True}, "give a size"),
        ({"vocab_size": 1e30}, "give a size"), ({"kv_lora_rank": 512}, "not modelled"),
        ({"num_experts": 8}, "no num_experts_per_tok"),
        ({"num_experts": 2, "num_experts_per_tok": 4}, "4 of 2 experts"),
    ],
)  # fmt: skip
def test_configs_that_cannot_be_right_are_refused(
    change: dict[str, object], problem: str, tmp_path: Path
) -> None:
    config = dict(data("models")["model"]["llama-3.1-8b"])
    (tmp_path / "config.json").write_text(json.dumps({**config, **change}), encoding="utf-8")
    with pytest.raises(ModelError, match=problem) as refused:
        find_shape(str(tmp_path))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "{}", "[" * 100_000,
        '{"target":[[1,1e-3],[2,NaN]],"drafters":{},"per_context":0}',
        '{"target":[[1,1e-3],[2,NaN],[3,1e-3]],"drafters":{},"per_context":0}',
        '{"target":[[1,1e-3],[1e999,2e-3]],"drafters":{},"per_context":0}',
        '{"target":[[1,1e-3],[2,%s]],"drafters":{},"per_context":0}' % ("9" * 400),
        '{"target":[[1,1e-3],[2,2e-3]],"drafters":{},"per_context":0}' + " " * (1 << 20),
        '{"target":[[1,2e-3],[2,1e-3]],"drafters":{},"per_context":0}',
        '{"target":[[1,1e-3],[2,2e-3]],"drafters":{},"per_context":-1}',
        '{"target":[[1,1e-3],[2,2e-3]],"drafters":{},"per_context":0,"host":[1]}',
        '{"target":[[1,1e-3],[2,2e-3]],"drafters":{"x":[null,NaN,0]},"per_context":0}',
    ],
)  # fmt: skip
def test_costs_that_make_no_sense_are_none(text: str, tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    file.write_text(text, encoding="utf-8")
    assert read_costs(file) is None


def test_costs_come_back_as_they_were_written(tmp_path: Path) -> None:
    passes = Curve((1, 4), (1e-4, 2e-4))
    drafters = {"a": DraftCosts(passes, 1e-5), "b": DraftCosts(None, 1e-5, 2e-6)}
    costs = Costs(Curve((1, 2), (1e-3, 2e-3)), drafters, 1e-9, 2e-4, 3e-5)
    write_costs(tmp_path / "costs.json", costs)
    assert read_costs(tmp_path / "costs.json") == costs
    older = json.loads((tmp_path / "costs.json").read_text(encoding="utf-8"))
    del older["host"]
    (tmp_path / "costs.json").write_text(json.dumps(older), encoding="utf-8")
    assert read_costs(tmp_path / "costs.json") == Costs(costs.target, drafters, 1e-9)


def test_files_that_are_no_config_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for text in ("[1]", "{", "\x00", "[" * 100_000, " " * 10_000_001):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ModelError, match="config"):
            find_shape(str(tmp_path))
    with pytest.raises(ConfigError, match=r"did you mean 'llama-3\.1-8b'"):
        find_shape("lama-3.1-8b")
    with pytest.raises(ConfigError, match=r"known are .*h100"):
        find_device("abacus")


# Costs


def test_steps_cost_what_the_controller_would_expect() -> None:
    steps = found(drafter="llama-3.2-1b").steps
    for batch, k in ((1, 0), (1, 5), (8, 3), (64, 1)):
        choice = Choice("model" if k else "none", k)
        methods = {"model": Method(("model",), 8)}
        rates = {"model": [0.5] * 8, "none": []}
        context = steps.context * batch
        _, seconds = expected(steps.costs, methods, rates, [choice] * batch, context)
        assert steps.seconds(batch, k) == pytest.approx(seconds + steps.costs.host_at(batch))


def test_a_forward_is_what_the_roofline_says() -> None:
    shape, device = find_shape("llama-3.1-8b"), find_device("h100")
    terms = Machine(device).terms(shape, 1)
    assert terms.weights == pytest.approx(shape.active * 2 / (3.35e12 * 0.8))
    assert terms.compute == pytest.approx(2 * shape.active / (989e12 * 0.7))
    assert terms.communication == 0
    eight = Machine(device).terms(shape, 8)
    assert eight.compute == pytest.approx(8 * terms.compute)
    assert eight.weights == terms.weights
    assert eight.logits == pytest.approx(8 * terms.logits)
    two = Machine(device, 2).terms(shape, 1)
    assert two.weights == pytest.approx(terms.weights / 2)
    assert two.communication > 2 * shape.layers * device.link_latency
    half = Machine(device, dtype="fp8").terms(shape, 1)
    assert half.weights == pytest.approx(terms.weights / 2)
    assert half.compute == pytest.approx(terms.compute * 989 / 1979)
    # The fit of vLLM on this device and model (arXiv 2601.11580): 5.89 ms and 21 us a row.
    assert sum(terms) == pytest.approx(5.89e-3, rel=0.05)
    assert eight.compute / 8 == pytest.approx(21e-6, rel=0.1)


def test_without_costs_the_speedup_is_the_tokens_of_a_step() -> None:
    one = found(drafter="ngram", acceptance=of_rate(0.7, 4))
    free = one.steps.draft(1, 4) / one.steps.seconds(1, 0)
    assert free < 0.01
    tokens = one.acceptance.tokens(4)
    assert 0.9 * tokens < one.tpot(1, 0) / one.tpot(1, 4) < tokens


def test_speedups_fall_with_the_batch_of_a_dense_model() -> None:
    speedups = [spread_at(found(hardware="b200"), 2**i, 3)[1] for i in range(0, 9, 2)]
    assert speedups == sorted(speedups, reverse=True)


def test_sparse_models_and_long_contexts_win_at_high_batches() -> None:
    sparse = found("llama-4-maverick", hardware="h200", tensor_parallel=8, dtype="fp8",
                   input_tokens=64, acceptance=of_positions([0.83, 0.62, 0.49]))  # fmt: skip
    assert spread_at(sparse, 256, 3)[1] > spread_at(sparse, 8, 3)[1] + 0.2
    short, long = (
        found("llama-3.1-70b", hardware="h200", tensor_parallel=8, input_tokens=tokens)
        for tokens in (256, 16_384)
    )
    assert spread_at(long, 128, 3)[1] > spread_at(short, 128, 3)[1] + 0.2


def test_what_memory_does_not_hold_does_not_run() -> None:
    tight = found("llama-2-7b", "llama-2-7b", hardware="a100-40gb")
    assert tight.memory.speculative < tight.memory.plain / 2
    batch = int(tight.memory.plain)
    assert tight.batch(batch, 4) == int(tight.memory.speculative)
    assert tight.batch(batch, 0) == batch
    assert tight.speedup(batch, 4) < 1
    none = found(drafter="llama-3.1-70b")
    assert none.memory.speculative == 0
    assert none.best(1)[1] == none.speedup(1, 4) == 0
    roomy = replace(tight, memory=None)
    assert roomy.speedup(batch, 4) > tight.speedup(batch, 4)


def test_break_even_is_where_speculation_neither_wins_nor_loses() -> None:
    for batch, k in ((1, 5), (64, 3)):
        one = found(drafter="llama-3.2-1b")
        rate = one.break_even(batch, k)
        at = replace(one, acceptance=of_rate(rate, k))
        assert at.speedup(batch, k) == pytest.approx(1, abs=1e-6)
    lost = found(drafter="llama-2-70b", hardware="h200", tensor_parallel=2)
    assert lost.break_even(1, 1) is None  # a drafter that is larger than its target


def test_the_chosen_length_is_the_best_of_all() -> None:
    one = found(drafter="llama-3.2-1b")
    for batch in (1, 8, 64, 256):
        k, speedup = one.best(batch)
        assert speedup == pytest.approx(max(one.speedup(batch, n) for n in range(1, 9)), rel=0.02)
        assert one.chosen(batch) == (k if speedup >= USUAL.enter_speedup else 0)
    spans = one.ranges()
    assert spans[0][0] == 1
    assert all(a[1] + 1 == b[0] and a[2] != b[2] for a, b in pairwise(spans))


def test_intervals_hold_the_expected_speedup() -> None:
    one = found()
    low, middle, high = spread_at(one, 8, 3)
    assert low < middle < high
    assert middle == pytest.approx(one.tpot(8, 0) / one.tpot(8, 3, EXPECTED), rel=0.05)
    assert spread_at(one, 8, 3) == spread_at(found(), 8, 3)  # the same draws each time


def test_a_drafter_elsewhere_takes_no_memory_but_the_link() -> None:
    same, own = (found("llama-3.1-70b", "llama-3.1-8b", hardware="h100", tensor_parallel=4,
                       placement=place) for place in ("same", "own"))  # fmt: skip
    assert own.memory.drafter == own.memory.per_sequence == 0
    assert own.memory.speculative > same.memory.speculative
    assert own.steps.link > same.steps.link == 0
    cpu = found("llama-3.1-8b", "llama-3.2-1b", placement="cpu")
    near = found("llama-3.1-8b", "llama-3.2-1b")
    assert cpu.steps.draft(1, 4) > 3 * near.steps.draft(1, 4)


def test_medusa_drafts_in_one_pass_and_layerskip_with_the_target() -> None:
    medusa, skip = found(drafter="medusa").steps, found(drafter="layerskip").steps
    assert medusa.draft(1, 4) == medusa.draft(1, 1)
    assert skip.draft(1, 4) == pytest.approx(4 * skip.draft(1, 1))
    assert 0.5 < skip.draft(1, 1) / skip.verify(1, 0) < 0.6


def test_costs_of_a_roofline_have_the_controllers_form() -> None:
    target, machine = find_shape("llama-3.1-8b"), Machine(find_device("h100"))
    steps = roofline(target, machine, "lookup", None, machine, 512.0)
    seconds = steps.costs.target.seconds
    assert list(seconds) == sorted(seconds)
    assert steps.costs.target.rows[0] == 1
    assert steps.costs.drafters["lookup"].passes is None


# What was published


def test_every_published_pair_is_in_the_catalogue() -> None:
    known = entries()
    assert {entry.name for entry in known} == PUBLISHED
    assert len(known) == len(PUBLISHED)


def test_most_published_figures_lie_between_p10_and_p90() -> None:
    told = [entry for entry in entries() if entry.published is not None]
    assert len(told) >= 19
    assert sum(entry.covered for entry in told) / len(told) >= 0.8


def test_the_docs_have_the_table_of_published_figures() -> None:
    text = DOCS.read_text(encoding="utf-8")
    tables = text.partition("<!-- published -->")[2].partition("<!-- /published -->")[0]
    assert tables.strip() == reference(), "run: python -m tests.support.planning_section"
    names = [*data("models")["model"], *data("hardware")["device"]]
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_docs_have_the_table_of_placements() -> None:
    text = DOCS.read_text(encoding="utf-8")
    found = text.partition("<!-- placement -->")[2].partition("<!-- /placement -->")[0]
    assert found.strip() == placed(), "run: python -m tests.support.planning_section"


def test_a_drafter_ahead_hides_its_passes_behind_certain_drafts() -> None:
    device, shape = find_device("xeon-8480"), find_shape
    pair = Pair(shape("llama-3.1-70b"), shape("llama-3.2-1b"), 0.999, "int4")
    one, two = (
        {placed.name: placed for placed in placements(pair, Cpus(device, 56, 56, sockets))}
        for sockets in (1, 2)
    )
    assert one[AHEAD].speedup > one[APART].speedup
    assert {SOCKET} == two.keys() - one.keys()
    never = {p.name: p for p in placements(replace(pair, chance=0.01), Cpus(device, 56, 56))}
    assert never[AHEAD].speedup < never[APART].speedup < never[TOGETHER].speedup < 1


def test_advice_for_a_cpu_says_what_cores_of_its_own_would_cost() -> None:
    cpu, gpu = (
        advise(Situation("llama-3.1-8b", "llama-3.2-1b", hardware, dtype="int4")).notes
        for hardware in ("xeon-8480", "h100")
    )
    (said,) = [note for note in cpu if "drafter_cpus" in note]
    assert "(modelled)" in said
    assert not [note for note in gpu if "drafter_cpus" in note]


def test_the_example_of_the_docs_runs(capsys: pytest.CaptureFixture[str]) -> None:
    code = DOCS.read_text(encoding="utf-8").partition("```python\n")[2].partition("```")[0]
    exec(code, {})
    assert capsys.readouterr().out.startswith("use at batch 1, the best draft has")
