"""A server's options, read from a TOML file, the environment and flags; the later win."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.config import ENGINE_OPTIONS
from ..base.options import PREFIX, Option
from ..base.vllm_names import translate_deprecated
from ..errors import ConfigError, no_option, shown

OTHERS = frozenset({"OUTRIDER_NATIVE_ISA", "OUTRIDER_PEERS", "OUTRIDER_CONFIG"})
"""Variables that are no options of a server."""
SECRET = frozenset({"api_key"})
"""Options whose value is not shown."""
LISTED = "outrider serve --help lists the known ones."

SWITCH = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False, "": False}
"""Texts of a switch in the environment."""
DAY = 86400.0
"""Seconds."""
RELAXED = (
    "memory",
    "api_key",
    "served_model_name",
    "allowed_hosts",
    "allowed_origins",
    "speculative_config",
)
"""Text options that a file may give as a number, a list or a table."""

SERVER_OPTIONS = (
    Option("host", str, "127.0.0.1", "Address to listen on."),
    Option("port", int, 8000, "Port to listen on; 0 takes a free one.", 0, 65535),
    Option("allowed_hosts", str, None,
           "More host names that clients may use, comma-separated; * for all."),
    Option("allowed_origins", str, None,
           "Origins whose pages may call the server, comma-separated; * for all."),
    Option("root_path", str, None, "Path under which a proxy serves it, as in /llm."),
    Option("api_key", str, None,
           "API keys, comma-separated; without any, the server is open."),
    Option("api_key_file", str, None, "A file with one API key per line."),
    Option("served_model_name", str, None, "Names of the model for clients, comma-separated."),
    Option("chat_template", str, None, "A file with a chat template, instead of the model's."),
    Option("generation_config", str, "auto", "Sampling defaults: auto, vllm, or a folder."),
    Option("tool_call_parser", str, "auto",
           "hermes, llama3_json, pythonic, mistral, granite, qwen3_coder, lfm2, openai, or auto, "
           "which reads the chat template."),
    Option("reasoning_parser", str, "auto",
           "deepseek_r1, qwen3, mistral, seed_oss, cohere, granite, openai_gptoss, none, or auto, "
           "which reads the chat template."),
    Option("per_request_spec_decode_metrics", str, "summary",
           "Figures of speculation in each answer: none, summary or detailed."),
    Option("slo", str, None, "Latency targets that goodput counts, as in ttft=200ms,tpot=50ms."),
    Option("max_connections", int, 1024, "Most open connections; more get 503.", 1),
    Option("max_queued_requests", int, 256, "Most waiting sequences; more get 429.", 1),
    Option("max_queued_tokens", int, 1 << 20, "Most waiting prompt tokens; more get 429.", 1),
    Option("max_body_bytes", int, 4 << 20,
           "Largest request body; larger ones get 413.", 1, 1 << 30),
    Option("request_timeout", float, None, "Most seconds that a request may take; then 408.",
           0.001, 365 * DAY),
    Option("shutdown_timeout", float, 30.0, "Seconds in which streams may end after SIGTERM.",
           0, DAY),
    Option("metrics_port", int, None, "Serve /metrics on this port only.",
           1, 65535),
    Option("share_prefix_cache", bool, False, "Share cached prefixes between API keys."),
    Option("otlp_traces_endpoint", str, None,
           "Send traces to this endpoint by OTLP; needs outrider[otel]."),
    Option("record", str, None, "Record prompts in this folder, to train drafters on."),
    Option("record_answers", bool, False, "Record answers, too."),
    Option("record_bytes", int, 64 << 20,
           "Most bytes to record; then recording stops.", 1, 1 << 40),
    Option("record_redact", str, None,
           "MODULE:FUNCTION that edits or drops each record before it is written."),
    Option("load_drafters", str, None,
           "Folder from which POST /v1/speculation may load drafters while the server runs."),
    Option("store_responses", int, 0,
           "Responses to keep in memory, so that later calls can continue them.", 0, 1 << 20),
    Option("log_interval", float, 10.0, "Seconds between log lines about speed; 0 for none.",
           0.05, DAY, zero=True),
    Option("log_format", str, "text", "text, or json for one object per line."),
    Option("log_level", str, "info", "debug, info (one line per call), warning or error."),
)  # fmt: skip
OPTIONS = (*SERVER_OPTIONS, *ENGINE_OPTIONS)
BY_NAME = {option.name: option for option in OPTIONS}
MODEL = Option("model", str, None, "The target.")
"""A file may name it too."""


@dataclass(frozen=True)
class Setting:
    """A value and where it comes from: default, environment, flag, or a file's path."""

    value: Any
    source: str


