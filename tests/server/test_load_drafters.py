"""Drafters that are loaded while a server runs: streams do not notice, and nothing else is."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient
from transformers import AutoConfig

from benchmarks.served import metrics
from outrider.errors import ConfigError
from outrider.native import choice as native
from outrider.server.app import create_app
from outrider.server.build import read_folder
from outrider.server.errors import Refusal
from outrider.server.settings import Settings
from outrider.server.speculation import drafter_in
from tests.support.echo import Echo
from tests.support.forked import Served
from tests.support.heads import Eagle, make_head, save_head
from tests.support.tiny import build_checkpoint

PATH = "/v1/speculation"
ASKED: dict[str, Any] = {
    "prompt": "for word in the lazy dog: ", "max_tokens": 200, "ignore_eos": True,
    "temperature": 0.8, "repetition_penalty": 1.1, "n": 16, "seed": 5,
}  # fmt: skip


@pytest.fixture(scope="module")
def drafters(
    tiny_llama: Path, tiny_drafter: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A folder of drafters, most of which cannot be used."""
    folder = tmp_path_factory.mktemp("drafters") / "of-tiny"
    shutil.copytree(tiny_drafter, folder / "small")
    shutil.copytree(tiny_drafter, folder / "deep" / "damaged")
    weights = folder / "deep" / "damaged" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    config = AutoConfig.from_pretrained(tiny_llama)
    save_head(make_head(Eagle(), config), folder / "head")
    config.hidden_size *= 2
    save_head(make_head(Eagle(), config), folder / "of-another")
    build_checkpoint(folder / "renamed", "llama", tokenizer=True, num_hidden_layers=1)
    file = folder / "renamed" / "tokenizer.json"
    about = json.loads(file.read_text())
    about["model"]["vocab"] = {
        {"a": "b", "b": "a"}.get(word, word): id for word, id in about["model"]["vocab"].items()
    }
    file.write_text(json.dumps(about))
    (folder / "empty").mkdir()
    (folder / "text.json").write_text("[1]")
    (folder / "out").symlink_to(tiny_drafter)
    shutil.copytree(tiny_drafter, folder / "half-out")
    (folder / "half-out" / "config.json").unlink()
    (folder / "half-out" / "config.json").symlink_to(tiny_drafter / "config.json")
    (folder / "circle").symlink_to(folder / "circle")
    (folder / "near").symlink_to(folder / "small")
    os.mkfifo(folder / "pipe")
    return folder


@pytest.fixture(scope="module")
def loading(tiny_llama: Path, drafters: Path) -> Iterator[Served]:
    # Few at once, so that much is left to do when a client has read the first tokens.
    with Served(tiny_llama, "--load-drafters", drafters, "--max-num-seqs", "2") as found:
        yield found


