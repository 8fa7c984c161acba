"""``outrider ops deploy translate``: old forms become today's, and every change has its reason."""

from __future__ import annotations

import ast
import difflib
import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.install import VLLM, program
from outrider.cli import app
from outrider.errors import ConfigError
from outrider.ops.deploy import capabilities
from outrider.ops.deploy.render import render
from outrider.ops.deploy.spec import parse
from outrider.ops.deploy.translate import translate
from outrider.ops.deploy.translation.rules import rules_of
from outrider.ops.deploy.translation.shell import MARKS
from tests.support import DATA, REPOSITORY, engines_section

GOLDEN = DATA / "golden"
SERVER = "python -m vllm.entrypoints.openai.api_server --model org/t "
EIGHT = "--speculative-model org/d --num-speculative-tokens 8 "


def words(text: str) -> list[str]:
    """The words of the one command of a text."""
    return shlex.split(text.replace("\\\n", " "))


def config(text: str) -> dict[str, Any]:
    """The object of ``--speculative-config``."""
    said = words(text)
    loaded: dict[str, Any] = json.loads(said[said.index("--speculative-config") + 1])
    return loaded


def known(text: str) -> None:
    """Every flag of vLLM's command must be one of today."""
    flags = [word for word in words(text) if word.startswith("--")]
    assert set(flags) <= set(capabilities.schema("vllm")["options"])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (EIGHT, {"method": "draft_model", "model": "org/d", "num_speculative_tokens": 8}),
        (
            EIGHT + "--speculative-draft-tensor-parallel-size=4 -tp 4",
            {
                "method": "draft_model",
                "model": "org/d",
                "num_speculative_tokens": 8,
                "draft_tensor_parallel_size": 4,
            },
        ),
        (
            EIGHT + "--speculative-draft-tensor-parallel-size=1 -tp 4",
            {"method": "draft_model", "model": "org/d", "num_speculative_tokens": 8},
        ),
        (
            "--speculative-method deepseek_mtp --num-speculative-tokens 1",
            {"method": "mtp", "num_speculative_tokens": 1},
        ),
        (
            '--speculative_model "[ngram]" --num_speculative_tokens 5 --ngram-prompt-lookup-max 4 '
            "--ngram-prompt-lookup-min=2 --use-v2-block-manager",
            {
                "method": "ngram",
                "num_speculative_tokens": 5,
                "prompt_lookup_max": 4,
                "prompt_lookup_min": 2,
            },
        ),
        (
            "--speculative-method eagle3 " + EIGHT,
            {"method": "eagle3", "model": "org/d", "num_speculative_tokens": 8},
        ),
        (
            EIGHT + "--speculative-disable-by-batch-size 16 --max-num-seqs 64",
            {
                "method": "draft_model",
                "model": "org/d",
                "num_speculative_tokens": 8,
                "num_speculative_tokens_per_batch_size": [[1, 16, 8], [17, 64, 0]],
            },
        ),
        (
            "--speculative-model org/EAGLE3-t --num-speculative-tokens 3",
            {"method": "eagle3", "model": "org/EAGLE3-t", "num_speculative_tokens": 3},
        ),
    ],
)
def test_flags_of_vllm_become_one_object(flags: str, expected: dict[str, Any]) -> None:
    result = translate(SERVER + flags)
    assert config(result.text) == expected
    assert words(result.text)[:3] == ["vllm", "serve", "org/t"]
    known(result.text)


@pytest.mark.parametrize("old", [*rules_of("vllm")])
def test_every_old_flag_is_gone_and_explained(old: str) -> None:
    rule = rules_of("vllm")[old]
    assert old not in capabilities.schema("vllm")["options"]
    value = "" if rule.switch else " ngram" if rule.key == "method" else " 3"
    more = "" if rule.key in (None, "num_speculative_tokens") else " --num-speculative-tokens 2"
    more += "" if rule.key in (None, "model", "method") else ' --speculative-model "[ngram]" -tp 3'
    result = translate(f"{SERVER} {old}{value}{more}")
    assert any(change.old.split()[0] == old and change.why for change in result.changes)
    assert old not in words(result.text)
    known(result.text)


