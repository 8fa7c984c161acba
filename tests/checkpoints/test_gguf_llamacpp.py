"""GGUF files of every family as llama.cpp itself reads them (make peers)."""

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
SAME = [case for case in CASES if not case.startswith("phi3")]
"""Of Phi-3 it reads no windows, and takes the long ropes by the server's context."""
COARSE = {"gemma2": 3e-2, "gemma3": 3e-2}
"""Its GELU is a table in fp16."""
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
    """The log probabilities of the likeliest tokens behind a prompt; none where it ends there."""
    wish = {"prompt": ids, "n_predict": 1, "temperature": -1, "n_probs": 20}
    asked = Request(f"{url}/completion", json.dumps(wish).encode())
    with urlopen(asked, timeout=60) as answer:
        found = json.loads(answer.read()).get("completion_probabilities", ())
    return {each["id"]: each["logprob"] for first in found for each in first["top_logprobs"]}


@pytest.mark.parametrize("case", SAME)
def test_llama_cpp_computes_the_same(
    case: str, make_checkpoint: Callable[..., Path], tmp_path: Path
) -> None:
    if not LLAMA_CPP.ready:
        pytest.skip("llama.cpp is not installed; run: make peers")
    family, options, _ = CASES[case]
    whole: dict[str, Any] = {**SIZES, **options, "tokenizer": True}
    source = make_checkpoint(tmp_path / "source", family, **whole)
    skip = "lm_head" if "tie" in str(options) else "none"
    path, _ = convert(source, tmp_path / "model.gguf", Kind.F32, byte_level(), skip=skip)
    begin = [(7 * i) % 250 + 3 for i in range(59)]
    with llama_server(path) as url:
        answers = ((last, likeliest(url, [*begin, last])) for last in range(5, 25))
        last, theirs = next(each for each in answers if each[1])
    assert len(theirs) == 20
    model = native_model(step(HERE[-1]), path, "float32", 128)
    whole_prompt = Segment([*begin, last], 0, range(1, 8), 1, 60)
    logits = model.run([whole_prompt], model.new_store(8, 16)).logits
    assert logits is not None
    mine = logits[-1].astype(np.float64) - np.logaddexp.reduce(logits[-1].astype(np.float64))
    for token, logprob in theirs.items():
        assert mine[token] == pytest.approx(logprob, abs=COARSE.get(case, 3e-4))