def resolve(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, Setting]:
    """Return the options in force, by name: defaults, then the file, the environment, the flags.

    A flag that was not given is None. Raises ConfigError: a name, a value or the file is wrong.
    """
    options = {option.name: Setting(option.default, "default") for option in OPTIONS}
    if file is not None:
        for name, value in read_file(file).items():
            options[name] = Setting(_checked(name, value, str(file)), str(file))
    names = {option.variable: option for option in OPTIONS}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in OTHERS or _of_kubernetes(variable, text):
            continue
        if variable not in names:
            raise no_option("the environment", variable, list(names), where=LISTED)
        option = names[variable]
        options[option.name] = Setting(_parsed(option, text, variable), "environment")
    for name, value in flags.items():
        if value is not None:
            name, value = translate_deprecated(name, value)
            options[name] = Setting(_in_range(BY_NAME[name], value, BY_NAME[name].flag), "flag")
    return options


def _of_kubernetes(variable: str, text: str) -> bool:
    """Return whether Kubernetes sets the variable for a Service named outrider."""
    named = re.search(r"_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))(_|$)", variable) is not None
    return named or text.startswith(("tcp://", "udp://"))


def read_file(file: Path) -> dict[str, Any]:
    """Return the options in a TOML file, whose keys have underscores or hyphens.

    A table ``deploy`` is left to ``outrider ops deploy render``.
    """
    from ..base.outside.documents import read_toml  # imports a reader of YAML

    table = read_toml(file, str(file))
    if isinstance(table.get("deploy"), dict):
        del table["deploy"]
    options = dict(
        translate_deprecated(key.replace("-", "_"), value) for key, value in table.items()
    )
    for name in options:
        if name not in BY_NAME and name != "model":
            raise no_option(str(file), name, [*BY_NAME, "model"], where=LISTED)
    return options


def _checked(name: str, value: Any, where: str) -> Any:
    """Return a value from a file, checked for the option's kind and range."""
    option = BY_NAME.get(name, MODEL)
    if name in RELAXED:
        value = ",".join(map(str, value)) if isinstance(value, list) else value
        kept = {"memory": int | float, "speculative_config": dict}.get(name)
        return value if kept and isinstance(value, kept) else _in_range(option, str(value), where)
    allowed = int | float if option.type is float else option.type
    if not isinstance(value, allowed) or (isinstance(value, bool) and option.type is not bool):
        raise _wrong(option, value, f"{where}: {name}")
    return _in_range(option, value, f"{where}: {name}")


def _parsed(option: Option, text: str, where: str) -> Any:
    """Return a value from the environment, checked for the option's kind and range."""
    try:
        value = SWITCH[text.lower()] if option.type is bool else option.type(text)
    except (KeyError, ValueError):
        raise _wrong(option, text, where) from None
    return _in_range(option, value, where)


def _in_range(option: Option, value: Any, where: str) -> Any:
    """Return ``value``, which must be within the option's range. Raises ConfigError: it is not."""
    if isinstance(value, str):
        # No usable path, name or key has either.
        if "\0" in value or value.encode(errors="ignore").decode() != value:
            raise ConfigError(f"{where} is {shown(value)}; give a text in UTF-8.")
    elif not (
        isinstance(value, bool)
        or option.low <= value <= option.high  # NaN never is
        or (option.zero and value == 0)
    ):
        raise _wrong(option, value, where)
    return value


def _wrong(option: Option, value: Any, where: str) -> ConfigError:
    """Return the error for a value that the option does not allow."""
    return ConfigError(f"{where} is {shown(value)}; give {option.expected}.")


def config_file(flag: str | None) -> Path | None:
    """Return the file to read: the flag's, else that of ``OUTRIDER_CONFIG``, else None."""
    file = flag or os.environ.get("OUTRIDER_CONFIG")
    return Path(file) if file else None


def toml(value: Any) -> str:
    """Return a value in TOML; an unset one is an empty text."""
    return json.dumps("" if value is None else value)