@pytest.mark.parametrize("source", ["vllm", "tgi", "llamacpp"])
def test_every_replacement_exists(source: str) -> None:
    options = capabilities.schema("llamacpp" if source == "llamacpp" else "vllm")["options"]
    keys = capabilities.schema("vllm")["nested"]["speculative_config"]
    for rule in rules_of(source).values():
        assert rule.option is None or rule.option == "MODEL" or rule.option in options, rule
        assert rule.key is None or rule.key in keys, rule


def test_what_is_current_stays_as_it_is() -> None:
    command = "vllm serve org/t --port 8000 --max-model-len 4k --no-enable-prefix-caching"
    result = translate(command)
    assert words(result.text) == words(command)
    assert result.changes == []


def test_variables_before_a_command_stay() -> None:
    result = translate("CUDA_VISIBLE_DEVICES=0,1 NAME='a b' exec vllm serve org/t --swap-space 4")
    assert words(result.text)[:3] == ["CUDA_VISIBLE_DEVICES=0,1", "NAME=a b", "vllm"]
    assert translate("A=$B vllm serve org/t").text == "A=$B vllm serve org/t\n"


def shell(text: str, **variables: str) -> list[list[str]]:
    """The words of each command of a text as a shell passes them on, ``vllm`` and the like."""
    tell = '() { printf \'%s\\0\' "${FUNCNAME[0]}" "$@"; echo; }\n'
    script = "".join(name + tell for name in ("vllm", "llama-server"))
    done = subprocess.run(
        ["bash", "-c", script + text], env={"PATH": "/usr/bin:/bin", **variables},
        capture_output=True, text=True, check=True, timeout=20,
    )  # fmt: skip
    return [line.split("\0")[:-1] for line in done.stdout.splitlines()]


def test_variables_of_a_shell_stay_and_take_effect() -> None:
    old = (
        'export HOST="$ADDRESS"\nK=5\n$ vllm serve $MODEL --port ${PORT:-8000} -tp $GPUS '
        '--speculative-model "$FOLDER/d r" --num-speculative-tokens $K --swap-space $S '
        "--api-key \"$(echo 'a)\"b')\" --host $HOST --chat-template '$literal' $MORE\n"
    )
    result = translate(old)
    variables = {"MODEL": "org/t", "GPUS": "2", "FOLDER": '/a "b"', "ADDRESS": "::1",
                 "MORE": "--seed 1"}  # fmt: skip
    assert "$S" not in result.text
    (said,) = shell(result.text, **variables)
    assert said[:-1] == shlex.split(
        "vllm serve org/t --seed 1 --port 8000 --tensor-parallel-size 2 --api-key 'a)\"b' "
        "--host ::1 --chat-template '$literal' --speculative-config"
    )
    assert json.loads(said[-1].replace('/a "b"', "/a")) == {
        "method": "draft_model", "model": "/a/d r", "num_speculative_tokens": 5,
    }  # fmt: skip
    assert any(change.old == "--num-speculative-tokens $K" for change in result.changes)
    assert translate(result.text).text == result.text
    (said,) = shell(
        translate('llama-server -m "$A" -md `echo d` --draft-max $K').text, A="t", K="3"
    )
    assert said[:7] == ["llama-server", "-m", "t", "-md", "d", "--spec-draft-n-max", "3"]
    (said,) = shell(translate('vllm serve "${A:-"b c"}" --port $((8000 + 1))').text)
    assert said == ["vllm", "serve", "b c", "--port", "8001"]


def test_commands_that_launch_nothing_are_named() -> None:
    result = translate("pip install vllm && source $VENV/bin/activate\nvllm serve a")
    assert [change.old for change in result.changes] == [
        "pip install vllm", "source $VENV/bin/activate"
    ]  # fmt: skip
    assert words(result.text) == ["vllm", "serve", "a"]


def test_unknown_flags_are_named() -> None:
    result = translate(SERVER + "--frobnicate 3")
    assert "--frobnicate" not in result.text
    assert any(change.old == "--frobnicate" for change in result.changes)


def test_switches_lose_their_values() -> None:
    result = translate(SERVER + "--enable-chunked-prefill=False --trust-remote-code=true")
    assert "--no-enable-chunked-prefill" in words(result.text)
    assert words(result.text)[-1] == "--trust-remote-code"