def load(server: Served, name: Any, **more: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{PATH}", json={"load": name, **more}, timeout=60)


def completed(server: Served) -> list[str]:
    answer = httpx.post(f"{server.url}/v1/completions", json=ASKED, timeout=60)
    assert answer.status_code == 200, answer.text
    return [choice["text"] for choice in answer.json()["choices"]]


def texts_with(server: Served, *names: str) -> list[str]:
    """The texts of a stream during which drafters are loaded."""
    body, texts = {**ASKED, "stream": True}, [""] * ASKED["n"]
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as stream:
        for number, line in enumerate(line for line in stream.iter_lines() if line):
            if line == "data: [DONE]":
                break
            if number % 20 == 10 and number // 20 < len(names):
                answer = load(server, names[number // 20])
                assert answer.status_code == 200, answer.text
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                texts[choice["index"]] += choice["text"]
    assert number // 20 >= len(names)
    return texts


def test_streams_go_on(loading: Served, drafters: Path, tiny_llama: Path) -> None:
    before = httpx.get(f"{loading.url}{PATH}").json()
    assert before["loading"] == {"folder": str(drafters), "loaded": None, "under_way": False}
    assert before["target"] == str(tiny_llama)
    expected, counted = completed(loading), metrics(loading.url)
    names = ["small", *["head"] * bool(native.library()), "near"]
    assert texts_with(loading, *names) == expected
    after = httpx.get(f"{loading.url}{PATH}").json()
    assert after["loading"]["loaded"] == str(drafters / "near")
    assert set(after["drafters"]) == {*before["drafters"], "model"}
    assert after["drafters"]["model"]["folder"] == str(drafters / "near")
    assert after["drafters"]["suffix"]["folder"] is None
    assert after["drafter"] == "auto"
    assert after["enabled"]
    assert completed(loading) == expected
    now = metrics(loading.url)
    assert all(now[name] >= count for name, count in counted.items() if name.endswith("_total"))
    assert now["vllm:num_preemptions_total"] > counted["vllm:num_preemptions_total"]
    wanted = {"n": 1, "speculation": {"drafter": "model", "num_speculative_tokens": 4}}
    answer = httpx.post(f"{loading.url}/v1/completions", json={**ASKED, **wanted})
    assert answer.json()["metrics"]["speculative_decoding"]["num_draft_tokens"] > 0
    assert answer.json()["choices"][0]["text"] == expected[0]


def test_a_death_in_its_first_minute_brings_back_the_one_before(
    loading: Served, drafters: Path
) -> None:
    assert load(loading, "small").status_code == 200
    assert loading.kill_engine()
    engine_is_back(loading)
    found = httpx.get(f"{loading.url}{PATH}").json()
    assert found["loading"]["loaded"] != str(drafters / "small")
    assert completed(loading)
    assert any(f"the drafter in {drafters / 'small'} is given up" in line for line in loading.lines)


def engine_is_back(server: Served) -> None:
    """Wait until another engine is ready."""
    deadline = time.monotonic() + 60
    time.sleep(0.2)
    while not httpx.get(f"{server.url}/ready").is_success:
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("name", "status", "text"),
    [
        ("deep/damaged", 400, "damaged"),
        ("deep", 400, "config.json"),
        ("empty", 400, "empty"),
        pytest.param("of-another", 400, "made for a target with a width", marks=pytest.mark.skipif(
            native.library() is None, reason="the native step is off")),
        ("renamed", 400, "has another tokenizer"),
        ("text.json", 400, "text.json"),
        ("small/config.json", 400, "is no drafter; give the folder of one"),
        ("half-out/model.safetensors", 400, "is no drafter"),
        ("out", 400, "links that lead out"),
        ("half-out", 400, "links that lead out"),
        ("circle", 404, "there is no drafter"),
        ("pipe", 404, "there is no drafter"),
        ("none", 404, "there is no drafter 'none'"),
        ("ngram", 404, "there is no drafter"),
        ("../of-tiny/small", 400, "give the name of a drafter below"),
        ("small/..", 400, "give the name"),
        ("small/", 400, "give the name"),
        ("./small", 400, "give the name"),
        ("", 400, "give the name"),
        ("/etc", 400, "give the name"),
        ("sm\0all", 400, "give the name"),
        ("sm\nall", 400, "give the name"),
        ("a" * 1025, 400, "give the name"),
        ("a" * 1000, 404, "there is no drafter"),
        ("a/" * 500 + "a", 404, "there is no drafter"),
        (["small"], 400, "valid string"),
        (1, 400, "valid string"),
    ],
)  # fmt: skip
def test_bad_drafters(loading: Served, name: Any, status: int, text: str) -> None:
    before = httpx.get(f"{loading.url}{PATH}").json()
    answer = load(loading, name)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, "load"), error
    assert text in error["message"]
    assert "\n" not in error["message"]
    after = httpx.get(f"{loading.url}{PATH}").json()
    assert after["loading"] == before["loading"]
    assert set(after["drafters"]) == set(before["drafters"])
    assert httpx.get(f"{loading.url}/health").is_success


def test_bad_drafters_disturb_no_stream(loading: Served) -> None:
    expected = completed(loading)
    body, texts = {**ASKED, "stream": True}, [""] * ASKED["n"]
    with httpx.stream("POST", f"{loading.url}/v1/completions", json=body, timeout=60) as stream:
        for number, line in enumerate(line for line in stream.iter_lines() if line):
            if line == "data: [DONE]":
                break
            if number in (5, 15):
                assert load(loading, "renamed" if number == 5 else "deep/damaged").is_error
            for choice in json.loads(line.removeprefix("data: "))["choices"]:
                texts[choice["index"]] += choice["text"]
    assert texts == expected


def test_load_goes_alone(loading: Served) -> None:
    for more in ({"enabled": True}, {"num_speculative_tokens": None}, {"drafter": "suffix"}):
        answer = load(loading, "small", **more)
        assert answer.status_code == 400
        assert "load cannot be combined" in answer.json()["error"]["message"]


def test_off_unless_a_folder_is_named(server: Served, tiny_llama: Path, tmp_path: Path) -> None:
    answer = load(server, "small")
    assert answer.status_code == 403
    assert "start it with --load-drafters DIR" in answer.json()["error"]["message"]
    assert httpx.get(f"{server.url}{PATH}").json()["loading"] is None
    assert read_folder({"load_drafters": None}, "load_drafters") is None
    (tmp_path / "link").symlink_to(tiny_llama)
    assert read_folder({"load_drafters": str(tmp_path / "link")}, "load_drafters") == tiny_llama
    with pytest.raises(ConfigError, match="is not a folder; create it"):
        read_folder({"load_drafters": str(tmp_path / "none")}, "load_drafters")


def test_who_may(tiny_llama: Path, drafters: Path) -> None:
    """Those who may switch: whoever has a key, and without keys this machine."""
    for keys, headers, status in (
        ((), {"X-Forwarded-For": "1.2.3.4"}, 403),
        (("k",), {}, 401),
        (("k",), {"Authorization": "Bearer k"}, 404),
    ):
        settings = Settings(names=("tiny",), load_drafters=drafters, api_keys=keys)
        with TestClient(create_app(Echo(tiny_llama, None), settings), "http://localhost") as client:
            found = client.post(PATH, json={"load": "none"}, headers=headers)
            assert found.status_code == status


def test_another_one_meanwhile_is_refused(tiny_llama: Path, drafters: Path) -> None:
    settings = Settings(names=("tiny",), load_drafters=drafters, api_keys=("k",))
    app = create_app(Echo(tiny_llama, None), settings)
    key = {"Authorization": "Bearer k"}
    with TestClient(app, "http://localhost", headers=key) as client:
        app.state.service.llm.loads._under_way = object()
        found = client.post(PATH, json={"load": "small"})
        assert found.status_code == 409
        assert found.json()["error"]["type"] == "conflict_error"
        assert client.get(PATH).json()["loading"]["under_way"]


def test_names_below_the_folder(drafters: Path) -> None:
    assert drafter_in(drafters, "deep/damaged") == drafters / "deep" / "damaged"
    assert drafter_in(drafters, "text.json") == drafters / "text.json"
    for wrong in ("\ud800", "a\u2028b", "~", "~root", "$HOME", "small\\..\\.."):
        with pytest.raises(Refusal):
            drafter_in(drafters, wrong)
