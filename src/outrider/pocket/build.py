"""The recipe of the pocket pair: ``python -m outrider.pocket.build``.

Trains a byte-level BPE, a Llama-style target and its drafter from scratch on the standard
library's source. Every stage is kept below ``--work`` and not done again.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from . import corpus as text
from .train import (
    Recipe,
    distillation_loss,
    held_out_loss,
    keep_heap,
    narrow_norms,
    optimise,
    text_loss,
)

PHASES = ((0.6, 256), (0.3, 512), (0.1, 2048))
TARGET_RECIPE = Recipe(tokens=11_000_000, muon_rate=4e-3, adam_rate=4e-3, phases=PHASES)
DRAFTER_RECIPE = Recipe(
    tokens=4_500_000, muon_rate=2e-3, adam_rate=1e-3, phases=((0.9, 256), (0.1, 2048))
)
DRAFTER_LAYERS = (0, -1)


def shape(layers: int, intermediate: int) -> LlamaConfig:
    """The pair's common shape: width 384, 6 query and 2 key-value heads of 64, tied embeddings."""
    return LlamaConfig(
        vocab_size=text.VOCAB_SIZE, hidden_size=384, intermediate_size=intermediate,
        num_hidden_layers=layers, num_attention_heads=6, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=text.CONTEXT, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=text.SPECIALS.index(text.END),
        pad_token_id=text.SPECIALS.index(text.PAD), dtype="float32",
    )  # fmt: skip


def drafter_from(target: LlamaForCausalLM) -> LlamaForCausalLM:
    """A two-layer drafter that starts from the target's embeddings, norms, first and last layer.

    Of each copied MLP it keeps the neurons whose three weight rows have the largest product of
    norms.
    """
    drafter = LlamaForCausalLM(shape(len(DRAFTER_LAYERS), 384))
    drafter.model.embed_tokens.load_state_dict(target.model.embed_tokens.state_dict())
    drafter.model.norm.load_state_dict(target.model.norm.state_dict())
    for layer, index in zip(drafter.model.layers, DRAFTER_LAYERS, strict=True):
        state = target.model.layers[index].state_dict()
        gate, up, down = (state[f"mlp.{n}_proj.weight"] for n in ("gate", "up", "down"))
        strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
        keep = strength.topk(layer.mlp.gate_proj.out_features).indices.sort().values
        state["mlp.gate_proj.weight"], state["mlp.up_proj.weight"] = gate[keep], up[keep]
        state["mlp.down_proj.weight"] = down[:, keep]
        layer.load_state_dict(state)
    return drafter


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write bf16 safetensors, config and tokenizer to ``folder``."""
    narrow = LlamaForCausalLM(model.config)
    narrow.load_state_dict(model.state_dict())
    torch.nn.Module.to(narrow, torch.bfloat16)
    narrow.config.dtype = "bfloat16"
    narrow.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def build(work: Path, out: Path, scale: float, device: str) -> dict[str, object]:
    """Run the recipe; return what the model card needs to know."""
    work.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    keep_heap()
    narrow_norms()
    modules = list(text.standard_library())
    folder = work / "tokenizer"
    if not folder.exists():
        text.train_tokenizer([m.text for m in modules if not m.held_out]).save_pretrained(folder)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    data = text.encode(tokenizer, modules)
    card: dict[str, object] = {
        "python": platform.python_version(), "torch": torch.__version__, "device": device,
        "machine": platform.machine(), "modules": len(modules), "train_tokens": data.train_tokens,
        "held_out_modules": [m.path for m in modules if m.held_out],
    }  # fmt: skip

    def recipe(base: Recipe) -> Recipe:
        return Recipe(int(base.tokens * scale), base.muon_rate, base.adam_rate, base.phases)

    target = LlamaForCausalLM(shape(10, 1024))
    torch.nn.Module.to(target, device)
    card["target_hours"] = optimise(
        target, text_loss(target), data, recipe(TARGET_RECIPE), work / "target.pt", "target"
    )
    card["target_nats_token"], card["target_nats_byte"] = held_out_loss(target, data)
    drafter = drafter_from(target)
    torch.nn.Module.to(drafter, device)
    card["drafter_hours"] = optimise(
        drafter,
        distillation_loss(drafter, target),
        data,
        recipe(DRAFTER_RECIPE),
        work / "drafter.pt",
        "drafter",
    )
    card["drafter_nats_token"], card["drafter_nats_byte"] = held_out_loss(drafter, data)
    save(target.cpu(), tokenizer, out)
    save(drafter.cpu(), tokenizer, out / "drafter")
    (work / "card.json").write_text(json.dumps(card, indent=1))
    return card


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m outrider.pocket.build", description=__doc__)
    parser.add_argument(
        "--work", type=Path, default=Path("build/pocket"), help="checkpoints, to resume from"
    )
    parser.add_argument("--out", type=Path, required=True, help="where the finished pair goes")
    parser.add_argument(
        "--tokens-scale", type=float, default=1.0, help="times the recipe's token budget"
    )
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    args = parser.parse_args()
    card = build(args.work, args.out, args.tokens_scale, args.device)
    print(json.dumps({k: v for k, v in card.items() if k != "held_out_modules"}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
