"""Reads options; builds the engine and the settings of a server."""

import hashlib
import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any

from ..async_llm import AsyncLLM
from ..base.config import ENGINE_OPTIONS
from ..checkpoints.formats.gguf import SUFFIX, part_files
from ..errors import ConfigError, ModelError, shown
from ..frontend.presets import FILE, of_file, sampling_defaults
from ..text.calls import MARKS, Form
from ..text.reasoning import FORMS, form_of
from .aliases import ALIASED
from .hosts import bare
from .options import Setting
from .record import Record, Recording
from .settings import Settings
from .shown import short

PARSERS: dict[str, Form] = {
    **{form: form for form in MARKS}, "llama3_json": "llama3", "llama4_pythonic": "pythonic",
    "qwen3_xml": "qwen3_coder",
}  # fmt: skip
"""Forms of calls by vLLM's names."""
SECONDS = {"ms": 0.001, "s": 1.0}


def build(model: str | Path, name: str, chosen: Mapping[str, Setting]) -> tuple[AsyncLLM, Settings]:
    """Return the engine of a checkpoint, which loads in the background, and the server's settings.

    It is served as ``name`` by default. Raises OutriderError: the checkpoint cannot be used.
    """
    values = {name: one.value for name, one in chosen.items()}
    options = {o.name: values[o.name] for o in ENGINE_OPTIONS if chosen[o.name].source != "default"}
    template = values["chat_template"]
    if template is not None:
        template = read_text(Path(template), "chat_template")
    form = PARSERS.get(choice(values, "tool_call_parser", ("auto", *PARSERS)))
    thinks = choice(values, "reasoning_parser", ("auto", "none", *FORMS))
    details = ("none", "summary", "detailed")
    own: dict[str, Any] = {each.name: values.get(each.name) for each in fields(Settings)}
    own |= {
        "names": tuple(filter(None, (values["served_model_name"] or "").split(",")))
        or names_of(name),
        "detail": choice(values, "per_request_spec_decode_metrics", details),
        "api_keys": read_keys(values["api_key"], values["api_key_file"]),
        "allowed_hosts": read_hosts(values["allowed_hosts"]),
        "allowed_origins": read_origins(values["allowed_origins"]),
        "root_path": read_root(values["root_path"]),
        "max_body": values["max_body_bytes"],
        "otlp_traces_endpoint": read_endpoint(values["otlp_traces_endpoint"]),
        "slo": read_slo(values["slo"]),
        "recording": read_recording(values),
        "load_drafters": read_folder(values, "load_drafters"),
    }
    llm = AsyncLLM(model, **options)
    try:
        codec = llm.inputs.codec
        if codec is None and template is not None:
            raise ConfigError("chat_template is given, but the model has no tokenizer; drop it.")
        if codec is not None:
            codec.chat_template = codec.chat_template if template is None else template
            codec.set_form = form
            own["tool_form"] = codec.call_form
            own["reasoning"] = FORMS.get(thinks)
            if thinks == "auto":
                own["reasoning"] = form_of("".join(codec.templates.values()))
        own |= {
            "longest": llm.config.max_draft_length, "fingerprint": fingerprint(llm),
            "defaults": read_defaults(values["generation_config"], llm.inputs.folder),
        }  # fmt: skip
        return llm, Settings(**{name: value for name, value in own.items() if value is not None})
    except BaseException:
        llm.shutdown()
        raise


def names_of(model: str) -> tuple[str, ...]:
    """Return the names to serve ``model`` under, which is its name on disk.

    A GGUF file is also named without its ending and, as in Ollama, with a colon before the dtype.
    """
    if not model.endswith(SUFFIX):
        return (model,)
    stem = re.sub(r"-\d{5}-of-\d{5}$", "", model.removesuffix(SUFFIX))
    coded = re.fullmatch(r"(.+?)[-.]((?:I?Q\d|TQ\d|B?F16|F32|MXFP4)\w*)", stem, re.IGNORECASE)
    short = [f"{coded[1]}:{coded[2]}".lower()] if coded else []
    return tuple(dict.fromkeys([stem, *short, model]))


def choice(values: Mapping[str, Any], name: str, words: Sequence[str]) -> Any:
    """Return the option ``name``. Raises ConfigError: it is none of ``words``."""
    value = values[name]
    if value not in words:
        raise ConfigError(f"{name} is {shown(value)}; give {', '.join(words[:-1])} or {words[-1]}.")
    return value


def read_text(file: Path, name: str) -> str:
    """Return the text of a file that an option names. Raises ConfigError: it cannot be read."""
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"{name}: {file} cannot be read ({reason}).") from None


def read_keys(listed: str | None, file: str | None) -> tuple[str, ...]:
    """Return the keys in an option and a file. Raises ConfigError: none, or a wrong one."""
    parts = [key.strip() for key in (listed or "").split(",")]
    if file is not None:
        parts += read_text(Path(file), "api_key_file").split()
    keys = tuple(dict.fromkeys(key for key in parts if key))
    if not keys and (listed is not None or file is not None):
        raise ConfigError("api_key or api_key_file is given, but has no key; drop it or give one.")
    if not all(key.isascii() and key.isprintable() and " " not in key for key in keys):
        raise ConfigError("an API key may have only ASCII letters, digits and signs.")
    return keys


