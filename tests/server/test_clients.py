"""Clients of others against a server of the pocket pair, as their users run them (make clients)."""

from __future__ import annotations

import json
import os
import re
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks.install import AGENTS, GUIDELLM, SCHEMATHESIS, VLLM, Environment, home
from benchmarks.peers.known import FOLDER
from benchmarks.served import Served
from outrider import pocket
from outrider.checkpoints.checkpoint import open_checkpoint
from tests.support import REPOSITORY

pytestmark = pytest.mark.slow

CASES = 10_000
SECONDS = 3600


@pytest.fixture
def server() -> Iterator[Served]:
    with Served("--request-timeout", "2", "--num-speculative-tokens", "4") as found:
        yield found
        # Of a stream that fails on the way the log alone tells.
        assert not [s for s in found.lines if re.search(r"Traceback|status=5|error=5", s)]


def read(server: Served, path: str) -> str:
    with urllib.request.urlopen(server.url + path) as answer:
        return str(answer.read().decode())


def command(environment: Environment) -> list[str | Path]:
    """What runs a client; its arguments follow."""
    if environment is VLLM:
        return [VLLM.python, "-P", FOLDER / "runners" / "vllm_command.py"]
    return [environment.python.with_name(environment.name)]


def run(environment: Environment, folder: Path, *arguments: object) -> str:
    """What a client says in the end."""
    if not environment.ready:
        pytest.skip(f"{environment.name} is not installed; run: make clients")
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command(environment)), *map(str, arguments)], cwd=folder,
        env={**inherited, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.parametrize(
    ("backend", "endpoint"),
    [("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")],
)
def test_vllm_bench_serve(backend: str, endpoint: str, server: Served, tmp_path: Path) -> None:
    said = run(
        VLLM, tmp_path, "bench", "serve", "--backend", backend, "--endpoint", endpoint,
        "--base-url", server.url, "--model", "pocket", "--tokenizer", pocket.PATH,
        "--dataset-name", "random", "--random-input-len", 64, "--random-output-len", 32,
        "--num-prompts", 64, "--max-concurrency", 8, "--temperature", 0,
        "--save-result", "--result-dir", tmp_path, "--result-filename", "result.json",
    )  # fmt: skip
    result = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))
    assert (result["completed"], result["failed"]) == (64, 0)
    assert result["total_output_tokens"] == 64 * 32
    assert "unavailable" not in said  # /tokenize and /detokenize, which it checks prompts with
    assert 0 < result["spec_decode_acceptance_rate"] <= 100
    assert 1 < result["spec_decode_acceptance_length"] <= 5
    assert result["spec_decode_num_drafts"] > 0
    by_position = result["spec_decode_per_position_acceptance_rates"]
    assert by_position == sorted(by_position, reverse=True)
    assert "Acceptance rate" in said


def test_guidellm(server: Served, tmp_path: Path) -> None:
    run(
        GUIDELLM, tmp_path, "run", "--backend", f"kind=openai_http,target={server.url}",
        "--profile", "kind=concurrent,streams=4", "--constraint", "kind=max_requests,count=100",
        "--tokenizer", f"kind=hf_auto,model={pocket.PATH}",
        "--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=32",
        "--output", "kind=json,path=result.json", "--disable-console",
    )  # fmt: skip
    (benchmark,) = json.loads((tmp_path / "result.json").read_text(encoding="utf-8"))["benchmarks"]
    totals = benchmark["metrics"]["request_totals"]
    assert totals == {"successful": 100, "errored": 0, "incomplete": 0, "total": 100}


@pytest.fixture
def greedy(tmp_path: Path) -> Iterator[Served]:
    """A server that always says the same."""
    folder = tmp_path / "greedy"
    folder.mkdir()
    (folder / "generation_config.json").write_text('{"temperature": 0}')
    with Served("--generation-config", folder) as found:
        yield found


@pytest.mark.parametrize("language", ["python", "node"])
def test_clients_by_their_defaults(language: str, greedy: Served, tmp_path: Path) -> None:
    """Agents and SDKs over responses, messages and chats: texts, forms, tools, streams."""
    if not AGENTS.ready:
        pytest.skip("agents is not installed; run: make clients")
    scripts, folder = REPOSITORY / "tests/support/clients", home() / AGENTS.name
    command = [AGENTS.python, scripts / "python_clients.py"]
    if language == "node":
        command = [Path("node"), scripts / "node_clients.mjs", folder]
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [*map(str, command), greedy.url, "pocket"], cwd=tmp_path, env=inherited, check=False,
        capture_output=True, text=True, timeout=SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    got = json.loads(done.stdout.splitlines()[-1])
    assert len(got) == 5
    wrong = {name: told for name, told in got.items() if not _all(told)}
    assert not wrong


def _all(told: Any) -> bool:
    """Whether a client got all that it asked for."""
    return all(map(_all, told)) if isinstance(told, list) else told is True or told == "double"


