"""What the commands show: help at any width, texts with brackets, progress, odd streams."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.table import Table

from outrider.cli import app, common, load
from outrider.cli.bench import greedy_line
from tests.support.commands import outrider

HOSTILE = "[bold]a[/bold] [/] :cat: [x"


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    inner = dict(getattr(command, "commands", {}))
    yield path, inner.pop(getattr(command, "default", None), command)
    for name, one in inner.items():
        yield from commands(one, (*path, name))


EVERY_COMMAND = dict(commands(typer.main.get_command(app)))


def test_the_sentences_of_the_first_help_are_the_commands() -> None:
    """It imports none of them, so it has these sentences of its own."""
    group = EVERY_COMMAND[()]
    said = {name: (one.help or "").split("\n\n")[0] for name, one in group.commands.items()}
    assert dict(group.sentences()) == said


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_has_every_name_whole(width: int) -> None:
    assert ("drafters", "check") in EVERY_COMMAND
    for path, command in EVERY_COMMAND.items():
        done = outrider(*path, "--help", env={"COLUMNS": str(width)})
        assert done.exit_code == 0
        words = set(re.split(r"[\s,]+", done.stdout))
        options = [o for p in command.params if not getattr(p, "hidden", False) for o in p.opts]
        assert {o for o in options if o.startswith("-")} <= words, path
        assert set(getattr(command, "commands", {})) <= words
        text = " ".join(done.stdout.split())
        assert "…" not in text
        assert max(map(len, done.stdout.splitlines())) <= max(width, 80), path
        for one in getattr(command, "commands", {}).values():
            assert "".join(one.help.split("\n\n")[0].split()) in "".join(text.split())
        for param in command.params:
            said = getattr(param, "help", None)
            if said and not getattr(param, "hidden", False):
                assert "".join(said.split()) in "".join(text.split())


def test_common_options_come_first_and_few_commands_stand_at_the_top() -> None:
    assert len(EVERY_COMMAND[()].commands) <= 14
    firsts = {("serve",): "--config", ("generate",): "--prompt", ("ops", "advise"): "--drafter"}
    for path in EVERY_COMMAND:
        text = outrider(*path, "--help", env={"COLUMNS": "80"}).stdout
        common = re.split(r"\n\w[^\n]*:\n", text[text.index("Options:") :])[0]
        names = re.findall(r"^  (?:-\w, )?(--[\w-]+)", common, re.MULTILINE)
        assert names[0] == firsts.get(path, names[0])
        assert len(names) - names.count("--help") <= 12, path


@pytest.mark.parametrize(("old", "name"), [("guard", "guard"), ("observe", "alerts")])
def test_old_commands_work_with_a_hint(old: str, name: str) -> None:
    was, now = (outrider(*words, "--help") for words in ([old], ["ops", name]))
    hint = f"hint: outrider {old} is now outrider ops {name}.\n"
    assert (was.exit_code, was.stderr) == (now.exit_code, hint + now.stderr)
    assert was.stdout.split("\n", 1)[1] == now.stdout.split("\n", 1)[1]


@pytest.mark.parametrize(
    ("old", "new", "hinted"),
    [
        ("--workload=x", "--prompts x", True),
        ("--model m --rounds 8", "m --rounds 8", False),
        ("--rounds 8 --model=m", "m --rounds 8", False),
        ("--json -", "--json", True),
        ("m --json x.json", "m --out x.json", True),
        ("--json=x.json", "--out x.json", True),
        ("--prompts --model m --rounds 8", "m --prompts=--model --rounds 8", False),
        ("--prompts=--workload -- m", "m --prompts=--workload", False),
    ],
)
def test_old_options_are_read_as_those_of_today(
    old: str, new: str, hinted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    monkeypatch.setattr("outrider.cli.spelling.hint", said.append)
    command = EVERY_COMMAND[("bench",)]
    was, now = (command.make_context("bench", words.split()).params for words in (old, new))
    assert was == now
    assert len(said) == hinted


def test_a_report_behind_the_switch_is_an_argument_where_one_is_needed() -> None:
    command = EVERY_COMMAND[("ops", "diagnose")]
    params = command.make_context("diagnose", ["--json", "report.json"]).params
    assert (params["source"], params["json_"], params["out"]) == ("report.json", True, None)


def test_brackets_of_help_stay() -> None:
    for command, extra in ((("serve",), "outrider[otel]"), (("tune",), "outrider[plot]")):
        assert extra in outrider(*command, "--help").stdout
    assert "[127.0.0.1]" in outrider("serve", "--help").stdout


def test_texts_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    console = common.report_console(on_stderr=False)
    grid = Table(title=HOSTILE)
    grid.add_column(HOSTILE)
    grid.add_row(HOSTILE)
    console.print(grid)
    console.print(HOSTILE)
    run = {"temperature": 0, "acceptance_length": 2.0, "batch_size": 1, "drafter": HOSTILE,
           "num_speculative_tokens": 4, "acceptance_length_without_repeats": None,
           "repeated_share": 0.5}  # fmt: skip
    console.print(greedy_line([run]))
    assert capsys.readouterr().out.count(HOSTILE) == 5
    grid.add_row("\x1b[31mred\udcff")  # as a file's name may be
    console.print(grid)
    assert "␛[31mred\ufffd" in capsys.readouterr().out


def test_a_name_in_an_error_is_no_command_to_the_terminal(tmp_path: Path) -> None:
    (tmp_path / "\x1b[31mred").mkdir()
    done = outrider("drafters", "suggest", tmp_path / "\x1b[31mred")
    assert done.exit_code == 1
    assert "␛[31mred has no config.json" in done.stderr


def test_no_command_makes_a_console_of_its_own() -> None:
    folder = Path(common.__file__).parent
    for file in folder.glob("*.py"):
        text = file.read_text(encoding="utf-8")
        assert file.name == "common.py" or not re.search(r"\bConsole\(|rich\.markup", text), file


def test_off_a_terminal_long_work_says_a_line_now_and_then(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with common.telling("verifying"):
        pass
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(common, "EVERY", 0.01)
    with common.telling("verifying") as tell:
        time.sleep(0.1)
        tell("rule [bold]x")
        time.sleep(0.1)
    said = capsys.readouterr().err.splitlines()
    assert set(said) == {"verifying ...", "rule [bold]x ..."}
    monkeypatch.setattr(common, "EVERY", 0.0)
    load.progress()("c=4", 3, 1, 10)
    assert capsys.readouterr().err == "c=4: 3 of 10, 1 failed\n"
    monkeypatch.setattr(common, "EVERY", 60.0)
    load.progress()("c=4", 10, 0, 10)
    assert capsys.readouterr().err == ""


PROGRAM = (sys.executable, "-m", "outrider")


@pytest.mark.parametrize("streams", [">&-", "<&- >&- 2>&-"])
def test_closed_streams_do_not_matter(streams: str) -> None:
    command = f"{sys.executable} -m outrider ops alerts dashboard {streams}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("command", [("--help",), ("ops", "alerts", "dashboard")])
def test_a_full_disk_is_one_sentence(command: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*PROGRAM, *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "error: No space left on device.\n")


def test_tables_are_utf_8_under_any_locale() -> None:
    env = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": ""}
    done = subprocess.run([*PROGRAM, "drafters"], env=env, capture_output=True, check=True)
    assert "─" in done.stdout.decode("utf-8")


def test_a_report_is_refused_before_the_work_where_it_could_not_be_written(tmp_path: Path) -> None:
    for file, why in (
        ("/proc/x.json", "No such file"),
        (tmp_path, "Is a directory"),
        (tmp_path / "no" / "x.json", "No such file"),
    ):
        done = outrider("bench", "--out", file)
        assert done.exit_code == 2
        assert f"--out {file} cannot be written: {why}" in " ".join(done.stderr.split())
    assert not [*tmp_path.iterdir()]
