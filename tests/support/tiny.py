"""Tiny checkpoints, made on the spot: random weights whose logits are spread, and a tokenizer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.support.on_disk import kept_on_disk

# torch and transformers are imported where they are used: the process that only hands out tests
# reads this file, too, and waits for no import.
if TYPE_CHECKING:
    import torch

MakeCheckpoint = Callable[..., Path]

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


@kept_on_disk
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