def test_llama_server() -> None:
    result = translate("./llama-server -m t.gguf -md d.gguf --draft-max 16 --draft-min 1 -ngl 99")
    assert words(result.text) == shlex.split(
        "./llama-server -m t.gguf -md d.gguf --spec-draft-n-max 16 --spec-draft-n-min 1 -ngl 99 "
        "--spec-type draft-simple -ngld all"
    )
    assert len(result.changes) == 4
    off = translate("llama-server -m t.gguf --no-warmup -nkvo --no-webui --no-cont-batching")
    assert not off.changes
    lookup = translate("llama-server -m t.gguf --spec-type ngram-mod --draft-max 32")
    assert "--spec-ngram-mod-n-max" in words(lookup.text)


def test_tgi() -> None:
    command = "text-generation-launcher --model-id org/t --speculate 3 --num-shard 2 --port 80"
    result = translate(command)
    assert words(result.text)[:-2] == shlex.split(
        "vllm serve org/t --tensor-parallel-size 2 --port 80"
    )
    assert config(result.text) == {"method": "ngram", "num_speculative_tokens": 3}


def test_builds_of_target_and_drafter_become_a_config() -> None:
    target = (
        "trtllm-build --checkpoint_dir ./t --output_dir e --max_draft_len 10 \\\n"
        "  --max_batch_size 4 "
        "  --speculative_decoding_mode draft_tokens_external --gemm_plugin auto"
    )
    drafter = "trtllm-build --checkpoint_dir ./d --output_dir f"
    result = translate(f"{drafter}\n{target}")
    loaded = yaml.safe_load(result.files["trtllm.yaml"])
    assert loaded["speculative_config"] == {
        "decoding_type": "Draft_Target",
        "max_draft_len": 10,
        "speculative_model": "DRAFTER_CHECKPOINT",
    }
    assert loaded["max_batch_size"] == 4
    assert set(loaded) <= set(capabilities.schema("trtllm")["nested"]["config"])
    assert any("needs no separate engine" in change.why for change in result.changes)
    alone = translate(drafter)
    assert "speculative_config" not in yaml.safe_load(alone.files["trtllm.yaml"])
    assert any("if it built the drafter" in change.why for change in alone.changes)


PYTHON = """\
from vllm import LLM  # kept

def make(draft):
    return LLM(model="a", speculative_model=draft, num_speculative_tokens=5,
               use_v2_block_manager=True, **more)
"""


def test_python_calls_are_rewritten_in_their_place() -> None:
    result = translate(PYTHON)
    assert result.text.startswith(
        "from vllm import LLM  # kept\n\ndef make(draft):\n    return LLM("
    )
    call = next(node for node in ast.walk(ast.parse(result.text)) if isinstance(node, ast.Call))
    assert {word.arg for word in call.keywords} == {"model", "speculative_config", None}
    made = ast.unparse(next(w.value for w in call.keywords if w.arg == "speculative_config"))
    assert made == "{'method': 'draft_model', 'model': draft, 'num_speculative_tokens': 5}"
    assert len(result.changes) == 4


def test_arguments_that_are_unset_draft_nothing() -> None:
    result = translate("llm = LLM(model='a', speculative_model=None, use_v2_block_manager=False)\n")
    assert result.text == "llm = LLM(\n    model='a',\n)\n"


def test_the_old_asynchronous_engine() -> None:
    result = translate(
        "from vllm.engine.async_llm_engine import AsyncLLMEngine\n"
        "from vllm.engine.arg_utils import AsyncEngineArgs\n"
        'é = "ü"; args = AsyncEngineArgs(model="a", speculative_model="[ngram]", '
        "num_speculative_tokens=5, ngram_prompt_lookup_max=4)\n"
        "engine = AsyncLLMEngine.from_engine_args(args)\n"
    )
    ast.parse(result.text)
    assert "from vllm.v1.engine.async_llm import AsyncLLM\n" in result.text
    assert "engine = AsyncLLM.from_engine_args(args)" in result.text
    assert "'method': 'ngram', 'num_speculative_tokens': 5, 'prompt_lookup_max': 4" in result.text
    assert "AsyncLLMEngine" not in result.text


