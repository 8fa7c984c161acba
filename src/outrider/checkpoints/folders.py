"""Finds the folder of a checkpoint, its GGUF file, or its snapshot of the hub."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from ..base.config import BUNDLED, POCKET
from ..base.types import Folder
from ..errors import ModelError
from .formats.gguf import is_gguf


def find_folder(model: Folder, more: Sequence[str] = ()) -> Path:
    """Return the folder of a checkpoint: ``model`` itself, or the hub's snapshot of that name.

    ``POCKET`` is the bundled target, unless a folder of that name exists, and ``POCKET/drafter`` a
    drafter inside it. A GGUF file is returned as it is; other files stand for their folder.
    ``more`` are patterns of further files to fetch.
    """
    path = Path(os.path.expanduser(model))  # a user who does not exist stays as written
    if str(model) == POCKET and not (path / "config.json").is_file():
        return BUNDLED
    if str(model).startswith(f"{POCKET}/") and not path.exists():
        return _bundled(str(model))
    if path.suffix in (".json", ".safetensors") and path.is_file():
        return path.parent
    if path.exists() or is_gguf(path) or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(model)):
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", *more]
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"model {str(model)!r} is no folder here, and the hub did not give it: {reason}"
        ) from None


def name_of(folder: Path) -> str:
    """Return the hub name of a snapshot in the hub's cache, and the path of any other folder."""
    found = re.search(r"/models--([\w.-]+?)--([\w.-]+)/snapshots/[^/]+$", folder.as_posix())
    return f"{found[1]}/{found[2]}" if found else str(folder)


def _bundled(name: str) -> Path:
    """Return the folder of a bundled drafter. Raises ModelError: there is none of that name."""
    known = sorted(f"{POCKET}/{each.parent.name}" for each in BUNDLED.glob("*/config.json"))
    if name not in known:
        raise ModelError(
            f"this package has no {name!r}, only {' and '.join(known) or 'the target'}; give one "
            "of these, or a folder."
        )
    return BUNDLED / name.removeprefix(f"{POCKET}/")
