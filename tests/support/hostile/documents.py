"""Readers of documents for planning, deployment and load tests; see ``hostile_readers``."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import strategies as st

from outrider.base.outside.text import printable
from outrider.errors import ConfigError
from tests.support.hostile import inputs as made
from tests.support.hostile.inputs import damaged, jsons, texts, tomls, trees
from tests.support.hostile.readers import REPORT, SERVED, Made, check_said, in_file, reader


def advice() -> dict[str, Any]:
    """An advice as ``outrider ops advise --json`` writes it."""
    from outrider.ops.planning.advise import advise
    from outrider.ops.planning.situation import Situation

    found: dict[str, Any] = json.loads(
        json.dumps(advise(Situation("llama-3.1-8b", "eagle3", hardware="h100")).to_json())
    )
    return found


@reader("advice")
def advice_file(folder: Path) -> Made:
    from outrider.ops.deploy import advised, spec
    from outrider.ops.deploy.render import render
    from outrider.ops.planning.advice import load_advice

    def read(file: Path) -> None:
        found = load_advice(file)
        for engine in ("vllm", "sglang"):
            try:
                render(spec.parse(advised.document_of(found, engine, None)))
            except ConfigError as error:
                check_said(str(error))

    return jsons(advice()), in_file(folder, "advice.json", read)


@reader("acceptance file")
def acceptance_file(folder: Path) -> Made:
    from outrider.ops.planning.acceptance import read_acceptance

    plain = {"acceptance_rate": 0.7, "num_speculative_tokens": 4}

    def read(file: Path) -> None:
        read_acceptance(file, "model").survival(5)

    return jsons(REPORT, SERVED, plain), in_file(folder, "a.json", read)


@reader("acceptance text")
def acceptance_text(folder: Path) -> Made:
    from outrider.ops.planning.acceptance import parse_acceptance

    return texts(damaged("0.73@5", "0.92,0.81,0.71")), lambda text: parse_acceptance(text)


DEMAND = """
[model]
target = "llama-3.1-8b"
drafter = "eagle3"
hardware = "h100"
acceptance = "0.7@4"
[traffic]
peak = 3.5
input_tokens = 500
output_tokens = 200
tasks = {chat = 0.7, code = 0.3}
temperature = 0.7
[slo]
ttft = 0.5
percentile = 0.9
[fleet]
spare = 1
standby = 0.2
max_num_seqs = 64
price = 3.0
"""


@reader("demand")
def demand(folder: Path) -> Made:
    import tomllib

    from outrider.ops.deploy.demand import parse_demand

    sample = tomllib.loads(DEMAND)
    hours = {**sample, "traffic": {**sample["traffic"], "by_hour": [1.0] * 24}}
    del hours["traffic"]["peak"]
    cases = st.one_of(texts(tomls(DEMAND)), texts(jsons(sample, hours)))
    return cases, lambda text: parse_demand(text, "demand.toml")


SPEC = """
engine = "vllm"
[target]
model = "org/target"
revision = "main"
attention_heads = 32
vocab_size = 32000
[drafter]
method = "eagle3"
model = "org/head"
num_speculative_tokens = 4
schedule = [[1, 16, 4], [17, 256, 0]]
[parallel]
tensor = 2
[limits]
max_model_len = 8192
max_num_seqs = 64
[memory]
gpu_share = 0.9
[service]
model_name = "llama"
port = 8001
"""
TUNED = "[deploy]\n" + re.sub(r"^\[(\w+)\]$", r"[deploy.\1]", SPEC, flags=re.M) + "[other]\na = 1\n"
"""As ``outrider tune`` writes it."""


@reader("deploy spec")
def spec(folder: Path) -> Made:
    from outrider.ops.deploy import spec as specs
    from outrider.ops.deploy.render import FORMATS, render
    from outrider.ops.deploy.spec import filled

    def read(file: Path) -> None:
        found = filled(specs.parse(specs.read(file), str(file)))
        for form in FORMATS:
            render(found, form)

    return tomls(SPEC, TUNED), in_file(folder, "spec.toml", read)


COMMANDS = (
    "export A=1\npython -m vllm.entrypoints.openai.api_server --model org/t --speculative-model "
    "org/d --num-speculative-tokens 8 \\\n  -tp 4 --max-model-len=8192 | tee log\n",
    'vllm serve org/t --speculative-config \'{"method": "eagle3", "model": "org/h"}\' # x\n',
    "llama-server -m t.gguf -md d.gguf --draft-max 8 --draft-min 2 -c 8192 -np 4\n",
    "text-generation-launcher --model-id org/t --speculate 3 --port 80\n",
    "trtllm-build --checkpoint_dir c --speculative_decoding_mode draft_tokens_external "
    "--max_draft_len 5 --output_dir e\n",
)
PYTHON = """
from vllm import LLM, SamplingParams
from vllm.engine.async_llm_engine import AsyncLLMEngine
llm = LLM(model="org/t", speculative_model="org/d", num_speculative_tokens=5,
          use_v2_block_manager=True, **{"x": 1})