def test_what_is_left_of_the_old_engine_and_its_metrics_is_commented() -> None:
    code = (
        "import vllm\nfrom sklearn import metrics\n"
        "engine = AsyncLLMEngine.from_engine_args(args)\nother = vllm.AsyncLLMEngine\n"
        "wait = out.metrics.first_token_time - out.metrics.arrival_time\n"
        "m = outs[0].metrics\nprint(m.spec_token_acceptance_counts, metrics.f1_score)\n"
    )
    result = translate(code)
    assert result.text == code
    assert sorted(change.old for change in result.changes) == [
        "line 3: AsyncLLMEngine", "line 4: vllm.AsyncLLMEngine", "line 5: out.metrics",
        "line 5: out.metrics.first_token_time", "line 6: outs[0].metrics",
        "line 7: m.spec_token_acceptance_counts",
    ]  # fmt: skip
    assert "disable_log_stats=False" in result.commented()
    for line in (
        "engine = AsyncLLMEngine.from_engine_args(args)\n",
        "x = o.metrics.arrival_time\n",
    ):
        alone = translate(line)
        assert alone.name == "code.py"
        assert len(alone.changes) == 1


def test_the_deployment_of_vllm_0_6_3() -> None:
    result = CliRunner().invoke(
        app, ["ops", "deploy", "translate", str(GOLDEN / "vllm-0.6.3.yaml")]
    )
    assert result.exit_code == 0
    assert result.stdout == (GOLDEN / "vllm-today.yaml").read_text()


