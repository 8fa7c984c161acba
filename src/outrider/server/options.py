"""A server's options: one list, read from a TOML file, the environment and flags, later ones first.

The list is all there is: flags, ``OUTRIDER_*`` variables, the file's keys and ``outrider config``
are made from it.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..config import renewed
from ..errors import ConfigError, no_option

PREFIX = "OUTRIDER_"
OTHERS = frozenset({"OUTRIDER_NATIVE_ISA", "OUTRIDER_PEERS", "OUTRIDER_CONFIG"})
"""Variables that are no server's options."""
SOURCES = ("default", "file", "environment", "flag")
SECRET = frozenset({"api_key"})
"""Options whose value is not shown."""

Kind = Literal["text", "number", "share", "switch"]
KINDS: dict[Kind, type] = {"text": str, "number": int, "share": float, "switch": bool}


@dataclass(frozen=True)
class Option:
    """One option.

    Args:
        name: with underscores; the flag has hyphens, the variable is in capitals.
        kind: of its value.
        default: where nobody gives it.
        help: one sentence.
        engine: True for what ``LLM`` takes under that name.
    """

    name: str
    kind: Kind
    default: Any
    help: str
    engine: bool = False

    @property
    def flag(self) -> str:
        """As on the command line."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """As in the environment."""
        return PREFIX + self.name.upper()


def _engine(name: str, kind: Kind, default: Any, help: str) -> Option:
    return Option(name, kind, default, help, engine=True)


OPTIONS = (
    Option("host", "text", "127.0.0.1", "Address to listen on."),
    Option("port", "number", 8000, "Port to listen on; 0 takes a free one."),
    Option("api_key", "text", None, "Keys that open the server, with commas; none leaves it open."),
    Option("api_key_file", "text", None, "A file with one key a line."),
    Option("served_model_name", "text", None, "What clients call the model; several with commas."),
    _engine("drafter", "text", "auto", "auto, ngram, none, or a checkpoint's folder or file."),
    _engine("num_speculative_tokens", "number", 4, "Longest draft K, in tokens."),
    _engine("prompt_lookup_min", "number", None, "Shortest n-gram of drafter ngram, in tokens."),
    _engine("prompt_lookup_max", "number", None, "Longest n-gram of drafter ngram, in tokens."),
    _engine("speculative_config", "text", None, "vLLM's JSON, instead of the two above."),
    _engine("tokenizer", "text", None, "A folder with a tokenizer, instead of the model's."),
    _engine("dtype", "text", "auto", "auto, float32, bfloat16 or float16."),
    _engine("quantization", "text", None, "Make the target few-bit at load: int8, int4, ..."),
    _engine("drafter_quantization", "text", "auto", "The same for the drafter; none leaves it."),
    _engine("drafter_window", "number", None, "Tokens that a drafter looks back at."),
    _engine("preset", "text", None, "long-context: a drafter's window that serves there."),
    _engine("max_model_len", "number", None, "Longest prompt plus output, in tokens."),
    _engine("max_num_seqs", "number", 32, "Sequences decoded together at most."),
    _engine("max_num_batched_tokens", "number", 512, "Rows of a step at most: the prefill chunk."),
    _engine("scheduling_policy", "text", "fcfs", "fcfs, or priority: the lowest goes first."),
    _engine("enable_prefix_caching", "switch", True, "Share the pages of equal beginnings."),
    _engine("memory", "text", None, "Of the cache: bytes, 2GiB, or a share of what is free."),
    _engine("gpu_memory_utilization", "share", None, "vLLM's name for a share as memory."),
    _engine("seed", "number", None, "Base of the seeds of requests without one."),
    Option("chat_template", "text", None, "A file with a chat template, instead of the model's."),
    Option("generation_config", "text", "auto", "Of sampling: auto, vllm for none, or a folder."),
    Option("tool_call_parser", "text", "auto", "hermes, llama3_json, or auto: by the template."),
    Option("per_request_spec_decode_metrics", "text", "summary", "none, summary or detailed."),
    Option("slo", "text", None, "What a good request keeps, as in ttft=200ms,tpot=50ms."),
    Option("max_queued_requests", "number", 256, "Sequences that may wait; beyond it 429."),
    Option("max_queued_tokens", "number", 1 << 20, "Prompt tokens that may wait; beyond it 429."),
    Option("max_body_bytes", "number", 4 << 20, "Largest body; beyond it 413."),
    Option("request_timeout", "share", None, "Seconds that a request may take; beyond it 408."),
    Option("shutdown_timeout", "share", 30.0, "Seconds that streams get to end after SIGTERM."),
    Option("metrics_port", "number", None, "Serve /metrics there, and not beside the API."),
    Option("cache_salt_per_key", "switch", False, "Keys share no cached prefixes."),
    Option("otlp_traces_endpoint", "text", None, "Send spans there by OTLP; needs outrider[otel]."),
    Option("log_interval", "share", 10.0, "Seconds between two lines on speed; 0 for none."),
    Option("log_format", "text", "text", "text, or json for an object a line."),
    Option("log_level", "text", "info", "debug, info (a line a call), warning or error."),
)  # fmt: skip
BY_NAME = {option.name: option for option in OPTIONS}


@dataclass(frozen=True)
class Chosen:
    """A value and where it comes from: one of ``SOURCES``, for a file with its path."""

    value: Any
    source: str


def resolve(
    flags: Mapping[str, Any], environment: Mapping[str, str], file: Path | None
) -> dict[str, Chosen]:
    """What is in force, by name: defaults, then the file, the environment, the flags.

    Args:
        flags: None where a flag was not given.
        environment: variables; those without the prefix are passed over.
        file: a TOML file, None for none.

    Raises:
        ConfigError: an unknown name, a value of the wrong kind, or a file that cannot be read.
    """
    found = {option.name: Chosen(option.default, "default") for option in OPTIONS}
    if file is not None:
        for name, value in read_file(file).items():
            found[name] = Chosen(_checked(name, value, str(file)), str(file))
    names = {option.variable: option.name for option in OPTIONS}
    for variable, text in sorted(environment.items()):
        if not variable.startswith(PREFIX) or variable in OTHERS or _of_kubernetes(variable, text):
            continue
        if variable not in names:
            raise no_option("the environment", variable, list(names))
        found[names[variable]] = Chosen(_parsed(names[variable], text, variable), "environment")
    for name, value in flags.items():
        if value is not None:
            name, value = renewed(name, value)
            found[name] = Chosen(value, "flag")
    return found


def _of_kubernetes(variable: str, text: str) -> bool:
    """Whether a variable is what pods beside a Service named outrider are given."""
    named = re.search(r"_(SERVICE_(HOST|PORT)|PORT_\d+_(TCP|UDP))(_|$)", variable) is not None
    return named or text.startswith(("tcp://", "udp://"))


def read_file(file: Path) -> dict[str, Any]:
    """The keys of a TOML file, with underscores or hyphens.

    Raises:
        ConfigError: it cannot be read, or has an unknown key.
    """
    try:
        given = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read ({error.strerror}).") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML: {error}.") from None
    found = dict(renewed(key.replace("-", "_"), value) for key, value in given.items())
    for name in found:
        if name not in BY_NAME and name != "model":
            raise no_option(str(file), name, [*BY_NAME, "model"])
    return found


def _checked(name: str, value: Any, where: str) -> Any:
    """A value from a file, of the option's kind.

    Raises:
        ConfigError: it is of another.
    """
    if name == "model":
        return value
    kind = KINDS[BY_NAME[name].kind]
    if name in ("memory", "api_key", "served_model_name", "speculative_config"):
        if isinstance(value, list):
            return ",".join(map(str, value))
        kept = dict if name == "speculative_config" else int | float
        return value if name != "api_key" and isinstance(value, kept) else str(value)
    right = isinstance(value, int | float if kind is float else kind)
    if not right or (isinstance(value, bool) and kind is not bool):
        raise ConfigError(f"{where}: {name} is {value!r}; give {_words(kind)}.")
    return value


def _parsed(name: str, text: str, where: str) -> Any:
    """A value from the environment.

    Raises:
        ConfigError: it is not of the option's kind.
    """
    kind = KINDS[BY_NAME[name].kind]
    if kind is bool:
        if text.lower() not in ("1", "true", "yes", "0", "false", "no", ""):
            raise ConfigError(f"{where} is {text!r}; give true or false.")
        return text.lower() in ("1", "true", "yes")
    try:
        return kind(text)
    except ValueError:
        raise ConfigError(f"{where} is {text!r}; give {_words(kind)}.") from None


def _words(kind: type) -> str:
    return {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}[kind]


def config_file(flag: str | None, environment: Mapping[str, str] = os.environ) -> Path | None:
    """The file to read: the flag's, else that of ``OUTRIDER_CONFIG``, else none."""
    found = flag or environment.get("OUTRIDER_CONFIG")
    return Path(found) if found else None