print(llm.generate("a")[0].metrics.first_token_time)
"""
MANIFEST = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: vllm, labels: &l {app: vllm}}
spec:
  replicas: 2
  selector: {matchLabels: *l}
  template:
    metadata: {labels: *l}
    spec:
      containers:
      - name: vllm
        image: vllm/vllm-openai:v0.6.0
        command: ["python3", "-m", "vllm.entrypoints.openai.api_server"]
        args: ["--model", "org/t", "--speculative-model", "org/d", "--num-speculative-tokens", "5"]
        env: [{name: A, value: "1"}]
        resources: {limits: {nvidia.com/gpu: 1}}
---
apiVersion: v1
kind: Service
metadata: {name: vllm}
"""
LAUGHS = "kind: List\na0: &a0 [x, x]\n" + "".join(
    f"a{level + 1}: &a{level + 1} [{', '.join([f'*a{level}'] * 9)}]\n" for level in range(20)
)
MERGES = "kind: List\nb0: &b0 {x: 1}\n" + "".join(
    f"b{level + 1}: &b{level + 1} {{<<: [*b{level}, *b{level}]}}\n" for level in range(60)
)


@reader("translate: commands")
def translate_commands(folder: Path) -> Made:
    from outrider.ops.deploy.translate import translate

    return texts(damaged(*COMMANDS)), translate


@reader("translate: Python")
def translate_python(folder: Path) -> Made:
    from outrider.ops.deploy.translate import translate

    return texts(damaged(PYTHON)), translate


@reader("translate: manifests")
def translate_manifests(folder: Path) -> Made:
    import yaml

    from outrider.ops.deploy.translate import translate

    sample = next(iter(yaml.safe_load_all(MANIFEST)))
    cases = st.one_of(damaged(MANIFEST), damaged(MANIFEST, LAUGHS, MERGES), jsons(sample))
    return texts(cases), translate


def check_document(found: Any) -> None:
    """Assert that a document can be written: finite numbers, no lone surrogates."""
    json.dumps(found, allow_nan=False, ensure_ascii=False, default=str).encode()


@reader("YAML documents")
def yaml_documents(folder: Path) -> Made:
    from outrider.base.outside.documents import parse_yaml

    return damaged(MANIFEST, LAUGHS, MERGES), lambda data: check_document(parse_yaml(data, "It"))


@reader("JSON documents")
def json_documents(folder: Path) -> Made:
    from outrider.base.outside.documents import read_json

    return jsons(REPORT, SERVED), in_file(
        folder, "x.json", lambda file: check_document(read_json(file, "It"))
    )


@reader("TOML documents")
def toml_documents(folder: Path) -> Made:
    from outrider.base.outside.documents import parse_toml

    return damaged(SPEC, DEMAND), lambda data: check_document(parse_toml(data, "It"))