def leaves(value: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    items = value.items() if isinstance(value, dict) else enumerate(value)
    found = {}
    for key, each in items:
        inner = isinstance(each, (dict, list))
        found |= leaves(each, (*path, key)) if inner else {(*path, key): each}
    return found


def test_each_deviation_of_the_manifest_is_explained() -> None:
    text = (GOLDEN / "vllm-0.6.3.yaml").read_text()
    result = translate(text)
    old, new = list(yaml.safe_load_all(text)), list(yaml.safe_load_all(result.text))
    changed = {p for p, v in leaves(new).items() if leaves(old).get(p) != v}
    changed |= set(leaves(old)) - set(leaves(new))
    said = " ".join(str(change) for change in result.changes)
    word = {
        "image": "image", "command": "vllm serve", "args": "--speculative-model",
        "env": "HUGGING_FACE_HUB_TOKEN", "startupProbe": "startupProbe",
        "livenessProbe": "livenessProbe", "readinessProbe": "/v1/models", "lifecycle": "preStop",
        "securityContext": "securityContext", "volumeMounts": "/dev/shm", "volumes": "/dev/shm",
        "terminationGracePeriodSeconds": "terminationGracePeriodSeconds",
        "enableServiceLinks": "enableServiceLinks", "type": "LoadBalancer",
        "automountServiceAccountToken": "automountServiceAccountToken",
    }  # fmt: skip
    for path in changed:
        assert any(word[part] in said for part in path if part in word), path
    engine = new[0]["spec"]["template"]["spec"]["containers"][0]
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 4
    command = engine["command"]
    assert command[command.index("--tensor-parallel-size") + 1] == "4"
    known(shlex.join(command))
    assert "hf_not_a_token" not in result.text
    assert "initialDelaySeconds" not in result.text
    again = translate(result.text)  # today's form is a fixed point
    assert list(yaml.safe_load_all(again.text)) == new
    assert again.changes == []


DEPLOYMENT = """\
apiVersion: apps/v1
kind: Deployment
spec: {template: {spec: {containers: [%s]}}}
"""
SHELL = 'image: vllm/vllm-openai, command: [sh, -c, "exec vllm serve org/t --swap-space 4"]'


def test_probes_and_secrets_of_ones_own_stay() -> None:
    tls = "{httpGet: {path: /health, port: 1, scheme: HTTPS}, periodSeconds: 3}"
    own = "{exec: {command: [true]}, initialDelaySeconds: 9}"
    container = (
        f"{{image: vllm/vllm-openai, args: [--model, a, -tp, '2', -pp, '2'], livenessProbe: {own}, "
        f"readinessProbe: {tls}, env: [{{name: VLLM_API_KEY, value: k}}]}}"
    )
    result = translate(DEPLOYMENT % f"{container}, {container}")
    pod = yaml.safe_load(result.text)["spec"]["template"]["spec"]
    engine = pod["containers"][0]
    assert engine["readinessProbe"] == {
        "httpGet": {"path": "/v1/models", "port": 1, "scheme": "HTTPS"},
        "periodSeconds": 3,
    }
    assert engine["livenessProbe"] == {"exec": {"command": [True]}}
    assert engine["startupProbe"]["exec"] == {"command": [True]}
    assert engine["env"][0]["valueFrom"]["secretKeyRef"]["name"] == "vllm-api-key"
    assert engine["resources"]["limits"]["nvidia.com/gpu"] == 4
    assert [volume["name"] for volume in pod["volumes"]] == ["shm"]


def test_a_container_with_a_shell() -> None:
    result = translate(DEPLOYMENT % f"{{{SHELL}}}")
    pod = yaml.safe_load(result.text)["spec"]["template"]["spec"]
    command = pod["containers"][0]["command"]
    assert command == ["vllm", "serve", "org/t", "--shutdown-timeout", "45"]
    assert pod["containers"][0]["resources"] == {"limits": {"nvidia.com/gpu": 1}}


def test_variables_of_a_manifest_stay() -> None:
    result = translate(
        DEPLOYMENT
        % "{image: 'vllm/vllm-openai:$TAG', args: [--model, $(M), --tensor-parallel-size, "
        "$(TP), '--speculative-model=$(D)', --num-speculative-tokens, '${K}', --seed, $$(S)]}"
    )
    container = yaml.safe_load(result.text)["spec"]["template"]["spec"]["containers"][0]
    assert container["image"] == "vllm/vllm-openai:$TAG"
    assert container["command"] == [
        "vllm", "serve", "$(M)", "--tensor-parallel-size", "$(TP)", "--seed", "$$(S)",
        "--speculative-config",
        '{"method": "draft_model", "model": "$(D)", "num_speculative_tokens": ${K}}',
        "--shutdown-timeout", "45",
    ]  # fmt: skip
    again = translate(result.text)
    assert again.text == result.text
    script = '[sh, -c, "exec vllm serve $M --port ${P:-1} --speculative-model $D -tp 2 '
    result = translate(
        DEPLOYMENT % f'{{image: vllm, command: {script}--num-speculative-tokens $K"]}}'
    )
    container = yaml.safe_load(result.text)["spec"]["template"]["spec"]["containers"][0]
    assert container["command"][:2] == ["sh", "-c"]
    (said,) = shell(container["command"][2].removeprefix("exec "), M="org/t", D="org/d", K="3")
    assert said[:7] == ["vllm", "serve", "org/t", "--port", "1", "--tensor-parallel-size", "2"]
    assert json.loads(said[8])["num_speculative_tokens"] == 3
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 2


def lost(text: str, fewer: int) -> str:
    """A text whose lines have fewer spaces before them."""
    return re.sub(f"^ {{1,{fewer}}}", "", text, flags=re.M)


@pytest.mark.parametrize("fewer", [2, 4, 6, 8, 99])
def test_a_manifest_whose_indentation_was_lost_says_so(fewer: int) -> None:
    text = (GOLDEN / "vllm-0.6.3.yaml").read_text()
    for old in (text, text.split("---")[0]):
        with pytest.raises(ConfigError, match=r"indentation is lost: line \d+|indentation there"):
            translate(lost(old, fewer))
    with pytest.raises(ConfigError, match="line breaks are lost: line 1 has several keys"):
        translate(" ".join(text.split()))
    with pytest.raises(ConfigError, match="template of a chart; give the output of helm template"):
        translate(text.replace("vllm/vllm-openai:v0.6.3", "{{ .Values.image }}"))


def doubled(levels: int, wide: int = 9) -> str:
    """A manifest of aliases of aliases: ``wide`` to the power of ``levels`` values."""
    lists = [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * wide)}]\n" for i in range(1, levels)]
    return f"kind: Deployment\na0: &a0 [{', '.join('x' * wide)}]\n" + "".join(lists)


