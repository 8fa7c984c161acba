"""The readers of what comes from outside: texts, documents, answers over HTTP."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field

from outrider.base.outside.documents import (
    parse_json,
    parse_toml,
    parse_yaml,
    read_json,
    read_toml,
)
from outrider.base.outside.http import address, call
from outrider.base.outside.models import Part, checked
from outrider.base.outside.text import printable, well_formed
from outrider.errors import ConfigError, EndpointError, ModelError
from tests.support.peering import drips, peer, says

LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{i}: &a{i}\n  <<: [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain, ünïcode, 日本, 😀", "plain, ünïcode, 日本, 😀"),
        ("\x1b[31mred\x1b[0m", r"\x1b[31mred\x1b[0m"),
        ("one\r\n2026 forged\ttwo", "one 2026 forged two"),
        ("a\u2028b\u2029c\x85d", "a b c d"),
        ("\ud800", r"\ud800"),
        ("a\u202eb\u2066c\x00\x9b", r"a\u202eb\u2066c\x00\x9b"),
        (ValueError("an\nerror"), "an error"),
    ],
)
def test_what_is_printed_is_one_harmless_line(text: object, shown: str) -> None:
    assert printable(text) == shown
    assert printable(text).isprintable()


def test_a_number_that_python_does_not_write_is_printed_too() -> None:
    assert printable(10**5000) == "a value too long to be shown"


@pytest.mark.parametrize("text", ["x" * 10**7, "\x1b" * 10**7, " " * 10**7 + "x"])
def test_what_is_printed_is_short(text: str) -> None:
    assert len(printable(text, 50)) <= 50


def test_lone_surrogates_are_replaced_and_nothing_else() -> None:
    assert well_formed("a\ud800b😀\x00") == "a\ufffdb😀\x00"


P = {"p": 1}
GOOD: list[tuple[Callable[..., Any], str | bytes, Any]] = [
    (parse_json, '{"a": [1.5, null, true, "\\ud83d\\ude00"]}', {"a": [1.5, None, True, "😀"]}),
    (parse_json, b'\xef\xbb\xbf{"a": 1, "a": 2}', {"a": 2}),
    (parse_json, '"\\ud800"', "\ufffd"),
    (parse_json, '{"\\udfff": 1}', {"\ufffd": 1}),
    (parse_yaml, "on: yes\n8000: 2024-01-01\n~: =", [{"on": True, "8000": "2024-01-01", "~": "="}]),
    (parse_yaml, "a: &a {p: 1}\nb: {<<: *a, q: *a}", [{"a": P, "b": {"p": 1, "q": P}}]),
    (parse_yaml, "a: 1\n---\n---\n- b\n", [{"a": 1}, None, ["b"]]),
    (parse_yaml, "", []),
    (parse_toml, 'a.b = [1, "x"]\n[c]\nd = 1.5', {"a": {"b": [1, "x"]}, "c": {"d": 1.5}}),
]  # fmt: skip


@pytest.mark.parametrize(("parse", "text", "value"), GOOD)
def test_good_documents(parse: Callable[..., Any], text: str, value: Any) -> None:
    assert parse(text, "It") == value


def test_nothing_is_shared_in_a_document() -> None:
    (found,) = parse_yaml("a: &a [1]\nb: *a", "It")
    found["a"].append(2)
    assert found["b"] == [1]


BAD: list[tuple[Callable[..., Any], str | bytes, str]] = [
    (parse_json, "", "Expecting value"),
    (parse_json, b'{"a": "\xff"}', "UTF-8"),
    (parse_json, "[" * 10**6, "deep"),
    (parse_json, '{"a":' * 101 + "1" + "}" * 101, "deep"),
    (parse_json, '{"a": [1e999]}', "a.0 is inf; give a finite"),
    (parse_json, "NaN", "finite"),
    (parse_json, "9" * 4000, "300 digits"),
    (parse_json, "9" * 5000, "300 digits"),
    (parse_json, " " * (1 << 24) + "1", "16 MiB"),
    (parse_yaml, LAUGHS, "aliases"),
    (parse_yaml, MERGES, "aliases"),
    (parse_yaml, "a: &a [*a]", "nothing before it"),
    (parse_yaml, "- " * 10**5, "deep"),
    (parse_yaml, "{a: " * 10**4, "deep"),
    (parse_yaml, "a: 1\nb: {c: 1, c: 2}", "line 2: the key 'c' stands twice"),
    (parse_yaml, "a: !!python/object/apply:os.system [ls]", "tag"),
    (parse_yaml, "a: !!bool maybe", "tag"),
    (parse_yaml, "a: !!int ''", "tag"),
    (parse_yaml, "? [a]\n: 1", "a key is not text"),
    (parse_yaml, "a: .nan", "finite"),
    (parse_yaml, "a: 1" + ":59" * 10**5, "300 digits"),
    (parse_yaml, "a: [1", "line 2"),
    (parse_yaml, "a: \x07", "control"),
    (parse_toml, "a." * 10**5 + "a = 1", "64 parts"),
    (parse_toml, "a = " + "[" * 10**5, "deep"),
    (parse_toml, "a = 1e999", "finite"),
    (parse_toml, "a = 0x" + "f" * 10**4, "300 digits"),
    (parse_toml, "a = 1\na = 2", "overwrite"),
]


@pytest.mark.parametrize(("parse", "text", "why"), BAD)
def test_bad_documents_are_refused_in_a_sentence(
    parse: Callable[..., Any], text: str, why: str
) -> None:
    with pytest.raises(ModelError) as caught:
        parse(text, "The thing x.y", error=ModelError)
    said = str(caught.value)
    assert said.startswith("The thing x.y")
    assert why in said
    assert said.isprintable()
    assert len(said) < 400


@pytest.mark.parametrize("read", [read_json, read_toml])
def test_files_that_cannot_be_read(tmp_path: Path, read: Callable[..., Any]) -> None:
    for file in (tmp_path, tmp_path / "none", Path("a\0b"), tmp_path / ("x" * 999)):
        with pytest.raises(ConfigError, match="It cannot be read: "):
            read(file, "It")
    with pytest.raises(ConfigError, match="MiB"):
        read(Path("/dev/zero"), "It")


def test_a_key_twice_in_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text('{"a": 1, "a": 2}', encoding="utf-8")
    with pytest.raises(ConfigError, match="key 'a' twice"):
        read_json(file, "It")


class Inner(Part):
    url: str
    kind: Literal["a", "b"] = "a"


class Outer(Part):
    inner: Inner
    seconds: Annotated[float, Field(ge=0, le=3600)] = 1.0
    shares: tuple[float, ...] = ()
    count: int = 1


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"inner": {}}, "It, [inner] has no url; add it."),
        ({"inner": "x"}, "It: inner is 'x'; give a table."),
        (
            {"inner": {"url": "x", "knd": "a"}},
            "It, [inner] has no option 'knd'; did you mean 'kind'?",
        ),
        ({"inner": {"url": "x", "kind": "c"}}, "It: inner.kind is 'c'; known are a, b."),
        ({"secnds": 1}, "It has no option 'secnds'; did you mean 'seconds'?"),
        ({"seconds": -1}, "It: seconds is -1; give a number from 0 to 3,600."),
        ({"seconds": True}, "It: seconds is True; give a number."),
        ({"seconds": float("nan")}, "It: seconds is nan; give a finite number."),
        ({"shares": [1, "\n"]}, "It: shares.1 is '\\n'; give a number."),
        ({"count": 1.5}, "It: count is 1.5; give a whole number."),
    ],
)
def test_documents_of_another_form_are_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(Outer, {"inner": {"url": "x"}, **change}, "It")
    assert str(caught.value) == said


def test_a_document_becomes_its_model() -> None:
    read = checked(Outer, {"inner": {"url": "x"}, "shares": [1, 0.5], "seconds": 2}, "It")
    assert read == Outer(inner=Inner(url="x"), shares=(1.0, 0.5), seconds=2.0)


# HTTP

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.mark.parametrize(
    "answer",
    [
        drips(b"", b"H"),
        drips(b"HTTP/1.1 200 OK\r\nX: ", b"x"),
        drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n" * 100, 0.0),
        drips(b"HTTP/1.1 200 OK\r\n\r\n", b"x"),
        drips(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
        drips(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n", b"X: y\r\n"),
        lambda _: time.sleep(0.6),
    ],
    ids=range(8),
)
def test_a_call_ends_however_the_answer_trickles(answer: Callable[[socket.socket], None]) -> None:
    begin = time.monotonic()
    with peer(answer) as (url, _), pytest.raises(EndpointError, match="does not answer"):
        call(url, seconds=0.3)
    assert time.monotonic() - begin < 5


def test_a_call_ends_where_the_peer_does_not_read() -> None:
    with (
        peer(lambda _: time.sleep(2)) as (url, _),
        pytest.raises(EndpointError, match="does not answer"),
    ):
        call(url, "x" * (1 << 25), seconds=0.3)


def test_a_call_ends_in_the_middle_of_a_handshake() -> None:
    with (
        peer(lambda _: time.sleep(1)) as (url, _),
        pytest.raises(EndpointError, match="does not answer"),
    ):
        call(url.replace("http:", "https:"), seconds=0.3)


def test_a_call_ends_while_a_name_is_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*arguments: Any) -> Any:
        if arguments[5]:
            raise OSError
        time.sleep(1)

    monkeypatch.setattr(socket, "getaddrinfo", slow)
    with pytest.raises(EndpointError, match="no address of its name"):
        call("http://somewhere", seconds=0.2)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        b"\xff\xff\xff\r\n\r\n",
        b"HTTP/1.1 2e2 OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"X: y\r\n" * 1000 + b"\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nshort",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nab",
        b"\x1b[2J\nHTTP\r\n\r\n",
    ],
)
def test_what_is_not_http_is_one_sentence(head: bytes) -> None:
    with peer(says(head)) as (url, _), pytest.raises(EndpointError) as caught:
        call(url, seconds=2)
    assert str(caught.value).isprintable()
    assert url in str(caught.value)


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308, 304, 300])
def test_no_redirect_is_followed_and_no_key_goes_elsewhere(status: int) -> None:
    with peer(says(OK)) as (other, stolen):
        head = f"HTTP/1.1 {status} x\r\nLocation: {other}/a\r\nContent-Length: 0\r\n\r\n".encode()
        with peer(says(head)) as (url, asked), pytest.raises(EndpointError) as caught:
            call(f"{url}/v1/models", key="secret", seconds=2)
    assert b"Bearer secret" in asked[0]
    assert not stolen
    assert other in str(caught.value)


def test_an_answer_without_end_is_cut_off() -> None:
    with (
        peer(drips(b"HTTP/1.1 200 OK\r\n\r\n", b"x" * 65536, 0.0)) as (url, _),
        pytest.raises(EndpointError, match="more than 1 MiB"),
    ):
        call(url, seconds=20, limit=1 << 20)


def test_a_good_answer() -> None:
    with peer(says(b"HTTP/1.1 100 Continue\r\n\r\n" + OK)) as (url, asked):
        found = call(f"{url}/a b?q=ü%20", {"a": "\ud800"}, key="k", seconds=5)
    assert (found.status, found.ok, found.json()) == (200, True, {})
    head, _, body = asked[0].partition(b"\r\n\r\n")
    assert head.startswith(b"POST /a%20b?q=%C3%BC%20 HTTP/1.1\r\n")
    assert json.loads(body) == {"a": "\ud800"}


@pytest.mark.parametrize(
    "body", [b"x", b"\xff", b"[" * 100_000, b"1e999", b"NaN", b"9" * 9999], ids=range(6)
)
def test_a_body_that_is_no_json_is_none(body: bytes) -> None:
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    with peer(says(head + body)) as (url, _):
        assert call(url, seconds=5).json() is None


@pytest.mark.parametrize(
    "url",
    ["", "http://", "ftp://a", "http://a:x", "http://a:99999", "http://[::1",
     "http://\ud800", "a\x1bb", f"http://{'a' * 64}.b"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is not an address") as caught:
        address(url)
    assert str(caught.value).isprintable()


def test_a_key_that_no_header_can_carry_is_refused() -> None:
    for key in ("ü", "a\r\nX: y", "a\x00"):
        with pytest.raises(ConfigError, match="no header"):
            call("http://127.0.0.1:9", key=key)


def test_a_call_is_interrupted() -> None:
    code = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from outrider.base.outside.http import call; call(sys.argv[1], seconds=60)"
    )  # background jobs of a script ignore SIGINT
    with peer(drips(b"", b"HTTP/1.1 100 Continue\r\n\r\n")) as (url, asked):
        process = subprocess.Popen([sys.executable, "-c", code, url], stderr=subprocess.PIPE)
        try:
            while not asked:
                time.sleep(0.01)
            os.kill(process.pid, signal.SIGINT)
            assert b"KeyboardInterrupt" in process.communicate(timeout=20)[1]
        finally:
            process.kill()
