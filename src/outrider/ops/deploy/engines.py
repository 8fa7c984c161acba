"""Starts of the engines: from a spec to the program, its options and its config file.

Tables in ``data/engines`` map options to values of a spec: ``options`` always, ``speculation`` if
something drafts, by method if methods have options of their own. A text in a table names a value;
anything else is taken as it is.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...base.cpus import parse_cpus
from ...base.outside.models import Part
from ...engine.control.schedules import tensorrt
from ...errors import ConfigError, shown
from .capabilities import DATA, EngineVersion, data, schema
from .checks import other_vocabulary
from .spec import Spec
from .yamls import dump

DRAIN_SECONDS = 45
"""Seconds for vLLM's streams to end after SIGTERM, else aborted; with preStop below the grace."""
SGLANG_SEQUENCES = 48
"""SGLang's default of ``max_running_requests`` with speculation."""
TRTLLM_CONFIG = "trtllm.yaml"
REPOSITORY = "repository"
FOLDER = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}")
OF_A_SERVER = ("host", "port", "shutdown-timeout", "served-model-name")
"""Options of vLLM that Triton's backend lacks; Triton names a model by its folder."""
PLAIN = re.compile(r"[\w./:@,+=%-]+")
"""Values that docker, compose, systemd and a shell read alike from an env file."""


Value = str | int | float | bool | dict[str, Any]


@dataclass(frozen=True)
class Launch:
    """A start of an engine.

    The value True means a flag without a value. The command reads ``files``, texts by path;
    ``config_file`` is the name and text of the engine's own config with the same contents.
    """

    program: tuple[str, ...]
    options: Mapping[str, Value]
    config_file: tuple[str, str]
    files: Mapping[str, str] = field(default_factory=dict)

    def arguments(self) -> list[str]:
        """Return the command as a list."""
        words = list(self.program)
        for flag, value in self.options.items():
            words.append(flag)
            if value is not True:
                words.append(text(value))
        return words

    def command(self, quote: Callable[[str], str] = shlex.quote) -> str:
        """Return the command for a shell, one option a line; ``quote`` quotes a word."""
        lines = [" ".join(map(quote, self.program))]
        for flag, value in self.options.items():
            lines.append(flag if value is True else f"{flag} {quote(text(value))}")
        return " \\\n    ".join(lines) + "\n"


def text(value: Value) -> str:
    """Return an option's value on the command line; a table becomes JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict) else str(value)


def present(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that are set: neither None nor False nor an empty table."""
    unset = (None, False)
    return {n: v for n, v in options.items() if not (any(v is each for each in unset) or v == {})}


def _values(spec: Spec, engine: EngineVersion) -> dict[str, Any]:
    """Return the values that options may take, by name: the spec's, and what follows from them."""
    target, drafter, limits, k = spec.target, spec.drafter, spec.limits, spec.draft_length
    tensor, stages = spec.parallel.tensor, spec.parallel.pipeline
    return {
        **{f"{name}.{key}": v for name, part in spec if isinstance(part, Part) for key, v in part},
        "host": "0.0.0.0",
        "dtype": None if target.dtype == "auto" else target.dtype,
        "tensor": tensor if tensor > 1 else None,
        "stages": stages if stages > 1 else None,
        "split": "row" if tensor > 1 else "layer" if stages > 1 else None,
        "drain": DRAIN_SECONDS,
        "slots": limits.max_model_len and limits.max_model_len * (limits.max_num_seqs or 1),
        "sequences": limits.max_num_seqs or (SGLANG_SEQUENCES if spec.drafts else None),
        "layers": "all",
        "drafter layers": "all" if drafter.model else None,
        # A checkpoint of speculators names its method and draft length itself.
        "method": None if drafter.method == "speculators" else engine.methods.get(drafter.method),
        "length": k,
        "rows": k and k + 1,
        "first length": drafter.schedule[0][2] if drafter.schedule else k,
        "schedule": [list(each) for each in drafter.schedule] or None,
        "other vocabulary": other_vocabulary(spec, engine),
        "drafter threads": len(parse_cpus(drafter.cpus)) if drafter.cpus else None,
        "our drafter": _our_drafter(spec, engine),
        **_files("target", target.model),
        **_files("drafter", drafter.model),
    }


def _files(name: str, model: str | None) -> dict[str, str | None]:
    is_file = model is not None and model.endswith(".gguf")
    return {f"{name} file": model if is_file else None, f"{name} hub": None if is_file else model}


def _our_drafter(spec: Spec, engine: EngineVersion) -> str:
    name = spec.drafter.model or spec.drafter.method
    if other_vocabulary(spec, engine):
        return f"retokenize:{name}"
    if not spec.drafter.adaptive:
        return name
    # Drafters among which auto chooses by itself need not be named.
    known = ("suffix", str(Path(spec.target.model) / "drafter"))
    return "auto" if name in known else f"auto+{name}"


def _filled(table: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, Any]:
    return present({n: values[v] if isinstance(v, str) else v for n, v in table.items()})


def speculation(spec: Spec, engine: EngineVersion, of: str) -> dict[str, Any]:
    """Return the drafter's options by the table of engine ``of``."""
    if not spec.drafts:
        return {}
    table = data(f"engines/{of}")["speculation"]
    return _filled(table.get(spec.drafter.method, table["usual"]), _values(spec, engine))


