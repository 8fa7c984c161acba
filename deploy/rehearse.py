"""Builds the images and runs them as in production, without a Docker daemon: buildah and runc.

    sudo python deploy/rehearse.py
    sudo python deploy/rehearse.py --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu

All arguments are passed to ``buildah build``. Server and guard then run as the image's user and
process 1, without capabilities, on a read-only root and in an isolated network. The server must
pass its health check and answer a completion request. The guard must publish metrics for
Prometheus. Only /tmp may be writable, and both must exit with 0 after SIGTERM. Image sizes are
limited; the limit for the server applies only without torch. The images are removed, their base
image is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = ("buildah", "runc")
START_SECONDS, STOP_SECONDS = 180, 60
SERVER_MB, GUARD_MB = 350, 120
TMP = {
    "destination": "/tmp", "type": "tmpfs", "source": "tmp",
    "options": ["mode=1777", "noexec", "nosuid", "nodev"],
}  # fmt: skip
COMPLETE = """
import json, urllib.request
body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 16, "seed": 1}).encode()
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(request, timeout=60).read().decode())
"""
POLICY = """
folder = "/tmp/guard"
listen = "127.0.0.1:9109"
interval = 0.5
[engine]
url = "http://127.0.0.1:8000"
"""
FIGURES = """
import http.client
connection = http.client.HTTPConnection("127.0.0.1", 9109)
connection.request("GET", "/metrics")
figures = connection.getresponse().read().decode()
assert "outrider_guard_" in figures
print(figures)
"""
WRITABLE = """
import os
found = []
for folder, below, _ in os.walk("/"):
    if folder in ("/proc", "/sys", "/dev"):
        below.clear()
    elif os.access(folder, os.W_OK):
        found.append(folder)
        below.clear()
print(*found)
"""


class Failed(Exception):
    """A step failed; the message says why."""


def call(*command: str | Path) -> str:
    """Return what a command prints.

    Raises:
        Failed: its exit status is not 0.
    """
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise Failed(f"{' '.join(map(str, command))[:100]}: {done.stderr[-3000:]}")
    return done.stdout.strip()


def build(scratch: Path, target: str, arguments: Sequence[str]) -> str:
    """Build an image and return its id.

    Raises:
        Failed: a line of the Dockerfile failed.
    """
    file = scratch / "image"
    options = ("--format", "docker", "--isolation", "chroot", "--layers=false", "--iidfile", file)
    command = ["buildah", "build", "--target", target, *map(str, options), *arguments]
    if subprocess.call([*command, str(REPOSITORY)]):
        raise Failed("the image cannot be built.")
    return file.read_text().strip()


def bundle(scratch: Path, root: str, config: dict[str, Any], words: Sequence[str]) -> None:
    """Write what runc runs: the image's program on a read-only root, without capabilities."""
    call("runc", "spec", "--bundle", scratch)
    spec = json.loads((scratch / "config.json").read_text())
    user, group = map(int, config["User"].split(":"))
    spec["root"] = {"path": root, "readonly": True}
    spec["process"] = {
        "args": [*config["Entrypoint"], *words], "env": config["Env"],
        "cwd": config["WorkingDir"], "user": {"uid": user, "gid": group},
        "capabilities": {}, "noNewPrivileges": True,
    }  # fmt: skip
    policy = scratch / "policy.toml"
    policy.write_text(POLICY)
    given = {"destination": "/policy.toml", "source": str(policy), "options": ["bind", "ro"]}
    spec["mounts"] = [*(m for m in spec["mounts"] if m["type"] != "cgroup"), TMP, given]
    (scratch / "config.json").write_text(json.dumps(spec))


@contextmanager
def running(scratch: Path, name: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the bundle under a name until the block ends."""
    process = subprocess.Popen(
        ["runc", "run", "--bundle", str(scratch), name], stdin=subprocess.DEVNULL
    )
    try:
        yield process
    finally:
        subprocess.call(["runc", "delete", "--force", name], stderr=subprocess.DEVNULL)
        process.wait()


def until(what: str, process: subprocess.Popen[bytes], *command: str) -> str:
    """Repeat a command until it succeeds, and return what it prints.

    Raises:
        Failed: it does not succeed in time, or the process ends.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            return call(*command)
        except Failed as error:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"{what}: {error}") from None
            time.sleep(0.5)


