"""The abilities of engines' recorded versions, their traps, and the schemas of their options."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ...base.engines import find_engine
from ...base.methods import NONE, TABLE
from ...base.outside.models import DataPart, checked
from ...base.tables import table
from ...errors import ConfigError, shown
from .spec import Spec

DATA = Path(__file__).with_name("data")
data = partial(table, "outrider.ops.deploy")
OURS = {
    each.name: "a head's folder" if each.checkpoint else each.ours
    for each in TABLE
    if each.ours not in (None, NONE)
} | {"draft_model": "a folder"}
"""Methods of our own engine, and how each is named to it; it can choose every draft's length."""
ENGINES = ("outrider", "vllm", "sglang", "trtllm", "triton", "llamacpp")


@dataclass(frozen=True)
class Note(DataPart):
    """A known loss or trap: when and where it was read, and the methods or features it affects."""

    date: str
    text: str
    source: str
    methods: tuple[str, ...] = ()
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class EngineVersion(DataPart):
    """One version of one engine.

    ``methods`` maps a spec's methods to the engine's names. Tuples list methods: whose drafter may
    have another tokenizer, that run over pipeline stages, whose K the engine can choose, that need
    K. ``padding`` is the largest accepted difference of vocabularies, in tokens. With ``schedule``
    K can follow the batch size; with ``falling`` the first K must be the largest. ``parallel`` says
    whether it runs on several GPUs; it has no option for the values ``unused``.
    """

    engine: str
    title: str
    version: str
    recorded: str
    image: str
    methods: Mapping[str, str]
    other_vocabulary: tuple[str, ...]
    padding: int
    with_pipeline: tuple[str, ...]
    schedule: bool
    falling: bool
    adaptive: tuple[str, ...]
    parallel: bool
    gpu: bool
    dtypes: tuple[str, ...]
    quantizations: tuple[str, ...]
    draft_quantization: bool
    needs_length: tuple[str, ...]
    unused: tuple[str, ...]
    alive: str
    ready: str
    notes: tuple[Note, ...]


@cache
def schema(engine: str) -> dict[str, Any]:
    """Return the recorded options of an engine: names, types, and the version they belong to."""
    loaded: dict[str, Any] = json.loads((DATA / "schemas" / f"{engine}.json").read_text("utf-8"))
    return loaded


def versions(engine: str) -> list[str]:
    """Return the recorded versions of an engine, the newest first."""
    return [each["version"] for each in data(f"engines/{engine}")["versions"]]


def find(engine: str | None, version: str | None = None) -> EngineVersion:
    """Return an engine's capabilities; without a ``version``, those of the newest recorded one."""
    named = find_engine(engine)
    engine = named.name if named else engine
    if engine not in ENGINES:
        near = difflib.get_close_matches(engine or "", ENGINES, 1)
        said = "No engine is named" if engine is None else f"There is no engine {shown(engine)}"
        hint = f"did you mean {near[0]}?" if near else f"give --engine {', '.join(ENGINES)}."
        raise ConfigError(f"{said}; {hint}")
    known = data(f"engines/{engine}")
    wanted = version or versions(engine)[0]
    for each in known["versions"]:
        if each["version"] == wanted.removeprefix("v"):
            values = {"engine": engine, "title": known["title"], "notes": known.get("notes", [])}
            ours = {"methods": OURS, "adaptive": list(OURS)} if engine == "outrider" else {}
            return checked(EngineVersion, values | ours | each, f"engines/{engine}.toml")
    raise ConfigError(
        f"{known['title']} {shown(wanted)} is no version that is recorded here, so its options are "
        f"not known; give --engine-version {' or '.join(versions(engine))}."
    )


def notes(engine: EngineVersion, spec: Spec) -> list[Note]:
    """Return the losses and traps that concern a spec on this engine."""
    used = {
        "speculation": spec.drafts,
        "schedule": bool(spec.drafter.schedule),
        "adaptive": spec.drafter.adaptive,
        "other_vocabulary": bool(spec.drafter.other_vocabulary),
        "pipeline": spec.parallel.pipeline > 1,
        "tensor": spec.parallel.tensor > 1,
        "quantization": spec.target.quantization is not None,
    }
    method = spec.drafter.method if spec.drafts else None
    return [
        note
        for note in engine.notes
        if (not note.methods or method in note.methods) and all(used[x] for x in note.features)
    ]