BOMBS = {
    "aliases": doubled(12), "a few aliases": doubled(5), "nearly too many": doubled(4, 20),
    "as image": doubled(12) + "spec: {template: {spec: {containers: [{image: *a11}]}}}\n",
    "merged": "kind: X\na0: &a0 {k: v}\n" + "".join(
        f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}], k{i}: [*a{i - 1}, *a{i - 1}]}}\n"
        for i in range(1, 30)
    ),
    "cycle": "kind: X\na: &a [*a]\n", "cycle of merges": "kind: X\na: &a\n  <<: *a\n",
    "deep": "kind: X\na: " + "[" * 400, "deep lists": "kind: X\na: " + "- " * 2000 + "x\n",
    "long number": "kind: X\na: " + "9" * 500_000, "sixties": "kind: X\na: 1" + ":1" * 100_000,
    "same anchors": "kind: X\na: [&a 1, &a [*a, *a], *a]\n" * 2,
    "tag": "kind: X\na: !!python/object/apply:os.system [ls]\n",
    "set": "kind: X\na: !!set {a, b}\n",
    "date": "kind: X\na: 0000-00-00T99:99:99Z\n", "binary": "kind: X\na: !!binary x\n",
    "complex key": "kind: X\n? [a]\n: b\n", "nul": "kind: X\na: \0\n",
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_documents_that_explode_are_refused_at_once(name: str) -> None:
    began = time.process_time()
    with pytest.raises(ConfigError) as refused:
        translate(BOMBS[name])
    assert time.process_time() - began < 5
    assert str(refused.value).isprintable()
    assert str(refused.value).endswith(".")


def test_the_grace_period_covers_the_time_that_streams_get() -> None:
    result = translate(
        DEPLOYMENT % "{image: vllm/vllm-openai, args: [--model, a, --shutdown-timeout, '300']}"
    )
    pod = yaml.safe_load(result.text)["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == 330
    assert pod["containers"][0]["command"].count("--shutdown-timeout") == 1


def test_a_list_of_kubectls_is_read_like_its_items() -> None:
    documents = list(yaml.safe_load_all((GOLDEN / "vllm-0.6.3.yaml").read_text()))
    listed = translate(yaml.safe_dump({"apiVersion": "v1", "kind": "List", "items": documents}))
    apart = translate(yaml.safe_dump_all(documents))
    assert yaml.safe_load(listed.text)["items"] == list(yaml.safe_load_all(apart.text))
    assert listed.changes == apart.changes


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "No command"),
        ("ls -l", "No command"),
        ("vllm serve 'a", "cannot be read"),
        ("vllm serve a > log", "Redirections"),
        ("vllm serve ${MODEL", "is open"),
        ("vllm serve $'a'", "is open"),
        ("vllm serve `a", "is open"),
        ("vllm serve a\ufdd0", "U\\+FDD0"),
        ("vllm serve a --enable-chunked-prefill=$X", "switches take no value"),
        ("trtllm-build --max_batch_size $N", "a variable of the shell"),
        ("vllm serve --port 1", "names no model"),
        ("text-generation-launcher --speculate 2", "names no model"),
        (SERVER + "--speculative-model org/d", "no num_speculative_tokens"),
        (SERVER + "--speculative-model org/d --num-speculative-tokens 0", "give 1 or more"),
        (SERVER + "--num-speculative-tokens x", "whole number"),
        (SERVER + "--speculative-model ibm/t-accelerator --num-speculative-tokens 3", "EAGLE-3"),
        (SERVER + EIGHT + "--speculative-draft-tensor-parallel-size 2 -tp 4", "1 or the target"),
        (SERVER + EIGHT + "--tensor-parallel-size all", "whole number"),
        ("trtllm-build --speculative_decoding_mode medusa --max_draft_len 3", "no successor"),
        ("trtllm-build --speculative_decoding_mode draft_tokens_external", "no --max_draft_len"),
        ("trtllm-build --max_batch_size many", "whole number"),
        ("trtllm-build\ntrtllm-build", "several builds"),
        ("from vllm import LLM\nLLM(", "no Python"),
        ("kind: Deployment\n\tx", "as YAML"),
        ("kind: ConfigMap\n", "No container"),
        ("kind: Deployment\nspec: [1]\n", "No container"),
        (DEPLOYMENT % "{image: vllm/vllm-openai, args: x}", "a list of words"),
        (DEPLOYMENT % "{image: vllm/vllm-openai, args: [--model, a], env: [3]}", "list of tables"),
        (DEPLOYMENT % '{image: vllm, command: [sh, -c, "sleep 1"]}', "one command of vLLM"),
        (DEPLOYMENT % '{image: vllm, command: [sh, -c, "A=1 vllm serve a"]}', "variables in env"),
        ("x" * (2**18 + 1), "256 KiB"),
        ("LLM(a=" + "(" * 300 + ")" * 300 + ")", "no Python"),
        ("LLM(speculative_model=" + "-" * 5000 + "x)", "nested too deeply|no Python"),
        (
            "LLM(model='a', speculative_model='d', num_speculative_tokens=K, "
            "speculative_disable_by_batch_size=4)",
            "write them as numbers",
        ),
        ("LLM(speculative_config={}, speculative_model='d', num_speculative_tokens=1)", "keep one"),
        (SERVER + EIGHT + "--speculative-config '{}'", "keep one"),
        ("kind: " + "[" * 5000, "as YAML|nested too deeply"),
        ("kind: 2024-99-99", "No container"),
    ],
)
def test_what_cannot_be_translated_is_a_sentence(text: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        translate(text)
    assert "\n" not in str(refused.value)


PIECES = ["vllm", "serve", "org/t", "--speculative-model", "[ngram]", "--num-speculative-tokens",
          "5", "-tp", "--swap-space=4", "LLM(", "model='a'", ")", "kind: Deployment", "\n", "- x",
          "trtllm-build", "--max_draft_len", "llama-server", "--draft-max", "=", "'", "\\", ";",
          "$A", '"$(b', "${C:-'d'}", "`", '"', "$(E)", "&a [*a, *a]", "<<: *a", "- image: vllm",
          "  spec:", "args: [--model, $(A)]", ".metrics", "AsyncLLMEngine",
          ":", "text-generation-launcher", "--model-id", "--speculate", "\x00", "ü"]  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=12).map(" ".join))
