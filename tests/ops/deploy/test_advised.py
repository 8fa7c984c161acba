"""What ``outrider ops advise`` writes, on its road: render, rules, the guard's policy, roi."""

from __future__ import annotations

import json
import random
import shlex
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import ConfigError, OutriderError
from outrider.ops.alerts.rules import break_even_of
from outrider.ops.deploy import advised
from outrider.ops.deploy.render import render as rendered
from outrider.ops.deploy.spec import parse
from outrider.ops.guard import policy
from outrider.ops.planning import Advice, Situation, advise, read_advice
from outrider.ops.planning.rules import LEAVE

NAMES = ("--model", "org/target", "--drafter", "org/drafter")
LARGE = Situation("llama-3.1-70b", "llama-3.2-1b", "h100", 4, concurrency={1: 0.5, 128: 0.5})
SERVERS = ("vllm", "sglang", "trtllm", "triton")


def saved(folder: Path, advice: Advice | dict[str, Any] | str) -> Path:
    file = folder / "advice.json"
    document = advice.to_json() if isinstance(advice, Advice) else advice
    file.write_text(document if isinstance(document, str) else json.dumps(document), "utf-8")
    return file


def render(folder: Path, advice: Any, *flags: str) -> Any:
    words = ["ops", "deploy", "render", "--advice", str(saved(folder, advice)), *flags]
    return CliRunner().invoke(app, words)


def words_of(text: str) -> list[str]:
    return shlex.split(text.replace("\\\n", ""), comments=True)


def speculative(text: str) -> dict[str, Any]:
    words = words_of(text)
    found: dict[str, Any] = json.loads(words[words.index("--speculative-config") + 1])
    return found


@pytest.fixture(scope="module")
def large() -> Advice:
    return advise(LARGE)


@pytest.fixture(scope="module")
def mixed(large: Advice) -> dict[str, Any]:
    return large.to_json()


# The document


def test_it_holds_what_was_advised_on(large: Advice) -> None:
    found = large.deployment
    assert (found.hardware, found.tensor_parallel, found.replicas) == ("h100", 4, 1)
    assert (found.method, found.drafter and found.drafter.name) == ("draft_model", "llama-3.2-1b")
    assert found.target.checkpoint == "meta-llama/Llama-3.1-70B-Instruct"
    assert found.target.weights_gib == pytest.approx(70.55e9 * 2 / 2**30, rel=0.01)
    assert found.max_model_len == LARGE.input_tokens + LARGE.output_tokens
    assert found.traffic.concurrency == {1: 0.5, 128: 0.5}
    assert read_advice(json.dumps(large.to_json()), "it") == large


Change = Callable[[dict[str, Any]], Any]
DAMAGE: list[tuple[Change, str]] = [
    (lambda d: d.update(extra=1), "has no option 'extra'; drop it"),
    (lambda d: d["deployment"].update(tensor_paralel=4), "did you mean 'tensor_parallel'?"),
    (
        lambda d: d["deployment"]["target"].update(bits=4),
        r"\[deployment\.target\] has no option 'bits'",
    ),
    (lambda d: d["break_even"].update(rate=1), r"\[break_even\] has no option 'rate'"),
    (lambda d: d.update(version=2), "has advice version 2, but this Outrider reads version 1"),
    (lambda d: d.pop("version"), "not an advice with a version"),
    (lambda d: d.pop("deployment"), "has no deployment"),
    (lambda d: d["deployment"].update(tensor_parallel="4"), "deployment.tensor_parallel is '4'"),
    (lambda d: d["deployment"].update(tensor_parallel=4.5), "deployment.tensor_parallel is 4.5"),
    (lambda d: d["deployment"].update(tensor_parallel=True), "deployment.tensor_parallel is True"),
    (lambda d: d["deployment"].update(tensor_parallel=0), "deployment.tensor_parallel is 0"),
    (lambda d: d["deployment"].update(replicas=10**30), "deployment.replicas is"),
    (lambda d: d["deployment"].update(method="magic"), "deployment.method is 'magic'"),
    (lambda d: d["deployment"].update(memory_gib=-1.0), "deployment.memory_gib is -1"),
    (lambda d: d["deployment"]["target"].update(dtype="fp3"), "dtype is 'fp3'"),
    (lambda d: d["deployment"]["target"].update(weights_gib=1e999), "give a finite number"),
    (lambda d: d["speedup"]["p10"].update(value=float("nan")), "give a finite number"),
    (lambda d: d["break_even"].update(value=1.5), "break_even is 1.5"),
    (lambda d: d["deployment"]["target"].update(checkpoint="a\nb"), r"'a\\nb' is not a single"),
    (lambda d: d.update(target="\x1b[31m"), r"x1b\[31m' is not a single line of text"),
    (lambda d: d.update({"\x1b]0;\u2028": 1}), r"no option '.*x1b\]0;.*'; drop"),
    (lambda d: d.update(k="5"), "k is '5'"),
    (lambda d: d.update(k=0), "k is 0"),
    (lambda d: d.update(schedule=[[1, 2]]), "schedule.0"),
    (lambda d: d.update(schedule=[[2, 3, 4]]), "begin at batch size 1"),
    (lambda d: d.update(schedule=None), "schedule is None"),
    (lambda d: d["deployment"]["traffic"].update(concurrency={"a": 1.0}), "concurrency"),
    (lambda d: d["deployment"]["traffic"].update(input_tokens=0), "input_tokens is 0"),
]


