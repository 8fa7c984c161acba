"""A stderr that neither blocks nor raises: an unread log must not stop a server."""

import atexit
import io
import os
import sys
import threading
import time

MOST_WAITING = 1 << 20
"""Characters that wait for a slow reader; further text is dropped."""
END_SECONDS = 1.0
"""Time for the last lines when the process ends."""
RETRY_SECONDS = 0.05
STDERR = 2


class Stderr(io.TextIOBase):
    """Text for a file descriptor, written by a thread: it may be full, closed or never read."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int) -> None:
        super().__init__()
        self._fd = fd
        self._texts: list[str] = []
        self._waiting = self._dropped = 0
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="outrider-stderr", daemon=True).start()

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def write(self, text: str) -> int:
        """Queue ``text`` for the thread, or drop it if too much is waiting."""
        if not isinstance(text, str):  # click tests streams in this way
            raise TypeError("stderr takes text")
        with self._changed:
            if self._waiting + len(text) > MOST_WAITING:
                self._dropped += 1
            else:
                self._texts.append(text)
                self._waiting += len(text)
                self._changed.notify_all()
        return len(text)

    def drain(self, seconds: float = END_SECONDS) -> None:
        """Wait until all is written, at most ``seconds``."""
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, seconds)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._texts or self._dropped)
                text, self._texts = "".join(self._texts), []
                if self._dropped:
                    text += f"{self._dropped} lines were dropped: stderr was too slow\n"
                    self._dropped = 0
            self._write(text.encode(self.encoding, self.errors))
            with self._changed:
                self._waiting = sum(map(len, self._texts))
                self._changed.notify_all()

    def _write(self, data: bytes) -> None:
        while data:
            try:
                data = data[os.write(self._fd, data) :]
            except BlockingIOError:  # another process made the file non-blocking
                time.sleep(RETRY_SECONDS)
            except OSError:  # full, closed, or without a reader: the text is lost
                return


def guard() -> None:
    """Put a ``Stderr`` in the place of ``sys.stderr`` for the rest of the process."""
    if isinstance(sys.stderr, Stderr):
        return
    try:
        if sys.stderr is None:  # libraries write to its descriptor, so no socket may get it
            fd = os.dup2(os.open(os.devnull, os.O_WRONLY), STDERR)
        else:
            fd = sys.stderr.fileno()
    except (OSError, ValueError):  # a test's stream, which is no file
        return
    safe = sys.stderr = Stderr(fd)
    atexit.register(safe.drain)
