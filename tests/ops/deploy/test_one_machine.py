"""Two servers on one machine: HAProxy before them, systemd units, and the compose file."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from benchmarks.drill.fleet import free_ports
from outrider.server.options import BY_NAME, OPTIONS, resolve
from tests.support import REPOSITORY

DEPLOY = REPOSITORY / "deploy"
CONFIG = DEPLOY / "bare-metal" / "haproxy.cfg"
haproxy = shutil.which("haproxy") or shutil.which("haproxy", path="/usr/sbin:/usr/local/sbin")
needs_haproxy = pytest.mark.skipif(haproxy is None, reason="needs haproxy")
TRACKS = ("speculative", "plain")


class Stub:
    """A server that answers with its name; ``ready`` is the status of /ready."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.ready = 200
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(stub.ready if self.path == "/ready" else 200)
                self.send_header("Content-Length", str(len(name)))
                self.end_headers()
                self.wfile.write(name.encode())

            def log_message(self, *_: object) -> None:
                return

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                return  # a check that HAProxy gave up

        self.http = Server(("127.0.0.1", port), Handler)
        self.port = self.http.server_port
        threading.Thread(target=self.http.serve_forever, args=(0.02,), daemon=True).start()

    def end(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class Proxy:
    """HAProxy with the recipe's config before two servers: stubs unless ports are given."""

    def __init__(self, folder: Path, ports: dict[str, int] | None = None) -> None:
        self.stubs = {} if ports else {name: Stub(name) for name in TRACKS}
        # HAProxy inherits its sockets: it shares ports that it binds itself with other HAProxys.
        self.sockets = [socket.socket(), socket.socket()]
        for each in self.sockets:
            each.bind(("127.0.0.1", 0))
        clients, numbers = [each.fileno() for each in self.sockets]
        self.port = self.sockets[0].getsockname()[1]
        self.socket = folder / "admin.sock"
        ports = ports or {name: stub.port for name, stub in self.stubs.items()}
        addresses = {name.upper(): f"127.0.0.1:{port}" for name, port in ports.items()}
        self.process = subprocess.Popen(
            [str(haproxy), "-f", str(CONFIG)],
            env={
                **os.environ, **addresses, "CLIENTS": f"fd@{clients}",
                "NUMBERS": f"fd@{numbers}", "HAPROXY_SOCKET": str(self.socket),
            },
            pass_fds=(clients, numbers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        until(
            lambda: self.answers(1).total() > 0 and "ConnectionRefusedError" not in self.answers(1)
        )

    def answers(self, calls: int) -> Counter[str]:
        """Who answered, by name; errors by their type."""
        found: Counter[str] = Counter()
        for _ in range(calls):
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
            try:
                connection.request("GET", "/v1/models")
                found[connection.getresponse().read().decode()] += 1
            except OSError as error:
                found[type(error).__name__] += 1
            finally:
                connection.close()
        return found

    def command(self, text: str) -> str:
        """What HAProxy answers to a command of its runtime API."""
        with socket.socket(socket.AF_UNIX) as api:
            api.connect(str(self.socket))
            api.sendall(f"{text}\n".encode())
            return api.recv(65536).decode().strip()

    def share(self, speculative: int) -> None:
        """Set the weights, as the guard does."""
        assert self.command(f"set server engines/speculative weight {speculative}") == ""
        assert self.command(f"set server engines/plain weight {100 - speculative}") == ""

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for each in self.sockets:
            each.close()
        for stub in self.stubs.values():
            stub.end()


def until(holds: Callable[[], bool], seconds: float = 30.0) -> None:
    """Wait until something holds."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[Proxy]:
    found = Proxy(tmp_path)
    yield found
    found.end()


@needs_haproxy
def test_weights_share_the_traffic(proxy: Proxy) -> None:
    assert proxy.answers(50) == {"speculative": 50}
    proxy.share(25)
    shared = proxy.answers(400)
    # Of 400 calls a share of 25 % gives 60 to 140, but for once in a million times.
    assert 55 < shared["speculative"] < 145
    assert shared.total() == shared["speculative"] + shared["plain"]
    proxy.share(0)
    assert proxy.answers(50) == {"plain": 50}


@needs_haproxy
def test_a_server_that_dies_costs_no_new_request(proxy: Proxy) -> None:
    port = proxy.stubs["speculative"].port
    proxy.stubs["speculative"].end()
    # The standby has no weight, and no check has missed it yet.
    assert proxy.answers(50) == {"plain": 50}
    proxy.stubs["speculative"] = Stub("speculative", port)
    until(lambda: proxy.answers(1) == {"speculative": 1})


@needs_haproxy
def test_a_server_that_drains_gets_no_new_request(proxy: Proxy) -> None:
    proxy.stubs["speculative"].ready = 503
    until(lambda: proxy.answers(1) == {"plain": 1})
    proxy.stubs["speculative"].ready = 200
    until(lambda: proxy.answers(1) == {"speculative": 1})
    assert proxy.command("set server engines/speculative state drain") == ""
    assert proxy.answers(20) == {"plain": 20}


@needs_haproxy
@pytest.mark.parametrize("where", ["bare metal", "compose"])
def test_haproxy_takes_the_config(where: str) -> None:
    gateway = compose()["services"]["gateway"] if where == "compose" else {}
    environment = {**os.environ, **gateway.get("environment", {})}
    command = [str(haproxy), "-c", "-f", str(CONFIG)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((DEPLOY / "compose/compose.yaml").read_text("utf-8"))
    return found


def test_the_compose_file_hangs_together() -> None:
    services = compose()["services"]
    assert set(services) == {*TRACKS, "gateway", "guard"}
    gateway = services["gateway"]
    (subnet,) = compose()["networks"]["engines"]["ipam"]["config"]
    for track in TRACKS:
        service = services[track]
        address = service["networks"]["engines"]["ipv4_address"]
        assert gateway["environment"][track.upper()] == f"{address}:8000"
        assert address.startswith(subnet["subnet"].removesuffix("0/24"))
        assert "ports" not in service
        command, *flags = service["command"]
        assert command == "serve"
        given = dict(flag.split("=") for flag in flags)
        assert set(given) <= {option.flag for option in OPTIONS}
        grace = float(service["stop_grace_period"].removesuffix("s"))
        assert grace > BY_NAME["shutdown_timeout"].default
        compile(service["healthcheck"]["test"][-1], "healthcheck", "exec")
    assert services["plain"]["command"][-1] == "--drafter=none"
    assert all(port.startswith("127.0.0.1:") for port in gateway["ports"])
    for service in services.values():
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
    (mounted,) = gateway["volumes"]
    assert (DEPLOY / "compose" / mounted.split(":")[0]).resolve() == CONFIG


def test_the_guards_policies_name_what_there_is() -> None:
    policies = pytest.importorskip("outrider.ops.guard.policy", reason="needs outrider ops guard")
    backend = re.search(r"(?m)^backend (\w+)$", CONFIG.read_text("utf-8"))
    servers = re.findall(r"(?m)^    server (\w+) ", CONFIG.read_text("utf-8"))
    for place in ("bare-metal", "compose"):
        policy = policies.read(DEPLOY / place / "guard.toml")
        assert policy.traffic.backend == backend[1]
        assert [policy.traffic.engine, policy.traffic.standby] == servers[:2]
    gateway = compose()["services"]["gateway"]["environment"]
    urls = [policy.engine.url, policy.standby.url]
    assert urls == [f"http://{gateway[track.upper()]}" for track in TRACKS]
    assert policy.traffic.address == "tcp:gateway:" + gateway["HAPROXY_SOCKET"].rpartition(":")[2]
    alone = policies.read(DEPLOY / "bare-metal" / "guard.toml")
    text = CONFIG.read_text("utf-8")
    assert alone.traffic.address.removeprefix("unix:") in text
    for track, url in zip(TRACKS, [alone.engine.url, alone.standby.url], strict=True):
        assert f"${{{track.upper()}-{url.removeprefix('http://')}}}" in text


def environment_of(track: str) -> dict[str, str]:
    text = (DEPLOY / "bare-metal" / f"{track}.env").read_text("utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return dict(line.split("=", 1) for line in lines)


def test_both_units_read_one_config_and_listen_where_haproxy_looks(tmp_path: Path) -> None:
    defaults = dict(re.findall(r"\$\{(\w+)-([^}]*)\}", CONFIG.read_text("utf-8")))
    file = tmp_path / "outrider.toml"
    file.write_text('model = "/srv/models/target"\ndrafter = "/srv/models/drafter"\n', "utf-8")
    for track in TRACKS:
        environment = environment_of(track)
        assert environment.pop("OUTRIDER_CONFIG") == "/etc/outrider/outrider.toml"
        chosen = resolve({}, environment, file)
        assert chosen["model"].value == "/srv/models/target"
        assert defaults[track.upper()] == f"{chosen['host'].value}:{chosen['port'].value}"
        drafter = "none" if track == "plain" else "/srv/models/drafter"
        assert chosen["drafter"].value == drafter


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
@pytest.mark.parametrize("name", [*TRACKS, "guard"])
def test_systemd_understands_the_units(name: str, tmp_path: Path) -> None:
    unit = "bare-metal/outrider-guard.service" if name == "guard" else "outrider.service"
    text = (DEPLOY / unit).read_text("utf-8")
    # One file by two names reads two environments.
    assert name == "guard" or "EnvironmentFile=-/etc/outrider/%N.env\n" in text
    file = tmp_path / f"outrider-{name}.service"
    file.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text), "utf-8")
    command = ["systemd-analyze", "verify", "--recursive-errors=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@needs_haproxy
def test_an_upgrade_loses_nothing_and_a_death_only_what_it_ran(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path
) -> None:
    from benchmarks.served import Served

    def track(drafter: str | Path, port: int) -> Served:
        return Served(tiny_llama, "--drafter", drafter, "--port", str(port))

    def ask() -> str:
        """Return the text of a completion, or what went wrong."""
        connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=60)
        body = '{"prompt": "def", "max_tokens": 24, "seed": 7, "ignore_eos": true}'
        try:
            connection.request(
                "POST", "/v1/completions", body, {"Content-Type": "application/json"}
            )
            answer = connection.getresponse()
            text = answer.read().decode()
            if answer.status != 200:
                return f"{answer.status}: {text}"
            return "" if json.loads(text)["usage"]["completion_tokens"] == 24 else text
        except OSError as error:
            return f"lost: {error!r}"
        finally:
            connection.close()

    def load() -> None:
        while not ended.is_set():
            outcomes.append(ask())

    ports = free_ports(dict.fromkeys(TRACKS, 0))
    outcomes: list[str] = []
    ended = threading.Event()
    with track(tiny_drafter, ports["speculative"]) as old, track("none", ports["plain"]):
        proxy = Proxy(tmp_path, ports)
        clients = [threading.Thread(target=load) for _ in range(4)]
        for client in clients:
            client.start()
        try:
            until(lambda: len(outcomes) > 20)
            # Upgraded: out of the traffic first, then ended.
            assert proxy.command("set server engines/speculative state drain") == ""
            until(lambda: metric(old.url, "vllm:num_requests_running") == 0)
            assert old.stop() == 0
            with track(tiny_drafter, ports["speculative"]) as new:
                until(lambda: page(new.url, "/ready")[0] == 200)
                assert proxy.command("set server engines/speculative state ready") == ""
                until(lambda: metric(new.url, "vllm:request_success_total") > 10)
                assert [each for each in outcomes if each] == []
                # Killed: what the clients had there is lost, and what reached its socket meanwhile.
                before = len(outcomes)
                new.process.kill()
                until(lambda: len(outcomes) > before + 40)
        finally:
            ended.set()
            for client in clients:
                client.join()
            proxy.end()
    lost = [each for each in outcomes if each]
    assert len(lost) <= 2 * len(clients)
    assert all(each.startswith(("lost", "502")) for each in lost)


def page(url: str, path: str) -> tuple[int, str]:
    """The status and the text of a page."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=10)
    with closing(connection):
        connection.request("GET", path)
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def metric(url: str, name: str) -> float:
    """The sum of a metric's samples."""
    lines = page(url, "/metrics")[1].splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
