"""Does without Docker what ``docker build`` and ``docker run --read-only`` would do.

    sudo python deploy/rehearse.py                             # torch from PyTorch's index
    sudo python deploy/rehearse.py --build-arg TORCH_INDEX=    # torch from where pip looks anyway

Every line comes from the Dockerfile itself, and one that is not understood ends the script. Each
stage is a folder with a fresh Debian by mmdebstrap; each RUN line runs in it by chroot, with mounts
and processes of its own. The server is then started as its user, as process 1, without
capabilities, on a read-only root and in a network of its own that leads nowhere; the health check
must pass, a completion must come, nothing outside of /tmp may be writable, and SIGTERM must end it
with 0. Nothing stays behind. What pip is told on this machine (pip config list) holds here too.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dockerfile import Ignore, Instruction, Refused, Stage, parse, stages

REPOSITORY = Path(__file__).resolve().parent.parent
TOOLS = {
    "mmdebstrap": "mmdebstrap",
    "unshare": "util-linux",
    "nsenter": "util-linux",
    "mount": "mount",
    "chroot": "coreutils",
    "ip": "iproute2",
}
"""Commands that are called here, each with its package in Debian and Ubuntu."""
PASSED = re.compile(r"(https?|no|all)_proxy", re.IGNORECASE)
"""Variables that Docker hands to RUN lines without being told."""
HOST = "/mnt/host"
START_SECONDS, STOP_SECONDS = 180, 60
TAIL = 60
"""Lines of output that are shown of what failed."""

MOUNTS = """
set -e
root=$1; shift
mount -t proc proc "$root/proc"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"; mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
ln -s /proc/self/fd/0 "$root/dev/stdin"
ln -s /proc/self/fd/1 "$root/dev/stdout"
ln -s /proc/self/fd/2 "$root/dev/stderr"
mkdir "$root/dev/shm"; mount -t tmpfs -o mode=1777,size=64m shm "$root/dev/shm"
"""
BUILD = MOUNTS + 'exec chroot "$root" "$@"'
BUILD_WITH_HOST = (
    MOUNTS
    + f"""
mkdir -p "$root{HOST}"; mount --rbind / "$root{HOST}"; mount -o remount,bind,ro "$root{HOST}"
status=0; chroot "$root" "$@" || status=$?
exit $status"""
)
SERVE = (
    # The root first: what is mounted on it afterwards stays writable.
    """
set -e
mount --bind "$1" "$1"; mount -o remount,bind,ro "$1"
mount -t tmpfs -o mode=1777,noexec,nosuid,nodev tmp "$1/tmp"
mount -t sysfs -o ro sysfs "$1/sys"
ip link set lo up
"""
    + MOUNTS
    + 'exec chroot "$root" "$@"'
)

COMPLETE = """
import json, urllib.request
body = json.dumps({"prompt": "def add(a, b):", "max_tokens": 16, "seed": 1}).encode()
request = urllib.request.Request(
    "http://127.0.0.1:8000/v1/completions", body, {"Content-Type": "application/json"})
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
print(opener.open(request, timeout=60).read().decode())
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
    """A step that failed, in words."""


def step(text: str) -> None:
    """Tell what comes now."""
    print(f"==> {text}", flush=True)


def call(what: str, command: Sequence[str], verbose: bool = False) -> str:
    """Run a command; its output, which ``verbose`` shows as it comes.

    Raises:
        Failed: its exit status is not 0.
    """
    begin, lines = time.monotonic(), []
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, errors="replace",
    ) as process:  # fmt: skip
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                if verbose:
                    print(f"    {line}", end="", flush=True)
        except BaseException:
            process.kill()  # or leaving would wait for its end
            raise
    if process.returncode:
        tail = "" if verbose else "".join(f"    {line}" for line in lines[-TAIL:])
        raise Failed(f"{tail}{what}\n    failed with exit status {process.returncode}")
    print(f"    done, {time.monotonic() - begin:.0f} s", flush=True)
    return "".join(lines)