def schemathesis(folder: Path, *arguments: object) -> int:
    """How many cases it ran; none may have been answered with 5xx."""
    run(
        SCHEMATHESIS, folder, "run", *arguments, "--checks", "not_a_server_error", "--seed", 1,
        "--request-timeout", 60, "--generation-database", "none", "--no-color",
        "--output-sanitize", "false", "--report", "json", "--report-json-path", "report.json",
    )  # fmt: skip
    report = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    assert report["test_cases"]["with_failures"] == report["test_cases"]["errored"] == 0
    assert report["operations"]["tested"] == report["operations"]["total"]
    return int(report["test_cases"]["generated"])


def test_what_the_schema_allows_is_never_5xx(server: Served, tmp_path: Path) -> None:
    assert schemathesis(tmp_path, f"{server.url}/openapi.json", "--max-examples", 2000) >= CASES


def servable(document: dict[str, Any]) -> dict[str, Any]:
    """The schema of requests that the server takes: the published one's are mostly refused."""
    largest = open_checkpoint(pocket.PATH).shape.vocab_size - 1
    token = {"type": "integer", "minimum": 0, "maximum": largest}
    tokens = {"type": "array", "items": token, "minItems": 1, "maxItems": 64}
    text = {"type": "string", "minLength": 1}
    texts = {"type": "array", "items": text, "minItems": 1, "maxItems": 4}
    role = {"enum": ["system", "user", "assistant"]}
    message = {"type": "object", "properties": {"role": role, "content": text},
               "required": ["role", "content"]}  # fmt: skip
    forms = [{"regex": "[a-z]{1,9}"}, {"choice": ["a", "b c"]}, {"json_object": True},
             {"json": {"type": "object", "properties": {"a": {"type": "integer"}}}},
             {"grammar": 'start: "a" | "b"'}]  # fmt: skip

    def number(kind: str, low: float, high: float) -> dict[str, Any]:
        return {"type": kind, "minimum": low, "maximum": high}

    narrow: dict[str, Any] = {
        "prompt": {"anyOf": [text, tokens, texts]},
        "messages": {"type": "array", "items": message, "minItems": 1, "maxItems": 4},
        "tokens": tokens,
        "n": number("integer", 1, 3),
        "max_tokens": number("integer", 1, 32),
        "max_completion_tokens": number("integer", 1, 32),
        "min_tokens": {"const": 1},
        "temperature": number("number", 0, 2),
        "top_p": number("number", 0.01, 1),
        "top_k": number("integer", 0, 100),
        "min_p": number("number", 0, 1),
        "repetition_penalty": number("number", 0.5, 2),
        "presence_penalty": number("number", -2, 2),
        "frequency_penalty": number("number", -2, 2),
        "seed": number("integer", 0, 2**53),
        "stop": {"anyOf": [text, texts]},
        "stop_token_ids": tokens,
        "bad_words": texts,
        "allowed_token_ids": tokens,
        "logit_bias": {"type": "object", "maxProperties": 4, "additionalProperties": False,
                       "patternProperties": {"^[1-9][0-9]{1,2}$": number("number", -100, 100)}},
        "truncate_prompt_tokens": number("integer", 1, 64),
        "structured_outputs": {"enum": forms},
        "timeout": number("number", 0.5, 2),
    }  # fmt: skip
    absent = ("model", "response_format", "tool_choice", "chat_template_kwargs")
    absent += ("continue_final_message", "documents", "reasoning_effort", "prompt_logprobs")
    absent += ("guided_json", "guided_regex", "guided_choice", "guided_grammar", "drafter")
    for schema in document["components"]["schemas"].values():
        properties = schema.get("properties", {})
        for name in absent:
            properties.pop(name, None)
        taken = {name for name, found in properties.items() if "enum" not in found}
        properties.update({name: narrow[name] for name in taken if name in narrow})
    schemas = document["components"]["schemas"]
    for name in ("CompletionRequest", "ChatRequest"):
        schemas[name]["required"] += ["max_tokens", "logprobs"]
    schemas["CompletionRequest"]["properties"]["logprobs"] = number("integer", 0, 20)
    schemas["ChatRequest"]["properties"]["logprobs"] = {"const": True}  # top_logprobs needs it
    return document


def test_what_runs_is_never_5xx(server: Served, tmp_path: Path) -> None:
    document = servable(json.loads(read(server, "/openapi.json")))
    (tmp_path / "openapi.json").write_text(json.dumps(document), encoding="utf-8")
    schemathesis(
        tmp_path, "openapi.json", "--url", server.url, "--mode", "positive", "--max-examples", 400
    )
    generated = re.findall(r"request_success_total\{.*\} ([0-9.]+)", read(server, "/metrics"))
    assert sum(map(float, generated)) >= 400