SERVER = """
model = "m"
host = "0.0.0.0"
port = 8000
api_key = ["a", "b"]
memory = "2GiB"
speculative_config = {method = "ngram", num_speculative_tokens = 4}
slo = "ttft=200ms,tpot=50ms"
max-model-len = 4096
request_timeout = 60.0
share_prefix_cache = true
log_format = "json"
[deploy.target]
model = "x"
"""


@reader("server options")
def server_options(folder: Path) -> Made:
    from outrider.server.options import resolve

    return tomls(SERVER), in_file(folder, "s.toml", lambda file: resolve({}, {}, file))


@reader("server environment")
def server_environment(folder: Path) -> Made:
    from outrider.server.options import resolve

    sample = {"OUTRIDER_PORT": "8000", "OUTRIDER_MEMORY": "2GiB",
              "OUTRIDER_SHARE_PREFIX_CACHE": "true", "OUTRIDER_SLO": "ttft=1s",
              "OUTRIDER_SPECULATIVE_CONFIG": '{"method": "ngram"}'}  # fmt: skip
    cases = st.dictionaries(
        st.sampled_from(list(sample)), texts(damaged(*sample.values())), max_size=2
    )
    return cases, lambda found: resolve({}, sample | found, None)


@reader("speculative_config")
def speculative_config(folder: Path) -> Made:
    from outrider.base.vllm_names import translate_deprecated

    sample = {"method": "eagle3", "model": "h", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    cases = st.one_of(trees(sample), texts(jsons(sample, {"method": "ngram"})))
    return cases, lambda config: translate_deprecated("speculative_config", config)


@reader("kept costs")
def kept_costs(folder: Path) -> Made:
    from outrider.ops.planning.situation import read_profile

    curve = [[1, 0.001], [8, 0.002], [64, 0.01]]
    sample = {
        "target": curve, "drafters": {"model": [curve, 0.001, 0.0001], "ngram": [None, 1e-5, 0.0]},
        "per_context": 1e-9, "host": [1e-4, 1e-5],
    }  # fmt: skip
    return jsons(sample), in_file(folder, "costs.json", read_profile)


@reader("likely ids")
def likely_ids(folder: Path) -> Made:
    from outrider.drafters.likely import read_ids

    sample = {"vocabulary": 100, "ids": [3, 17, 99]}
    return jsons(sample), in_file(folder, "ids.json", lambda file: read_ids(file, 100, 8))


@reader("catalogue config")
def catalogue_config(folder: Path) -> Made:
    from outrider.ops.planning.catalogue import eagle_head, find_shape, read_config

    sample = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "vocab_size": 151936, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "text_config": None, "tie_word_embeddings": False,
    }  # fmt: skip

    def read(_: Path) -> None:
        shape = find_shape(str(folder))
        shape.read(4)
        eagle_head(shape, read_config(str(folder)))

    return jsons(sample), in_file(folder, "config.json", read)


LINES = [{"prompt": "a", "answer": "b"}, {"messages": [{"role": "user", "content": "hi"}]},
         {"prompt": "c", "schema": {"type": "object"}},
         {"question_id": 81, "category": "qa", "turns": ["d", "e"]}]  # fmt: skip


@reader("data set")
def data_set(folder: Path) -> Made:
    from outrider.bench.load.datasets import body_of, load_prompts

    shared = [{"conversations": [{"from": "human", "value": "hello"}, {"from": "gpt"}]}]

    def read(file: Path) -> None:
        found = load_prompts(str(file))
        json.dumps([body_of(item, True, {}) for item in found.items])

    return jsons(shared, LINES), in_file(folder, "set.json", read)


@reader("data set of lines")
def data_lines(folder: Path) -> Made:
    from outrider.bench.load.datasets import load_prompts

    text = "".join(json.dumps(line) + "\n" for line in LINES)
    lines = trees(*LINES).map(made.as_json).map(lambda line: line + b"\n" + text.encode())
    return st.one_of(lines, damaged(text)), in_file(
        folder, "set.jsonl", lambda file: load_prompts(str(file))
    )


