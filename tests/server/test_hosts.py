"""Which Host and Origin headers are the server's own."""

from __future__ import annotations

import pytest

from outrider.server.hosts import from_this_machine, host_is_ours, origin_is_ours
from outrider.server.settings import Settings

LOCAL = Settings(names=("x",))
WIDE = Settings(names=("x",), host="0.0.0.0", allowed_hosts=("llm.example.com",))
ALL = Settings(names=("x",), allowed_hosts=("*",))
LOOPBACK = ("localhost", "LOCALHOST:80", "localhost.", "127.0.0.1:8000", "127.1.2.3", "[::1]:1")
FOREIGN = (
    "evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.localhost.com:8000",
    "[::1].evil.example", "a b", "", ":80", "localhost:80:80", "user@localhost", "localhost/x",
    "[::1", "::1", "localhost:x", "x" * 60_000 + ".com",
)  # fmt: skip


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_names_are_always_ours(host: str) -> None:
    for settings in (LOCAL, WIDE, ALL):
        assert host_is_ours(host, settings)


@pytest.mark.parametrize("host", FOREIGN)
def test_foreign_names_never_are(host: str) -> None:
    assert not host_is_ours(host, LOCAL)
    assert not host_is_ours(host, WIDE)


@pytest.mark.parametrize("host", ["10.0.0.7:8000", "[fd00::1]:8000", "outrider", "outrider:8000"])
def test_addresses_and_plain_names_are_ours_beyond_loopback(host: str) -> None:
    assert host_is_ours(host, WIDE)
    assert not host_is_ours(host, LOCAL)


def test_names_can_be_allowed() -> None:
    assert host_is_ours("LLM.example.com.:443", WIDE)
    assert not host_is_ours("other.example.com", WIDE)
    assert host_is_ours("anything.example", ALL)
    assert host_is_ours("box.lan", Settings(names=("x",), host="box.lan"))


@pytest.mark.parametrize(
    ("origin", "host", "ours"),
    [
        ("http://10.0.0.7:8000", "10.0.0.7:8000", True),
        ("http://outrider", "outrider:80", True),
        ("https://a.example", "a.example", True),
        ("http://localhost:3000", "10.0.0.7:8000", True),
        ("https://llm.example.com", "10.0.0.7:8000", True),
        ("http://10.0.0.8:8000", "10.0.0.7:8000", False),
        ("http://other", "outrider", False),
        ("http://10.0.0.7:9000", "10.0.0.7:8000", False),
        ("null", "localhost", False),
        ("", "localhost", False),
        ("file://", "localhost", False),
        ("chrome-extension://localhost", "localhost", False),
        ("http://[", "localhost", False),
        ("http://localhost@evil.example", "localhost", False),
    ],
)
def test_origins(origin: str, host: str, ours: bool) -> None:
    assert origin_is_ours(origin, host, WIDE) is ours


def test_a_proxy_is_not_this_machine() -> None:
    here = {"host": "localhost:8000"}
    for peer in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1"):
        assert from_this_machine(here, peer)
    for peer in ("10.0.0.7", "::ffff:10.0.0.7", "", None):
        assert not from_this_machine(here, peer)
    assert not from_this_machine({"host": "10.0.0.7"}, "127.0.0.1")
    assert not from_this_machine({}, "127.0.0.1")
    for name in ("Forwarded", "via", "X-Forwarded-Host", "x-real-ip", "CF-Connecting-IP"):
        assert not from_this_machine({**here, name: ""}, "127.0.0.1")
