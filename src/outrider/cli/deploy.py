"""``outrider ops deploy``: other engines, and our server in production."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..base.methods import WITH_CHECKPOINT, find_method, named_method, suggested_method
from ..errors import ConfigError
from .commands import FAILED
from .common import Advised, AsJson, Out, read_text, write
from .flags import argument, setting
from .spelling import App

if TYPE_CHECKING:
    from ..ops.planning import Advice

app = App()
OF_A_CHECKPOINT = (
    "model", "quantization", "other_vocabulary", "attention_heads", "vocab_size", "weights_gib",
)  # fmt: skip
"""Keys of a spec that describe a drafter's checkpoint."""
FORMS = "command, config, compose or kustomize"
Folder = Annotated[
    Path | None,
    typer.Option("--out", "-o", metavar="FOLDER", help="Write files there instead of stdout."),
]


@app.callback()
def deploy() -> None:
    """Configure vLLM, SGLang, TensorRT-LLM, Triton, llama.cpp or Outrider; plan replicas."""


@app.command()
def render(
    spec: Path | None = argument(
        "[SPEC]",
        "A TOML file, or what outrider ops advise --out wrote; flags win.",
        None,
        show_default=False,
    ),
    advice: Advised = None,
    engine: str | None = setting(None, "outrider, vllm, sglang, trtllm, triton or llamacpp."),
    engine_version: str | None = setting(None, "A recorded version; the newest unless given."),
    model: str | None = setting(None, "The target: a folder or a hub name."),
    drafter: str | None = setting(
        None, "The drafter's folder or hub name, or a method: ngram, suffix, mtp, none."
    ),
    method: str | None = setting(
        None, f"Method of a checkpoint: {', '.join(WITH_CHECKPOINT)}; by default its name tells."
    ),
    num_speculative_tokens: int | None = setting(None, "Draft length K."),
    tensor_parallel_size: int | None = setting(None, "GPUs that share each layer."),
    max_model_len: int | None = setting(None, "Most tokens of prompt and output together."),
    format_: str = setting("command", FORMS + ".", "--format"),
    out: Folder = None,
) -> None:
    """Write an engine's command, its config, a compose file or kustomize manifests."""
    from ..ops.deploy import spec as specs
    from ..ops.deploy.capabilities import find
    from ..ops.deploy.render import render as rendered

    given, own = _advice(spec, advice)
    source = f"The spec {spec}" if spec else "The command"
    document = specs.read(spec) if own and spec else {}
    flags: dict[str, Any] = {
        "engine": engine or document.get("engine"),
        "engine_version": engine_version or document.get("engine_version"),
        "target": {"model": model},
        "drafter": {"num_speculative_tokens": num_speculative_tokens},
        "parallel": {"tensor": tensor_parallel_size},
        "limits": {"max_model_len": max_model_len},
    }
    if given is not None:
        from ..ops.deploy import advised  # imports numpy

        specs.parse(_merged({"target": {"model": "the advice's"}}, document), source)
        document = _merged(
            advised.document_of(given, flags["engine"], flags["engine_version"]), document
        )
        if document["drafter"]["method"] == "none":
            drafter = method = None  # the advice is not to draft
        elif num_speculative_tokens is not None:
            document["drafter"].pop("schedule", None)
    document = _merged(_with_drafter(document, drafter, method), flags)
    notes: list[str] = []
    parsed = specs.parse(document, source)
    if given is not None:
        known = find(parsed.engine, parsed.engine_version)
        advised.check_names(document, given, known)
        notes = advised.notes_of(document, given, known)
    result = rendered(parsed, format_, notes)
    _deliver(result.files, result.text(), out)


@app.command()
def translate(
    source: str = argument("FILE", 'A file; "-" is stdin.', show_default=False),
    out: Folder = None,
) -> None:
    """Turn an old command, Python call or manifest into today's; explain each change.

    Commands of vLLM, TGI, llama.cpp and trtllm-build, Python that calls vLLM, and manifests of
    Kubernetes that run vLLM.
    """
    from ..ops.deploy.translate import translate as translated

    result = translated(read_text(None if source == "-" else Path(source), source))
    text = result.commented()
    files = {result.name: text, **result.files}
    text += "".join(f"\n# file: {name}\n{content}" for name, content in result.files.items())
    _deliver(files, text, out)


@app.command()
def plan(
    source: str = argument(
        "FILE", 'Model, traffic, service levels: TOML or JSON; "-" is stdin.', show_default=False
    ),
    json_: AsJson = False,
    out: Out = None,
) -> None:
    """Compute the replicas and devices that traffic needs, with and without speculation.

    Spares and a plain standby are counted. The exit code is 1 where no number of replicas keeps
    the service levels. docs/production.md has an example of a file.
    """
    from ..ops.deploy.capacity import capacity_markdown
    from ..ops.deploy.capacity import plan as planned
    from ..ops.deploy.demand import parse_demand
    from .reports import deliver

    file, name = (None, "stdin") if source == "-" else (Path(source), source)
    capacity = planned(parse_demand(read_text(file, name), name))
    deliver(capacity.to_json(), capacity_markdown(capacity), json_, out)
    if capacity.plain is None and capacity.speculative is None:
        raise typer.Exit(FAILED)


def _advice(spec: Path | None, advice: Path | None) -> tuple[Advice | None, bool]:
    """Return the advice, if any, and whether the spec is TOML and not an advice itself."""
    text = read_text(spec, str(spec)) if spec else ""
    own = not text.lstrip().startswith("{")  # a JSON object, which a TOML spec never is
    if own and advice is None:
        return None, True  # without loading planning, which imports numpy
    from ..ops.planning import load_advice, read_advice

    if advice is None:
        return read_advice(text, str(spec)), False
    if not own:
        raise ConfigError(f"{spec} is an advice, and --advice names another; give only one.")
    return load_advice(advice), True


def _with_drafter(document: dict[str, Any], name: str | None, method: str | None) -> dict[str, Any]:
    """Return the document with another drafter; of none, nothing else of drafting stays."""
    own = document.get("drafter", {})
    if not isinstance(own, dict) or (name is None and method is None):
        return document
    said = {"method": named_method(method, "--method").name} if method else {}
    named = None if name is None or os.path.exists(name) else find_method(name)
    before = find_method(own.get("method"))
    if name is not None and named is None:
        kept = before.name if before and before.checkpoint else suggested_method(name)
        said = {"method": kept, "model": name} | said
    elif named is not None:
        said = {"method": named.name} | said
        if named.name == "none":
            own = {key: value for key, value in own.items() if key == "required"}
        elif before is None or named.name != before.name:
            own = {key: value for key, value in own.items() if key not in OF_A_CHECKPOINT}
    return {**document, "drafter": {**own, **said}}


def _merged(document: dict[str, Any], flags: dict[str, Any]) -> dict[str, Any]:
    """Return the document with the flags that are given in place of its own values."""
    merged = dict(document)
    for name, value in flags.items():
        if isinstance(value, dict):
            given = {key: each for key, each in value.items() if each is not None}
            own = merged.get(name, {})
            if given:
                merged[name] = {**own, **given} if isinstance(own, dict) else own
        elif value is not None:
            merged[name] = value
    return merged


def _deliver(files: dict[str, str], text: str, out: Path | None) -> None:
    if out is None:
        write(text)
        return
    try:
        for name, content in files.items():
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (out / name).write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be written: {error.strerror}.") from None
    write("".join(f"{out / name}\n" for name in files))