@pytest.mark.parametrize(("damage", "said"), DAMAGE)
def test_a_damaged_document_gets_one_sentence(
    mixed: dict[str, Any], damage: Change, said: str
) -> None:
    document = json.loads(json.dumps(mixed))
    damage(document)
    with pytest.raises(ConfigError, match=said) as refused:
        read_advice(json.dumps(document), "advice.json")
    text = str(refused.value)
    assert text.startswith("advice.json")
    assert text.isprintable()
    assert len(text) < 500


SPOILED: tuple[Any, ...] = (
    None, True, -1, 0, 2**63, 10**400, 0.5, 1e300, float("nan"), "", "4", "\x1b[31m", "a\nb",
    "\u2028", "\ud800", "x" * 300, [], [1], {}, {"a": 1}, [[1, 1, True]], "--help",
)  # fmt: skip


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    pairs = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else pairs:
        yield from places(each, (*path, key))


@pytest.mark.parametrize("seed", range(4))
def test_no_value_anywhere_gets_a_traceback(seed: int, mixed: dict[str, Any]) -> None:
    rng, everywhere = random.Random(seed), list(places(mixed))[1:]
    for _ in range(60):
        document = json.loads(json.dumps(mixed))
        *path, last = rng.choice(everywhere)
        owner = document
        for key in path:
            owner = owner[key]
        owner[last] = rng.choice(SPOILED)
        said = ""
        try:
            advice = read_advice(json.dumps(document), "advice.json")
            made = {**advised.document_of(advice, "vllm", None), "engine": "vllm"}
            rendered(parse(made)).text()
        except OutriderError as error:
            said = str(error)
        assert said.isprintable()


TEXTS = (
    "", "{", "[1", "[]", "null", '{"a": 1}', '{"version": 1, "verdict": ' + "[" * 100_000,
    '{"version": 1, "verdict": "\\ud800"}', '{"version": "1", "verdict": 1}', "{" + " " * 2**20,
    "\ud800", "\ufeff{}", "not json",
)  # fmt: skip


@pytest.mark.parametrize("text", TEXTS, ids=range(len(TEXTS)))
def test_what_is_no_advice_gets_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^x\.json ") as refused:
        read_advice(text, "x.json")
    assert str(refused.value).isprintable()


def test_every_reader_has_the_same_sentences(mixed: dict[str, Any], tmp_path: Path) -> None:
    file = saved(tmp_path, {**mixed, "extra": 1})
    guard = tmp_path / "policy.toml"
    guard.write_text('advice = "advice.json"\n[engine]\nurl = "http://e:8000"\n')
    for words in (
        ("ops", "deploy", "render", "--engine", "vllm", "--advice", file),
        ("ops", "deploy", "render", "--engine", "vllm", file),
        ("ops", "alerts", "rules", "--advice", file),
        ("ops", "roi", "--devices", "4", "--price", "4", "--advice", file),
        ("ops", "guard", "status", "--policy", guard),
    ):
        done = CliRunner().invoke(app, list(map(str, words)))
        assert done.exit_code == 2, words
        assert "has no option 'extra'; drop it" in " ".join(done.output.split()), words
    missing = CliRunner().invoke(
        app, ["ops", "alerts", "rules", "--advice", str(tmp_path / "none")]
    )
    assert missing.exit_code == 2
    assert "cannot be read" in missing.output


