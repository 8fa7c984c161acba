"""The guard's folder: its state, a person's commands, and the audit."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from math import isfinite
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .states import State, of_json

STATE, STATUS, COMMAND, AUDIT = "state.json", "status.json", "command.json", "audit.jsonl"


class Store:
    """Files of one guard.

    Raises:
        ConfigError: the folder cannot be written.
    """

    def __init__(self, folder: str | Path, *, create: bool = True) -> None:
        self.folder = Path(folder)
        if create:
            try:
                self.folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"The guard's folder {folder} cannot be made: {error.strerror}."
                ) from None

    def load(self, engine: str) -> State:
        """Return the state on disk, a new one where there is none.

        Raises:
            ConfigError: the file is damaged, or belongs to the guard of another engine.
        """
        document = self._read(STATE)
        if document is None:
            return State(engine=engine)
        state = of_json(document, str(self.folder / STATE))
        if state.engine != engine:
            raise ConfigError(
                f"{self.folder} belongs to a guard of {state.engine}; name another folder."
            )
        return state

    def save(self, state: State) -> None:
        """Write the state; a reader, and a guard after kill -9, sees the old one or the new one."""
        self._write(STATE, state.to_json())

    def show(self, status: dict[str, Any]) -> None:
        """Write what ``outrider guard status`` shows."""
        self._write(STATUS, status)

    def status(self) -> dict[str, Any] | None:
        """Return what was shown last; None where no guard ever ran here."""
        document = self._read(STATUS)
        return document if isinstance(document, dict) else None

    def command(self, mode: str | None) -> None:
        """Leave a person's word: hold this mode, or None for rules again."""
        self._write(COMMAND, {"force": mode})

    def commanded(self) -> tuple[bool, str | None]:
        """Return whether a person said anything, and the mode."""
        document = self._read(COMMAND)
        if not isinstance(document, dict) or "force" not in document:
            return False, None
        return True, document["force"]

    def obeyed(self) -> None:
        """Forget the person's word, which the state has now."""
        (self.folder / COMMAND).unlink(missing_ok=True)

    def record(self, entry: dict[str, Any]) -> None:
        """Append a line to the audit; it is on disk when this returns."""
        line = json.dumps(finite(entry), ensure_ascii=False) + "\n"
        file = os.open(self.folder / AUDIT, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o640)
        try:
            end = os.fstat(file).st_size
            if end and os.pread(file, 1, end - 1) != b"\n":  # torn when a guard died
                line = "\n" + line
            os.write(file, line.encode())
            os.fsync(file)
        finally:
            os.close(file)

    def history(self) -> Iterator[dict[str, Any]]:
        """Yield the audit's entries, the oldest first; a torn last line is left out."""
        try:
            lines = (self.folder / AUDIT).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return
        for line in lines.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if isinstance(entry, dict):
                yield entry

    def _read(self, name: str) -> Any:
        path = self.folder / name
        try:
            return json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except NotADirectoryError:
            raise ConfigError(f"The guard's folder {self.folder} is a file.") from None
        except OSError as error:
            raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} is damaged; remove it to begin anew.") from None

    def _write(self, name: str, document: Any) -> None:
        """Replace a file at once; its bytes and its name are on disk when this returns."""
        path, draft = self.folder / name, self.folder / f".{name}.{os.getpid()}"
        try:
            with draft.open("w", encoding="utf-8") as file:
                json.dump(finite(document), file, ensure_ascii=False, indent=1)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(path)
            folder = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}.") from None


def finite(value: Any) -> Any:
    """Return a document whose infinities and NaN are texts, since JSON has none."""
    if isinstance(value, float) and not isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [finite(each) for each in value]
    return value
