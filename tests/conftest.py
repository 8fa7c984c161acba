"""What every test has: tiny checkpoints, a server of them, and the order that tests leave."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis  # before any test: its hook for trio warns where one has frozen the collector
import pytest
from httpx._transports import default as httpx_transports
from tokenizers import Tokenizer

from tests.support.forked import PRELOADED, Served, by_fork
from tests.support.tiny import MakeCheckpoint, build_checkpoint, byte_level_tokenizer

# torch and transformers are imported where they are used: the process that only hands out tests
# reads this file, too, and waits for no import.
if TYPE_CHECKING:
    import openai

# A busy machine is no failure. `settings` of a test start from this profile.
hypothesis.settings.register_profile("outrider", deadline=None)
hypothesis.settings.load_profile("outrider")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the collector of garbage from searching all modules and tests again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session")
def make_checkpoint() -> MakeCheckpoint:
    """``make_checkpoint(folder, family, **config)``: see ``build_checkpoint``."""
    return build_checkpoint


@pytest.fixture(scope="session", autouse=True)
def costly_work_is_done_once() -> Iterator[None]:
    """Imports for the processes of ``AsyncLLM`` (5 s of CPU), certificates for clients (50 ms).

    These processes are forked from one that has done the imports, as are those of ``forked``.
    """
    multiprocessing.set_forkserver_preload([PRELOADED])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multiprocessing, "get_context", by_fork)
        name = "create_ssl_context"
        patch.setattr(httpx_transports, name, functools.cache(getattr(httpx_transports, name)))
        yield


@pytest.fixture(autouse=True)
def no_drafter_fails(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Fail a test whose drafter raised, since the engine goes on without a draft."""
    yield
    said = [record.getMessage() for record in caplog.get_records("call")]
    assert not [text for text in said if "failed and is switched off" in text]


@pytest.fixture(autouse=True)
def logs_stay_put() -> Iterator[None]:
    """Undo what `serve` in this process does to logging: its handler holds the test's stderr."""
    loggers = logging.getLogger(), logging.getLogger("outrider")
    before = [(one, one.handlers[:], one.level, one.propagate) for one in loggers]
    yield
    for one, handlers, level, propagate in before:
        one.handlers[:] = handlers
        one.setLevel(level)
        one.propagate = propagate


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The tiny byte-level tokenizer."""
    return byte_level_tokenizer()


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 2 layers with grouped heads and a tokenizer; do not write to it."""
    return build_checkpoint(tmp_path_factory.mktemp("llama"), "llama", tokenizer=True)


@pytest.fixture(scope="session")
def tiny_qwen2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen2 of 2 layers and a tokenizer; do not write to it."""
    return build_checkpoint(tmp_path_factory.mktemp("qwen2"), "qwen2", tokenizer=True)


@pytest.fixture(scope="session")
def tiny_qwen3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 of 2 layers and a tokenizer; do not write to it."""
    return build_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", tokenizer=True)


@pytest.fixture(scope="session")
def tiny_drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 1 layer with the tokenizer of ``tiny_llama``; do not write to it."""
    folder = tmp_path_factory.mktemp("drafter-of-llama")
    return build_checkpoint(folder, "llama", tokenizer=True, seed=1, num_hidden_layers=1)


@pytest.fixture(scope="session")
def server(tiny_llama: Path, tiny_drafter: Path) -> Iterator[Served]:
    """A server of the tiny pair by two names; leave it as it was."""
    with Served(
        tiny_llama,
        "--served-model-name",
        "tiny,other",
        "--drafter",
        tiny_drafter,
        "--num-speculative-tokens",
        "4",
    ) as found:
        yield found


@pytest.fixture(scope="session")
def client(server: Served) -> openai.OpenAI:
    """OpenAI's client of that server."""
    import openai

    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
