"""A server's options: where they come from, and what is refused."""

import json
import logging
import re
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest
from typer.testing import CliRunner

from outrider.base.config import ENGINE_OPTIONS, EngineConfig, EngineOptions
from outrider.base.options import Option
from outrider.base.vllm_names import translate
from outrider.cli import app
from outrider.drafters.ngram import NgramSpec
from outrider.engine.setup import set_up
from outrider.errors import ConfigError, OutriderError
from outrider.server.build import build, names_of, read_defaults, read_hosts, read_keys, read_slo
from outrider.server.options import OPTIONS, RELAXED, resolve

ENVIRONMENT = {"OUTRIDER_PORT": "2", "OUTRIDER_HOST": "b", "OUTRIDER_NATIVE_ISA": "x", "PATH": "/"}


def written(folder: Path, text: str) -> Path:
    file = folder / "outrider.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_later_sources_win(tmp_path: Path) -> None:
    file = written(tmp_path, 'port = 1\nhost = "a"\nmax-num-seqs = 7\nshare_prefix_cache = true\n')
    found = resolve({"port": 3, "host": None}, ENVIRONMENT, file)
    assert (found["port"].value, found["port"].source) == (3, "flag")
    assert (found["host"].value, found["host"].source) == ("b", "environment")
    assert (found["max_num_seqs"].value, found["max_num_seqs"].source) == (7, str(file))
    assert found["share_prefix_cache"].value is True
    assert (found["dtype"].value, found["dtype"].source) == ("auto", "default")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("prot = 1", "did you mean 'port'"),
        ('port = "1"', "port is '1'; give a whole number"),
        ("port = true", "give a whole number"),
        ("port = ", "cannot be read as TOML"),
        ("shutdown_timeout = 3\nhost = 5", "host is 5; give a text"),
        ("model = 5", "model is 5; give a text"),
        ("port = " + "9" * 5000, "cannot be read as TOML"),
        ("port = " + "9" * 4000, "port has more than 300 digits"),
        ("log_interval = nan", "log_interval is nan; give a finite number"),
        ("allowed_hosts = [[]]\nmodel = ''", r"allowed_hosts has '\[\]'"),
        ('chat_template = "\\u0000"', "give a text in UTF-8"),
        ("slo = " + "[" * 100_000, "is nested too deeply"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        read_hosts(resolve({}, {}, written(tmp_path, text))["allowed_hosts"].value)
    assert len(str(found.value)) < 500


HOSTILE: dict[type, tuple[Any, ...]] = {
    int: (-1, -(2**31), 2**64, 10**400),
    float: (-1.0, -1e-300, float("nan"), float("inf"), -float("inf"), 1e308),
    str: ("\0", "\ud800", "a\0" * 100_000),
}


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_no_option_takes_anything(option: Option, tmp_path: Path) -> None:
    for value in HOSTILE.get(option.type, ()):
        with pytest.raises(ConfigError, match=f"^{option.flag} is ") as found:
            resolve({option.name: value}, {}, None)
        assert len(str(found.value)) < 400
    for text in ("nan", "-1", "1e999", "x" * 100_000, "9" * 5000, "\udcff"):
        if option.type is str and text != "\udcff":
            continue
        with pytest.raises(ConfigError, match=f"^{option.variable} is ") as found:
            resolve({}, {option.variable: text}, None)
        assert len(str(found.value)) < 400
    for text in ("-1", "1979-05-27", "{a = 1}", "[true]", "1e400"):
        if option.name in RELAXED or (option.type is float and text == "[true]"):
            continue
        with pytest.raises(ConfigError, match=f"outrider.toml: {option.name} is "):
            resolve({}, {}, written(tmp_path, f"{option.name} = {text}"))


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("slo", "ttft=1.2.3s", "give limits such as ttft"),
        ("slo", "ttft=" + "9" * 5000 + "s", "give limits such as ttft"),
        ("allowed_hosts", "a b", "give names"),
        ("allowed_hosts", "http://a", "give names"),
        ("otlp_traces_endpoint", "localhost", "is 'localhost'; give a URL such as"),
        ("otlp_traces_endpoint", "ftp://a", "give a URL such as"),
        ("api_key", "a b", "only ASCII letters"),
        ("api_key", "\u00fc", "only ASCII letters"),
        ("api_key_file", "/", "cannot be read"),
        ("chat_template", "/", "cannot be read"),
        ("chat_template", "/nowhere", "cannot be read"),
        ("tool_call_parser", "x" * 10_000, "give auto, hermes"),
        ("speculative_config", "[" * 5000, "."),
        ("per_request_spec_decode_metrics", "all", "none, summary or detailed"),
        ("max_queued_requests", 0, "give a whole number from 1"),
    ],
)
def test_options_are_checked_before_a_server_starts(
    tiny_llama: Path, option: str, value: Any, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        build(tiny_llama, "tiny", resolve({option: value}, {}, None))
    assert len(str(found.value)) < 500


@pytest.mark.parametrize(
    "words",
    [
        ("--log-interval", "-1"), ("--log-interval", "nan"), ("--shutdown-timeout", "nan"),
        ("--request-timeout", "0"), ("--metrics-port", "0"), ("--port", "65536"),
        ("--slo", "ttft=1.2.3s"), ("--host", "a b"), ("--host", "\u00fc" * 100),
        ("--host", "a.." * 9), ("--log-format", "xml"), ("--max-connections", "0"),
        ("--port", "70000"), ("--metrics-port", "70000"),
    ],
)  # fmt: skip
def test_the_command_ends_with_a_sentence(
    words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (None, "outrider"):  # the command sets both
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    monkeypatch.setattr(logging.getLogger("outrider"), "propagate", True)
    monkeypatch.setattr(logging.getLogger("outrider"), "level", 0)
    done = CliRunner().invoke(app, ["serve", *words])
    assert (done.exit_code, type(done.exception)) == (2, SystemExit), done.output
    assert done.stderr.startswith("error: ")
    assert len(done.stderr) < 500
    if words[1] == "70000":
        assert re.search(rf"{words[0]} is 70000; give .* to 65,535\.", done.stderr)


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"OUTRIDER_PROT": "1"}, "did you mean 'OUTRIDER_PORT'"),
        ({"OUTRIDER_PORT": "x"}, "OUTRIDER_PORT is 'x'; give a whole number"),
        ({"OUTRIDER_SHARE_PREFIX_CACHE": "maybe"}, "give true or false"),
    ],
)
def test_a_wrong_variable_is_refused(environment: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve({}, environment, None)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        resolve({}, {}, tmp_path / "absent.toml")


def test_keys_and_slos(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n", encoding="utf-8")
    assert read_keys("zero,one", str(file)) == ("zero", "one", "two")
    with pytest.raises(ConfigError, match="has no key"):
        read_keys("", None)
    assert read_slo("ttft=200ms,tpot=0.05s") == {"ttft": 0.2, "tpot": 0.05}
    assert read_slo(None) == {}
    with pytest.raises(ConfigError, match="such as ttft=200ms"):
        read_slo("ttft=fast")


@pytest.mark.parametrize(
    ("file", "names"),
    [
        ("pocket", ("pocket",)), ("Qwen3-4B", ("Qwen3-4B",)),
        ("SmolLM2-135M-Instruct.Q4_1.gguf", ("SmolLM2-135M-Instruct.Q4_1",
         "smollm2-135m-instruct:q4_1", "SmolLM2-135M-Instruct.Q4_1.gguf")),
        ("a-iq4_nl-00001-of-00003.gguf", ("a-iq4_nl", "a:iq4_nl", "a-iq4_nl-00001-of-00003.gguf")),
        ("b.bf16.gguf", ("b.bf16", "b:bf16", "b.bf16.gguf")),
        ("model.gguf", ("model", "model.gguf")),
    ],
)  # fmt: skip
def test_gguf_files_have_short_names(file: str, names: tuple[str, ...]) -> None:
    assert names_of(file) == names


def test_what_a_checkpoint_says_of_sampling(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    assert read_defaults("auto", tmp_path) == {}
    file.write_text(
        '{"temperature": 0.6, "top_k": 20, "top_p": null, "max_new_tokens": 9, "do_sample": true}'
    )
    found = {"temperature": 0.6, "top_k": 20, "max_tokens": 9}
    assert read_defaults("auto", tmp_path) == read_defaults(str(tmp_path), Path("/")) == found
    assert read_defaults("vllm", tmp_path) == {}
    for text, said in (
        ("[]", "no JSON object"),
        ("{", "is damaged"),
        ('{"temperature": -1}', "temperature is -1.*give vllm for none"),
        ('{"max_new_tokens": "9"}', "max_tokens is '9'"),
        ('{"top_k": 4294967296}', "top_k is 4294967296; a whole number from -1 to 2147483647"),
    ):
        file.write_text(text)
        with pytest.raises(ConfigError, match=said):
            read_defaults("auto", tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_defaults(str(tmp_path), tmp_path)


def test_vllms_speculative_config(tiny_llama: Path) -> None:
    given = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
    llm, settings = build(
        tiny_llama, "tiny", resolve({"speculative_config": json.dumps(given)}, {}, None)
    )
    llm.shutdown()
    spec = set_up(llm.spec.model, llm.spec.drafter, llm.spec.options).spec
    assert isinstance(spec, NgramSpec)
    assert spec.prompt_lookup_max == 2
    assert (llm.config.num_speculative_tokens, settings.longest) == (3, 3)
    for wrong, said in (
        ('{"method": "medusa"}', "method 'medusa'"), ("[1]", "give an object"), ("{", "no JSON"),
        ('{"method": "ngram", "promt_lookup_max": 2}', "did you mean 'prompt_lookup_max'"),
        ('{"method": "suffix", "suffix_decoding_depth": 9}', "no option 'suffix_decoding_depth'"),
        ('{"method": "ngram", "suffix_decoding_max_tree_depth": 9}', "has no option 'suffix_deco"),
        ('{"method": "suffix", "model": "some/model"}', "has method 'suffix'"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=said):
            build(tiny_llama, "tiny", resolve({"speculative_config": wrong}, {}, None))


@pytest.mark.parametrize(
    ("given", "drafter"),
    [
        ({"method": "EAGLE3", "model": "/head"}, "/head"),
        ({"method": "draft-model", "model": "/d"}, "/d"),
        ({"method": "prompt_lookup"}, "ngram"),
        ({"method": "ngram_gpu"}, "ngram"),
        ({"model": "[ngram]"}, "ngram"),
        ({"method": "layerskip"}, "layerskip"),
    ],
)
def test_methods_have_the_names_of_the_one_table(given: dict[str, str], drafter: str) -> None:
    assert translate({"speculative_config": given}) == {"drafter": drafter}


@pytest.mark.parametrize("method", ["mtp", "mlp_speculator", "deepseek_mtp"])
def test_a_method_that_is_not_here_is_no_checkpoint(method: str) -> None:
    with pytest.raises(ConfigError, match=f"has method '{method}'; give none, ngram"):
        translate({"speculative_config": {"method": method, "model": "/d"}})


def test_vllms_suffix_decoding_is_ours() -> None:
    ours = {"method": "suffix", "num_speculative_tokens": 16}
    same = {
        "suffix_decoding_max_tree_depth": 64, "suffix_decoding_max_cached_requests": 0,
        "suffix_decoding_max_spec_factor": 1.0, "suffix_decoding_min_token_prob": 0.1,
    }  # fmt: skip
    meant = {"drafter": "suffix", "num_speculative_tokens": 16}
    assert translate({"speculative_config": ours | same}) == meant
    for name, said in (
        ("suffix_decoding_max_tree_depth", "64 tokens"),
        ("suffix_decoding_max_cached_requests", "suffix_store"),
        ("suffix_decoding_max_spec_factor", "as many tokens"),
        ("suffix_decoding_min_token_prob", "probability"),
    ):
        with pytest.warns(UserWarning, match=f"{name} is ignored.*{said}"):
            assert translate({"speculative_config": {**ours, name: 7}}) == meant


def test_config_tells_what_is_in_force(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_HOST", "0.0.0.0")
    monkeypatch.setenv("OUTRIDER_API_KEY", "secret")
    file = written(tmp_path, "max_num_seqs = 7\n")
    words = ["config", "some/model", "--config", str(file), "--port", "9"]
    done = CliRunner().invoke(app, [*words, "--json"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["model"] == {"value": "some/model", "source": "argument"}
    assert found["port"] == {"value": 9, "source": "flag"}
    assert found["host"] == {"value": "0.0.0.0", "source": "environment"}
    assert found["max_num_seqs"] == {"value": 7, "source": str(file)}
    assert set(found) == {"model", *(option.name for option in OPTIONS)}
    text = CliRunner().invoke(app, words).stdout
    assert "secret" not in text + done.stdout
    written(tmp_path, "\n".join(line for line in text.splitlines() if '""' not in line))
    assert CliRunner().invoke(app, ["config", "--config", str(file)]).exit_code == 0


def test_vllms_removed_flags_work_and_give_todays(tmp_path: Path) -> None:
    words = ["--speculative-model", "[ngram]", "--ngram-prompt-lookup-max", "3"]
    done = CliRunner().invoke(app, ["config", "--json", *words])
    found = json.loads(done.stdout)
    assert found["drafter"] == {"value": "ngram", "source": "flag"}
    assert found["prompt_lookup_max"] == {"value": 3, "source": "flag"}
    for said in ("use drafter", 'use "ngram"', "use prompt_lookup_max"):
        assert said in done.stderr
    assert "--speculative-model" not in CliRunner().invoke(app, ["serve", "--help"]).stdout
    with pytest.warns(FutureWarning, match="use prompt_lookup_min"):
        found = resolve({}, {}, written(tmp_path, "ngram_prompt_lookup_min = 1"))
    assert found["prompt_lookup_min"].value == 1


def test_another_tokenizer(tiny_llama: Path, tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((tiny_llama / name).read_bytes())
    llm, _ = build(tiny_llama, "tiny", resolve({"tokenizer": str(tmp_path)}, {}, None))
    llm.shutdown()
    assert llm.inputs.codec is not None
    assert llm.inputs.codec.source == tmp_path
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(OutriderError, match="has no tokenizer"):
        build(tiny_llama, "tiny", resolve({"tokenizer": str(empty)}, {}, None))


def test_what_kubernetes_adds_is_no_option() -> None:
    found = resolve(
        {},
        {
            "OUTRIDER_SERVICE_HOST": "10.0.0.1", "OUTRIDER_SERVICE_PORT_HTTP": "80",
            "OUTRIDER_PORT": "tcp://10.0.0.1:80", "OUTRIDER_PORT_80_TCP_ADDR": "10.0.0.1",
            "OUTRIDER_METRICS_SERVICE_PORT": "9", "OUTRIDER_METRICS_PORT": "tcp://10.0.0.1:9",
        },
        None,
    )  # fmt: skip
    assert found["port"].source == found["metrics_port"].source == "default"
    assert resolve({}, {"OUTRIDER_PORT": "81"}, None)["port"].value == 81
    assert resolve({}, {"OUTRIDER_METRICS_PORT": "9"}, None)["metrics_port"].value == 9


def test_a_key_may_look_like_a_number(tmp_path: Path, tiny_llama: Path) -> None:
    found = resolve({}, {}, written(tmp_path, "api_key = 12345"))
    assert build(tiny_llama, "tiny", found)[1].api_keys == ("12345",)


def test_every_engine_option_is_an_argument_a_flag_and_a_variable() -> None:
    names = {option.name for option in ENGINE_OPTIONS}
    assert {"drafter", *get_type_hints(EngineOptions)} == names
    assert {f.name for f in fields(EngineConfig)} - names == {"page_size"}
    hints = get_type_hints(EngineConfig)
    for name, hint in get_type_hints(EngineOptions).items():
        assert hint == hints.get(name, hint), name
    for command in ("serve", "generate"):
        shown = CliRunner().invoke(app, [command, "--help"], env={"COLUMNS": "200"}).stdout
        assert all(option.flag in shown for option in ENGINE_OPTIONS)
    for option in ENGINE_OPTIONS:
        value = {str: "x", int: "2", float: "0.5", bool: "true"}[option.type]
        found = resolve({}, {option.variable: value}, None)[option.name]
        assert found.source == "environment"