# To the engines


def test_vllm_gets_all_of_it(large: Advice, tmp_path: Path) -> None:
    done = render(tmp_path, large, "--engine", "vllm")
    assert done.exit_code == 0, done.output
    words = words_of(done.stdout)
    assert words[2] == "meta-llama/Llama-3.1-70B-Instruct"
    said = dict(zip(words[3::2], words[4::2], strict=True))
    assert said["--tensor-parallel-size"] == "4"
    assert said["--max-model-len"] == "768"
    assert said["--dtype"] == "bfloat16"
    assert said["--max-num-seqs"] == str(large.deployment.max_num_seqs)
    config = speculative(done.stdout)
    assert config["num_speculative_tokens_per_batch_size"] == [list(e) for e in large.schedule]
    assert config["model"] == "meta-llama/Llama-3.2-1B-Instruct"
    assert config["num_speculative_tokens"] == max(k for _, _, k in large.schedule)
    assert "draft_tensor_parallel_size" not in config


@pytest.mark.parametrize("engine", SERVERS)
@pytest.mark.parametrize("count", [4, 8])
def test_manifests_ask_for_the_gpus_of_the_advice(
    engine: str, count: int, tmp_path: Path, mixed: dict[str, Any]
) -> None:
    served = {**mixed["deployment"], "tensor_parallel": count, "replicas": 3}
    done = render(
        tmp_path, {**mixed, "deployment": served}, "--engine", engine, "--format", "kustomize",
        "--out", str(tmp_path / "base"),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    manifest = yaml.safe_load((tmp_path / "base" / "deployment.yaml").read_text())
    assert manifest["spec"]["replicas"] == 3
    (container,) = manifest["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == count
    texts = [file.read_text() for file in (tmp_path / "base").rglob("*") if file.is_file()]
    assert any("768" in text for text in texts)


def test_fewer_gpus_than_hold_the_weights_are_refused(large: Advice, tmp_path: Path) -> None:
    done = render(tmp_path, large, "--engine", "vllm", "--tensor-parallel-size", "1")
    assert done.exit_code == 2
    assert "weights take" in done.output


@pytest.mark.parametrize(
    ("engine", "dtype", "expected"),
    [
        ("vllm", "fp8", {"--quantization fp8", '"quantization": "fp8"'}),
        ("sglang", "fp8", {"--quantization fp8", "--speculative-draft-model-quantization fp8"}),
        ("outrider", "int8", {"--quantization int8", "--drafter-quantization int8"}),
        ("outrider", "int4", {"--quantization int4"}),
        ("outrider", "fp32", {"--dtype float32"}),
    ],
)
def test_weights_stay_what_was_advised_on(
    engine: str, dtype: str, expected: set[str], tmp_path: Path
) -> None:
    device = "xeon-8480" if engine == "outrider" else "h100"
    advice = advise(Situation("llama-3.1-8b", "llama-3.2-1b", device, dtype=dtype))
    done = render(tmp_path, advice, "--engine", engine)
    assert done.exit_code == 0, done.output
    assert all(each in done.stdout for each in expected), done.stdout


@pytest.mark.parametrize("engine", ["vllm", "trtllm"])
def test_weights_that_an_engine_cannot_make_need_a_checkpoint(engine: str, tmp_path: Path) -> None:
    """int4 of a bf16 checkpoint was rendered as bf16: twice the memory of the advice and more."""
    advice = advise(Situation("qwen2.5-32b", "suffix", "l40s", dtype="int4"))
    done = render(tmp_path, advice, "--engine", engine)
    assert done.exit_code == 2
    assert "is for int4 weights" in done.output
    named = render(tmp_path, advice, "--engine", engine, "--model", "org/t-awq")
    assert named.exit_code == 0, named.output
    assert "not checked: org/t-awq must hold int4 weights" in named.stdout


def test_a_t4_gets_its_own_half(tmp_path: Path) -> None:
    advice = advise(Situation("llama-3.2-3b", "suffix", "t4"))
    assert "--dtype float16" in render(tmp_path, advice, "--engine", "vllm").stdout


def test_llama_cpp_asks_for_files_of_its_own(tmp_path: Path) -> None:
    advice = advise(Situation("llama-3.1-8b", "llama-3.2-1b", "rtx-4090"))
    done = render(tmp_path, advice, "--engine", "llamacpp")
    assert done.exit_code == 2
    assert "loads GGUF files" in done.output
    done = render(tmp_path, advice, "--engine", "llamacpp", *NAMES)
    assert done.exit_code == 0, done.output
    assert f"--spec-draft-n-max {advice.k}" in done.stdout
    slots = advice.deployment.max_num_seqs
    assert f"--ctx-size {768 * int(slots or 0)}" in done.stdout


def test_our_server_chooses_up_to_the_longest(tmp_path: Path) -> None:
    advice = advise(Situation("llama-3.1-8b", "llama-3.2-1b", "xeon-8480", concurrency={8: 1.0}))
    done = render(tmp_path, advice, "--engine", "outrider", *NAMES, "--format", "config")
    assert done.exit_code == 0, done.output
    config = tomllib.loads(done.stdout)
    assert config["drafter"] == "auto+org/drafter"
    assert config["num_speculative_tokens"] == max(k for _, _, k in advice.schedule)
    assert config["max_model_len"] == 768
    assert "max_num_seqs" not in config


def test_our_server_refuses_an_advice_for_several_gpus(large: Advice, tmp_path: Path) -> None:
    done = render(tmp_path, large, "--engine", "outrider")
    assert done.exit_code == 2
    assert "specifies 4 GPUs" in " ".join(done.output.split())


def test_figures_of_another_kind_of_device_are_said(tmp_path: Path) -> None:
    advice = advise(Situation("llama-3.1-8b", "suffix", "xeon-8480"))
    done = render(tmp_path, advice, "--engine", "vllm")
    assert "has figures for xeon-8480, but vLLM runs on GPUs" in done.stdout
    assert "--max-num-seqs" not in done.stdout


def test_an_engine_that_drafts_longest_first_gets_one_length(
    mixed: dict[str, Any], tmp_path: Path
) -> None:
    rising = {**mixed, "schedule": [[1, 4, 3], [5, 64, 8]]}
    done = render(tmp_path, rising, "--engine", "trtllm")
    assert done.exit_code == 0, done.output
    assert f"max_draft_len: {mixed['k']}" in done.stdout
    assert "draft_len_schedule" not in done.stdout


def test_heads_and_lookups_stay_what_they_are(tmp_path: Path) -> None:
    advice = advise(Situation("llama-3.1-8b", "eagle3", "h100", dtype="fp8"))
    done = render(tmp_path, advice, "--engine", "vllm")
    assert done.exit_code == 0, done.output
    config = speculative(done.stdout)
    assert config["method"] == "eagle3"
    assert config["model"] == "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B"
    assert "quantization" not in config  # published heads hold bf16
    suffix = advise(Situation("llama-3.1-8b", "suffix", "h100"))
    assert speculative(render(tmp_path, suffix, "--engine", "vllm").stdout)["method"] == "suffix"
    medusa = advise(Situation("llama-3.1-8b", "medusa", "h100"))
    done = render(tmp_path, medusa, "--engine", "vllm", *NAMES)
    assert "has no method medusa" in done.output
    unknown = advise(Situation("llama-3.1-70b", "eagle3", "h100", 4))
    done = render(tmp_path, unknown, "--engine", "vllm")
    assert done.exit_code == 2
    assert "is not a checkpoint; give a folder or a hub name with --drafter" in done.output


def test_padded_vocabularies_are_what_each_engine_makes_of_them(tmp_path: Path) -> None:
    advice = advise(Situation("qwen2.5-32b", "qwen2.5-0.5b", "a100", 2))
    assert not advice.deployment.other_vocabulary
    config = speculative(render(tmp_path, advice, "--engine", "vllm").stdout)
    assert config["use_heterogeneous_vocab"] is True
    assert "another vocabulary" in render(tmp_path, advice, "--engine", "sglang").output
    assert render(tmp_path, advice, "--engine", "llamacpp", *NAMES).exit_code == 0


def test_a_drafter_that_the_gpus_cannot_share_is_refused(tmp_path: Path) -> None:
    advice = advise(Situation("qwen2.5-32b", "qwen2.5-0.5b", "a100", 4))
    done = render(tmp_path, advice, "--engine", "vllm")
    assert done.exit_code == 2
    assert "the drafter's 14 attention heads" in " ".join(done.output.split())


def test_a_drafter_placed_elsewhere_is_refused(tmp_path: Path) -> None:
    advice = advise(Situation("llama-3.1-8b", "llama-3.2-1b", "h100", placement="own"))
    done = render(tmp_path, advice, "--engine", "vllm")
    assert done.exit_code == 2
    assert "places the drafter elsewhere (own)" in done.output


def test_an_advice_against_speculation_renders_none(mixed: dict[str, Any], tmp_path: Path) -> None:
    done = render(tmp_path, {**mixed, "verdict": LEAVE}, "--engine", "vllm", *NAMES)
    assert done.exit_code == 0, done.output
    assert "--speculative-config" not in done.stdout
    assert "--tensor-parallel-size 4" in done.stdout
    assert "Speculation is off" in done.stdout


def test_flags_and_a_spec_win_over_the_advice(large: Advice, tmp_path: Path) -> None:
    spec = tmp_path / "spec.toml"
    spec.write_text(
        'engine = "vllm"\n[service]\nreplicas = 2\nmodel_name = "mine"\n'
        "[limits]\nmax_model_len = 8192\n"
    )
    done = render(tmp_path, large, str(spec), "--num-speculative-tokens", "3", *NAMES)
    assert done.exit_code == 0, done.output
    assert "--max-model-len 8192" in done.stdout
    assert "input and" not in done.stdout  # the note speaks of the advice's length
    assert "--served-model-name mine" in done.stdout
    assert "serve org/target" in done.stdout
    config = speculative(done.stdout)
    assert config["num_speculative_tokens"] == 3
    assert "num_speculative_tokens_per_batch_size" not in config
    spec.write_text("engine = 3\n")
    assert "engine is 3" in render(tmp_path, large, str(spec)).output
    twice = CliRunner().invoke(
        app, ["ops", "deploy", "render", str(tmp_path / "advice.json"), "--advice", str(spec)]
    )
    assert "--advice names another" in " ".join(twice.output.split())


# To rules and the guard


def test_rules_and_guard_take_the_break_even(large: Advice, tmp_path: Path) -> None:
    file = saved(tmp_path, large)
    assert large.break_even is not None
    assert break_even_of(file) == large.break_even.value
    toml = tmp_path / "policy.toml"
    toml.write_text('advice = "advice.json"\n[engine]\nurl = "http://e:8000"\n')
    signal = policy.read(toml).signals["acceptance"]
    assert signal.bad == pytest.approx(large.break_even.value)
    assert signal.clear > signal.bad
    toml.write_text(toml.read_text() + "[signals]\nacceptance = { below = 0.7 }\n")
    assert policy.read(toml).signals["acceptance"].bad == 0.7
    assert policy.parse({"engine": {"url": "http://e:8000"}}).signals["acceptance"].bad == 0.55


def test_an_advice_without_break_even_is_no_threshold(tmp_path: Path) -> None:
    saved(tmp_path, advise(Situation("llama-3.1-8b", "suffix")))
    toml = tmp_path / "policy.toml"
    toml.write_text('advice = "advice.json"\n[engine]\nurl = "http://e:8000"\n')
    with pytest.raises(ConfigError, match="has no break-even acceptance"):
        policy.read(toml)
    with pytest.raises(ConfigError, match="has no break-even acceptance"):
        break_even_of(tmp_path / "advice.json")
    saved(tmp_path, advise(Situation("llama-3.1-8b", "suffix", "h100")))
    assert policy.read(toml).signals["acceptance"].bad >= 0.01  # lookups break even at nothing
