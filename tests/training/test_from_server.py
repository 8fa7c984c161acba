"""``train adapt --from-server``: what a server recorded comes in, and a drafter goes back to it."""

from __future__ import annotations

import json
import re
import shlex
import stat
from collections.abc import Callable
from pathlib import Path
from shutil import copytree
from typing import Any

import httpx
import pytest

from outrider.base.outside.http import Answer
from outrider.errors import ConfigError, EndpointError
from outrider.training import adapt, from_server
from outrider.training.adapt import Verdict
from outrider.training.from_server import (
    FEWEST,
    Source,
    ask,
    check_loads,
    command,
    hand_over,
    keep_prompts,
    place,
)
from tests.support.commands import outrider
from tests.support.forked import Served
from tests.support.taught import measure_little

URL = "http://127.0.0.1:9"
LINE = b'{"prompt": "a"}\n'


@pytest.fixture
def said(tmp_path: Path) -> dict[str, Any]:
    """What a server says that records prompts and loads drafters."""
    for name in ("recorded", "drafters", "target"):
        (tmp_path / name).mkdir()
    (tmp_path / "recorded" / "prompts.jsonl").write_bytes(LINE * 300)
    return {
        "drafter": "auto", "target": str(tmp_path / "target"),
        "drafters": {"suffix": {"folder": None}, "eagle3": {"folder": str(tmp_path / "target")}},
        "recording": {"folder": str(tmp_path / "recorded"), "records": 300, "bytes": 4800},
        "loading": {"folder": str(tmp_path / "drafters"), "loaded": None, "under_way": False},
    }  # fmt: skip


Answers = Callable[..., list[Any]]


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Answers:
    """``answering(body, status)``: a server that answers so; returns what it is asked."""

    def answers(body: Any, status: int = 200) -> list[Any]:
        asked: list[Any] = []

        def call(url: str, body_: Any = None, *, key: str | None, seconds: float) -> Answer:
            asked.append((url, body_, key))
            return Answer(status, body if isinstance(body, bytes) else json.dumps(body).encode())

        monkeypatch.setattr(from_server, "call", call)
        return asked

    return answers


def test_what_a_server_says(said: dict[str, Any], answering: Answers, tmp_path: Path) -> None:
    asked = answering(said)
    source = ask("127.0.0.1:9/v1/", "k")
    assert asked == [(f"{URL}/v1/speculation", None, "k")]
    assert source == Source(
        URL, "k", str(tmp_path / "target"), str(tmp_path / "target"),
        tmp_path / "recorded" / "prompts.jsonl", 4800, tmp_path / "drafters",
    )  # fmt: skip
    for default, drafter in (("suffix", None), ("eagle3+suffix", source.drafter), ("none", None)):
        answering({**said, "drafter": default, "loading": None})
        found = ask(URL, None)
        assert (found.drafter, found.drafters) == (drafter, None)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"recording": None}, "records no prompts; start it with --record DIR"),
        ({"recording": {"folder": "/no/where", "records": 300, "bytes": 1}}, "which is not here"),
        ({"recording": {"folder": "a\0", "records": 300, "bytes": 1}}, "which is not here"),
        ({"recording": {"folder": 5, "records": 300, "bytes": 1}}, "does not say what is recorded"),
        ({"target": "/no/where"}, "serves '/no/where', which is not here"),
        ({"drafters": {"eagle3": {"folder": "a/hub-name"}}}, "drafts with 'a/hub-name', which is"),
        ({"loading": {"folder": "a\0"}}, "loads drafters from 'a\\x00', which is not here"),
        ({"target": None}, "does not say what it serves"),
        ({"drafters": []}, "does not say what it serves"),
    ],
)
def test_servers_that_do_not_do(
    said: dict[str, Any], answering: Answers, change: dict[str, Any], why: str
) -> None:
    answering({**said, **change})
    with pytest.raises((ConfigError, EndpointError), match=re.escape(why)):
        ask(URL, None)


def test_too_few_and_strangers(said: dict[str, Any], answering: Answers) -> None:
    said["recording"]["records"] = FEWEST - 1
    answering(said)
    with pytest.raises(ConfigError, match=f"has recorded {FEWEST - 1} prompts, and {FEWEST} are"):
        ask(URL, None)
    for body, status in (({}, 200), ({}, 404), (b"hello", 200), ([1], 200), (b"\xff", 500)):
        answering(body, status)
        with pytest.raises(EndpointError, match="is not that of an outrider serve"):
            ask(URL, None)
    answering({}, 401)
    with pytest.raises(EndpointError, match="wants an API key"):
        ask(URL, None)
    with pytest.raises(ConfigError, match="--from-server 'ftp://a' is not an address"):
        ask("ftp://a", None)


def test_prompts_are_kept_whole_private_and_once(
    said: dict[str, Any], answering: Answers, tmp_path: Path
) -> None:
    said["recording"]["bytes"] = FEWEST * len(LINE) + 3  # a line is being written
    answering(said)
    source = ask(URL, None)
    whole = source.prompts.read_bytes()
    for count in (0, 9):  # it was moved away meanwhile
        source.prompts.write_bytes(LINE * count)
        with pytest.raises(ConfigError, match=f"has {count} prompts by now"):
            keep_prompts(source, tmp_path / "out")
        assert not [*(tmp_path / "out").iterdir()]
    source.prompts.write_bytes(whole)
    kept = keep_prompts(source, tmp_path / "out")
    assert kept.read_bytes() == LINE * FEWEST
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600
    source.prompts.write_bytes(LINE * 9)  # the server goes on: who resumes has the same prompts
    assert keep_prompts(source, tmp_path / "out").read_bytes() == LINE * FEWEST
    with pytest.raises(ConfigError, match="cannot be copied to"):
        keep_prompts(source, source.prompts)


