"""``outrider ops diagnose``, ``doctor`` and ``checklist`` on the command line."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks.served import Served
from outrider.ops.diagnose import endpoint
from tests.support import DATA
from tests.support.commands import outrider
from tests.support.guarding import http
from tests.support.peering import drips, peer, says

CASES = DATA / "cases"


def test_a_live_server_is_seen_saved_and_seen_again(server: Served, tmp_path: Path) -> None:
    kept, report = tmp_path / "kept.json", tmp_path / "report.json"
    done = outrider(
        "ops", "diagnose", server.url, "--plain", server.url, "--save", kept, "--out", report
    )
    assert done.exit_code in (0, 1), done.output
    [seen] = json.loads(report.read_text())["seen"]
    assert seen["facts"]["engine"] == "outrider"
    assert seen["facts"]["speculation_counters"] == "yes"
    assert seen["facts"]["output_differs"] == 0.0
    again = outrider("ops", "diagnose", kept, "--json")
    facts = json.loads(again.stdout)["seen"][0]["facts"]
    assert facts == seen["facts"]


def test_problems_are_told_with_remedies_and_exit_code_1() -> None:
    done = outrider("ops", "diagnose", CASES / "wrong-family.json")
    assert done.exit_code == 1
    assert "## Acceptance is low" in done.stdout
    likely = done.stdout.index("Likely: The drafter is from another family")
    assert likely < done.stdout.index("Poss")
    healthy = outrider("ops", "diagnose", CASES / "healthy-vllm.json")
    assert healthy.exit_code == 0
    assert "Nothing is wrong" in healthy.stdout


def test_thresholds_come_from_a_file_and_flags_win(tmp_path: Path) -> None:
    file = tmp_path / "limits.toml"
    file.write_text("high_memory = 0.94\n")
    case = CASES / "memory-93.json"
    assert outrider("ops", "diagnose", case, "--thresholds", file).exit_code == 0
    flag = outrider("ops", "diagnose", case, "--thresholds", file, "--threshold", "high_memory=0.9")
    assert flag.exit_code == 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("ops", "diagnose", "http://127.0.0.1:9"), "cannot be reached"),
        (("ops", "diagnose", "none.json"), "is no file"),
        (("ops", "diagnose", CASES / "healthy.json", "--fact", "speedup"), "give NAME=VALUE"),
        (
            ("ops", "diagnose", CASES / "healthy.json", "--thresholds", CASES / "healthy.json"),
            "as TOML",
        ),
        (("ops", "doctor", "--port", "70000"), "port is 70000"),
        (("ops", "checklist", "--yes", "nonsense"), "there is no point"),
        (("ops", "checklist", "--state", CASES / "healthy.json"), "is not a checklist's state"),
        (("ops", "checklist", "--plain", "http://x"), "give --source"),
        (("ops", "checklist", "--model", "x"), "give MODEL and --drafter"),
    ],
)
def test_bad_input_gets_one_sentence(args: tuple[object, ...], words: str) -> None:
    done = outrider(*args)
    assert done.exit_code in (1, 2)
    assert words in done.output.replace("\n", " ")
    assert "Traceback" not in done.output


HOSTILE_MODELS = [
    "[" * 10**5, '{"data": [{"id": 1e999}]}', '{"data": {}}', "null", '{"data": [[]]}', "\\ud800",
    '{"data": [{}]}', "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("said", HOSTILE_MODELS, ids=range(len(HOSTILE_MODELS)))
def test_a_server_that_says_nonsense_gets_one_sentence(said: str) -> None:
    with http(lambda *_: (200, said)) as url:
        done = outrider("ops", "diagnose", url)
    assert done.exit_code == 1
    assert "not OpenAI's" in " ".join(done.output.split())
    assert "Traceback" not in done.output


def test_diagnose_takes_no_key_to_another_server() -> None:
    stolen: list[object] = []

    def steal(*asked: object) -> tuple[int, object]:
        stolen.append(asked)
        return 200, {"data": [{"id": "x"}]}

    with http(steal) as other:
        head = f"HTTP/1.1 302 x\r\nLocation: {other}\r\nContent-Length: 0\r\n\r\n".encode()
        with peer(says(head)) as (url, asked):
            done = outrider("ops", "diagnose", url, "--api-key", "secret")
    assert done.exit_code == 1
    assert "redirects to" in " ".join(done.output.split())
    assert b"Bearer secret" in asked[0]
    assert not stolen


@pytest.mark.parametrize("start", [b"", b"HTTP/1.1 200 OK\r\n\r\n"])
def test_diagnose_waits_for_no_trickle(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "ANSWER_SECONDS", 0.3)
    with peer(drips(start, b"H")) as (url, _):
        done = outrider("ops", "diagnose", url)
    assert done.exit_code == 1
    assert "does not answer" in " ".join(done.output.split())


def test_doctor_reports_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bad = outrider("ops", "doctor", "--model", tmp_path, "--port", "0")
    probe = {"torch": "2", "threads": 2, "isas": ["a"], "isa": "a", "isa_error": "",
             "cuda_build": "", "cuda": []}  # fmt: skip
    monkeypatch.setattr(sys.modules["outrider.ops.diagnose.doctor"], "_probe", lambda models: probe)
    good = outrider("ops", "doctor", "--port", "0", "--json")
    report = json.loads(good.stdout)
    assert report["fit"] is (good.exit_code == 0) is True
    assert bad.exit_code == 1
    assert "fail  model" in bad.stdout
    assert "->" in bad.stdout


def test_the_checklist_is_ticked_kept_and_done(tmp_path: Path) -> None:
    from outrider.ops.diagnose.checklist import points

    state = tmp_path / "state.json"
    first = outrider("ops", "checklist", "--state", state, "--source", CASES / "healthy-vllm.json",
                     "--no", "rehearsal-rollback")  # fmt: skip
    assert first.exit_code == 1
    assert "- [x] monitoring-acceptance: " in first.stdout
    assert "- [!] rehearsal-rollback: " in first.stdout
    ids = ",".join(point.id for point in points())
    last = outrider("ops", "checklist", "--state", state, "--yes", ids, "--json")
    assert last.exit_code == 0
    assert {each["status"] for each in json.loads(last.stdout)} == {"yes"}
