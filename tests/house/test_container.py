"""The Dockerfile, its rehearsal, and the systemd unit; the rehearsal itself is slow."""

from __future__ import annotations

import configparser
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import pytest

from deploy.rehearse import missing
from outrider.server.options import BY_NAME, OPTIONS
from tests.support import REPOSITORY

UNIT = REPOSITORY / "deploy" / "outrider.service"
# The Dockerfile without comments, a line an instruction.
TEXT = re.sub(
    r"\\\n\s*", "", re.sub(r"(?m)^#.*\n", "", (REPOSITORY / "Dockerfile").read_text("utf-8"))
)


def instructions(name: str) -> list[str]:
    """The arguments of every instruction of that name."""
    return re.findall(rf"(?m)^{name} (.*)", TEXT)


def unit() -> configparser.ConfigParser:
    """The unit, without its repeated keys."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT, encoding="utf-8")
    return parser


def test_the_image_is_as_careful_as_it_should_be() -> None:
    assert len(instructions("FROM")) > 1
    for each in instructions("USER"):
        user, group = each.split(":")
        assert int(user) >= 1000
        assert int(group) >= 1000
    assert instructions("ENTRYPOINT") == ['["outrider"]'] * 2
    assert instructions("CMD")[-1] == '["serve"]'
    (health,) = instructions("HEALTHCHECK")
    program = re.search(r'CMD \["python", "-c", "(.*)"\]$', health)
    assert program is not None
    assert "/health" in program[1]
    compile(program[1], "HEALTHCHECK", "exec")
    variables = dict(pair.split("=", 1) for pair in instructions("ENV")[-1].split())
    assert variables["PATH"].startswith("/opt/outrider/bin:")
    ours = {name for name in variables if name.startswith("OUTRIDER_")}
    assert ours <= {option.variable for option in OPTIONS}


def test_what_is_copied_is_there_and_is_let_through() -> None:
    let_through = {
        line[1:]
        for line in (REPOSITORY / ".dockerignore").read_text("utf-8").splitlines()
        if line.startswith("!")
    }
    copied = {
        source
        for line in instructions("COPY")
        if not line.startswith("--from")
        for source in line.split()[:-1]
    }
    assert copied == let_through
    assert all((REPOSITORY / source).exists() for source in copied)


GUARD = """
import sys
from importlib import import_module

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(name)

sys.meta_path.insert(0, Missing())
from pathlib import Path
import outrider.cli.guard, outrider.ops.guard, outrider.ops.planning.advice
for file in Path(outrider.ops.guard.__path__[0]).glob("*.py"):
    import_module(f"outrider.ops.guard.{file.stem}")
"""


def needed(names: Iterable[str]) -> set[str]:
    """Distributions, and what they need."""
    found: set[str] = set()
    todo = [*names]
    while todo:
        name = re.split(r"[^\w.-]", todo.pop())[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            with suppress(metadata.PackageNotFoundError):  # another system's
                wanted = metadata.requires(name) or ()
                todo += [each for each in wanted if "extra ==" not in each]
    return found


def test_the_guard_s_image_has_what_it_imports() -> None:
    (needs,) = (line for line in instructions("ARG") if line.startswith("GUARD_NEEDS"))
    kept = needed(needs.partition("=")[2].strip('"').split())
    modules = metadata.packages_distributions()
    gone = [
        module
        for module, homes in modules.items()
        if module != "outrider" and not {home.lower().replace("_", "-") for home in homes} & kept
    ]
    assert "numpy" in gone
    subprocess.run([sys.executable, "-c", GUARD, *gone], check=True)


def test_the_unit_starts_a_server_that_can_drain() -> None:
    service = unit()["Service"]
    program, command, *flags = service["ExecStart"].split()
    assert Path(program).name == "outrider"
    assert command == "serve"
    given = dict(zip(flags[::2], flags[1::2], strict=True))
    assert given.keys() <= {option.flag for option in OPTIONS}
    drain = float(given.get("--shutdown-timeout", BY_NAME["shutdown_timeout"].default))
    assert float(service["TimeoutStopSec"]) > drain + 5
    assert service["KillMode"] == "mixed"
    assert service["EnvironmentFile"].startswith("-/")
    assert service["DynamicUser"] == service["NoNewPrivileges"] == "yes"
    assert service["ProtectSystem"] == "strict"


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    # The program is not installed where the example says, and nothing else may be wrong.
    file = tmp_path / UNIT.name
    text = UNIT.read_text(encoding="utf-8")
    file.write_text(re.sub(r"(?m)^ExecStart=\S+", "ExecStart=/bin/true", text), encoding="utf-8")
    command = ["systemd-analyze", "verify", "--recursive-errors=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.skipif(missing() is not None, reason=str(missing()))
def test_the_image_can_be_built_and_run() -> None:
    """About five minutes on one core.

    ``OUTRIDER_BUILD`` holds more arguments of ``buildah build``, where the base image or an index
    is a local one.
    """
    script = REPOSITORY / "deploy" / "rehearse.py"
    more = shlex.split(os.environ.get("OUTRIDER_BUILD", ""))
    command = [sys.executable, str(script), *more]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