@reader("trace")
def trace(folder: Path) -> Made:
    from outrider.bench.load.arrivals import load_trace

    return damaged('0.5\n{"timestamp": 1500}\n3\n'), in_file(
        folder, "trace.jsonl", lambda file: load_trace(str(file))
    )


CHUNK = {"choices": [{"index": 0, "text": "ab", "delta": None, "finish_reason": None}]}
DELTA = {"choices": [{"delta": {"content": "x", "tool_calls": [{"function": {"arguments": "{"}}]}}],
         "usage": {"prompt_tokens": 3, "completion_tokens": 2}}  # fmt: skip


@reader("stream of a load test")
def stream(folder: Path) -> Made:
    from outrider.base.outside.stamped import StampedAnswer
    from outrider.bench.load.stream import Record, read

    whole = b"".join(
        b"data: " + json.dumps(chunk).encode() + b"\n\n" for chunk in (CHUNK, DELTA, CHUNK)
    )
    event = trees(CHUNK, DELTA, {"error": {"message": "x"}}).map(made.as_json)
    streams = event.map(lambda data: whole + b"data: " + data + b"\n\n" + whole)

    def call(case: tuple[bytes, int, int]) -> None:
        data, size, status = case
        parts = [data[at : at + size] for at in range(0, len(data), size)][:3000]
        record = Record(0.0, 0.0)
        read(StampedAnswer(status, [(float(i), part) for i, part in enumerate(parts)]), record)
        check_said(record.error)

    sizes = st.sampled_from([1 << 16, 1 << 20, 7])
    statuses = st.sampled_from([200] * 8 + [500])
    return st.tuples(st.one_of(streams, damaged(whole)), sizes, statuses), call


@reader("models of a load test")
def listed_models(folder: Path) -> Made:
    from outrider.base.outside.stamped import Client, StampedAnswer

    def call(case: tuple[bytes, int]) -> None:
        body, status = case

        async def ask(*_: Any) -> StampedAnswer:
            return StampedAnswer(status, [(0.0, body)])

        own: Any = SimpleNamespace(ask=ask, url="http://s:1")
        name = asyncio.run(Client.model(own))
        json.dumps({"model": name}).encode()  # as it is asked
        check_said(printable(name))  # as a report names it

    sample = {"data": [{"id": "m"}], "error": {"message": "x"}}
    return st.tuples(jsons(sample), st.sampled_from([200, 200, 200, 500])), call


@reader("extra body")
def extra_body(folder: Path) -> Made:
    import typer

    from outrider.cli.load import extra

    def call(text: str) -> None:
        try:
            extra(text)
        except typer.BadParameter as error:
            check_said(str(error))

    return texts(jsons({"top_p": 0.9, "n": 1})), call


def audited(read: Callable[[bytes, str], object]) -> Callable[[bytes], object]:
    return lambda body: read(body, "http://s:1")


@reader("audit: completions")
def audit_completions(folder: Path) -> Made:
    from outrider.audit.endpoint.answers import completions

    classic = {"choices": [{
        "index": 0, "text": "ab", "finish_reason": "stop", "token_ids": [1, 2],
        "logprobs": {"tokens": ["a", "b"], "token_logprobs": [-0.1, -0.2],
                     "top_logprobs": [{"a": -0.1, "c": -2.0}, {"b": -0.2}]},
    }], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}  # fmt: skip
    entry = {"token": "a", "id": 3, "logprob": -0.5, "top_logprobs": [{"token": "a", "id": 3,
             "logprob": -0.5}]}  # fmt: skip
    chat = {"choices": [{"text": "a", "index": 0, "logprobs": {"content": [entry]}}, {"text": ""}]}
    return jsons(classic, chat), audited(completions)


@reader("audit: messages")
def audit_messages(folder: Path) -> Made:
    from outrider.audit.endpoint.answers import message

    sample = {"choices": [{"message": {"content": "x"}, "finish_reason": "stop"}]}
    return jsons(sample), audited(message)
