"""GGUF files in the peers' harness: pairs, settings that are tried, servers and short tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import start
from benchmarks.peers import files, known, servers
from benchmarks.peers.known import FILE, OWN
from benchmarks.peers.pairs import split_pairs
from benchmarks.peers.runners.ik_llamacpp import IkLlamaCpp
from benchmarks.peers.runners.llamacpp import LlamaCpp
from benchmarks.peers.runners.serve import as_many
from benchmarks.peers.session import PeerError
from outrider.bench.workload import Item, Workload
from outrider.errors import ConfigError

SPEC: dict[str, Any] = {
    "target": "T.gguf", "drafter": "D.gguf", "dtype": FILE, "lookup": "", "k": 4, "threads": 2,
    "arguments": ["--flash-attn", "on"], "context": 100, "parallel": 3,
}  # fmt: skip


def test_a_file_behind_a_file_is_its_drafter() -> None:
    assert split_pairs("pocket,T.gguf,D.gguf,planted") == ["pocket", "T.gguf,D.gguf", "planted"]
    assert split_pairs("A.gguf,B.gguf,C.gguf") == ["A.gguf,B.gguf", "C.gguf"]
    assert split_pairs("A.gguf,pocket,A.gguf") == ["A.gguf", "pocket"]


def test_modes_of_files() -> None:
    peers = known.peers()
    assert peers[OWN].modes(FILE) == ("plain", "draft", "ngram", "auto")
    wanted = ("plain", "draft", "ngram", "ngram map-k", "ngram mod")
    assert peers["llama.cpp"].modes(FILE) == wanted
    assert peers["llama.cpp"].modes("float32") == (
        "plain", "draft", "draft int8", "draft int4", "ngram",
    )  # fmt: skip
    assert peers["mistral.rs"].modes(FILE) == ("plain",)
    assert FILE not in peers["openvino"].dtypes


@pytest.mark.parametrize("runner", [LlamaCpp, IkLlamaCpp])
def test_commands_of_servers(runner: type[LlamaCpp]) -> None:
    plain = runner.command("server", {**SPEC, "mode": "plain"}, "80")
    assert plain[:3] == ["server", "--model", "T.gguf"]
    assert plain[plain.index("--ctx-size") + 1] == str(3 * 116)
    assert plain[plain.index("--flash-attn") + 1] == "on"
    assert "D.gguf" not in plain
    draft = runner.command("server", {**SPEC, "mode": "draft"}, "80")
    assert draft[draft.index("--model-draft") + 1] == "D.gguf"
    lookup = runner.command("server", {**SPEC, "mode": "ngram", "lookup": "map-k"}, "80")
    assert lookup[lookup.index("--spec-type") + 1] == "ngram-map-k"


def test_texts_read_again_have_as_many_ids() -> None:
    assert as_many([1, 2, 3], 2) == [1, 2]
    assert as_many([1], 3) == [1, -1, -1]


def test_chats_are_new_to_every_server(tmp_path: Path) -> None:
    chat = ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"})
    workload = Workload("x", (Item(messages=chat), Item("a text")))
    file = tmp_path / "chats.jsonl"
    servers.write_chats(workload, file, "0 of 3", 3)
    chats = [json.loads(line)["messages"] for line in file.read_text().splitlines()]
    assert [c[-1]["content"] for c in chats] == [
        "(0 of 3, 1) Hello", "(0 of 3, 2) a text", "(0 of 3, 3) Hello",
    ]  # fmt: skip
    assert chats[0][0]["content"] == "Be brief."
    assert chat[1]["content"] == "Hello"


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_POST(self):
        Handler.asked += 1
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(503 if Handler.asked < 3 else 200)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_start_lasts_until_a_chat_is_answered() -> None:
    def command(slots: int, tokens: int, port: int) -> list[str]:
        assert (slots, tokens) == (1, servers.ROOM)
        return [sys.executable, "-ISc", SERVER, str(port)]

    taken = servers.start(servers.Server("fake", "plain", 0, "", command))
    assert taken["seconds"] > 0
    assert 0 < taken["later_bytes"] <= taken["peak_bytes"]
    ended = servers.Server("fake", "plain", 0, "", lambda *_: [sys.executable, "-ISc", "pass"])
    with pytest.raises(PeerError, match="gave no answer"):
        servers.start(ended)


def run(peer: str, mode: str, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "peer": peer, "mode": mode, "tokens_per_second": speed, "num_speculative_tokens": 0,
        "load": "decode", "dtype": FILE, "first_difference": None, **more,
    }  # fmt: skip


def test_short_tables() -> None:
    server = {
        "peer": OWN, "mode": "auto", "seconds": 1.25, "ready_bytes": 2e8, "later_bytes": 3e8,
        "loads": [{"clients": 1, "tokens_per_second": 10.0}],
    }  # fmt: skip
    fast = {**server, "loads": [{"clients": 1, "tokens_per_second": 30.0}]}
    runs = [
        run(OWN, "plain", 20.0), run(OWN, "draft", 50.0, num_speculative_tokens=4),
        run(OWN, "plain", 99.0, load="prefill 512"),
        run("other", "plain", 10.0, first_difference=7),
    ]  # fmt: skip
    cold = {"name": "T + D", "temperature": 0.0, "runs": runs, "servers": [server, fast]}
    warm = {"name": "T + D", "temperature": 0.8, "runs": [run(OWN, "plain", 21.0)]}
    machine = {"cpu": "C", "cores": 2, "date": "2026-11-27T00:00:00"}
    report = {"machine": machine, "max_tokens": 9, "pairs": [cold, warm]}
    lines = list(files.tables(report))
    assert lines[0] == "T + D · 9 tokens · C, 2 cores · 2026-11-27"
    own = (
        "| outrider | 20.0 | 50.0 (draft, K = 4) | 21.0 (plain) | 99.0 | 1.25 | 200 | 300 | ours |"
    )
    assert own in lines
    assert "| other | 10.0 | 10.0 (plain) |  |  |  |  |  | part at token 7 |" in lines
    assert "| outrider, auto | 30 |" in lines
    assert list(files.tables({**report, "pairs": [{**warm, "runs": []}]})) == []


@pytest.mark.parametrize("command", ["", "server", "'server {port}"])
def test_a_command_without_a_place_for_its_port_is_refused(command: str) -> None:
    with pytest.raises(ConfigError, match="--command"):
        start.words_of(command)
