"""The server as a process: start, signals, the end."""

import asyncio
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

import uvicorn

from ..async_llm import AsyncLLM
from ..base.freed_memory import trim_regularly
from ..errors import ConfigError, OutriderError
from .app import create_app
from .http import bounded, files
from .log import log_intervals, logger
from .service import Service
from .settings import Settings
from .shown import short

KEEP_ALIVE_SECONDS = 65
LOOK_SECONDS = 0.05
SIGNALS = (signal.SIGTERM, signal.SIGINT)
LONGEST_DRAIN = 1e6
"""Seconds that stand for an infinite ``shutdown_timeout``: uvicorn needs a whole number."""
END_SECONDS = 10.0
"""Seconds until the process exits even if threads still tokenise; Python would wait for them."""


def listener(host: str, port: int, flag: str) -> socket.socket:
    """Return a socket that listens on an address. Raises ConfigError: it cannot."""
    # asyncio turns Nagle's algorithm off only if the protocol is named. With Nagle, a first token
    # waits for the acknowledgement of the headers, 40 ms on Linux.
    listening = socket.socket(
        socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP
    )
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
        listening.listen()  # two sockets may be bound to one port until the first one listens
    except (OSError, ValueError, TypeError) as error:  # the last two: a host that is no name
        listening.close()
        why = error.strerror if isinstance(error, OSError) else "the host is not a valid name"
        raise ConfigError(
            f"the server cannot listen on {short(host)}:{port} ({why}); give another {flag}."
        ) from None
    return listening


class Server:
    """One server, which runs until a signal, or until its engine cannot be kept alive.

    Port 0 takes a free one; ``say`` shows a line of the greeting.
    Raises ConfigError: the address cannot be listened on.
    """

    def __init__(
        self, llm: AsyncLLM, settings: Settings, host: str, port: int, say: Callable[[str], None]
    ) -> None:
        self.llm = llm
        self.settings = settings
        self.say = say
        self.app = create_app(llm, settings)
        self.service: Service = self.app.state.service
        self.sockets = [listener(host, port, "--port")]
        if settings.metrics_port is not None:
            try:
                self.sockets.append(listener(host, settings.metrics_port, "--metrics-port"))
            except ConfigError:
                self.sockets[0].close()
                raise
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{self.sockets[0].getsockname()[1]}"
        most = files(settings.max_connections)
        if most < settings.max_connections:
            logger.warning("max_connections is %d: the limit on open files allows no more.", most)
        self.uvicorn = uvicorn.Server(
            uvicorn.Config(
                self.app, log_config=None, access_log=False, server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS, ws="none", proxy_headers=False,
                http=bounded(replace(settings, max_connections=most)), lifespan="on",
                timeout_graceful_shutdown=1,
            )
        )  # fmt: skip
        # uvicorn's own handlers would refuse connections at the first signal.
        self.uvicorn.capture_signals = nullcontext  # type: ignore[assignment]
        self.signals = 0
        self.failure: OutriderError | None = None

    def run(self) -> OutriderError | None:
        """Serve until the end; return why it ended, None after a signal."""
        return asyncio.run(self._run())

    async def _run(self) -> OutriderError | None:
        heed(asyncio.get_running_loop(), self._signalled)
        trim_regularly()
        work = [self._watch()]
        if self.settings.log_interval:
            work.append(log_intervals(self.service.metrics, self.settings.log_interval))
        tasks = [asyncio.create_task(each) for each in work]
        try:
            await self.uvicorn.serve(self.sockets)
            # Calls that a second signal cancels are not failures.
            logging.getLogger("uvicorn.error").disabled = True
            for task in tasks:
                task.cancel()
            self.llm.shutdown()
            failure = self.llm.failure or self.failure
            end_within(END_SECONDS, 0 if failure is None else 1)
            return failure
        finally:
            for number in SIGNALS:  # the loop that they would wake is about to close
                signal.signal(number, signal.SIG_IGN)

    async def _watch(self) -> None:
        """Greet when the engine is ready; end the server after a signal or a failure."""
        llm = self.llm
        try:
            greeted = False
            while not (llm.failure or self.signals):
                if llm.ready and not greeted:
                    greeted = True
                    self._greet()
                await asyncio.sleep(LOOK_SECONDS)
            if llm.failure is None:
                await self._drain()
        except Exception as error:
            logger.exception("the server cannot continue")
            self.failure = OutriderError(f"the server cannot continue ({error}); see its log.")
        finally:
            self.uvicorn.should_exit = True

    def _greet(self) -> None:
        """Show the greeting; a failure is logged and does not stop the server."""
        try:
            for line in self.greeting():
                self.say(line)
        except Exception:
            logger.exception("the greeting cannot be shown")

    async def _drain(self) -> None:
        """Wait for running streams until ``shutdown_timeout``, then end the engine."""
        clock = asyncio.get_running_loop().time
        deadline = clock() + self.settings.shutdown_timeout
        while self.llm.live and clock() < deadline:
            await asyncio.sleep(LOOK_SECONDS)
        self.llm.shutdown()  # running streams end with an error event
        # Slow readers have the rest of the time to read what has been written.
        self.uvicorn.config.timeout_graceful_shutdown = round(
            min(max(1.0, deadline - clock()), LONGEST_DRAIN)
        )

    def _signalled(self) -> None:
        """Drain on the first signal, end at once on the second."""
        self.signals += 1
        self.service.draining = True
        if self.signals > 1:
            self.uvicorn.should_exit = self.uvicorn.force_exit = True
            end_within(END_SECONDS, 0)

    def greeting(self) -> list[str]:
        """Return lines on the model, the address, and a call to try."""
        inputs, ready, now = self.llm.inputs, self.llm.ready, self.llm.speculation
        recorder = self.service.recorder
        assert ready is not None
        assert now is not None
        most = now.num_speculative_tokens or ready.max_draft
        drafts = f"{now.drafter}, up to {most} tokens a step"
        drafts += ", chosen by the engine" if self.service.metrics.chosen is not None else ""
        sampling = ", ".join(f"{name} {value}" for name, value in self.settings.defaults.items())
        body = '{"prompt": "def add(a, b):", "max_tokens": 32}'
        return [
            f"model: {self.settings.names[0]} ({inputs.folder}), context {ready.max_model_len}",
            f"drafter: {drafts if now.enabled else 'none'}",
            f"sampling: {sampling or 'temperature 1'} unless a request sets it",
            ready.budget,
            *([] if recorder is None else [recorder.told()]),
            f"listening on {self.address} ({len(self.settings.api_keys) or 'no'} API keys)",
            f"try: curl {self.address}/v1/completions -H 'Content-Type: application/json' "
            f"-d '{body}'",
        ]


def heed(loop: asyncio.AbstractEventLoop, heard: Callable[[], object]) -> None:
    """Call ``heard`` in the loop at each of ``SIGNALS``; two during one C call count as one.

    ``loop.add_signal_handler`` loses a signal while the pipe that wakes the loop is full: a few
    hundred messages of the engine fill it while the loop is busy.
    """
    for number in SIGNALS:
        signal.signal(number, lambda *_: loop.call_soon_threadsafe(heard))
        signal.siginterrupt(number, False)


def end_within(seconds: float, code: int) -> None:
    """End the process after ``seconds``, unless it ends before."""
    timer = threading.Timer(seconds, os._exit, (code,))
    timer.daemon = True
    timer.start()
