"""Tiny checkpoints, made on the spot: random weights whose logits are spread, and a tokenizer."""

from __future__ import annotations

import functools
import gc
import logging
import multiprocessing
import shutil
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hypothesis  # before any test: its hook for trio warns where one has frozen the collector
import pytest
from forked import PRELOADED, Served, by_fork
from httpx._transports import default as httpx_transports
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

# torch and transformers are imported where they are used: the process that only hands out tests
# reads this file, too, and waits for no import.
if TYPE_CHECKING:
    import openai
    import torch


MakeCheckpoint = Callable[..., Path]

# A busy machine is no failure. `settings` of a test start from this profile.
hypothesis.settings.register_profile("outrider", deadline=None)
hypothesis.settings.load_profile("outrider")

END = "<|end|>"
PAD = "<pad_extra>"
SPECIALS = [END, "<|user|>", "<|model|>"]
TEMPLATE = (
    "{% for t in tools or [] %}{{ t.function.name }};{% endfor %}"
    "{% for m in messages %}{% if m['role'] not in ['user', 'model'] %}"
    "{{ raise_exception('roles are user and model') }}{% endif %}"
    "{{ '<|' + m['role'] + '|>' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|model|>' }}{% endif %}"
)
PROSE = """
def greet(name):
    return f"Hello, {name}!"

for word in ("the quick brown fox", "jumps over", "the lazy dog"):
    print(greet(word))
"""
VOCABULARY = 320

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


def byte_level_tokenizer() -> Tokenizer:
    """A byte-level BPE of 3 specials, 256 bytes and a few merges, the same on every call."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([PROSE] * 2, trainer)
    return tokenizer


def save_tokenizer(folder: Path, template: str | None = TEMPLATE) -> None:
    """Put the byte-level tokenizer into a checkpoint."""
    from transformers import PreTrainedTokenizerFast

    fast = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), eos_token=END)
    fast.chat_template = template
    fast.save_pretrained(folder)


def randomise(model: torch.nn.Module, seed: int) -> None:
    """Weights that keep activations near 1 and spread the logits; norms and biases count too."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if weight.dim() == 1:
                weight.copy_(noise * 0.2 + (1 if "norm" in name else 0))
            elif "embed" in name or "lm_head" in name:
                weight.copy_(noise * 0.5)
            else:
                weight.copy_(noise * 1.2 / weight.shape[1] ** 0.5)


def build_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    tokenizer: bool = False,
    dtype: torch.dtype | None = None,
    max_shard_size: int | str = "1GB",
    **config: Any,
) -> Path:
    """Save a tiny random model of ``family`` to ``folder``, and return the folder.

    ``config`` overrides ``SIZES``; with ``tokenizer`` the byte-level one comes along and its end
    token is the model's EOS. None is float32.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {**SIZES, "vocab_size": VOCABULARY if tokenizer else 128, **config}
    if tokenizer:
        options = {**options, "eos_token_id": config.get("eos_token_id", 0)}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **options))
    randomise(model, seed)
    model.to(dtype or torch.float32).save_pretrained(folder, max_shard_size=max_shard_size)
    if tokenizer:
        save_tokenizer(folder)
    return folder


def padded_copy(folder: Path, to: Path) -> Path:
    """Copy a checkpoint and add ``PAD`` to its tokenizer, the first id that the model lacks."""
    shutil.copytree(folder, to)
    tokenizer = Tokenizer.from_file(str(to / "tokenizer.json"))
    tokenizer.add_special_tokens([PAD])
    tokenizer.save(str(to / "tokenizer.json"))
    return to


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