def test_any_text_is_translated_or_refused(text: str) -> None:
    translated_or_refused(text)


@pytest.mark.slow
@settings(max_examples=20_000, deadline=None)
@given(st.lists(st.sampled_from(PIECES), max_size=24).map(" ".join))
def test_very_many_texts_are_translated_or_refused(text: str) -> None:
    translated_or_refused(text)


def translated_or_refused(text: str) -> None:
    said = "."
    try:
        said = translate(text).commented() and "."
    except ConfigError as error:
        said = str(error)
    assert "\n" not in said
    assert not MARKS.search(said)


def test_the_docs_hold_the_tables() -> None:
    docs = (REPOSITORY / "docs" / "engines.md").read_text("utf-8")
    assert docs[docs.index(engines_section.BEGIN) :] == engines_section.reference()


PARSE = """
import json, sys
from vllm.config.speculative import SpeculativeConfig
from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
for words in json.load(sys.stdin):
    parsed = parser.parse_args(words)
    validate_parsed_serve_args(parsed)
    unknown = set(parsed.speculative_config or {}) - set(SpeculativeConfig.__dataclass_fields__)
    assert not unknown, unknown
    print(words[0])
"""


@pytest.mark.slow
def test_vllm_itself_parses_what_is_rendered_and_translated(tmp_path: Path) -> None:
    if not VLLM.ready:
        pytest.skip("vllm is not installed; run: make peers")
    texts = [translate(SERVER + EIGHT + "--use-v2-block-manager --swap-space 4").text]
    for method in capabilities.find("vllm").methods:
        drafter: dict[str, Any] = {"method": method, "num_speculative_tokens": 4}
        if method in ("draft_model", "eagle3", "speculators"):
            drafter |= {"model": "org/d", "tensor_parallel_size": 1}
        drafter["schedule"] = [[1, 8, 4], [9, 64, 0]]
        spec = {
            "engine": "vllm",
            "target": {"model": "org/t", "dtype": "bfloat16", "quantization": "fp8"},
            "drafter": drafter,
            "parallel": {"tensor": 4},
            "limits": {"max_model_len": 8192, "max_num_seqs": 64, "max_num_batched_tokens": 2048},
            "memory": {"gpu_share": 0.9},
        }
        texts.append(render(parse(spec)).files["run.sh"])
        file = tmp_path / f"{method}.yaml"
        file.write_text(render(parse(spec), "config").files["vllm.yaml"])
        texts.append(f"vllm serve --config {file}")
    lines = [shlex.split(text.replace("\\\n", ""), comments=True)[2:] for text in texts]
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    said = subprocess.run(
        [VLLM.python, "-c", PARSE],
        input=json.dumps(lines), env=inherited, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert said.returncode == 0, said.stderr[-2000:]
    assert len(said.stdout.splitlines()) == len(lines)


@pytest.mark.slow
def test_llama_server_itself_parses_what_is_rendered_and_translated(tmp_path: Path) -> None:
    """It ends for want of the model, after it has read its options."""
    if not program("llama-server").exists():
        pytest.skip("llama.cpp is not built; run: make peers")
    model, drafter = (str(tmp_path / name) for name in ("target.gguf", "drafter.gguf"))
    texts = [translate(f"llama-server -m {model} -md {drafter} --draft-max 16 --draft-min 1").text]
    for method in ("none", *capabilities.find("llamacpp").methods):
        spec: dict[str, Any] = {
            "engine": "llamacpp",
            "target": {"model": model},
            "drafter": {"method": method},
            "limits": {"max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 128},
            "service": {"model_name": "m", "port": 8123},
        }
        if method != "none":
            spec["drafter"]["num_speculative_tokens"] = 4
        if method in ("draft_model", "eagle3"):
            spec["drafter"]["model"] = drafter
        texts.append(render(parse(spec)).files["run.sh"])
    for text in texts:
        words = shlex.split(text.replace("\\\n", ""), comments=True)
        done = subprocess.run(
            [program("llama-server"), *words[1:]], capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        said = done.stdout + done.stderr
        assert done.returncode != 0
        assert "target.gguf" in said, said[-2000:]
        assert "invalid argument" not in said
        assert "error while handling argument" not in said


def test_a_long_quote_takes_time_by_its_length() -> None:
    """Each letter of it copied all before: a MiB took minutes."""
    began = time.process_time()
    with pytest.raises(ConfigError, match="No command of vLLM"):
        translate('echo "' + "x" * 260_000 + '"')
    with pytest.raises(ConfigError, match="No command of vLLM"):
        translate("A=1 " * 65_000)
    with pytest.raises(ConfigError, match="more than 5,000 commands"):
        translate(f"{SERVER}\n" + "a\n" * 5_000)
    for blanks in ("\n" * 260_000, " \n" * 130_000, "{\n" * 130_000, "from\n" * 50_000):
        with pytest.raises(ConfigError):
            translate(f"echo a{blanks}b")
    assert time.process_time() - began < 20


OWN = """\
# Kept by hand.
apiVersion: apps/v1
kind: Deployment
metadata: { name: "engine" }   # the name
spec:
  template:
    spec:
      containers:
      - name: 'engine'
        image:   vllm/vllm-openai:v0.6.3   # pinned
        args:
        - --model=org/t
        - --num-speculative-tokens=5
        - "--speculative-model=org/d"   # small

        # Where it listens.
        ports: [ {containerPort: 8000, name: "http"} ]
        env: &env
          # Told to both.
          - {name: MODE, value: "yes"}
          - name: NOTHING
            value: ~
        readinessProbe:
          httpGet: {path: /health, port: http}
          initialDelaySeconds: 60   # a guess
      - name: sidecar
        image: busybox
        env: *env
---
# Another.
{kind: ConfigMap, data: {on: 0o17}}
"""


def test_all_but_the_changed_lines_of_a_manifest_stay() -> None:
    result = translate(OWN)
    old, new = OWN.splitlines(), result.text.splitlines()
    gone = [line.strip() for line in difflib.ndiff(old, new) if line.startswith("- ")]
    assert [line[1:].strip() for line in gone] == [
        "image:   vllm/vllm-openai:v0.6.3   # pinned", "args:", "- --model=org/t",
        "- --num-speculative-tokens=5", '- "--speculative-model=org/d"   # small',
        "httpGet: {path: /health, port: http}", "initialDelaySeconds: 60   # a guess",
    ]  # fmt: skip
    assert "        image: vllm/vllm-openai:v0.33.0   # pinned" in new
    assert "        # Where it listens." in new
    assert translate(result.text).text == result.text


def test_a_value_that_others_share_is_changed_for_one_alone() -> None:
    shared = OWN.replace("value: ~", "value: ~\n          - {name: HF_TOKEN, value: hidden}")
    result = translate(shared)
    engine, sidecar = yaml.safe_load(result.text.split("---")[0])["spec"]["template"]["spec"][
        "containers"
    ]
    assert "valueFrom" in engine["env"][-1]
    assert sidecar["env"][-1] == {"name": "HF_TOKEN", "value": "hidden"}
