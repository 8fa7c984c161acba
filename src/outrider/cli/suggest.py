"""``outrider drafters suggest``: the known drafters of a model, with a forecast of each here."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError, ModelError, OutriderError, shown
from .common import AsJson, new_table, report_console, status, write
from .flags import argument

if TYPE_CHECKING:
    from ..checkpoints.extras import Extras
    from ..checkpoints.files import Files
    from ..checkpoints.heads import Head
    from ..ops.planning.suggest import KnownModel, Suggestion

MOST_FILES = 200
"""Files and folders near a model that are looked at."""
NAMED = ("general.name", "general.basename", "general.base_model.0.name")
FORECAST = (
    "Acceptance and speedup are forecasts, not measurements: acceptance is assumed of the method "
    "(docs/planning.md), what a step takes is modelled from this machine's memory and arithmetic, "
    "for one request of conversation at T = 0. Names are those of the catalogue; nothing was "
    "downloaded. auto takes suffix by itself."
)


def suggest(
    model: str = argument("MODEL", "The target: a folder, .gguf file, or the catalogue's name."),
    json_: AsJson = False,
) -> None:
    """List known drafters of a model, with a forecast of each on this machine.

    They are smaller models with its tokenizer beside it and in the hub's cache, published heads and
    siblings, and drafters that need no checkpoint. Nothing is downloaded.
    """
    with status("looking"):
        from ..native.choice import library
        from ..ops.planning.suggest import entry_for, this_machine
        from ..ops.planning.suggest import suggest as suggested

        target, near, heads = _known(model)
        entry, native = entry_for(target), library()
        here = this_machine(native.isa if native else "")
        found = suggested(target, near, here, [(str(h.folder), h.kind) for h in heads])
        extras = _extras([*(each.path for each in near), *(str(h.folder) for h in heads)])
    if json_:
        rows = [_plain(each) for each in found]
        for row in rows:
            row["extras"] = extras[row["drafter"]].to_json() if row["drafter"] in extras else None
        write(json.dumps({"model": model, "entry": entry, "drafters": rows}) + "\n")
        return
    console = report_console(on_stderr=False)
    console.print(f"{model}: {'not in the catalogue' if entry is None else f'known as {entry}'}")
    grid = new_table("drafter", "method", "found", "forecast: accepted", "speedup")
    grid.columns[0].overflow = "fold"
    for each in found:
        accepted = each.acceptance.said() if each.acceptance else "not modelled"
        speedup = each.speedup.said() if each.speedup else ""
        style = None if each.served else "dim"
        grid.add_row(each.drafter, each.method, each.found, accepted, speedup, style=style)
    console.print(grid)
    console.print(FORECAST)
    for drafter, more in extras.items():
        for use, length in more.lengths.items():
            console.print(f"{drafter} recommends {length} tokens for {use}.", markup=False)
        for one in more.measured:
            console.print(f"{drafter} says of {one.use}: {one.said()}.", markup=False)
    commands = [each.command for each in found if each.command]
    others = "; this engine does not draft with the others" if len(commands) < len(found) else ""
    console.print(f"Run next{others}:")
    for command in commands:  # on one line, to be copied
        console.print(command, soft_wrap=True)


def _plain(each: Suggestion) -> dict[str, Any]:
    from ..ops.planning.figure import to_json

    return dict(to_json(each))


def _extras(paths: list[str]) -> dict[str, Extras]:
    """Return what the drafters in folders say beyond their format, of those that do."""
    from ..checkpoints.extras import NO_EXTRAS, extras_of

    found: dict[str, Extras] = {}
    for path in paths:
        with suppress(OutriderError, OSError):
            extras = extras_of(Path(path))
            if extras != NO_EXTRAS:
                found[path] = extras
    return found


def _known(model: str) -> tuple[KnownModel, list[KnownModel], list[Head]]:
    """Return a model, and what lies on disk: smaller ones with its tokenizer, heads that fit."""
    from ..checkpoints.checkpoint import open_checkpoint
    from ..checkpoints.files import Files
    from ..checkpoints.heads import check_target, read_head
    from ..ops.planning.catalogue import checkpoint_of, data, find_shape
    from ..ops.planning.suggest import KnownModel

    if not os.path.exists(model):
        models = data("models")["model"]
        on_hub = {e["checkpoint"].lower(): name for name, e in models.items() if "checkpoint" in e}
        entry = on_hub.get(model.lower(), model.lower())
        if entry not in models:
            raise ConfigError(
                f"{shown(model)} is neither on disk nor in the catalogue; give a folder, a .gguf "
                "file, or a name of docs/planning.md."
            )
        return KnownModel(checkpoint_of(entry) or entry, (entry,), find_shape(entry)), [], []
    own = Files(Path(model))
    target = _read(own)
    near: list[KnownModel] = []
    heads: list[Head] = []
    for files in _near(Path(model)):
        with suppress(OutriderError, OSError):  # damaged, of another kind, or another user's
            head = read_head(files)
            if head is not None:
                a = open_checkpoint(own).architecture
                if a is not None:
                    check_target(head, a, a.hidden_size, a.num_layers)
                    heads.append(head)
                continue
            known = _read(files)
            if _fits(own, target, files, known):
                near.append(known)
    return target, near, heads


def _near(model: Path) -> Iterator[Files]:
    """Yield the checkpoints beside a model, below it, and in the hub's cache."""
    from ..checkpoints.files import Files

    hub = Path(os.path.expanduser(os.environ.get("HF_HOME", "~/.cache/huggingface"))) / "hub"
    itself = os.path.realpath(model)
    places = [*_entries(Path(itself).parent), *_entries(model)]
    places += [*hub.glob("models--*/snapshots/*"), *hub.glob("models--*/snapshots/*/*.gguf")]
    for place in sorted(dict.fromkeys(places))[:MOST_FILES]:
        if os.path.realpath(place) == itself:
            continue
        if place.suffix == ".gguf" or os.path.isfile(place / "config.json"):
            yield Files(place)


