"""What a server records, what it leaves out, and what it does when that fails."""

from __future__ import annotations

import itertools
import json
import logging
import os
import stat
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from outrider.base.types import Event
from outrider.errors import ConfigError
from outrider.frontend.outputs import RequestState
from outrider.server import completions, dialogue, record
from outrider.server.app import create_app
from outrider.server.build import build, read_function, read_recording
from outrider.server.errors import Refusal
from outrider.server.options import resolve
from outrider.server.reader import Reader, Said
from outrider.server.record import FILE, Record, Recorder, Recording
from outrider.server.settings import Settings
from outrider.text.called import ToolCall
from outrider.training.prompts import read_prompts
from tests.support.echo import Echo
from tests.support.forked import Served

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "for word"}
CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
LINE = b'{"prompt": "a"}\n'
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


@contextmanager
def front(model: Path, folder: Path, engine: type[Echo] = Echo, **how: Any) -> Iterator[TestClient]:
    """The front of a server that records; what waits is written at its end."""
    recording = Recording(folder, **{"most": 1 << 20, **how})
    app = create_app(engine(model, None), Settings(names=("tiny",), recording=recording))
    app.state.service.llm.inputs.codec.chat_template = TEMPLATE
    with TestClient(app, "http://localhost", raise_server_exceptions=False) as found:
        yield found


def ask(client: TestClient, *prompts: str, status: int = 200, **more: Any) -> None:
    for prompt in prompts:
        found = client.post(COMPLETIONS, json={"prompt": prompt, **more})
        assert found.status_code == status, found.text


def recorded(folder: Path) -> list[Record]:
    text = (folder / FILE).read_text()
    assert text.endswith("\n") or not text
    return [json.loads(line) for line in text.split("\n")[:-1]]


def waited(holds: Callable[[], bool]) -> None:
    """Wait for the thread that writes."""
    end = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_prompts_are_recorded_as_they_were_asked(tiny_llama: Path, tmp_path: Path) -> None:
    odd = 'a\0b\n"c"\u2028\x85 \u00e9\U0001f642'
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    talk = [{"role": "developer", "content": "x", "name": "n"}, {**USER, "content": parts}]
    with front(tiny_llama, tmp_path / "new" / "folder") as client:
        ask(client, odd, "streamed", stream=True, stream_options={"include_usage": True})
        ask(client, "sampled", n=3, echo=True)
        ask(client, "stored", store=True)
        client.post(COMPLETIONS, json={"prompt": ["one", "two"], "store": None})
        client.post(CHATS, json={"messages": talk})
        client.post(CHATS, json={"messages": [USER], "stream": True})
    texts = [{"role": "developer", "content": "x"}, {"role": "user", "content": "one\ntwo"}]
    lines = recorded(tmp_path / "new" / "folder")
    prompts = (odd, "streamed", "sampled", "stored", "one", "two")
    assert lines == [
        *({"prompt": each} for each in prompts), {"messages": texts}, {"messages": [USER]}
    ]  # fmt: skip
    for place in (tmp_path / "new" / "folder", tmp_path / "new" / "folder" / FILE):
        items = read_prompts(place, False, print)
        assert [i.prompt for i in items[:6]] == [*prompts]
        assert [[*i.messages] for i in items[6:]] == [texts, [USER]]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "store": False}),
        (COMPLETIONS, {"prompt": "a", "store": False, "stream": True}),
        (COMPLETIONS, {"prompt": [5, 6]}),
        (COMPLETIONS, {"prompt": [5, 6], "echo": True}),
        (COMPLETIONS, {"prompt": "a b c", "truncate_prompt_tokens": 2}),
        (COMPLETIONS, {"prompt": "a", "echo": True, "max_tokens": 0}),
        (COMPLETIONS, {"prompt": "a" * 200}),
        (CHATS, {"messages": [USER], "store": False}),
        (CHATS, {"messages": [USER], "truncate_prompt_tokens": 2}),
        (CHATS, {"messages": [{**USER, "content": "a" * 101}]}),
        (CHATS, {"messages": [USER, {"role": "assistant", "tool_calls": [CALL]}]}),
        (CHATS, {"messages": [USER, {"role": "tool", "content": "b", "tool_call_id": "a"}]}),
    ],
)
def test_what_stays_out(
    path: str, body: dict[str, Any], tiny_llama: Path, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(record, "LONGEST", 100)
    with front(tiny_llama, tmp_path, answers=True) as client:
        found = client.post(path, json=body)
        assert found.status_code == 200, found.text
    assert recorded(tmp_path) == []


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_wish_that_cannot_be_read_is_refused(path: str, tiny_llama: Path, tmp_path: Path) -> None:
    with front(tiny_llama, tmp_path) as client:
        for value in ("perhaps", 2, [False], {}, "\0" * 1000):
            body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [USER]}
            found = client.post(path, json={**body, "store": value})
            assert found.status_code == 400
            assert found.json()["error"]["param"] == "store"
    assert recorded(tmp_path) == []


