"""Adapts to a running server: takes the prompts that it recorded, and delivers the result."""

from __future__ import annotations

import json
import os
import shlex
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.kept import part_of
from ..base.methods import AUTO, TOGETHER
from ..base.outside.http import address, call
from ..checkpoints.files import new_folder
from ..errors import ConfigError, EndpointError, shown

SPECULATION = "/v1/speculation"
RECORDED = "prompts.jsonl"
"""The file of prompts in the folder of a recording."""
FEWEST = 200
"""Fewest prompts that leave enough to learn from after some are held out."""
ASK_SECONDS, LOAD_SECONDS = 30.0, 600.0
KEY = "OUTRIDER_API_KEY"
"""The variable of the key in the command that is printed."""


@dataclass(frozen=True)
class Source:
    """A server of ours on this machine, which records prompts.

    ``drafter`` is the checkpoint that it drafts with, None if it drafts without one. The file
    ``prompts`` had ``size`` bytes when the server was asked. It loads drafters from the folder
    ``drafters``, None if it loads none.
    """

    url: str
    key: str | None
    target: str
    drafter: str | None
    prompts: Path
    size: int
    drafters: Path | None


def ask(url: str, key: str | None) -> Source:
    """Return what a server reports about itself.

    Raises EndpointError: it does not answer, or is not an Outrider server. ConfigError: it records
    nothing, or has recorded too little, or runs on another machine.
    """
    parts = address(url, "--from-server")
    url = parts.place + parts.path.removesuffix("/v1")
    said = _answer(url, key)
    recording, target = said["recording"], said["target"]
    if not isinstance(recording, dict):
        raise ConfigError(
            f"{url} records no prompts; start it with --record DIR, and adapt when there are "
            f"{FEWEST} or more."
        )
    folder, records, size = (recording.get(name) for name in ("folder", "records", "bytes"))
    if not (isinstance(folder, str) and isinstance(records, int) and isinstance(size, int)):
        raise _foreign(url, "it does not say what is recorded")
    loading, drafter = said["loading"], _checkpoint(said)
    drafters = loading.get("folder") if isinstance(loading, dict) else None
    drafters = drafters if isinstance(drafters, str) else None
    prompts = f"{folder}/{RECORDED}"
    for what, place in (
        ("records", prompts), ("serves", target), ("drafts with", drafter),
        ("loads drafters from", drafters),
    ):  # fmt: skip
        if place is not None and not _exists(Path(place)):
            raise ConfigError(
                f"{url} {what} {shown(place)}, which is not here; run this on the machine of "
                "the server, as its user."
            )
    if records < FEWEST:
        raise ConfigError(
            f"{url} has recorded {records} prompts, and {FEWEST} are the fewest that a drafter can "
            "be adapted with; wait for more."
        )
    return Source(
        url, key, target, drafter, Path(prompts), size, None if drafters is None else Path(drafters)
    )  # fmt: skip


def _answer(url: str, key: str | None) -> dict[str, Any]:
    """Return a server's state of speculation. Raises EndpointError: it sends none."""
    answer = call(url + SPECULATION, key=key, seconds=ASK_SECONDS)
    if answer.status in (401, 403):
        raise EndpointError(f"{url} wants an API key (HTTP {answer.status}); give --api-key.")
    said = answer.json() if answer.ok else None
    if not isinstance(said, dict):
        raise _foreign(url, f"HTTP {answer.status}")
    if not ({"drafters", "drafter", "recording", "loading"} <= said.keys()):
        raise _foreign(url, "its answer lacks what ours has")
    if not isinstance(said.get("target"), str) or not isinstance(said["drafters"], dict):
        raise _foreign(url, "it does not say what it serves")
    return said


def _foreign(url: str, why: str) -> EndpointError:
    """Return the error of an answer that is not an Outrider server's."""
    return EndpointError(
        f"{url}{SPECULATION} is not that of an outrider serve of this version ({why}); correct "
        "the address."
    )


def _exists(place: Path) -> bool:
    """Return whether a path exists; one that cannot be looked at does not."""
    try:
        return place.is_file() or place.is_dir()
    except (OSError, ValueError):
        return False


def _checkpoint(said: Mapping[str, Any]) -> str | None:
    """Return the checkpoint of the default drafter, the first one if that is ``auto``."""
    default, drafters = str(said["drafter"]), said["drafters"]
    for name, about in drafters.items():
        folder = about.get("folder") if isinstance(about, dict) else None
        if isinstance(folder, str) and (default == AUTO or name in default.split(TOGETHER)):
            return folder
    return None


