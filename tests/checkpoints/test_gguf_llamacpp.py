"""GGUF files of hybrids as llama.cpp itself reads them (make peers)."""

from __future__ import annotations

import json
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind

from benchmarks.install import LLAMA_CPP, program
from outrider.models.rows import Segment
from outrider.native import choice as native
from tests.checkpoints.test_gguf import CASES, SIZES
from tests.support.ggufs import byte_level, convert
from tests.support.loading import native_model
from tests.support.native_steps import HERE, step

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(native.library() is None, reason="the native step is off"),
]
HYBRIDS = ("lfm2", "qwen3_5", "granite4", "falcon_h1", "nemotron_h")
FP32 = ("-fa", "off", "-ctk", "f32", "-ctv", "f32")
START_SECONDS = 60


@contextmanager
def llama_server(path: Path) -> Iterator[str]:
    """The address of llama.cpp's server with a file."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    command = [program("llama-server"), "-m", path, "--port", port, "-c", "512", "-t", "1", *FP32]
    log = path.with_suffix(".log")
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
        try:
            while time.monotonic() < until and server.poll() is None:
                try:
                    urlopen(f"{url}/health", timeout=1).close()
                    break
                except (URLError, OSError):
                    time.sleep(0.1)
            assert server.poll() is None, log.read_text()[-2000:]
            yield url
        finally:
            server.kill()


def likeliest(url: str, ids: list[int]) -> dict[int, float]:
    """The log probabilities of the likeliest tokens behind a prompt."""
    wish = {"prompt": ids, "n_predict": 1, "temperature": -1, "n_probs": 20, "cache_prompt": False}
    asked = Request(f"{url}/completion", json.dumps(wish).encode())
    with urlopen(asked, timeout=60) as answer:
        (first,) = json.loads(answer.read())["completion_probabilities"]
    return {each["id"]: each["logprob"] for each in first["top_logprobs"]}


@pytest.mark.parametrize("case", HYBRIDS)
def test_llama_cpp_computes_the_same(
    case: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    if not LLAMA_CPP.ready:
        pytest.skip("llama.cpp is not installed; run: make peers")
    family, options, _ = CASES[case]
    whole: dict[str, Any] = {**SIZES, **options, "tokenizer": True}
    source = make_checkpoint(tmp_path / "source", family, **whole)
    path, _ = convert(source, tmp_path / "model.gguf", Kind.F32, byte_level())
    ids = [(7 * i) % 250 + 3 for i in range(60)]
    model = native_model(step(HERE[-1]), path, "float32", 128)
    logits = model.run([Segment(ids, 0, range(1, 8), 1, 60)], model.new_store(8, 16)).logits
    assert logits is not None
    mine = logits[-1].astype(np.float64) - np.logaddexp.reduce(logits[-1].astype(np.float64))
    with llama_server(path) as url:
        theirs = likeliest(url, ids)
    assert len(theirs) == 20
    assert int(mine.argmax()) == max(theirs, key=lambda token: theirs[token])
    for token, logprob in theirs.items():
        assert mine[token] == pytest.approx(logprob, abs=3e-4)
