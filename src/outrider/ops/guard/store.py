"""The guard's folder: its state, a person's commands, and the audit."""

from __future__ import annotations

import json
import os
import stat
from collections import deque
from contextlib import suppress
from math import isfinite
from pathlib import Path
from typing import Any

from ...base.outside.documents import MIB, parse_json, read
from ...base.outside.text import printable
from ...errors import ConfigError
from .states import State, check_status, of_json

STATE = "state.json"
STATUS = "status.json"
COMMAND = "command.json"
AUDIT = "audit.jsonl"
LONGEST_EVENT = 2000
LONGEST_ENTRY = 16384
"""Most bytes of an audit entry: its text with every character escaped, and some fields."""
MOST_BYTES = MIB
"""Most bytes of a file or of a line of the audit; the guard writes a few kilobytes."""


class StoreError(ConfigError):
    """A file cannot be written: the disk is full, or the folder is gone or read-only."""


class GuardStore:
    """Files of one guard. Raises ConfigError: the folder cannot be written."""

    def __init__(self, folder: str | Path, *, create: bool = True) -> None:
        self.folder = Path(folder)
        try:
            if create:
                self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = f"The guard's folder {folder} cannot be made: {error.strerror}."
            raise ConfigError(why) from None

    def load(self, engine: str) -> State:
        """Return the state on disk, or a new one; ConfigError if damaged or of another engine."""
        document = self._read(STATE)
        if document is None:
            return State(engine=engine)
        state = of_json(document, str(self.folder / STATE))
        if state.engine != engine:
            whose = printable(state.engine)
            raise ConfigError(f"{self.folder} belongs to a guard of {whose}; name another folder.")
        return state

    def save(self, state: State) -> None:
        """Write the state, or raise StoreError; after kill -9 it is the old or the new one."""
        self._write(STATE, state.to_json())

    def show(self, status: dict[str, Any]) -> None:
        """Write the status for ``outrider ops guard status``."""
        self._write(STATUS, status)

    def status(self) -> dict[str, Any] | None:
        """Return the last status, None if no guard ever ran here; ConfigError if it is damaged."""
        document = self._read(STATUS)
        return None if document is None else check_status(document, str(self.folder / STATUS))

    def command(self, mode: str | None) -> None:
        """Leave a person's command: force this mode, or follow the rules again if None."""
        self._write(COMMAND, {"force": mode})

    def commanded(self) -> tuple[bool, str | None]:
        """Return whether a person gave a command, and its mode; ConfigError if it is damaged."""
        document = self._read(COMMAND)
        if not isinstance(document, dict) or "force" not in document:
            return False, None
        return True, document["force"]

    def obeyed(self) -> None:
        """Delete the person's command, which the state now holds, or raise StoreError."""
        try:
            (self.folder / COMMAND).unlink(missing_ok=True)
        except OSError as error:
            raise _cannot_write(self.folder / COMMAND, error) from None

    def record(self, entry: dict[str, Any]) -> None:
        """Append a line to the audit, on disk when this returns, or raise StoreError."""
        line = json.dumps(finite(entry)) + "\n"
        path = self.folder / AUDIT
        try:
            file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK, 0o640)
            try:
                end = os.fstat(file).st_size
                if end and os.pread(file, 1, end - 1) != b"\n":  # a guard died while writing
                    line = "\n" + line
                os.write(file, line.encode())
                os.fsync(file)
            finally:
                os.close(file)
        except OSError as error:
            raise _cannot_write(path, error) from None

    def history(self, last: int = 1000) -> list[dict[str, Any]]:
        """Return the newest entries of the audit, oldest first, without damaged lines."""
        path = self.folder / AUDIT
        if not self._exists(path):
            return []
        entries: deque[dict[str, Any]] = deque(maxlen=last)
        try:
            with path.open("rb") as file:
                # Read no more than that many entries can take.
                begin = max(0, path.stat().st_size - last * LONGEST_ENTRY)
                if begin:
                    file.seek(begin - 1)
                    file.readline(MOST_BYTES)  # skip the rest of an older line
                while line := file.readline(MOST_BYTES):
                    with suppress(ConfigError):
                        if isinstance(entry := parse_json(line, str(path)), dict):
                            entries.append(entry)
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        return list(entries)

    def _exists(self, path: Path) -> bool:
        """Return whether a file exists; ConfigError if the path is a pipe, a folder or the like."""
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise ConfigError(f"{path} is not a regular file; remove it to start again.")
        except FileNotFoundError:
            return False
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        return True

    def _read(self, name: str) -> Any:
        path = self.folder / name
        if not self._exists(path):
            return None
        text = read(path, str(path), limit=MOST_BYTES)
        with suppress(ConfigError):
            if (document := parse_json(text, str(path), unique=True)) is not None:
                return document
        raise ConfigError(f"{path} is damaged; remove it to start again.")

    def _write(self, name: str, document: Any) -> None:
        """Replace a file atomically; its bytes and its name are on disk when this returns."""
        path, draft = self.folder / name, self.folder / f".{name}.{os.getpid()}"
        text = json.dumps(finite(document), indent=1)  # in ASCII, which is safe to print
        try:
            with draft.open("w", encoding="ascii") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            with suppress(OSError):
                draft.unlink()
            raise _cannot_write(path, error) from None


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path} cannot be written: {error.strerror}.")


def finite(value: Any) -> Any:
    """Return a document whose infinities and NaN are texts, since JSON has none."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
