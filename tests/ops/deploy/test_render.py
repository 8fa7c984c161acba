"""``outrider ops deploy render``: every engine's files parse and hold only recorded options."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from outrider.base.methods import WITH_CHECKPOINT
from outrider.cli import app
from outrider.errors import ConfigError
from outrider.ops.deploy import capabilities
from outrider.ops.deploy.engines import LAUNCHES
from outrider.ops.deploy.render import FORMATS, render
from outrider.ops.deploy.spec import parse
from tests.support.specs import SCHEDULE, document, pairs, rich

HUB = {"target": {"model": "org/target"}}
KINDS = {"int": int, "float": (int, float), "str": str, "bool": bool, "list": list, "flag": bool}


def launch(made: dict[str, Any]) -> Any:
    spec = parse(made)
    return LAUNCHES[str(spec.engine)](spec, capabilities.find(spec.engine))


def fits(kind: str, value: Any) -> bool:
    if kind.startswith("choice:"):
        return value in kind.removeprefix("choice:").split("|")
    if kind in ("int", "float") and isinstance(value, bool):
        return False
    return kind == "other" or isinstance(value, KINDS[kind])


def check_recorded(values: dict[str, Any], recorded: dict[str, str]) -> None:
    for name, value in values.items():
        assert name in recorded, name
        assert fits(recorded[name], value), (name, value, recorded[name])


@pytest.mark.parametrize(("engine", "method"), [p for p in pairs() if p[0] != "outrider"])
def test_every_option_is_recorded_with_its_type(engine: str, method: str) -> None:
    made = launch(rich(engine, method))
    schema = capabilities.schema(engine)
    if engine == "llamacpp":  # its parser takes every value as a text and reads numbers itself
        assert set(made.options) <= set(schema["options"])
    else:
        check_recorded(dict(made.options), schema["options"])
    nested = capabilities.schema("vllm")["nested"]["speculative_config"]
    if "--speculative-config" in made.options:
        check_recorded(made.options["--speculative-config"], nested)
    if engine == "triton":
        arguments = json.loads(made.files["repository/llama/1/model.json"])
        check_recorded(arguments.pop("speculative_config", {}), nested)
        flags = {"--" + name.replace("_", "-"): value for name, value in arguments.items()}
        check_recorded(flags, capabilities.schema("vllm")["options"])
    if engine == "trtllm":
        config = yaml.safe_load(made.files["trtllm.yaml"])
        kinds = schema["nested"]
        check_recorded(config, kinds["config"])
        check_recorded(config.get("kv_cache_config", {}), kinds["kv_cache_config"])
        if method != "none":
            speculation = config["speculative_config"]
            check_recorded(speculation, kinds[speculation["decoding_type"]])


@pytest.mark.parametrize(("engine", "method"), pairs())
def test_command_and_config_say_the_same(engine: str, method: str) -> None:
    made = launch(rich(engine, method))
    name, text = made.config_file
    written = {flag.lstrip("-"): value for flag, value in made.options.items()}
    if engine in ("vllm", "sglang"):
        config = yaml.safe_load(text)
        config.pop("model", None)
        assert config == written
    elif engine == "outrider":
        config = tomllib.loads(text)
        assert config.pop("model") == "org/target"
        assert config == {flag.replace("-", "_"): value for flag, value in written.items()}
    elif engine == "llamacpp":
        lines = [line for line in text.splitlines() if not line.startswith("#")]
        variables = capabilities.schema("llamacpp")["nested"]["environment"]
        assert {line.partition("=")[0] for line in lines} == {
            variables[flag] for flag in made.options if flag in variables
        }
    else:
        assert made.files[name] == text


def test_cpus_of_a_drafter_go_where_an_engine_has_a_place_for_them() -> None:
    def made(engine: str, cpus: str) -> dict[str, Any]:
        document = rich(engine, "draft_model")
        document["drafter"]["cpus"] = cpus
        return document

    assert launch(made("outrider", "8-14,16")).options["--drafter-cpus"] == "8-14,16"
    assert launch(made("llamacpp", "8-14,16")).options["--spec-draft-threads"] == 8
    for engine in ("vllm", "sglang", "trtllm", "triton"):
        said = render(parse(made(engine, "8-15"))).notes
        assert [note for note in said if "no option for drafter.cpus" in note], engine
    with pytest.raises(ConfigError, match=r"cpus is '8-'; give"):
        parse(made("outrider", "8-"))


@pytest.mark.parametrize("method", [m for e, m in pairs() if e == "outrider"])
@pytest.mark.parametrize("adaptive", [False, True])
def test_our_own_server_accepts_what_is_rendered(method: str, adaptive: bool) -> None:
    made = rich("outrider", method)
    made["drafter"]["adaptive"] = adaptive and method != "none"
    words = launch(made).arguments()
    assert words[:2] == ["outrider", "serve"]
    # ``config`` has serve's parser and options, and starts nothing.
    result = CliRunner().invoke(app, ["config", *words[2:], "--json"])
    assert result.exit_code == 0, result.output
    shown = {name: each["value"] for name, each in json.loads(result.stdout).items()}
    assert shown["model"] == "org/target"
    assert shown["max_num_seqs"] == 64
    assert (shown["drafter"] == "none") == (method == "none")


def test_our_own_config_file_is_accepted(tmp_path: Path) -> None:
    name, text = launch(rich("outrider", "draft_model")).config_file
    (tmp_path / name).write_text(text)
    result = CliRunner().invoke(app, ["config", "--config", str(tmp_path / name), "--json"])
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["drafter"]["value"] == "org/drafter"


@pytest.mark.parametrize("engine", capabilities.ENGINES)
@pytest.mark.parametrize("form", FORMATS)
def test_all_files_parse(engine: str, form: str) -> None:
    method = "draft_model" if engine != "triton" else "speculators"
    result = render(parse(rich(engine, method)), form)
    for name, text in result.files.items():
        if name.endswith(".yaml"):
            assert list(yaml.safe_load_all(text)), name
        elif name.endswith(".json"):
            assert json.loads(text)
        elif name.endswith(".toml"):
            assert tomllib.loads(text)
    first = next(iter(result.files.values()))
    dated = [line for line in first.splitlines() if line.startswith("# 20")]
    assert len(dated) == len(
        capabilities.notes(capabilities.find(engine), parse(rich(engine, method)))
    )


HOSTILE = ["a b;rm -rf /", "$(id) `id` ${HOME}", "'\"\\", "x: {y: [1]} # z", "ä €", "{{ 7*7 }}"]


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("engine", ["vllm", "trtllm", "outrider"])
def test_no_text_leaves_its_place(engine: str, name: str) -> None:
    made = document(engine, "draft_model", drafter={"model": name})
    made["target"]["model"] = name
    words = launch(made).arguments()
    command = render(parse(made)).files["run.sh"]
    assert shlex.split(command.replace("\\\n", ""), comments=True) == words
    container = yaml.safe_load(render(parse(made), "kustomize").files["deployment.yaml"])
    said = container["spec"]["template"]["spec"]["containers"][0]["command"]
    assert [word.replace("$$", "$") for word in said] == words
    assert all("$(" not in word.replace("$$(", "") for word in said)
    composed = yaml.safe_load(render(parse(made), "compose").files["compose.yaml"])
    entrypoint = composed["services"]["engine"]["entrypoint"]
    assert [word.replace("$$", "$") for word in entrypoint] == words


def test_vllm_schedule_and_vocabulary() -> None:
    drafter = {"schedule": SCHEDULE, "tensor_parallel_size": 4, "other_vocabulary": True}
    made = document("vllm", "draft_model", drafter=drafter, parallel={"tensor": 4})
    del made["drafter"]["num_speculative_tokens"]
    assert launch(made).options["--speculative-config"] == {
        "method": "draft_model",
        "model": "org/drafter",
        "num_speculative_tokens": 5,
        "num_speculative_tokens_per_batch_size": SCHEDULE,
        "use_heterogeneous_vocab": True,
    }


def test_a_checkpoint_of_speculators_is_named_alone() -> None:
    assert launch(document("vllm", "speculators")).options["--speculative-config"] == {
        "model": "org/drafter"
    }


def test_sglang_is_told_how_many_requests_run() -> None:
    assert launch(document("sglang", "eagle3")).options["--max-running-requests"] == 48
    limited = document("sglang", "eagle3", limits={"max_num_seqs": 200})
    assert launch(limited).options["--max-running-requests"] == 200
    assert "--max-running-requests" not in launch(document("sglang")).options
    adaptive = document("sglang", "eagle3", drafter={"adaptive": True})
    assert launch(adaptive).options["--speculative-adaptive"] is True


def test_trtllm_schedule_has_both_ends_of_ranges() -> None:
    made = launch(rich("trtllm", "eagle3"))
    config = yaml.safe_load(made.files["trtllm.yaml"])["speculative_config"]
    assert config["draft_len_schedule"] == {1: 5, 16: 5, 17: 2, 64: 2, 65: 0}
    made = document("trtllm", "ngram", drafter={"schedule": [[1, 4, 3], [5, 8, 0], [9, 16, 2]]})
    config = yaml.safe_load(launch(made).files["trtllm.yaml"])["speculative_config"]
    assert config["draft_len_schedule"] == {1: 3, 4: 3, 5: 0, 8: 0, 9: 2, 16: 2}
    assert config["max_draft_len"] == 3  # the first range's, not K
    made["drafter"]["schedule"] = [[1, 4, 3], [5, 8, 4]]
    with pytest.raises(ConfigError, match="begin with its longest draft"):
        render(parse(made))


def test_llama_server_offloads_both_models() -> None:
    made = document("llamacpp", "draft_model", drafter={"model": "/models/d.gguf"})
    made["target"]["model"] = "/models/t.gguf"
    options = launch(made).options
    assert (options["--n-gpu-layers"], options["--spec-draft-ngl"]) == ("all", "all")
    assert (options["--model"], options["--spec-draft-model"]) == (
        "/models/t.gguf",
        "/models/d.gguf",
    )


def test_triton_has_no_model_of_its_own() -> None:
    result = render(parse(rich("triton", "draft_model")), "config")
    assert not any(name.endswith(".py") for name in result.files)
    assert any("no model.py" in note for note in result.notes)


@pytest.mark.parametrize("name", ["..", "a/b", "-x", "a b"])
def test_triton_refuses_names_that_are_no_folders(name: str) -> None:
    service = {"model_name": name} if not name.startswith("-") else {"model_name": "." + name}
    with pytest.raises(ConfigError, match="by its folder"):
        render(parse(document("triton", service=service)))


def test_facts_of_a_local_checkpoint_are_read(tmp_path: Path) -> None:
    config = {"num_attention_heads": 12, "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    made = document("vllm", parallel={"tensor": 8})
    made["target"]["model"] = str(tmp_path)
    with pytest.raises(ConfigError, match="does not divide the target's 12 attention heads"):
        render(parse(made))


@pytest.mark.parametrize(
    ("engine", "words", "expected"),
    [
        ("vllm", "--drafter org/EAGLE3-of-it --num-speculative-tokens 3", '"method": "eagle3"'),
        ("vllm", "--drafter org/h --method EAGLE --num-speculative-tokens 3", '"method": "eagle"'),
        ("vllm", "--drafter nextn --num-speculative-tokens 1", '"method": "mtp"'),
        ("sglang", "--drafter org/h --method eagle --num-speculative-tokens 3", "algorithm EAGLE "),
        ("sglang", "--drafter mtp --num-speculative-tokens 1", "algorithm NEXTN"),
        ("outrider", "--drafter org/h --method medusa", "--drafter org/h"),
        ("outrider", "--drafter layerskip", "--drafter layerskip"),
        ("llamacpp", "--drafter org/h --method eagle-3", "--spec-type draft-eagle3"),
        ("trtllm", "--drafter NGram --num-speculative-tokens 3", "decoding_type: NGram"),
    ],
)
def test_methods_have_one_table_of_names(engine: str, words: str, expected: str) -> None:
    flags = ["ops", "deploy", "render", "--engine", engine, "--model", "org/t", *words.split()]
    done = CliRunner().invoke(app, flags)
    assert done.exit_code == 0, done.output
    assert expected in done.stdout


@pytest.mark.parametrize("method", WITH_CHECKPOINT)
def test_the_name_of_a_method_is_no_checkpoint(method: str) -> None:
    """``--drafter eagle3`` once rendered a model of that name."""
    flags = ["--engine", "vllm", "--model", "org/t", "--num-speculative-tokens", "3"]
    done = CliRunner().invoke(app, ["ops", "deploy", "render", *flags, "--drafter", method])
    assert done.exit_code == 2, done.output
    assert f"drafter.method {method} needs drafter.model" in " ".join(done.output.split())


def test_a_method_leaves_no_checkpoint_of_another(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(
        'engine = "vllm"\n[target]\nmodel = "org/t"\nvocab_size = 9\n[drafter]\n'
        'method = "draft_model"\nmodel = "org/d"\nvocab_size = 8\nnum_speculative_tokens = 3\n'
    )
    done = CliRunner().invoke(app, ["ops", "deploy", "render", str(file), "--drafter", "suffix"])
    assert done.exit_code == 0, done.output
    assert "org/d" not in done.stdout


def test_medusa_is_where_an_engine_has_it() -> None:
    made = document("vllm", "medusa") | {"engine_version": "0.32.0"}
    assert '"method": "medusa"' in render(parse(made)).text()
    with pytest.raises(ConfigError, match=r"vLLM 0\.33\.0 has no method medusa"):
        render(parse(document("vllm", "medusa")))


BAD: list[tuple[dict[str, Any], str]] = [
    (
        document("vllm", "ngram", drafter={"num_speculative_tokens": 0, "required": True}),
        "draft length is 0 at every batch size",
    ),
    (document("vllm", drafter={"required": True}), "drafter.method is none"),
    (document("vllm", drafter={"num_speculative_tokens": 3}), "no drafter; give a drafter"),
    (
        document("vllm", "ngram", drafter={"schedule": [[1, 9, 0]], "required": True}),
        "0 at every batch size",
    ),
    (
        document("sglang", "draft_model", drafter={"other_vocabulary": True}),
        "refuses a drafter with another vocabulary",
    ),
    (
        document(
            "trtllm",
            "draft_model",
            target={"model": "t", "vocab_size": 9},
            drafter={"vocab_size": 8},
        ),
        r"another vocabulary \(8 tokens, the target has 9\)",
    ),
    (
        document("vllm", parallel={"tensor": 3}, target={"model": "t", "attention_heads": 64}),
        "does not divide the target's 64 attention heads",
    ),
    (
        document(
            "vllm",
            target={"model": "t", "weights_gib": 141.0},
            memory={"gpu_gib": 80, "gpu_share": 0.9},
        ),
        "weights take 141.0 GiB on each GPU, but 90% of 80 GiB is 72.0 GiB",
    ),
    (
        document(
            "vllm",
            "draft_model",
            target={"model": "t", "weights_gib": 70.0},
            drafter={"weights_gib": 8.0},
            memory={"gpu_gib": 80, "gpu_share": 0.9},
        ),
        "78.0 GiB",
    ),
    (document("vllm") | {"engine_version": "0.6.3"}, "no version that is recorded"),
    (document("vlm"), "did you mean vllm"),
    (document("sglang", "suffix"), "has no method suffix"),
    (document("outrider", "mlp_speculator"), "has no method mlp_speculator"),
    (document("outrider", parallel={"tensor": 2}), "runs on one device"),
    (document("trtllm", "eagle3", parallel={"pipeline": 2}), "several pipeline stages"),
    (
        {"engine": "sglang", **HUB, "drafter": {"method": "ngram", "schedule": [[1, 9, 2]]}},
        "no draft lengths by batch",
    ),
    (document("vllm", "eagle3", drafter={"adaptive": True}), "chooses draft lengths itself"),
    (
        document("vllm", "eagle3", drafter={"tensor_parallel_size": 2}, parallel={"tensor": 4}),
        "runs a drafter on the target's GPUs; give 4",
    ),
    (
        document(
            "vllm", "draft_model", drafter={"tensor_parallel_size": 1}, parallel={"tensor": 4}
        ),
        "runs a drafter on the target's GPUs; give 4",
    ),
    (document("vllm", "ngram", drafter={"model": "org/d"}), "takes no checkpoint"),
    (document("outrider", "ngram", drafter={"cpus": "8-15"}), "method ngram has none; drop"),
    ({"engine": "vllm", **HUB, "drafter": {"method": "eagle3"}}, "needs drafter.model"),
    ({"engine": "vllm", **HUB, "drafter": {"method": "ngram"}}, "needs a draft length"),
    ({"engine": "vllm"}, "names no target"),
    ({"engine": "vllm", "target": {}}, r"\[target\] has no model"),
    ({"engine": "vllm", "target": "x"}, "write a table"),
    (document("vllm", tokens={}), "no option 'tokens'"),
    (document("vllm", limits={"max_model_length": 9}), "did you mean 'max_model_len'"),
    (document("vllm", limits={"max_model_len": "9"}), "give a whole number"),
    (document("vllm", limits={"max_model_len": True}), "give a whole number"),
    (document("vllm", memory={"gpu_share": 1.5}), "from 0.01 to 1"),
    (document("vllm", memory={"gpu_gib": float("nan")}), "give a finite number"),
    (document("vllm", target={"model": "--help"}), "must not begin with a hyphen"),
    (document("vllm", target={"model": "a\nb"}), "a text on one line"),
    (document("vllm", "ngram", drafter={"schedule": [[1, 4, 5], [6, 9, 1]]}), "begin at batch"),
    (document("vllm", "ngram", drafter={"schedule": [[1, 4, 9]]}), "exceeds num_speculative"),
    (document("vllm", "ngram", drafter={"schedule": 3}), "three whole numbers"),
    (document("vllm", "ngram", limits={"max_model_len": 4}), "does not fit into max_model_len"),
    (document("vllm", target={"model": "t", "dtype": "fp4"}), "target.dtype is 'fp4'"),
    (document("trtllm", target={"model": "t", "quantization": "fp8"}), "the checkpoint says it"),
]


@pytest.mark.parametrize(("made", "reason"), BAD)
def test_what_cannot_work_is_refused_in_a_sentence(made: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        render(parse(made))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("service", "model", "reason"),
    [
        ({"name": "Model"}, "org/t", "small letters"),
        ({"namespace": "a_b"}, "org/t", "small letters"),
        ({}, "/home/me/t", "cannot be seen in a container"),
        ({}, "./t", "cannot be seen in a container"),
    ],
)
@pytest.mark.parametrize("form", ["compose", "kustomize"])
def test_what_no_container_can_have_is_refused(
    service: dict[str, Any], model: str, reason: str, form: str
) -> None:
    made = document("vllm", target={"model": model}, service=service)
    with pytest.raises(ConfigError, match=reason):
        render(parse(made), form)


def test_what_could_not_be_checked_is_said() -> None:
    notes = "\n".join(render(parse(document("vllm", "draft_model", parallel={"tensor": 2}))).notes)
    for fact in ("attention_heads", "weights_gib", "vocab_size"):
        assert f"{fact}" in notes
    assert "not used: this engine has no option for memory.gpu_share" in "\n".join(
        render(parse(document("llamacpp", memory={"gpu_share": 0.5}))).notes
    )


def test_a_config_that_does_not_draft_says_so() -> None:
    for made in (
        document("vllm"),
        document("vllm", "ngram", drafter={"num_speculative_tokens": 0}),
    ):
        result = render(parse(made))
        assert any("Speculation is off" in note for note in result.notes)
        assert "--speculative-config" not in result.text()


@pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not here")
@pytest.mark.parametrize("engine", ["vllm", "triton"])
def test_kubectl_builds_the_base(engine: str, tmp_path: Path) -> None:
    for name, text in render(parse(rich(engine, "draft_model")), "kustomize").files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    built = subprocess.run(
        ["kubectl", "kustomize", str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert built.returncode == 0, built.stderr
    kinds = {each["kind"] for each in yaml.safe_load_all(built.stdout)}
    assert kinds >= {"Deployment", "Service", "PodDisruptionBudget", "PersistentVolumeClaim"}
    assert ("ConfigMap" in kinds) == (engine == "triton")


def test_probes_wait_for_a_model() -> None:
    files = render(parse(document("sglang", "ngram", parallel={"tensor": 4})), "kustomize").files
    pod = yaml.safe_load(files["deployment.yaml"])["spec"]["template"]["spec"]
    engine = pod["containers"][0]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert "initialDelaySeconds" not in files["deployment.yaml"]
    assert engine["readinessProbe"]["httpGet"]["path"] == "/health_generate"
    stop = int(engine["lifecycle"]["preStop"]["exec"]["command"][1])
    assert pod["terminationGracePeriodSeconds"] > stop + 30


@pytest.mark.parametrize("form", ["compose", "kustomize"])
def test_streams_of_vllm_get_time_to_end(form: str) -> None:
    """vLLM aborts them at SIGTERM unless told otherwise; the time lies within the grace."""
    text = render(parse(document("vllm", "ngram")), form).text()
    found = [each for each in yaml.safe_load_all(text.replace("# file:", "---\n# file:")) if each]
    if form == "compose":
        engine = found[0]["services"]["engine"]
        command, grace, pause = engine["entrypoint"], engine["stop_grace_period"].rstrip("s"), 0
    else:
        pod = next(each for each in found if each["kind"] == "Deployment")["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        command, grace = container["command"], pod["spec"]["terminationGracePeriodSeconds"]
        pause = int(container["lifecycle"]["preStop"]["exec"]["command"][1])
    assert 30 <= int(command[command.index("--shutdown-timeout") + 1]) < int(grace) - pause


def test_flags_win_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    file.write_text(
        'engine = "sglang"\n[target]\nmodel = "org/t"\n[drafter]\nmethod = "ngram"\n'
        "num_speculative_tokens = 3\n"
    )
    run = CliRunner().invoke
    words = ["ops", "deploy", "render", str(file)]
    assert "--speculative-algorithm NGRAM" in run(app, words).stdout
    other = run(app, [*words, "--engine", "vllm", "--num-speculative-tokens", "7"])
    assert '"num_speculative_tokens": 7' in other.stdout
    drafter = run(app, [*words, "--drafter", "org/d"]).stdout
    assert "--speculative-algorithm STANDALONE" in drafter
    file.write_text(file.read_text().replace('"ngram"', '"eagle3"\nmodel = "org/e"'))
    assert "EAGLE3" in run(app, [*words, "--drafter", "org/d"]).stdout
    assert "NGRAM" in run(app, [*words, "--drafter", "ngram"]).stdout
    assert "Speculation is off" in run(app, [*words, "--drafter", "none"]).stdout
    out = tmp_path / "out"
    written = run(app, [*words, "--format", "kustomize", "--out", str(out)])
    assert written.exit_code == 0
    assert sorted(p.name for p in out.iterdir()) == sorted(
        Path(line).name for line in written.stdout.splitlines()
    )


@pytest.mark.parametrize(
    ("content", "reason"),
    [(b"engine = ", "cannot be read as TOML"), (b"\xff", "not UTF-8"), (None, "No such file")],
)
def test_a_bad_file_is_a_sentence(content: bytes | None, reason: str, tmp_path: Path) -> None:
    file = tmp_path / "spec.toml"
    if content is not None:
        file.write_bytes(content)
    result = CliRunner().invoke(app, ["ops", "deploy", "render", str(file)])
    assert result.exit_code == 2
    assert reason in result.stderr
    assert "Traceback" not in result.output


def test_nothing_here_imports_torch() -> None:
    code = (
        "import sys, runpy; sys.argv = ['outrider', 'deploy', 'render', '--engine', 'vllm', "
        "'--target', 'x', '--format', 'kustomize']\n"
        "import outrider.ops.deploy.render, outrider.ops.deploy.translate\n"
        "from outrider.cli import app\n"
        "try:\n    app()\nexcept SystemExit as end:\n    assert not end.code\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