def read_hosts(listed: str | None) -> tuple[str, ...]:
    """Return the names that clients may call the server by. Raises ConfigError: one is no name."""
    hosts = []
    for name in filter(None, map(str.strip, (listed or "").split(","))):
        host = bare(name)
        if host is None:
            raise ConfigError(
                f"allowed_hosts has {shown(name)}; give names such as llm.example.com, or * for "
                "all."
            )
        hosts.append(host)
    return tuple(hosts)


def read_origins(listed: str | None) -> tuple[str, ...]:
    """Return the origins whose pages may call the server. Raises ConfigError: one is no origin."""
    text = (listed or "").strip()
    if text.startswith("["):  # vLLM's form
        try:
            text = ",".join(map(str, json.loads(text)))
        except (ValueError, TypeError, RecursionError):
            raise ConfigError(f"allowed_origins is {shown(listed)}; give a list.") from None
    parts = (part.strip().rstrip("/").lower() for part in text.split(","))
    origins = tuple(filter(None, parts))  # in lower case, as browsers send them
    for origin in origins:
        if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^\s/,?#]+", origin):
            raise ConfigError(
                f"allowed_origins has {shown(origin)}; give origins such as "
                "https://app.example.com, or * for all."
            )
    return origins


def read_root(path: str | None) -> str:
    """Return the path below which a proxy serves. Raises ConfigError: it is no path."""
    if not path:
        return ""
    if not re.fullmatch(r"(/[\w.~-]+)+/?", path):
        raise ConfigError(f"root_path is {shown(path)}; give a path such as /llm.")
    if path.split("/")[1] in ALIASED:
        raise ConfigError(f"root_path is {shown(path)}, but API paths begin with it; give another.")
    return path.rstrip("/")


def read_endpoint(url: str | None) -> str | None:
    """Return the address that spans are sent to. Raises ConfigError: it is no HTTP address."""
    if url is None or re.fullmatch(r"https?://(\[[\da-fA-F:.]+\]|[^\s/:]+)(:\d{1,5})?(/\S*)?", url):
        return url
    raise ConfigError(
        f"otlp_traces_endpoint is {shown(url)}; give a URL such as http://localhost:4318/v1/traces."
    )


def read_defaults(source: str, model: Path) -> dict[str, Any]:
    """Return the sampling defaults by the names of ``SamplingParams``.

    ``source`` is auto for the ``model``'s own, vllm for none, or a folder with a
    generation_config.json. Raises ConfigError: the file is missing or damaged, or a value out of
    range.
    """
    if source == "vllm":
        return {}
    try:
        return sampling_defaults(model) if source == "auto" else of_file(Path(source) / FILE)
    except (ConfigError, ModelError) as error:
        raise ConfigError(f"generation_config: {error} Or give vllm for none.") from None


def read_slo(text: str | None) -> dict[str, float]:
    """Return limits in seconds from a text such as ``ttft=200ms,tpot=50ms``; refuse other texts."""
    limits: dict[str, float] = {}
    for part in filter(None, (text or "").split(",")):
        match = re.fullmatch(r"\s*(ttft|tpot)=(\d{1,9}(?:\.\d{1,9})?)(ms|s)\s*", part)
        if match is None:
            raise ConfigError(f"slo is {shown(text)}; give limits such as ttft=200ms,tpot=50ms.")
        limits[match[1]] = float(match[2]) * SECONDS[match[3]]
    return limits


def read_folder(values: Mapping[str, Any], name: str) -> Path | None:
    """Return the folder that an option names, with links resolved; None if it is not set.

    Raises ConfigError: it is no folder.
    """
    if not values[name]:
        return None
    folder = Path(values[name])
    if not folder.is_dir():
        raise ConfigError(f"{name}: {folder} is not a folder; create it, or give another.")
    return folder.resolve()


def read_recording(values: Mapping[str, Any]) -> Recording | None:
    """Return what is recorded; None for nothing. Raises ConfigError: it cannot be redacted."""
    if not values["record"]:
        return None
    redact = values["record_redact"]
    return Recording(
        Path(values["record"]).absolute(), values["record_bytes"], values["record_answers"],
        read_function(redact, "record_redact") if redact else None,
    )  # fmt: skip


def read_function(text: str, name: str) -> Callable[[Record], Record | None]:
    """Return the function that MODULE:FUNCTION names; modules may lie in the current folder."""
    module, _, function = text.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # last, so that nothing there shadows another module
    try:
        found = getattr(import_module(module), function)
    except (Exception, SystemExit) as error:  # whatever the module raises
        why = " ".join(f"{type(error).__name__}: {error}".split())
        raise ConfigError(
            f"{name}: {shown(text)} cannot be imported ({short(why)}); give MODULE:FUNCTION."
        ) from None
    if not callable(found):
        raise ConfigError(f"{name}: {shown(text)} is not a function; give MODULE:FUNCTION.")
    return found  # type: ignore[no-any-return]


def fingerprint(llm: AsyncLLM) -> str:
    """Return a hash of weight file names and sizes, dtype and quantization."""
    config, folder = llm.config, llm.inputs.folder
    files = sorted(folder.glob("*.safetensors")) if folder.is_dir() else part_files(folder)
    about = [str([(f.name, f.stat().st_size) for f in files]), config.dtype, config.quantization]
    return "fp_" + hashlib.sha256(json.dumps(about).encode()).hexdigest()[:12]
