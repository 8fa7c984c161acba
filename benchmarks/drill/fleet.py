"""Two servers, HAProxy, Prometheus and a guard, each in a process of its own."""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any
from urllib.request import Request, urlopen

from outrider import pocket
from outrider.errors import ConfigError

from ..served import Served

HERE = Path(__file__).parent
BINARIES = {"haproxy": "haproxy", "prometheus": "prometheus"}
"""By name: the package of Debian's that brings it."""
PORTS = {
    "engine": 0, "standby": 0, "api": 0, "proxy_metrics": 0, "guard": 0, "exporter": 0,
    "prometheus": 9090,
}  # fmt: skip
"""By name: the port that is taken if it is free, 0 for any."""
WAIT_SECONDS = 120.0
DRAFT_LENGTH = 4


@dataclass(frozen=True)
class Pace:
    """A drill's pace: seconds between evaluations and scrapes, and of a window."""

    interval: float
    window: float
    scrape: float


SHORT = Pace(1.0, 6.0, 1.0)
LONG = Pace(5.0, 30.0, 2.0)


def missing() -> str | None:
    """Return what must be installed before a drill; None for nothing."""
    lacking = [package for name, package in BINARIES.items() if find(name) is None]
    return f"apt-get install {' '.join(lacking)}" if lacking else None


def find(name: str) -> str | None:
    """Return where a program is, in Debian's place for servers, too."""
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/usr/local/sbin")


def free_ports(wanted: Mapping[str, int]) -> dict[str, int]:
    """Return ports that nobody listens on, by name: the wanted ones where these are free."""
    ports: dict[str, int] = {}
    with ExitStack() as held:  # until all are found, so that no two are the same
        for name, port in wanted.items():
            one = held.enter_context(socket.socket())
            try:
                one.bind(("127.0.0.1", port))
            except OSError:
                one.bind(("127.0.0.1", 0))
            ports[name] = int(one.getsockname()[1])
    return ports


def until(true: Callable[[], object], what: str, seconds: float = WAIT_SECONDS) -> float:
    """Wait until something is true; the seconds that took."""
    begin = time.monotonic()
    while True:
        with suppress(OSError, KeyError, ValueError):
            if true():
                return time.monotonic() - begin
        if time.monotonic() - begin > seconds:
            raise ConfigError(f"the drill waited {seconds:.0f} s for this: {what}.")
        time.sleep(0.05)