def _entries(folder: Path) -> list[Path]:
    """Return what lies in a folder: nothing where it is none, or may not be read."""
    try:
        return [*folder.iterdir()]
    except OSError:
        return []


def _read(files: Files) -> KnownModel:
    """Return a checkpoint as suggestions see it.

    Raises OSError. OutriderError: it is damaged, or there is none.
    """
    from ..checkpoints.formats.gguf_config import gguf_config
    from ..ops.planning.catalogue import shape_of
    from ..ops.planning.suggest import KnownModel

    path = files.folder
    names = [path.name]
    if files.gguf is not None:
        config = vars(gguf_config(files.gguf))
        names += [files.gguf.fields.text(key, "") for key in NAMED]
        size = sum(tensor.nbytes for tensor in files.gguf.tensors.values())
    elif files.config is not None:
        config = files.config
        names += [str(config.get("_name_or_path", "")), str(path)]
        size = sum(entry.nbytes for entry in files.tensors.values())
    else:
        raise ModelError(f"{path} has no config.json; give a checkpoint's folder or a .gguf file.")
    shape = shape_of(path.name, config)
    bits = 8 * size / shape.parameters
    return KnownModel(str(path), tuple(filter(None, names)), shape, bits)


def _fits(own: Files, target: KnownModel, files: Files, known: KnownModel) -> bool:
    """Return whether a model is smaller than the target by far, and has its tokenizer."""
    from ..checkpoints.tokenizers import differences, has_tokenizer
    from ..ops.planning.suggest import MOST_OF_TARGET

    if known.shape.read(1) * known.bits > MOST_OF_TARGET * target.shape.read(1) * target.bits:
        return False
    return has_tokenizer(own) and has_tokenizer(files) and not differences(own, files)