def pip_settings() -> tuple[dict[str, str], bool]:
    """What pip is told on this machine, as variables; and whether folders of the host are named.

    Those are then seen below ``HOST``, with all that lies beside them, as the pages of an index
    point there.
    """
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        pip = ["pip"]
    listed = subprocess.run([*pip, "config", "list"], capture_output=True, text=True, check=True)
    found: dict[str, tuple[int, str]] = {}
    local = False
    for line in listed.stdout.splitlines():
        key, _, quoted = line.partition("=")
        section, _, name = key.rpartition(".")
        rank = {"global": 0, "install": 1, ":env:": 2}.get(section)
        if rank is None or rank < found.get(name, (0, ""))[0]:
            continue
        words = []
        for word in shlex.split(quoted)[0].split():
            path = word.removeprefix("file://")
            if path.startswith("/") and Path(path).exists():
                local = True
                word = word.replace(path, HOST + str(Path(path).resolve()), 1)
            words.append(word)
        found[name] = rank, " ".join(words)
    variables = {f"PIP_{n.upper().replace('-', '_')}": value for n, (_, value) in found.items()}
    return variables, local


class Rehearsal:
    """The stages as folders below ``scratch``.

    Args:
        scratch: an empty folder for some gigabytes.
        given: arguments of the build, by name.
        verbose: show what commands say.
    """

    def __init__(self, scratch: Path, given: dict[str, str], verbose: bool) -> None:
        self.scratch = scratch
        self.verbose = verbose
        self.given = given
        self.pip, self.with_host = pip_settings()
        self.passed = {n: v for n, v in os.environ.items() if PASSED.fullmatch(n)}
        self.ignore = Ignore((REPOSITORY / ".dockerignore").read_text(encoding="utf-8"))
        self.roots: dict[str, Path] = {}

    def build(self, stage: Stage) -> Path:
        """Do every instruction of a stage; its folder."""
        root = self.roots[stage.name] = self.scratch / f"stage-{stage.name}"
        self._base(stage, root)
        for raw in stage.instructions:
            found = stage.expanded(raw)
            step(f"[{stage.name}] line {found.line}: {found.name} {found.text}")
            if found.name == "RUN":
                self._run(stage, root, found)
            elif found.name == "COPY":
                self._copy(stage, root, found)
            else:
                stage.apply(found, self.given)
                if found.name == "WORKDIR":
                    (root / stage.folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        return root

    def _base(self, stage: Stage, root: Path) -> None:
        """A Debian as the image has it, made once; or another stage."""
        step(f"[{stage.name}] FROM {stage.image}")
        base = self.roots.get(stage.image)
        if base is None:
            suite = re.fullmatch(r"debian:(\w+)-slim", stage.image)
            if suite is None:
                raise Failed(f"{stage.image}: only debian:SUITE-slim can be made here")
            base = self.roots[stage.image] = self.scratch / "base"
            call(
                "mmdebstrap",
                ["mmdebstrap", "--variant=minbase", suite[1], str(base)],
                self.verbose,
            )
        call("cp", ["cp", "--archive", "--reflink=auto", str(base), str(root)])

    def _run(self, stage: Stage, root: Path, found: Instruction) -> None:
        variables = {**self.passed, **self.pip, **stage.environment}
        script = BUILD_WITH_HOST if self.with_host else BUILD
        inside = [*unshared(script), str(root), *as_user(stage, variables, found.command())]
        call(f"line {found.line}: RUN {found.text}", inside, self.verbose)
        if self.with_host:
            (root / HOST.lstrip("/")).rmdir()

    def _copy(self, stage: Stage, root: Path, found: Instruction) -> None:
        *sources, target = found.words()
        if any(re.search(r"[*?\[]", source) for source in sources):
            raise found.refuse("patterns are not known")
        into = root / str(Path(stage.folder, target)).lstrip("/")
        origin = found.options.get("from")
        for source in sources:
            path = self.roots[origin] / source.lstrip("/") if origin else REPOSITORY / source
            if not path.is_dir():
                copied = into / path.name if target.endswith("/") or len(sources) > 1 else into
            else:
                copied = into
            copied.parent.mkdir(parents=True, exist_ok=True)
            if origin:
                end = "/." if path.is_dir() else ""
                copied.mkdir(exist_ok=True) if path.is_dir() else None
                call("cp", ["cp", "--archive", f"{path}{end}", str(copied)])
            else:
                self._from_context(path, copied, found)

    def _from_context(self, path: Path, copied: Path, found: Instruction) -> None:
        files = [path] if path.is_file() else [p for p in path.rglob("*") if p.is_file()]
        kept = [file for file in files if not self.ignore(file.relative_to(REPOSITORY))]
        if not kept:
            raise found.refuse(f"{path.name} is not there, or .dockerignore keeps it out")
        for file in kept:
            to = copied if file == path else copied / file.relative_to(path)
            to.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(file, to)
        print(f"    {len(kept)} files", flush=True)


def unshared(script: str, *options: str) -> list[str]:
    """A command that runs a script as root, with mounts and processes of its own, and its end."""
    namespaces = ["--mount", "--pid", "--fork", "--kill-child", *options]
    return ["unshare", *namespaces, "/bin/sh", "-c", script, "sh"]


def as_user(stage: Stage, variables: dict[str, str], command: list[str]) -> list[str]:
    """A command as the stage's user, in its folder, with these variables and no others."""
    uid, gid = stage.user.split(":")
    who = ["setpriv", f"--reuid={uid}", f"--regid={gid}", "--clear-groups", "--no-new-privs"]
    if uid != "0":
        who += ["--bounding-set=-all", "--inh-caps=-all"]
    set_ = [f"{name}={value}" for name, value in variables.items()]
    return ["/usr/bin/env", "-i", f"--chdir={stage.folder}", *set_, *who, *command]


class Container:
    """A stage's entrypoint and command on a read-only root, as ``docker run --read-only``."""

    def __init__(self, stage: Stage, root: Path) -> None:
        self.stage = stage
        command = as_user(stage, stage.variables, [*stage.entrypoint, *stage.command])
        self.process = subprocess.Popen(
            [*unshared(SERVE, "--net"), str(root), *command], stdin=subprocess.DEVNULL
        )

    @property
    def pid(self) -> int:
        """Of its process 1, seen from here."""
        own = self.process.pid
        return int(Path(f"/proc/{own}/task/{own}/children").read_text().split()[0])

    def execute(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command beside it, as ``docker exec``."""
        enter = ["nsenter", f"--target={self.pid}", "--mount", "--pid", "--net", "--root"]
        inside = as_user(self.stage, self.stage.variables, command)
        return subprocess.run([*enter, *inside], capture_output=True, text=True, timeout=90)

    def wait_healthy(self) -> float:
        """Seconds until the health check passes.

        Raises:
            Failed: it does not, or the server ends.
        """
        begin = time.monotonic()
        while True:
            time.sleep(0.5)
            if self.process.poll() is not None:
                raise Failed(f"it ended by itself with exit status {self.process.returncode}")
            done = self.execute(self.stage.health)
            if done.returncode == 0:
                return time.monotonic() - begin
            if time.monotonic() - begin > START_SECONDS:
                raise Failed(f"not healthy after {START_SECONDS} s:\n{done.stderr}")

    def python(self, code: str) -> str:
        """What a Python program inside says.

        Raises:
            Failed: its exit status is not 0.
        """
        done = self.execute(["python", "-c", code])
        if done.returncode:
            raise Failed(done.stderr)
        return done.stdout.strip()

    def status(self) -> dict[str, str]:
        """What the kernel says of process 1."""
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        return {
            name: " ".join(value.split()) for name, _, value in (x.partition(":") for x in lines)
        }


@contextmanager
def running(stage: Stage, root: Path) -> Iterator[Container]:
    """A container that does not outlive the block."""
    container = Container(stage, root)
    try:
        yield container
    finally:
        container.process.kill()  # --kill-child takes all that runs inside along
        container.process.wait()


def try_out(stage: Stage, root: Path) -> None:
    """Start the image, use it, end it.

    Raises:
        Failed: something is not as it must be.
    """
    step(f"run {shlex.join([*stage.entrypoint, *stage.command])} as {stage.user}, read-only root")
    with running(stage, root) as container:
        seconds = container.wait_healthy()
        step(f"HEALTHCHECK passes after {seconds:.1f} s")
        status = container.status()
        step("process 1: " + ", ".join(f"{n} {status[n]}" for n in ("Uid", "Gid", "CapEff")))
        if set(status["Uid"].split()) != {stage.user.split(":")[0]} or int(status["CapEff"], 16):
            raise Failed("it has more rights than it should")
        writable = container.python(WRITABLE)
        step(f"writable: {writable}")
        if writable != "/tmp":
            raise Failed("more than /tmp is writable")
        # A server that loads is alive already, and answers when it is ready.
        answer = ask(container)
        step(f"a completion: {json.dumps(answer['choices'][0]['text'])} {answer['usage']}")
        written = container.python("import os; print(*os.listdir('/tmp'))")
        step(f"the server wrote to /tmp: {written or 'nothing'}")
        step("SIGTERM to process 1")
        begin = time.monotonic()
        os.kill(container.pid, signal.SIGTERM)
        try:
            code = container.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            raise Failed(f"it still runs {STOP_SECONDS} s after SIGTERM") from None
        step(f"exit status {code} after {time.monotonic() - begin:.1f} s")
        if code:
            raise Failed(f"the exit status is {code}, not 0")


def ask(container: Container) -> dict[str, Any]:
    """The answer to a small request, as soon as there is one.

    Raises:
        Failed: none came in time.
    """
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            answer: dict[str, Any] = json.loads(container.python(COMPLETE))
            return answer
        except Failed as error:
            if "503" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.5)


def missing() -> str | None:
    """What keeps this script from running here, in one sentence; None for nothing."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "The rehearsal needs root on Linux: it mounts and changes users."
    packages = sorted({package for tool, package in TOOLS.items() if not shutil.which(tool)})
    if packages:
        return f"The rehearsal needs tools that are not here: apt-get install {' '.join(packages)}"
    return None


def main() -> int:
    """Build and try; 0 where everything went well."""
    parser = argparse.ArgumentParser(description="Build and run the Dockerfile without Docker.")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--scratch", help="an existing folder for 4 GB, instead of the usual one")
    parser.add_argument("--verbose", action="store_true", help="show what each line says")
    options = parser.parse_args()
    if why := missing():
        print(why, file=sys.stderr)
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the folder is removed
    given = dict(pair.partition("=")[::2] for pair in options.build_arg)
    try:
        found = stages(parse((REPOSITORY / "Dockerfile").read_text(encoding="utf-8")), given)
        with tempfile.TemporaryDirectory(prefix="outrider-", dir=options.scratch) as scratch:
            rehearsal = Rehearsal(Path(scratch), given, options.verbose)
            for stage in found:
                root = rehearsal.build(stage)
            size = call("du", ["du", "--summarize", "--block-size=MB", str(root)]).split()[0]
            step(f"the image holds {size}")
            try_out(found[-1], root)
    except (Failed, Refused) as error:
        print(f"FAILED: {error}", file=sys.stderr)
        return 1
    step("everything in the Dockerfile works")
    return 0


if __name__ == "__main__":
    sys.exit(main())
