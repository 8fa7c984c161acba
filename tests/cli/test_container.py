"""The Dockerfile, its rehearsal, and the systemd unit; the rehearsal itself is slow."""

from __future__ import annotations

import configparser
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from dockerfile import Ignore, Instruction, Refused, Stage, parse, stages, substitute
from rehearse import missing

from outrider.server.options import BY_NAME, OPTIONS

REPOSITORY = Path(__file__).parents[2]
TEXT = (REPOSITORY / "Dockerfile").read_text(encoding="utf-8")
UNIT = REPOSITORY / "deploy" / "outrider.service"


def known(given: dict[str, str], text: str = TEXT) -> list[Stage]:
    """The stages, each with all its instructions applied as the rehearsal does."""
    found = stages(parse(text), given)
    for stage in found:
        for instruction in stage.instructions:
            stage.apply(stage.expanded(instruction), given)
    return found


def unit() -> configparser.ConfigParser:
    """The unit, without its repeated keys."""
    parser = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read(UNIT, encoding="utf-8")
    return parser


def test_no_line_of_the_dockerfile_is_passed_over() -> None:
    written = [line for line in TEXT.splitlines() if re.match(r"[A-Za-z]", line)]
    found = parse(TEXT)
    assert [instruction.line for instruction in found] == [
        number for number, line in enumerate(TEXT.splitlines(), 1) if line in written
    ]
    runs = sum(len([i for i in stage.instructions if i.name == "RUN"]) for stage in known({}))
    assert runs == len([line for line in written if line.startswith("RUN ")]) > 4
    # Every word but those of comments is in some instruction.
    words = [w for x in TEXT.splitlines() if not x.startswith("#") for w in x.split() if w != "\\"]
    options = [f"--{k}={v}" for i in found for k, v in i.options.items()]
    assert sorted(words) == sorted([w for i in found for w in (i.name, *i.text.split())] + options)


def test_the_image_is_as_careful_as_it_should_be() -> None:
    last = known({})[-1]
    assert len(known({})) > 1
    assert int(last.user.split(":")[0]) >= 1000
    assert last.entrypoint == ["outrider"]
    assert last.command[0] == "serve"
    assert last.health[0] == "python"
    assert "/health" in last.health[-1]
    compile(last.health[-1], "HEALTHCHECK", "exec")
    assert last.variables["PATH"].startswith("/opt/outrider/bin:/usr/local/sbin:")
    ours = {name for name in last.variables if name.startswith("OUTRIDER_")}
    assert ours <= {option.variable for option in OPTIONS}
    for stage in known({}):
        for instruction in stage.instructions:
            for source in instruction.words()[:-1] if instruction.name == "COPY" else []:
                assert source.startswith("/") or (REPOSITORY / source).exists()


def test_arguments_are_taken_and_unknown_ones_refused() -> None:
    build, last = known({"BASE": "debian:other-slim", "TORCH_INDEX": ""})
    assert build.image == last.image == "debian:other-slim"
    assert build.environment["TORCH_INDEX"] == ""
    assert known({})[0].environment["TORCH_INDEX"].endswith("/cpu")
    with pytest.raises(Refused, match="no ARG X"):
        stages(parse(TEXT), {"X": ""})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("FROM a\nVOLUME /x", ":2: VOLUME /x: VOLUME is not known"),
        ("FROM a\nRUN --mount=type=cache x", "--mount is not known"),
        ("FROM a\nRUN cat <<EOF", "here-documents"),
        ("FROM a\nRUN a \\", "the last line goes on"),
        ("RUN a", "before the first FROM"),
        ("FROM ${X}", "X is not set"),
        ("FROM a\nUSER outrider", "write numbers"),
        ("FROM a\nHEALTHCHECK NONE", "only CMD"),
        ("FROM a\nENV A b", "write NAME=value"),
    ],
)
def test_what_is_not_understood_is_refused(text: str, said: str) -> None:
    with pytest.raises(Refused, match=re.escape(said)):
        known({}, text)


def test_lines_are_joined_and_variables_put_in() -> None:
    text = "FROM a\nRUN one \\\n# no part of it\n  && two\nENV A=x B='y z'\nCMD serve"
    (stage,) = known({}, text)
    assert stage.instructions[0].text == "one   && two"
    assert stage.instructions[0].command() == ["/bin/sh", "-c", "one   && two"]
    assert (stage.variables["A"], stage.variables["B"]) == ("x", "y z")
    line = Instruction(1, "ENV", {}, "$A ${A} ${A:-n} ${N:-n} ${A:+p}${N:+p}")
    assert substitute(line, {"A": "x"}) == "x x x n p"


@pytest.mark.parametrize(
    ("path", "out"),
    [
        ("src/outrider/cli/serve.py", False),
        ("pyproject.toml", False),
        ("src/outrider/pocket/model/config.json", False),
        ("src/outrider/native/src/api.cpp", False),
        ("src/outrider/native/liboutrider_amx.so", True),
        ("src/outrider/cli/__pycache__/serve.cpython-311.pyc", True),
        ("src/x.pyc", True),
        (".git/config", True),
        ("docs/server.md", True),
    ],
)
def test_only_what_is_needed_is_sent(path: str, out: bool) -> None:
    ignore = Ignore((REPOSITORY / ".dockerignore").read_text(encoding="utf-8"))
    assert ignore(Path(path)) is out


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
    """About six minutes on one core; torch comes from where pip finds it here."""
    script = REPOSITORY / "deploy" / "rehearse.py"
    command = [sys.executable, str(script), "--build-arg", "TORCH_INDEX="]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
