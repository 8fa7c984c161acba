"""Policies: what is accepted, and the one sentence that refuses what is not."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.errors import ConfigError
from outrider.ops.guard.policy import read
from tests.support import REPOSITORY

GOOD = """
folder = "FOLDER"
[engine]
url = "http://127.0.0.1:8001"
[standby]
url = "http://127.0.0.1:8002"
[source]
kind = "prometheus"
url = "http://127.0.0.1:9090"
engine = 'instance="a"'
standby = 'instance="b"'
[traffic]
kind = "haproxy"
address = "unix:/run/haproxy.sock"
backend = "llm"
engine = "engine"
standby = "plain"
[signals]
p99 = { above = 2.0 }
errors = { above = 0.1, clear = 0.01, for = 5 }
"""
HOSTILE = {
    "no TOML": ("[engine", "cannot be read as TOML"),
    "empty": ("", "names no engine"),
    "no url": ("[engine]\nkind = 'vllm'", "[engine] has no url"),
    "typo": ("intervall = 3\n[engine]\nurl = 'http://a'", "did you mean 'interval'"),
    "not an address": ("[engine]\nurl = 'nowhere'", "give an address"),
    "a port too large": ("[engine]\nurl = 'http://a:99999999'", "give an address"),
    "unknown engine": ("[engine]\nurl = 'http://a'\nkind = 'tgi'", "known are outrider"),
    "number as text": ("interval = '3'\n[engine]\nurl = 'http://a'", "give a number"),
    "not a number": ("interval = nan\n[engine]\nurl = 'http://a'", "interval is nan; give"),
    "infinite": ("window = inf\n[engine]\nurl = 'http://a'", "window is inf; give a finite"),
    "negative": ("window = -1\n[engine]\nurl = 'http://a'", "from 0 to"),
    "a number beyond floats": (
        f"window = {'9' * 400}\n[engine]\nurl = 'http://a'", "window has more than 300 digits",
    ),
    "a number beyond Python": (f"window = {'9' * 5000}\n[engine]\nurl = 'http://a'", "as TOML"),
    "a port of many digits": (
        f"listen = 'a:{'9' * 5000}'\n[engine]\nurl = 'http://a'", "give HOST:PORT",
    ),
    "a lease elsewhere": (
        "[engine]\nurl = 'http://a'\n[lease]\nkind = 'kubernetes'\nnamespace = 'a/../../b'",
        "no name of an object",
    ),
    "a route elsewhere": (
        "[engine]\nurl = 'http://a'\n[standby]\nurl = 'http://b'\n[traffic]\nkind = 'httproute'\n"
        "namespace = 'a'\nroute = '../x'\nengine = 'e'\nstandby = 's'",
        "no name of an object",
    ),
    "truth for a number": ("window = true\n[engine]\nurl = 'http://a'", "give a number"),
    "no interval": ("interval = 0\n[engine]\nurl = 'http://a'", "give 0.1 or more"),
    "short window": ("interval = 90\n[engine]\nurl = 'http://a'", "never seen"),
    "table for a text": ("[folder]\na = 1\n[engine]\nurl = 'http://a'", "give a text"),
    "text for a table": ("engine = 'http://a'", "give a table"),
    "same server": (
        "[engine]\nurl = 'http://a'\n[standby]\nurl = 'http://a/'", "are the same server",
    ),
    "no hysteresis": (
        "[engine]\nurl = 'http://a'\n[signals]\np99 = {above = 3, clear = 3}", "the guard flaps",
    ),
    "hysteresis reversed": (
        "[engine]\nurl = 'http://a'\n[signals]\nacceptance = {below = 0.5, clear = 0.4}",
        "clear must lie above it",
    ),
    "wrong side": (
        "[engine]\nurl = 'http://a'\n[signals]\np99 = {below = 3}", "has no option 'below'",
    ),
    "share in percent": (
        "[engine]\nurl = 'http://a'\n[signals]\nerrors = {above = 5, clear = 2}", "share from 0",
    ),
    "unknown signal": ("[engine]\nurl = 'http://a'\n[signals]\np98 = {}", "did you mean 'p99'"),
    "memory crossed": (
        "[engine]\nurl = 'http://a'\n[signals]\nmemory = {above = 0.98}", "below memory_critical",
    ),
    "impatient": (
        "[engine]\nurl = 'http://a'\n[recovery]\ncooldown = 1", "from before its change",
    ),
    "no stages": ("[engine]\nurl = 'http://a'\n[recovery]\nstages = []", "give numbers"),
    "stages fall": (
        "[engine]\nurl = 'http://a'\n[recovery]\nstages = [0.5, 0.1]", "shares that rise",
    ),
    "whole stage": ("[engine]\nurl = 'http://a'\n[recovery]\nstages = [1.0]", "shares that rise"),
    "traffic without standby": (
        "[engine]\nurl = 'http://a'\n[traffic]\nkind = 'webhook'\nurl = 'http://x'",
        "there is no [standby]",
    ),
    "haproxy half": (
        "[engine]\nurl = 'http://a'\n[standby]\nurl = 'http://b'\n[traffic]\nkind = 'haproxy'",
        "needs address",
    ),
    "commands in a name": (
        "[engine]\nurl = 'http://a'\n[standby]\nurl = 'http://b'\n[traffic]\nkind = 'haproxy'\n"
        "address = 'unix:/x'\nbackend = 'b; shutdown'\nengine = 'e'\nstandby = 's'",
        "no name of HAProxy's",
    ),
    "Prometheus without matcher": (
        "[engine]\nurl = 'http://a'\n[source]\nkind = 'prometheus'\nurl = 'http://p'",
        "needs engine",
    ),
    "queries of scrapes": (
        "[engine]\nurl = 'http://a'\n[source.queries]\np99 = 'x'", "need kind",
    ),
    "unknown query": (
        "[engine]\nurl = 'http://a'\n[source]\nkind = 'prometheus'\n[source.queries]\np98 = 'x'",
        "did you mean 'p99'",
    ),
    "short lease": (
        "[engine]\nurl = 'http://a'\n[lease]\nkind = 'kubernetes'\nnamespace = 'x'\nseconds = 5",
        "run out between two",
    ),
    "listen": ("listen = '9464'\n[engine]\nurl = 'http://a'", "give HOST:PORT"),
}  # fmt: skip


def write(folder: Path, text: str) -> Path:
    file = folder / "policy.toml"
    file.write_text(text.replace("FOLDER", str(folder / "guard")))
    return file


@pytest.mark.parametrize("name", HOSTILE)
def test_a_bad_policy_is_refused_in_one_sentence(name: str, tmp_path: Path) -> None:
    text, reason = HOSTILE[name]
    result = CliRunner().invoke(
        app, ["ops", "guard", "run", "--policy", str(write(tmp_path, text))]
    )
    assert result.exit_code == 2, result.output
    assert reason in result.stderr
    assert result.stderr.startswith("error: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_policy_is_read_with_its_defaults(tmp_path: Path) -> None:
    policy = read(write(tmp_path, GOOD))
    assert policy.can_shift
    assert policy.signals["p99"].clear == pytest.approx(1.2)  # as far from it as by default
    assert policy.signals["errors"].seconds == 5
    assert policy.recovery.stages == (0.05, 0.25, 0.5)
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none.toml")


DEPLOY = REPOSITORY / "deploy"
SHIPPED = sorted([*DEPLOY.rglob("guard.toml"), *DEPLOY.rglob("policy.toml")])


@pytest.mark.parametrize("file", SHIPPED, ids=str)
def test_the_policies_of_deployments_are_accepted(file: Path) -> None:
    assert read(file).can_shift


def test_nothing_of_the_guard_imports_torch() -> None:
    import subprocess
    import sys

    code = (
        "import sys, outrider.ops.guard.loop, outrider.cli.guard\n"
        "from outrider.ops.guard import switches\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