def try_out(scratch: Path, config: dict[str, Any], use: Callable[..., None]) -> None:
    """Start an image, use it and stop it.

    Raises:
        Failed: a check failed.
    """
    name = scratch.name
    with running(scratch, name) as process:
        use(process, name, config)
        pid = json.loads(call("runc", "state", name))["pid"]
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        status = dict(line.split(":\t", 1) for line in lines)
        user = config["User"].partition(":")[0]
        print(f"==> process 1: Uid {status['Uid']}, CapEff {status['CapEff']}", flush=True)
        if set(status["Uid"].split()) != {user} or user == "0" or int(status["CapEff"], 16):
            raise Failed("it has more rights than it should")
        writable = call("runc", "exec", name, "python", "-c", WRITABLE)
        if writable != "/tmp":
            raise Failed(f"more than /tmp is writable: {writable}")
        call("runc", "kill", name, "TERM")
        try:
            code = process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failed(f"it is still running {STOP_SECONDS} s after SIGTERM") from None
        if code:
            raise Failed(f"the exit status is {code}, not 0")


def use_server(process: subprocess.Popen[bytes], name: str, config: dict[str, Any]) -> None:
    """Wait for the health check, then for a completion; a server is alive before it is ready."""
    until("the health check", process, "runc", "exec", name, *config["Healthcheck"]["Test"][1:])
    complete = ("runc", "exec", name, "python", "-c", COMPLETE)
    answer = json.loads(until("a completion", process, *complete))
    print(f"==> a completion: {json.dumps(answer['choices'][0]['text'])}", flush=True)


def use_guard(process: subprocess.Popen[bytes], name: str, config: dict[str, Any]) -> None:
    """Wait until the guard publishes its metrics."""
    figures = until("the figures", process, "runc", "exec", name, "python", "-c", FIGURES)
    print(f"==> {figures.count(chr(10))} lines for Prometheus", flush=True)


def rehearse(
    target: str, words: Sequence[str], use: Callable[..., None], most: int | None,
    arguments: Sequence[str],
) -> None:  # fmt: skip
    """Build an image of at most ``most`` MB, and run its program with the arguments ``words``.

    Raises:
        Failed: a check failed.
    """
    with tempfile.TemporaryDirectory(prefix="outrider-") as place:
        scratch = Path(place)
        image = build(scratch, target, arguments)
        config = json.loads(call("buildah", "inspect", "--type", "image", image))["Docker"]
        container = call("buildah", "from", "--pull=never", image)
        try:
            root = call("buildah", "mount", container)
            size = int(call("du", "--summarize", "--bytes", root).split()[0]) / 1e6
            print(f"==> {target}: {size:.0f} MB", flush=True)
            if most is not None and size > most:
                raise Failed(f"the image is larger than {most} MB")
            bundle(scratch, root, config["config"], words)
            try_out(scratch, config["config"], use)
        finally:
            call("buildah", "rm", container)
            call("buildah", "rmi", image)


def missing() -> str | None:
    """Return in one sentence why this script cannot run here, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "The rehearsal needs root on Linux, because it mounts folders and changes users."
    tools = [tool for tool in TOOLS if not shutil.which(tool)]
    if tools:
        return f"The rehearsal needs missing tools: apt-get install {' '.join(tools)}"
    return None


def main() -> int:
    """Build and try the images; return 0 if everything went well."""
    if why := missing():
        print(why, file=sys.stderr)
        return 1
    arguments = sys.argv[1:]
    most = None if any("TORCH_INDEX=" in word for word in arguments) else SERVER_MB
    try:
        rehearse("server", ["serve"], use_server, most, arguments)
        guard = ["ops", "guard", "run", "--policy", "/policy.toml"]
        rehearse("guard", guard, use_guard, GUARD_MB, arguments)
    except Failed as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    print("==> everything in the Dockerfile works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