def options_of(spec: Spec, engine: EngineVersion, of: str | None = None) -> dict[str, Any]:
    """Return all options except the drafter's by the table of engine ``of``."""
    return _filled(data(f"engines/{of or engine.engine}")["options"], _values(spec, engine))


def _flags(options: Mapping[str, Value]) -> dict[str, Value]:
    return {f"--{name}": value for name, value in options.items()}


def _outrider(spec: Spec, engine: EngineVersion) -> Launch:
    drafting = speculation(spec, engine, "outrider") or {"drafter": "none"}
    options = options_of(spec, engine) | drafting
    rows = {"model": spec.target.model, **{n.replace("-", "_"): v for n, v in options.items()}}
    # TOML writes a one-line text as JSON does.
    config = "".join(f"{n} = {json.dumps(v, ensure_ascii=False)}\n" for n, v in rows.items())
    program = ("outrider", "serve", spec.target.model)
    return Launch(program, _flags(options), ("outrider.toml", config))


def _vllm(spec: Spec, engine: EngineVersion) -> Launch:
    config = {"speculative-config": speculation(spec, engine, "vllm")}
    options = options_of(spec, engine) | present(config)
    model = spec.target.model
    return Launch(
        ("vllm", "serve", model), _flags(options), ("vllm.yaml", dump({"model": model, **options}))
    )


def _triton(spec: Spec, engine: EngineVersion) -> Launch:
    """Return ``tritonserver`` on a repository: ``config.pbtxt``, and ``model.json`` of vLLM."""
    name = spec.service.model_name or spec.service.name
    if not FOLDER.fullmatch(name):
        raise ConfigError(
            f"Triton names a model by its folder, and service.model_name is {shown(name)}; give "
            "letters, digits, dots, hyphens and underscores."
        )
    config = {"speculative_config": speculation(spec, engine, "vllm")}
    own = options_of(spec, engine, "vllm").items()
    arguments = {n.replace("-", "_"): v for n, v in own if n not in OF_A_SERVER} | present(config)
    arguments = {"model": spec.target.model, **arguments}
    first, folder = f"{REPOSITORY}/{name}/config.pbtxt", f"{REPOSITORY}/{name}/1"
    files = {
        first: (DATA / "templates" / "config.pbtxt").read_text("utf-8"),
        f"{folder}/model.json": json.dumps(arguments, indent=2, ensure_ascii=False) + "\n",
    }
    options: dict[str, Value] = {"--model-repository": REPOSITORY, "--http-port": spec.service.port}
    return Launch(("tritonserver",), options, (first, files[first]), files)


def _sglang(spec: Spec, engine: EngineVersion) -> Launch:
    options = options_of(spec, engine) | speculation(spec, engine, "sglang")
    program = ("python3", "-m", "sglang.launch_server")
    return Launch(program, _flags(options), ("sglang.yaml", dump(options)))


def trtllm_config(spec: Spec, engine: EngineVersion) -> dict[str, Any]:
    """Return the contents of TensorRT-LLM's YAML config: everything except the address."""
    config = speculation(spec, engine, "trtllm")
    if config and (ranges := spec.drafter.schedule):
        config["draft_len_schedule"] = tensorrt(ranges)
        if config["draft_len_schedule"] is None:
            raise ConfigError(
                "TensorRT-LLM drafts longest for the smallest batches, but drafter.schedule begins "
                f"with {ranges[0][2]} tokens; begin with its longest draft."
            )
    share = present({"free_gpu_memory_fraction": spec.memory.gpu_share})
    more = {"kv_cache_config": share, "return_perf_metrics": True, "speculative_config": config}
    return {"backend": "pytorch", **options_of(spec, engine), **present(more)}


def trtllm(spec: Spec, config: Mapping[str, Any]) -> Launch:
    """Return ``trtllm-serve MODEL --config``, with a config's contents in the YAML file."""
    file, service = {TRTLLM_CONFIG: dump(config)}, spec.service
    options = {"--host": "0.0.0.0", "--port": service.port, "--served_model_name":
               service.model_name, "--config": TRTLLM_CONFIG}  # fmt: skip
    program = ("trtllm-serve", spec.target.model)
    return Launch(program, present(options), next(iter(file.items())), file)


def _llamacpp(spec: Spec, engine: EngineVersion) -> Launch:
    options = options_of(spec, engine) | speculation(spec, engine, "llamacpp")
    return Launch(("llama-server",), options, ("llamacpp.env", _environment(options)))


def _environment(options: Mapping[str, Value]) -> str:
    """Return llama.cpp's options as an env file; options that it cannot hold become a comment."""
    variables = schema("llamacpp")["nested"]["environment"]
    lines, flags = [], []
    for flag, value in options.items():
        said = "1" if value is True else text(value)
        if flag in variables and PLAIN.fullmatch(said):
            lines.append(f"{variables[flag]}={said}")
        else:
            flags.append(f"# {flag}" if value is True else f"# {flag} {shlex.quote(said)}")
    head = ["# No variable can hold these: add them to the command."] if flags else []
    return "\n".join([*lines, *head, *flags]) + "\n"


LAUNCHES: dict[str, Callable[[Spec, EngineVersion], Launch]] = {
    "outrider": _outrider,
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": lambda spec, engine: trtllm(spec, trtllm_config(spec, engine)),
    "triton": _triton,
    "llamacpp": _llamacpp,
}
