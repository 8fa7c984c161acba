"""From a spec to files: the command, the engine's config, compose or kustomize."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from jinja2 import Environment, StrictUndefined

from ...errors import ConfigError, shown
from . import capabilities, checks
from .capabilities import DATA, EngineVersion
from .engines import LAUNCHES, Launch
from .spec import Spec, Target, filled

LABEL = re.compile(r"[a-z]([-a-z0-9]{0,50}[a-z0-9])?")
KUBERNETES = ("kustomization", "deployment", "service", "pdb", "pvc", "network")
TOKEN_FROM_VARIABLE = ("llamacpp",)
"""Engines that do not read the hub's token from a file."""
PING = "import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=4)"


@dataclass(frozen=True)
class Rendered:
    """Files by their paths; the first is the main one. ``notes`` are lines for the reader."""

    files: dict[str, str]
    notes: list[str]

    def text(self) -> str:
        """Return all files as one text; if there are several, each has its name above it."""
        if len(self.files) == 1:
            return next(iter(self.files.values()))
        return "\n".join(f"# file: {name}\n{text}" for name, text in self.files.items())


def render(spec: Spec, form: str = "command", more: Sequence[str] = ()) -> Rendered:
    """Return the files of a deployment in a format, with ``more`` notes. Raises ConfigError."""
    if form not in FORMATS:
        raise ConfigError(f"There is no format {shown(form)}; give {', '.join(FORMATS)}.")
    engine = capabilities.find(spec.engine, spec.engine_version)
    spec = filled(spec)
    checks.check(spec, engine)
    if checks.other_vocabulary(spec, engine):
        drafter = spec.drafter.model_copy(update={"other_vocabulary": True})
        spec = spec.model_copy(update={"drafter": drafter})
    notes = [*_notes(spec, engine), *more]
    launch = LAUNCHES[engine.engine](spec, engine)
    files = FORMATS[form](spec, engine, launch)
    return Rendered(_with_notes(files, notes), notes)


def _notes(spec: Spec, engine: EngineVersion) -> list[str]:
    lines = [f"{engine.title} {engine.version}, options as recorded on {engine.recorded}."]
    if not spec.drafts:
        lines.append("Speculation is off: nothing drafts with this config.")
    lines += [f"not used: this engine has no option for {name}." for name in _unused(spec, engine)]
    told = capabilities.notes(engine, spec)
    lines += [f"{note.date}: {note.text} ({note.source})" for note in told]
    lines += [f"not checked: {sentence}" for sentence in checks.unchecked(spec)]
    return lines


def _unused(spec: Spec, engine: EngineVersion) -> list[str]:
    """Return the values set in the spec for which this engine has no option."""
    plain = Spec(target=Target(model=spec.target.model))
    return [each for each in engine.unused if attrgetter(each)(spec) != attrgetter(each)(plain)]


def _with_notes(files: dict[str, str], notes: list[str]) -> dict[str, str]:
    """Return the files with the notes as comments above the first file that allows comments."""
    for name in files:
        if not name.endswith(".json"):
            head = "".join(f"# {line}\n" for line in notes)
            return {n: head + t if n == name else t for n, t in files.items()}
    return files


def compose(spec: Spec, engine: EngineVersion, launch: Launch) -> dict[str, str]:
    """Return ``compose.yaml``, and the files that it mounts."""
    text = _template("compose.yaml.j2").render(_values(spec, engine, launch))
    return {"compose.yaml": text + "\n", **launch.files}


def kustomize(spec: Spec, engine: EngineVersion, launch: Launch) -> dict[str, str]:
    """Return a kustomize base: Deployment and what belongs to it, and the engine's config."""
    values = _values(spec, engine, launch)
    names = {f"{name}.yaml": f"kubernetes/{name}.yaml.j2" for name in KUBERNETES}
    texts = {name: _template(path).render(values) + "\n" for name, path in names.items()}
    return texts | dict(launch.files)


def _values(spec: Spec, engine: EngineVersion, launch: Launch) -> dict[str, Any]:
    service = spec.service
    for where, name in (("name", service.name), ("namespace", service.namespace)):
        if not LABEL.fullmatch(name):
            raise ConfigError(
                f"service.{where} is {shown(name)}; give small letters, digits and hyphens, at "
                "most 52, beginning with a letter."
            )
    models = [name for name in (spec.target.model, spec.drafter.model) if name is not None]
    for model in models:
        outside = model.startswith((".", "~", "/")) and not model.startswith("/models/")
        if outside or ".." in model.split("/"):
            raise ConfigError(
                f"The model {shown(model)} cannot be seen in a container; put it below /models, "
                "which is mounted, or name it as the hub does."
            )
    address = f"http://127.0.0.1:{service.port}{engine.alive}"
    python = ["CMD", "python3", "-c", PING, address]
    return {
        "name": service.name,
        "namespace": service.namespace,
        "image": service.image or engine.image,
        "command": launch.arguments(),
        "environment": _names(spec, engine),
        "files": launch.files,
        "port": service.port,
        "replicas": service.replicas,
        "gpus": spec.parallel.gpus if engine.gpu else 0,
        "alive": engine.alive,
        "ready": engine.ready,
        "token_in_file": engine.engine not in TOKEN_FROM_VARIABLE,
        "local": any(model.startswith("/models/") for model in models),
        "healthcheck": ["CMD", "curl", "-fs", address] if engine.engine == "llamacpp" else python,
    }


def _names(spec: Spec, engine: EngineVersion) -> dict[str, str]:
    """Return the variable with our server's host names in a cluster; others need none."""
    short = f"{spec.service.name}.{spec.service.namespace}"
    hosts = f"{short},{short}.svc,{short}.svc.cluster.local"
    return {"OUTRIDER_ALLOWED_HOSTS": hosts} if engine.engine == "outrider" else {}


def _template(name: str) -> Any:
    environment = Environment(undefined=StrictUndefined, autoescape=False)
    environment.filters |= {
        "value": lambda value: json.dumps(value, ensure_ascii=False),  # no text leaves its quotes
        "escaped": _for_compose,
        "literal": lambda text: text.replace("$", "$$"),
        "key": lambda path: path.replace("/", "."),
    }
    return environment.from_string((DATA / "templates" / name).read_text("utf-8"))


def _for_compose(value: Any) -> Any:
    """Return texts with each $ doubled; compose would take it for a variable."""
    if isinstance(value, list):
        return [_for_compose(each) for each in value]
    return str(value).replace("$", "$$")


FORMATS: dict[str, Callable[[Spec, EngineVersion, Launch], dict[str, str]]] = {
    "command": lambda spec, engine, launch: {"run.sh": launch.command(), **launch.files},
    "config": lambda spec, engine, launch: dict([launch.config_file]) | dict(launch.files),
    "compose": compose,
    "kustomize": kustomize,
}