def test_the_way_back(said: dict[str, Any], answering: Answers, tmp_path: Path) -> None:
    adapted = tmp_path / "out" / "drafter"
    adapted.mkdir(parents=True)
    (adapted / "config.json").write_text("{}")
    asked = answering(said)
    source = ask(URL, "k'")
    told = hand_over(source, adapted, "mine", False)
    assert told == f"have the server draft with it: {command(source, 'mine')}"
    assert (tmp_path / "drafters" / "mine" / "config.json").read_text() == "{}"
    assert shlex.split(command(source, "a'b")) == [
        "curl", f"{URL}/v1/speculation", "-H", "Content-Type: application/json",
        "-H", "Authorization: Bearer $OUTRIDER_API_KEY", "-d", '{"load": "a\'b"}',
    ]  # fmt: skip
    assert len(asked) == 1
    assert "as mine-2" not in hand_over(source, adapted, "mine", True)
    assert asked[1:] == [(f"{URL}/v1/speculation", {"load": "mine-2"}, "k'")]
    assert place(source, tmp_path / "drafters" / "mine", "x") == "mine"  # it is there
    assert place(source, adapted, "a\nb") == "adapted"
    there = {each.name for each in (tmp_path / "drafters").iterdir()}
    answering({"error": {"message": "no\nway"}}, 400)
    with pytest.raises(EndpointError, match=r"does not load the drafter: 'no\\nway'"):
        hand_over(source, adapted, "mine", True)
    assert {each.name for each in (tmp_path / "drafters").iterdir()} == there
    with pytest.raises(EndpointError):  # what lay there stays
        hand_over(source, tmp_path / "drafters" / "mine", "mine", True)
    assert {each.name for each in (tmp_path / "drafters").iterdir()} == there
    answering({**said, "loading": None})
    alone = ask(URL, None)
    told = hand_over(alone, adapted, "mine", False)
    assert f"--load-drafters {adapted.parent} and then: {command(alone, 'drafter')}" in told
    for nowhere in (None, alone):
        with pytest.raises(ConfigError, match="--load needs --from-server"):
            check_loads(nowhere)
    check_loads(source)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be copied to"):
        place(Source(URL, None, "", None, adapted, 0, tmp_path / "file"), adapted, "x")


@pytest.mark.parametrize("loaded", [None, "mine", "other"])
def test_a_copy_stays_only_where_the_server_drafts_with_it(
    loaded: str | None, said: dict[str, Any], answering: Answers, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The answer to the load is lost; what the server says then decides."""
    drafters, adapted = tmp_path / "drafters", tmp_path / "out"
    adapted.mkdir()
    said["loading"]["loaded"] = loaded and str(drafters / loaded)
    answering(said)
    source = ask(URL, None)
    monkeypatch.setattr(from_server, "load", gone)
    with pytest.raises(EndpointError, match="it is gone"):
        hand_over(source, adapted, "mine", True)
    assert (drafters / "mine").exists() == (loaded == "mine")


def gone(*_: Any) -> None:
    raise EndpointError("it is gone.")


def test_one_button(
    tiny_llama: Path, tiny_drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server records, a drafter is adapted to that, and the server drafts with it."""
    measure_little(monkeypatch, 6)
    monkeypatch.setattr(adapt, "SHARES", (1.0,))
    drafters = tmp_path / "drafters"
    copytree(tiny_drafter, drafters / "first")
    where = ("--record", tmp_path / "recorded", "--load-drafters", drafters)
    with Served(tiny_llama, "--drafter", drafters / "first", *where) as server:
        lines = [f"{n} the lazy dog jumps {n % 7}" for n in range(FEWEST)]
        for some in (lines[::2], lines[1::2]):
            body = {"prompt": some, "max_tokens": 1}
            httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).raise_for_status()
        names = ("--from-server", server.url, "--out", tmp_path / "mine", "--load")
        words = (*names, "--epochs", 1, "--max-tokens", 4, "--json")
        for deploy in (False, True):
            monkeypatch.setattr(adapt, "judge", lambda _, d=deploy: Verdict(d, "so it is."))
            done = outrider("train", "adapt", *words)
            assert done.exit_code == 0, done.output
            report = json.loads(done.stdout)
            assert report["drafter"] == str(drafters / "first")
            now = httpx.get(f"{server.url}/v1/speculation").json()
            if not deploy:
                assert "server" not in report
                assert now["loading"]["loaded"] is None
                assert {each.name for each in drafters.iterdir()} == {"first"}
                with monkeypatch.context() as broken:
                    broken.setattr(adapt, "judge", lambda _: Verdict(True, "so it is."))
                    broken.setattr(from_server, "load", gone)
                    done = outrider("train", "adapt", *words)
                assert done.exit_code == 1
                assert "it is gone" in done.stderr
                assert json.loads(done.stdout)["server"] is None
                assert {each.name for each in drafters.iterdir()} == {"first"}
        assert report["server"] == "the server drafts with it now; its name there is mine"
        assert now["drafters"]["model"]["folder"] == now["loading"]["loaded"]
        assert now["loading"]["loaded"] == str(drafters / "mine")
        answer = httpx.post(
            f"{server.url}/v1/completions", json={"prompt": "the lazy dog", "max_tokens": 30}
        )
        assert answer.is_success
    done = outrider("train", "adapt", "--out", tmp_path / "other", "--load")
    assert "--load needs --from-server" in done.output.replace("\n", " ")
    done = outrider("train", "adapt", "--out", tmp_path / "other", "--target", tiny_llama)
    assert "give --target, --drafter and --prompts" in done.output.replace("\n", " ")