class Fleet(AbstractContextManager["Fleet", None]):
    """All processes of a drill; as a context they are killed at the end.

    Args:
        folder: of configs, logs and the guard's state.
        drafter: of the speculative server.
    """

    def __init__(self, folder: Path, drafter: Path, pace: Pace) -> None:
        self.folder, self.drafter, self.pace = folder, drafter, pace
        self._others: dict[str, subprocess.Popen[bytes]] = {}
        self.engine: Served | None = None
        self.standby: Served | None = None
        self.values: dict[str, Any] = {
            "folder": folder / "guard", "socket": folder / "haproxy.sock",
            "interval": pace.interval, "window": pace.window, "wait": pace.window * 1.5,
            "scrape": f"{pace.scrape:g}s", "slow": 5.0, "good": 3.0,
            **free_ports(PORTS),
        }  # fmt: skip

    def __enter__(self) -> Fleet:
        try:
            self.standby = self._serve("standby", "--drafter", "none")
            self.start_engine()
            self._start("haproxy", "-db", "-f", self._write("haproxy.cfg"))
            self._start_exporter()
            self.start_prometheus()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._others):
            self.kill(name)
        for server in (self.engine, self.standby):
            if server is not None:
                server.stop(signal.SIGKILL)

    @property
    def url(self) -> str:
        """Return the address that clients send requests to, HAProxy's."""
        return f"http://127.0.0.1:{self.values['api']}"

    @property
    def policy(self) -> Path:
        """The guard's policy."""
        return self.folder / "policy.toml"

    def _write(self, name: str) -> Path:
        text = (HERE / name).read_text(encoding="utf-8")
        (self.folder / name).write_text(Template(text).substitute(self.values), encoding="utf-8")
        return self.folder / name

    def _serve(self, name: str, *arguments: str | Path) -> Served:
        return Served(
            pocket.PATH, "--port", str(self.values[name]), "--max-num-seqs", "8", *arguments,
            OMP_NUM_THREADS="1",
        )  # fmt: skip

    def start_engine(self) -> None:
        """Start the speculative server, at the same address every time."""
        length = str(DRAFT_LENGTH)
        self.engine = self._serve(
            "engine", "--drafter", self.drafter, "--num-speculative-tokens", length
        )

    def kill_engine(self) -> None:
        """End the speculative server as kill -9 does."""
        assert self.engine is not None
        self.engine.stop(signal.SIGKILL)

    def start_prometheus(self) -> None:
        """Start Prometheus, with its data from before."""
        self._start(
            "prometheus", f"--config.file={self._write('prometheus.yml')}",
            f"--storage.tsdb.path={self.folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{self.values['prometheus']}",
        )  # fmt: skip
        ready = f"{self.prometheus}/-/ready"
        until(lambda: urlopen(ready, timeout=1).status == 200, "Prometheus is ready")

    @property
    def prometheus(self) -> str:
        """Prometheus' address: port 9090, if it was free."""
        return f"http://127.0.0.1:{self.values['prometheus']}"

    def _start_exporter(self) -> None:
        """Start the exporter, at a port that is not Prometheus' own."""
        engine, standby = (f"http://127.0.0.1:{self.values[x]}" for x in ("engine", "standby"))
        self._outrider(
            "exporter", "ops", "alerts", "exporter", engine, "--standby", standby, "--port",
            str(self.values["exporter"]), "--interval", f"{self.pace.scrape:g}s",
        )  # fmt: skip

    def tell_guard(self, *words: str) -> None:
        """Say something to the guard as a person does."""
        command = [sys.executable, "-m", "outrider", "ops", "guard", *words]
        command += ["--policy", str(self.policy)]
        subprocess.run(command, check=True, capture_output=True)

    def start_guard(self, name: str = "guard") -> None:
        """Start the guard; under another name it has a folder of its own."""
        self.values["folder"] = self.folder / name
        self._write("policy.toml")
        begin = time.time()
        self._outrider("guard", "ops", "guard", "run", "--policy", str(self.policy))
        until(lambda: (self.status() or {"time": 0})["time"] > begin, "the guard evaluates")

    def _outrider(self, name: str, *arguments: str) -> None:
        self._start_process(name, [sys.executable, "-m", "outrider", *arguments])

    def _start(self, name: str, *arguments: str | Path) -> None:
        self._start_process(name, [str(find(name)), *map(str, arguments)])

    def _start_process(self, name: str, command: list[str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self._others[name] = subprocess.Popen(command, stdout=log, stderr=log)

    def kill(self, name: str) -> None:
        """End HAProxy, Prometheus, the exporter or the guard as kill -9 does."""
        process = self._others.pop(name, None)
        if process is not None:
            process.kill()
            process.wait()

    def status(self) -> dict[str, Any] | None:
        """Return what the guard shows; None before its first evaluation."""
        try:
            text = (self.values["folder"] / "status.json").read_text(encoding="utf-8")
        except FileNotFoundError:
            return None
        shown: dict[str, Any] = json.loads(text)
        return shown

    def mode(self) -> str:
        """Return the guard's state."""
        return str((self.status() or {"mode": "none"})["mode"])

    def audit(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Return the audit's entries from a time on."""
        file = self.values["folder"] / "audit.jsonl"
        lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
        return [entry for entry in map(json.loads, lines) if entry["time"] >= since]

    def done(self, since: float = 0.0) -> list[dict[str, Any]]:
        """Return what the guard changed from a time on."""
        return [entry for entry in self.audit(since) if entry["kind"] == "done"]

    def set_speculation(self, **fields: Any) -> None:
        """Set the engine's switch as its operator."""
        self.ask("/v1/speculation", fields)

    def ask(self, path: str, body: dict[str, Any]) -> None:
        """Send something to the engine itself."""
        url = f"http://127.0.0.1:{self.values['engine']}{path}"
        headers = {"Content-Type": "application/json"}
        with urlopen(Request(url, json.dumps(body).encode(), headers), timeout=10) as answer:
            answer.read()
