"""Records what clients ask, for training drafters: off unless the operator names a folder."""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from traceback import extract_tb
from typing import Any

from ..bench.workload import item_of
from ..errors import ConfigError
from ..text.messages import readable
from .log import logger

FILE = "prompts.jsonl"
LONGEST = 1 << 20
"""Most characters of a recorded prompt, which is held in memory while its request runs."""
LONGEST_LINE = 1 << 24
"""Most bytes read at a time from an existing file, which may have no line ends."""
MOST_WAITING = 1 << 24
"""Most characters that may wait to be written; further records are left out."""
MOST_KNOWN = 1 << 18
"""Most hashes of records that are kept to find duplicates; the oldest are dropped first."""
END_SECONDS = 2.0
"""How long a server that ends waits for the last records to be written."""
FLAGS = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
"""Open a file to append to, but never follow a link."""

Record = dict[str, Any]
"""One line: ``prompt`` or ``messages`` and, where asked for, ``answer``."""


@dataclass(frozen=True)
class Recording:
    """The settings of a recording: up to ``most`` bytes in ``folder``.

    ``redact`` returns the record to write, or None to leave it out.
    """

    folder: Path
    most: int
    answers: bool = False
    redact: Callable[[Record], Record | None] | None = None


class Recorder:
    """Writes records in a thread of its own, so that no request waits for them or fails.

    Attributes:
        records, size: lines and bytes of the file.
        written, duplicates: records written since the start, and skipped as already there.
        stopped: why nothing is written any more: "full" or "failed".

    Raises ConfigError: the file cannot be written to.
    """

    def __init__(self, how: Recording) -> None:
        self.how = how
        self.stopped: str | None = None
        self._given = self._taken = 0  # characters; each is changed by one thread
        self._refused = self._dropped = 0  # records, likewise
        self.written = self.duplicates = 0
        self._told = False
        self._known: dict[bytes, None] = {}
        self._queue: SimpleQueue[list[Record] | None] = SimpleQueue()
        self.records, self.size = check(how.folder, self._know)
        if self.size >= how.most:
            self._stop("full", "it is full")
        self._thread = Thread(target=self._work, name="outrider-record", daemon=True)
        self._thread.start()

    def add(self, records: list[Record]) -> None:
        """Queue records to be written; those that do not fit are left out."""
        size = sum(map(_characters, records))
        if self.stopped or self._given - self._taken + size > MOST_WAITING:
            self._refused += len(records)
            return
        self._given += size
        self._queue.put(records)

    def close(self) -> None:
        """Write the queued records, for at most ``END_SECONDS``."""
        self._queue.put(None)
        self._thread.join(END_SECONDS)

    def state(self) -> dict[str, Any]:
        """Return the state of the recording, without the folder, which clients need not know."""
        return {
            "records": self.records, "bytes": self.size, "max_bytes": self.how.most,
            "answers": self.how.answers, "redacted": self.how.redact is not None,
            "duplicates": self.duplicates, "left_out": self.left_out, "stopped": self.stopped,
        }  # fmt: skip

    @property
    def left_out(self) -> int:
        """The records that came too fast, were redacted away, or found no room."""
        return self._refused + self._dropped

    def told(self) -> str:
        """Return what is recorded, as a line of the greeting."""
        what = "prompts and answers" if self.how.answers else "prompts"
        what = "nothing more" if self.stopped else what
        return (
            f"recording: {what}{', redacted' * (self.how.redact is not None)}, in "
            f"{self.how.folder / FILE} ({self.size:,} of {self.how.most:,} bytes); a call with "
            "store: false stays out"
        )

    def _work(self) -> None:
        while (records := self._queue.get()) is not None:
            before = self.written + self.duplicates
            size = sum(map(_characters, records))
            try:
                lines = [line for record in records if (line := self._line(record)) is not None]
                if lines and not self.stopped:
                    self._write(lines)
            except OSError as error:
                self._stop("failed", f"it cannot be written to ({error.strerror})")
            self._dropped += len(records) - (self.written + self.duplicates - before)
            self._taken += size

    def _line(self, record: Record) -> bytes | None:
        """Return a record, redacted, as it is written; None where it is left out."""
        redact = self.how.redact
        try:
            kept = record if redact is None else redact(record)
            if kept is None:
                return None
            if not isinstance(kept, dict):
                raise TypeError
            item_of(kept, "record_redact")
            return json.dumps(kept, ensure_ascii=False).encode() + b"\n"
        except BaseException as error:  # whatever the operator's code raises, SystemExit too
            if not self._told:
                self._told = True
                # Not its message, which may quote a prompt.
                place = extract_tb(error.__traceback__)[-1]
                where = f"{Path(place.filename).name}, line {place.lineno}"
                logger.warning(
                    "a record is left out: record_redact failed, or returned no valid record "
                    "(%s in %s). This is logged only once.", type(error).__name__, where,
                )  # fmt: skip
            return None

    def _write(self, lines: list[bytes]) -> None:
        """Append lines as far as they fit. Raises OSError: the file cannot be written to."""
        with closing(_Opened(self.how.folder)) as file:
            for line in lines:
                size = file.size()
                if not size:  # a new file has begun
                    self._known.clear()
                    self.records = 0
                if self._is_known(line):
                    self.duplicates += 1
                    continue
                whole = line if file.ends_a_line(size) else b"\n" + line
                if size + len(whole) > self.how.most:
                    self._stop("full", "it is full")
                    return
                file.append(whole, size)
                self._know(line)
                self.records += 1
                self.written += 1
                self.size = size + len(whole)

    def _is_known(self, line: bytes) -> bool:
        return _hash(line) in self._known

    def _know(self, line: bytes) -> None:
        """Remember a line of the file."""
        self._known[_hash(line)] = None
        if len(self._known) > MOST_KNOWN:
            del self._known[next(iter(self._known))]

    def _stop(self, reason: str, told: str) -> None:
        self.stopped = reason
        logger.warning("recording has stopped: %s: %s.", self.how.folder / FILE, told)