def keep_prompts(source: Source, out: Path) -> Path:
    """Return a copy of the recorded prompts, which a resumed adaptation uses again.

    Raises ConfigError: it cannot be read or written, or has been replaced by too short a file.
    """
    file = out / "recorded.jsonl"
    if file.exists():
        return file
    try:
        out.mkdir(parents=True, exist_ok=True)
        with part_of(file) as part:
            part.unlink(missing_ok=True)
            # As private as the original.
            writing = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with source.prompts.open("rb") as opened, open(writing, "wb") as written:
                count, left = 0, source.size
                for line in opened:
                    left -= len(line)
                    if left < 0 or not line.endswith(b"\n"):
                        break
                    written.write(line)
                    count += 1
            if count < FEWEST:
                raise ConfigError(
                    f"{source.prompts} has {count} prompts by now, and {FEWEST} are the fewest "
                    "that a drafter can be adapted with; wait for more."
                )
    except OSError as error:
        raise ConfigError(
            f"{source.prompts} cannot be copied to {file} ({error.strerror}); run this as the "
            "server's user, or give another --out."
        ) from None
    return file


def place(source: Source, adapted: Path, name: str) -> str:
    """Copy a drafter into the server's folder for drafters, and return its name there.

    A drafter that is already there is not copied. Raises ConfigError: it cannot be copied.
    """
    folder = source.drafters
    assert folder is not None
    adapted = adapted.resolve()
    name = name if name.isprintable() else "adapted"  # the server takes no other names
    if adapted.is_relative_to(folder.resolve()):
        return adapted.relative_to(folder.resolve()).as_posix()
    try:
        there = {each.name for each in folder.iterdir()}
        free = (name if number == 1 else f"{name}-{number}" for number in range(1, len(there) + 2))
        own = next(each for each in free if each not in there)
        with new_folder(folder / own) as filling:
            shutil.copytree(adapted, filling, dirs_exist_ok=True)
    except (OSError, shutil.Error) as error:
        why = getattr(error, "strerror", None) or "a file cannot be copied"
        raise ConfigError(
            f"{adapted} cannot be copied to {shown(str(folder))} ({why}); copy it there, and then: "
            f"{command(source, name)}"
        ) from None
    return own


def check_loads(source: Source | None) -> None:
    """Raise ConfigError if the server could not load the result, before anything is trained."""
    folder = None if source is None else source.drafters
    if folder is None or not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            "--load needs --from-server, of a server with --load-drafters DIR, a folder that can "
            "be written to here."
        )


def command(source: Source, name: str) -> str:
    """Return the command that makes the server load a drafter from its folder."""
    key = f' -H "Authorization: Bearer ${KEY}"' if source.key else ""
    body = shlex.quote(json.dumps({"load": name}))
    return (
        f"curl {shlex.quote(source.url + SPECULATION)} -H 'Content-Type: application/json'{key} "
        f"-d {body}"
    )


def load(source: Source, name: str) -> None:
    """Make the server draft with a drafter from its folder. Raises EndpointError: it does not."""
    answer = call(
        source.url + SPECULATION, {"load": name}, key=source.key, seconds=LOAD_SECONDS
    )  # fmt: skip
    if not answer.ok:
        said = answer.json()
        error = said.get("error") if isinstance(said, dict) else None
        why = error.get("message") if isinstance(error, dict) else f"HTTP {answer.status}"
        raise EndpointError(f"{source.url} does not load the drafter: {shown(why)}")


def _has_loaded(source: Source, folder: Path) -> bool:
    """Return whether the server drafts with a folder; its answer to the load may have been lost."""
    try:
        loading = _answer(source.url, source.key)["loading"]
    except EndpointError:
        return False
    return isinstance(loading, dict) and loading.get("loaded") == str(folder)


def hand_over(source: Source, adapted: Path, name: str, at_once: bool) -> str:
    """Deliver a drafter to the server; return what was done, or the command that is left to run.

    A server without a folder for drafters must be restarted. Raises ConfigError: it cannot be
    copied. EndpointError: it is not loaded; the copy is then removed.
    """
    if source.drafters is None:
        beside = adapted.resolve()
        return (
            f"the server loads no drafters while it runs: start it with --drafter {beside}, or "
            f"with --load-drafters {beside.parent} and then: {command(source, beside.name)}"
        )
    own = place(source, adapted, name)
    if not at_once:
        return f"have the server draft with it: {command(source, own)}"
    try:
        load(source, own)
    except EndpointError:
        copy = source.drafters / own
        if copy.resolve() != adapted.resolve() and not _has_loaded(source, copy):
            shutil.rmtree(copy, ignore_errors=True)
        raise
    return f"the server drafts with it now; its name there is {own}"