class Failing(Echo):
    """An engine that fails after the first token."""

    async def run(
        self, state: RequestState, body: str | None = None
    ) -> AsyncGenerator[list[Event], None]:
        async for events in super().run(state, body):
            yield events
            raise Refusal("no", status=500)


def test_what_failed_is_not_recorded(tiny_llama: Path, tmp_path: Path) -> None:
    with front(tiny_llama, tmp_path, Failing) as client:
        ask(client, "a", status=500)
        ask(client, "b", stream=True)
        client.post(CHATS, json={"messages": [USER], "stream": True})
        ask(client, "c", status=400, max_tokens=10**6)
    assert recorded(tmp_path) == []


def test_answers(tiny_llama: Path, tmp_path: Path) -> None:
    with front(tiny_llama, tmp_path, answers=True) as client:
        text = client.post(COMPLETIONS, json={"prompt": "a"}).json()["choices"][0]["text"]
        ask(client, "a", n=2, stream=True, echo=True)
        client.post(CHATS, json={"messages": [USER]})
        assert client.get("/health").json()["recording"]["answers"]
    told = {"answer": text}
    one = {"prompt": "a", **told}
    assert recorded(tmp_path) == [one, {"messages": [USER], **told}]


def test_an_answer_that_calls_tools_is_none(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called = Said("", "beside", [ToolCall("f", "{}", True)])
    monkeypatch.setattr(Reader, "read", lambda *_: called)
    with front(tiny_llama, tmp_path, answers=True) as client:
        assert client.post(CHATS, json={"messages": [USER]}).is_success
    assert recorded(tmp_path) == [{"messages": [USER]}]


def test_nothing_is_done_unless_asked(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((completions, "of_text"), (dialogue, "of_messages")):
        monkeypatch.delattr(module, name)
    before = {thread.name for thread in threading.enumerate()}
    app = create_app(Echo(tiny_llama, None), Settings(names=("tiny",)))
    with TestClient(app, "http://localhost") as client:
        for stream in (False, True):
            ask(client, "a", stream=stream)
            assert client.post(CHATS, json={"messages": [USER], "stream": stream}).is_success
        assert client.get("/health").text == ""
        assert client.get("/v1/speculation").json()["recording"] is None
        now = {thread.name for thread in threading.enumerate()}
        assert "outrider-record" not in now - before
    assert read_recording({"record": None}) is None
    assert read_recording({"record": ""}) is None


def test_it_is_said(tiny_llama: Path, tmp_path: Path) -> None:
    with front(tiny_llama, tmp_path, most=100) as client:
        ask(client, "abc")
        waited(lambda: client.get("/health").json()["recording"]["records"] == 1)
        told = {
            "records": 1, "bytes": 18, "max_bytes": 100, "answers": False, "redacted": False,
            "duplicates": 0, "left_out": 0, "stopped": None,
        }  # fmt: skip
        assert client.get("/health").json() == {"recording": told}
        shown = client.get("/v1/speculation").json()["recording"]
        assert shown == {"folder": str(tmp_path), **told}


def test_the_files_are_private(tmp_path: Path) -> None:
    Recorder(Recording(tmp_path / "new", 100)).close()
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o700
    file = tmp_path / "new" / FILE
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o644)
    Recorder(Recording(tmp_path / "new", 100)).close()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_it_stops_at_its_bound_and_says_so_once(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    with front(tiny_llama, tmp_path, most=len(LINE) * 2 + 3) as client:
        ask(client, "a")
        waited(lambda: client.get("/health").json()["recording"]["records"] == 1)
    with front(tiny_llama, tmp_path, most=len(LINE) * 2 + 3) as client:
        ask(client, "b", "c", "d")
        waited(lambda: client.get("/health").json()["recording"]["stopped"] == "full")
        monkeypatch.delattr(completions, "of_text")  # nothing is held any more
        ask(client, "e", "f")
        told = client.get("/health").json()["recording"]
        assert (told["records"], told["bytes"]) == (2, len(LINE) * 2)
    assert recorded(tmp_path) == [{"prompt": "a"}, {"prompt": "b"}]
    assert caplog.text.count("recording has stopped") == 1
    assert caplog.text.count("it is full") == 1
    with front(tiny_llama, tmp_path, most=len(LINE) * 2) as client:
        assert client.get("/health").json()["recording"]["stopped"] == "full"
        ask(client, "c")
    assert recorded(tmp_path) == [{"prompt": "a"}, {"prompt": "b"}]


def metric(client: TestClient, name: str) -> float:
    """The sum of a metric's samples."""
    lines = [x for x in client.get("/metrics").text.splitlines() if x.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines)


def test_what_is_there_is_not_recorded_again(tiny_llama: Path, tmp_path: Path) -> None:
    """Within a server's life and after it; metrics say so."""
    with front(tiny_llama, tmp_path) as client:
        ask(client, "a", "a", "b", "a")
        client.post(CHATS, json={"messages": [{"role": "user", "content": "a"}]})
        waited(lambda: metric(client, "outrider_recorded_prompts_total") == 3)
        assert metric(client, "outrider_recording_duplicates_total") == 2
    with front(tiny_llama, tmp_path) as client:
        ask(client, "b", "c", "c")
        waited(lambda: metric(client, "outrider_recording_duplicates_total") == 2)
        assert metric(client, "outrider_recorded_prompts_total") == 1
        told = client.get("/health").json()["recording"]
        assert (told["records"], told["duplicates"], told["left_out"]) == (4, 2, 0)
        assert metric(client, "outrider_recording_bytes") == (tmp_path / FILE).stat().st_size
    assert [line.get("prompt") for line in recorded(tmp_path)] == ["a", "b", None, "c"]


def test_what_is_redacted_to_the_same_is_the_same(tiny_llama: Path, tmp_path: Path) -> None:
    with front(tiny_llama, tmp_path, redact=lambda r: {"prompt": r["prompt"][0]}) as client:
        ask(client, "ab", "ac", "b")
    assert recorded(tmp_path) == [{"prompt": "a"}, {"prompt": "b"}]


def test_old_duplicates_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_KNOWN", 2)
    recorder = Recorder(Recording(tmp_path, 1000))
    recorder.add([{"prompt": each} for each in "abcbca"])
    recorder.close()
    assert [line["prompt"] for line in recorded(tmp_path)] == [*"abca"]
    assert len(recorder._known) == 2


def test_what_stopped_recording_and_what_was_left_out_are_metrics(
    tiny_llama: Path, tmp_path: Path
) -> None:
    with front(tiny_llama, tmp_path, most=len(LINE)) as client:
        assert metric(client, "outrider_recording_stopped") == 0
        ask(client, "a", "b")
        waited(lambda: metric(client, "outrider_recording_left_out_total") == 1)
        assert 'reason="full"' in client.get("/metrics").text
        assert metric(client, "outrider_recording_stopped") == 1
    with TestClient(create_app(Echo(tiny_llama, None), Settings(names=("tiny",)))) as client:
        assert "outrider_record" not in client.get("/metrics", headers={"host": "localhost"}).text


def test_two_servers_share_a_folder_and_its_bound(tmp_path: Path) -> None:
    two = [Recorder(Recording(tmp_path, 1000)) for _ in range(2)]
    for number in range(100):
        two[number % 2].add([{"prompt": str(number)}])
    for each in two:
        each.close()
    lines = recorded(tmp_path)
    assert len({line["prompt"] for line in lines}) == len(lines)
    # Both may find room for the last record.
    assert 900 < (tmp_path / FILE).stat().st_size <= 1000 + 20


def test_a_line_that_a_crash_cut_spoils_no_other(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(LINE + LINE[:5])
    recorder = Recorder(Recording(tmp_path, 1000))
    recorder.add([{"prompt": "b"}])
    recorder.close()
    said: list[str] = []
    assert [i.prompt for i in read_prompts(tmp_path, True, said.append)] == ["a", "b"]
    assert len(said) == 1


def hooks() -> dict[str, Callable[[Record], Any]]:
    def leave(record: Record) -> Any:
        raise SystemExit

    def fail(record: Record) -> Any:
        raise ValueError(f"bad: {record}")

    async def later(record: Record) -> Any:
        return record

    return {
        "raises": fail, "ends": leave, "text": json.dumps, "list": lambda r: [r],
        "set": lambda r: {**r, "more": {1}}, "surrogate": lambda r: {"prompt": "\ud800"},
        "empty": lambda r: r.clear(), "nothing": lambda r: {}, "blank": lambda r: {"prompt": ""},
        "both": lambda r: {**r, "messages": []}, "deep": lambda r: {**r, "x": nested()},
        "false": lambda r: False,
    }  # fmt: skip


def nested() -> list[Any]:
    inner: list[Any] = []
    for _ in range(100_000):
        inner = [inner]
    return inner


@pytest.mark.parametrize("name", hooks())
def test_what_cannot_be_redacted_is_left_out(
    name: str, tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hook = hooks()[name]
    with front(tiny_llama, tmp_path, redact=hook) as client:
        ask(client, "my secret", "my secret")
        waited(lambda: client.get("/health").json()["recording"]["left_out"] == 2)
    assert recorded(tmp_path) == []
    said = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(said) == (name != "empty")
    assert "secret" not in caplog.text


def test_a_record_is_redacted(tiny_llama: Path, tmp_path: Path) -> None:
    def hide(record: Record) -> Record | None:
        if "private" in record["prompt"]:
            return None
        return {**record, "prompt": record["prompt"].replace("Ann", "X")}

    with front(tiny_llama, tmp_path, redact=hide) as client:
        ask(client, "Ann said", "private", "Bob said")
        assert client.get("/health").json()["recording"]["redacted"]
    assert recorded(tmp_path) == [{"prompt": "X said"}, {"prompt": "Bob said"}]


def test_what_was_written_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MOST_WAITING", 3)
    recorder = Recorder(Recording(tmp_path, 1000))
    for number in range(5):
        waited(lambda: recorder._given == recorder._taken)
        recorder.add([{"prompt": f"{number}aa"}])
    recorder.close()
    assert len(recorded(tmp_path)) == 5


def test_a_server_that_ends_writes_what_waits(tiny_llama: Path, tmp_path: Path) -> None:
    go_on = threading.Event()
    with front(tiny_llama, tmp_path, redact=lambda r: go_on.wait(60) and r) as client:
        ask(client, "a", "b")
        threading.Timer(0.2, go_on.set).start()
    assert [line["prompt"] for line in recorded(tmp_path)] == ["a", "b"]


def test_a_slow_hook_delays_no_request_and_no_end(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "MOST_WAITING", 10)
    monkeypatch.setattr(record, "END_SECONDS", 0.01)
    begun, go_on = threading.Event(), threading.Event()

    def slow(record: Record) -> Record:
        begun.set()
        go_on.wait(60)
        return record

    with front(tiny_llama, tmp_path, redact=slow) as client:
        ask(client, "aaaa")
        assert begun.wait(60)
        ask(client, "bbbb", "cccc", "dd")
        assert client.get("/health").json()["recording"]["left_out"] == 1
    assert recorded(tmp_path) == []  # the server has ended
    go_on.set()
    waited(lambda: len(recorded(tmp_path)) == 3)
    assert [line["prompt"] for line in recorded(tmp_path)] == ["aaaa", "bbbb", "dd"]


def test_a_folder_that_is_replaced_ends_recording_and_no_request(
    tiny_llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    with front(tiny_llama, folder) as client:
        ask(client, "a")
        waited(lambda: (folder / FILE).read_bytes() == LINE)
        folder.rename(tmp_path / "moved")
        folder.write_text("a file")
        ask(client, "b")
        waited(lambda: client.get("/health").json()["recording"]["stopped"] == "failed")
        ask(client, "c")
    assert folder.read_text() == "a file"
    assert (tmp_path / "moved" / FILE).read_bytes() == LINE
    assert caplog.text.count("cannot be written to (Not a directory)") == 1


def test_a_file_that_is_moved_away_is_begun_anew(tiny_llama: Path, tmp_path: Path) -> None:
    with front(tiny_llama, tmp_path) as client:
        ask(client, "a")
        waited(lambda: (tmp_path / FILE).read_bytes() == LINE)
        (tmp_path / FILE).rename(tmp_path / "older.jsonl")
        ask(client, "b", "a")
        waited(lambda: (tmp_path / FILE).exists() and len(recorded(tmp_path)) == 2)
        waited(lambda: client.get("/health").json()["recording"]["records"] == 2)
    assert recorded(tmp_path) == [{"prompt": "b"}, {"prompt": "a"}]
    assert [i.prompt for i in read_prompts(tmp_path, False, print)] == ["a", "b", "a"]


@pytest.mark.parametrize("written", [0, 7, None])
def test_a_full_disk_ends_recording_and_no_request(
    written: int | None, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    write = os.write

    def short(file: int, data: bytes) -> int:
        if not data.startswith(b'{"prompt": "b'):
            return write(file, data)
        if written is None:
            raise OSError(28, "No space left on device")
        return write(file, data[:written])

    monkeypatch.setattr(os, "write", short)
    with front(tiny_llama, tmp_path) as client:
        ask(client, "a", "b")
        waited(lambda: client.get("/health").json()["recording"]["stopped"] == "failed")
        ask(client, "c")
    assert (tmp_path / FILE).read_bytes() == LINE
    assert caplog.text.count("cannot be written to (No space left on device)") == 1


def a_file(place: Path) -> None:
    place.write_text("mine")


def inside_a_file(place: Path) -> None:
    place.parent.rmdir()
    place.parent.write_text("mine")


def a_dangling_link(place: Path) -> None:
    place.symlink_to(place.parent / "nowhere")


def holds_a_link(place: Path) -> None:
    place.mkdir()
    (place.parent / "other").write_text("mine")
    (place / FILE).symlink_to(place.parent / "other")


def holds_a_folder(place: Path) -> None:
    (place / FILE).mkdir(parents=True)


def holds_a_pipe(place: Path) -> None:
    place.mkdir()
    os.mkfifo(place / FILE)


@pytest.mark.parametrize(
    "made", [a_file, inside_a_file, a_dangling_link, holds_a_link, holds_a_folder, holds_a_pipe]
)
def test_a_folder_that_cannot_be_written_to_is_refused(
    made: Callable[[Path], None], tmp_path: Path
) -> None:
    folder = tmp_path / "inner" / "folder"
    folder.parent.mkdir()
    made(folder)
    with pytest.raises(ConfigError, match=r"^record: .* cannot be written to \(.*\); give ") as e:
        Recorder(Recording(folder, 100))
    assert len(str(e.value)) < 500
    assert all(p.read_text() == "mine" for p in tmp_path.rglob("*") if p.is_file())


def test_a_link_to_a_folder_is_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    recorder = Recorder(Recording(tmp_path / "link", 100))
    recorder.add([{"prompt": "a"}])
    recorder.close()
    assert recorded(tmp_path / "real") == [{"prompt": "a"}]


@pytest.mark.parametrize(
    "text",
    ["", ":", "json", "json:", "json:nothing", ":f", "no.such.module:f", "os:sep", "a b:c",
     "json:dumps:x", "..x:f", "bad_hook:f", "x" * 10_000],
)  # fmt: skip
def test_a_hook_that_is_none_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bad_hook.py").write_text("raise SystemExit('two\\nlines')\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"^record_redact: .*; give MODULE:FUNCTION") as found:
        read_function(text, "record_redact")
    assert len(str(found.value)) < 500
    assert "\n" not in str(found.value)


def test_options_become_what_is_recorded(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_hook.py").write_text("def hide(record):\n    return record\n")
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "outrider.toml"
    file.write_text('record = "there"\nrecord-bytes = 7\n')
    flags = {"record_answers": True, "record_redact": "own_hook:hide"}
    llm, settings = build(tiny_llama, "tiny", resolve(flags, {"OUTRIDER_RECORD": "here"}, file))
    llm.shutdown()
    how = settings.recording
    assert how is not None
    assert (how.folder, how.most, how.answers) == (tmp_path / "here", 7, True)
    assert how.redact is not None
    assert how.redact.__name__ == "hide"
    assert read_recording({n: s.value for n, s in resolve({}, {}, None).items()}) is None


def test_a_real_server_records_what_ended(tiny_llama: Path, tmp_path: Path) -> None:
    """Tools, clients that leave, many at once, and a signal right behind an answer."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object",
            "properties": {"a": {"enum": [1]}}, "required": ["a"]}}}  # fmt: skip
    with Served(tiny_llama, "--record", tmp_path / "r", "--record-answers") as server:
        assert any(f"recording: prompts and answers, in {tmp_path}" in x for x in server.lines)

        def post(path: str, **body: Any) -> httpx.Response:
            return httpx.post(server.url + path, json=body, timeout=60).raise_for_status()

        left = {"prompt": "left", "max_tokens": 250, "ignore_eos": True, "n": 128}
        with httpx.stream(
            "POST", server.url + COMPLETIONS, json={**left, "stream": True}, timeout=60
        ) as stream:
            next(stream.iter_lines())
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(server.url + COMPLETIONS, json=left, timeout=0.3)
        with ThreadPoolExecutor(8) as threads:
            several = itertools.repeat(COMPLETIONS)
            ask = lambda path, n: post(path, prompt=f"number {n}", max_tokens=3)  # noqa: E731
            [*threads.map(ask, several, range(40))]
        post(CHATS, messages=[USER], tools=[tool], tool_choice="required", max_tokens=100, seed=2)
        last = post(COMPLETIONS, prompt="last", max_tokens=9, temperature=0, ignore_eos=True)
        assert server.stop() == 0
    lines = recorded(tmp_path / "r")
    assert sorted(line["prompt"] for line in lines[:40]) == sorted(f"number {n}" for n in range(40))
    text = last.json()["choices"][0]["text"]
    assert lines[40:] == [{"messages": [USER]}, {"prompt": "last", "answer": text}]


def test_a_server_that_cannot_record_does_not_start(tiny_llama: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"error: record: .* cannot be written to") as found:
        Served(tiny_llama, "--record", tmp_path / "file")
    assert "Traceback" not in str(found.value)


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Let the test see the server's warnings."""
    logger = logging.getLogger("outrider")
    propagates, logger.propagate = logger.propagate, True
    yield
    logger.propagate = propagates