class _Opened:
    """The file of records, open to append to; each batch opens it, so that it may be moved away.

    Raises OSError: it cannot be opened, or is no plain file.
    """

    def __init__(self, folder: Path) -> None:
        self.file = os.open(folder / FILE, FLAGS, 0o600)
        try:
            mode = os.fstat(self.file).st_mode
            if not stat.S_ISREG(mode):
                raise OSError(errno.EINVAL, "it is not a regular file")
            if stat.S_IMODE(mode) & 0o077:
                os.fchmod(self.file, 0o600)
        except BaseException:
            self.close()
            raise

    def size(self) -> int:
        """Return the file's bytes, including those that other servers wrote."""
        return os.fstat(self.file).st_size

    def ends_a_line(self, size: int) -> bool:
        """Return whether the file ends with a whole line: a crash may have cut off the last."""
        return not size or os.pread(self.file, 1, size - 1) == b"\n"

    def append(self, line: bytes, size: int) -> None:
        """Append a whole line or nothing. Raises OSError: for example, the disk is full."""
        if os.write(self.file, line) < len(line):
            os.ftruncate(self.file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def close(self) -> None:
        """Close it."""
        os.close(self.file)


def _hash(line: bytes) -> bytes:
    return blake2b(line, digest_size=12).digest()


def check(folder: Path, told: Callable[[bytes], None]) -> tuple[int, int]:
    """Return the lines and bytes recorded in a folder, which is made if it is missing.

    ``told`` is called with each line. Raises ConfigError: nothing can be written there.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        _Opened(folder).close()
        lines = size = 0
        with (folder / FILE).open("rb") as file:
            while line := file.readline(LONGEST_LINE):
                told(line)
                lines, size = lines + line.endswith(b"\n"), size + len(line)
        return lines, size
    except OSError as error:
        raise ConfigError(
            f"record: {folder / FILE} cannot be written to ({error.strerror}); give another folder."
        ) from None


def of_text(prompt: str | None) -> Record | None:
    """Return the record of a prompt; None for one that is empty, too long or no text."""
    return {"prompt": prompt} if prompt and len(prompt) <= LONGEST else None


def of_messages(messages: list[Any]) -> Record | None:
    """Return the record of a conversation; None for one with tools in it, or too long."""
    if any(m.get("role") in ("tool", "function") or m.get("tool_calls") for m in messages):
        return None
    texts = [{"role": m["role"], "content": m["content"]} for m in readable(messages)]
    record = {"messages": texts}
    return record if _characters(record) <= LONGEST else None


def _characters(record: Record) -> int:
    """Return the characters of a record's texts."""
    told = len(record.get("prompt", "")) + len(record.get("answer", ""))
    return told + sum(len(m["content"]) for m in record.get("messages", ()))
