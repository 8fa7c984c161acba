"""A planted drafter with another tokenizer than ``exactness.planted_pair``'s target."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, PreTrainedTokenizerFast

from tests.support.exactness import VOCABULARY, tiny_tokenizer

SPECIALS = ["<|end|>", "</s>", "<|begin|>"]


def other_tokenizer(kept: float = 0.5, seed: int = 3) -> Tokenizer:
    """A byte-level tokenizer with the target's letters, some of its pairs, and pairs of its own.

    Its ids are the target's in no order.
    """
    rng = random.Random(seed)
    theirs = tiny_tokenizer().get_vocab()
    singles = [token for token in theirs if len(token) == 1]
    pairs = [tuple(token) for token in theirs if len(token) == 2 and rng.random() < kept]
    others = itertools.product("bcdfghjklmpqvwxyz", "aeiou")
    pairs += [pair for pair in others if "".join(pair) not in theirs]
    names = [*SPECIALS, *singles, *map("".join, pairs)]
    rng.shuffle(names)
    vocabulary = {name: id for id, name in enumerate(names)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIALS)
    return tokenizer


def save_other(target: Path, folder: Path, tokenizer: Tokenizer) -> Path:
    """Save the target's drafter with another tokenizer: the rows of shared tokens are theirs."""
    config = AutoConfig.from_pretrained(target / "drafter")
    names, theirs = tokenizer.get_vocab(), tiny_tokenizer().get_vocab()
    weights = load_file(target / "drafter" / "model.safetensors")
    rng = torch.Generator().manual_seed(5)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = weights[name]
        new = old.std() * torch.randn(len(names), old.shape[1], generator=rng)
        for token, id in names.items():
            if token in theirs and token not in SPECIALS:
                new[id] = old[theirs[token]]
        weights[name] = new
    config.vocab_size = len(names)
    config.eos_token_id = names["<|end|>"]
    config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    assert len(theirs) == VOCABULARY
    return folder
