"""From a spec to files: the command, the engine's config, compose or kustomize."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from ...errors import ConfigError, shown
from . import capabilities, checks, containers, facts
from .capabilities import Engine
from .engines import LAUNCHES
from .launch import Launch
from .spec import Spec, Target


@dataclass(frozen=True)
class Rendered:
    """Files by their paths; the first is the main one. ``notes`` are lines for the reader."""

    files: dict[str, str]
    notes: list[str]

    def text(self) -> str:
        """Return all files as one text; each but a single one has its name above it."""
        if len(self.files) == 1:
            return next(iter(self.files.values()))
        return "\n".join(f"# file: {name}\n{text}" for name, text in self.files.items())


def render(spec: Spec, form: str = "command", more: Sequence[str] = ()) -> Rendered:
    """Return the files of a deployment in a format; ``more`` are further notes.

    Raises ConfigError: the spec cannot work on this engine, or there is no such format.
    """
    if form not in FORMATS:
        raise ConfigError(f"There is no format {shown(form)}; give {', '.join(FORMATS)}.")
    engine = capabilities.find(spec.engine, spec.engine_version)
    spec = facts.filled(spec)
    checks.check(spec, engine)
    if checks.other_vocabulary(spec, engine):
        drafter = spec.drafter.model_copy(update={"other_vocabulary": True})
        spec = spec.model_copy(update={"drafter": drafter})
    notes = [*_notes(spec, engine), *more]
    launch = LAUNCHES[engine.engine](spec, engine)
    files = FORMATS[form](spec, engine, launch)
    return Rendered(_with_notes(files, notes), notes)


def _notes(spec: Spec, engine: Engine) -> list[str]:
    lines = [f"{engine.title} {engine.version}, options as recorded on {engine.recorded}."]
    if not spec.drafts:
        lines.append("Speculation is off: nothing drafts with this config.")
    lines += [f"not used: this engine has no option for {name}." for name in _unused(spec, engine)]
    told = capabilities.notes(engine, spec)
    lines += [f"{note.date}: {note.text} ({note.source})" for note in told]
    lines += [f"not checked: {sentence}" for sentence in checks.unchecked(spec)]
    return lines


def _unused(spec: Spec, engine: Engine) -> list[str]:
    """Return the values that are set in the spec but that this engine has no option for."""
    plain = Spec(target=Target(model=spec.target.model))
    return [each for each in engine.unused if attrgetter(each)(spec) != attrgetter(each)(plain)]


def _with_notes(files: dict[str, str], notes: list[str]) -> dict[str, str]:
    """Return the files with the notes as comments above the first that can hold comments."""
    for name in files:
        if not name.endswith(".json"):
            head = "".join(f"# {line}\n" for line in notes)
            return {n: head + t if n == name else t for n, t in files.items()}
    return files


FORMATS: dict[str, Callable[[Spec, Engine, Launch], dict[str, str]]] = {
    "command": lambda spec, engine, launch: {"run.sh": launch.command(), **launch.files},
    "config": lambda spec, engine, launch: dict([launch.config_file]) | dict(launch.files),
    "compose": containers.compose,
    "kustomize": containers.kustomize,
}
"""The formats, and what makes each."""
