"""Peers that say what they are told to, byte by byte if need be."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Answer = Callable[[socket.socket], None]


@contextmanager
def peer(answer: Answer) -> Iterator[tuple[str, list[bytes]]]:
    """Serve connections by ``answer``; give the address and the requests."""
    requests: list[bytes] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                try:
                    requests.append(connection.recv(65536))
                    answer(connection)
                except OSError:
                    pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}", requests
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(10)
    assert not thread.is_alive()


def says(data: bytes) -> Answer:
    return lambda connection: connection.sendall(data)


def drips(start: bytes, again: bytes, pause: float = 0.05) -> Answer:
    def answer(connection: socket.socket) -> None:
        connection.sendall(start)
        while True:
            connection.sendall(again)
            time.sleep(pause)

    return answer
