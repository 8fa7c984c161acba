"""The recipe of the pocket pair: ``python -m outrider.pocket.build``.

Trains a byte-level BPE, a Llama-style target and its drafter from scratch on the standard
library's source. Results of every stage are kept below ``--work``, from which a build resumes.
"""

import argparse
import itertools
import json
import platform
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..base.extras import torch_for
from ..base.threads import cpu_name
from ..base.types import SamplingParams

with torch_for("python -m outrider.pocket.build", program=__name__ == "__main__"):
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from ..checkpoints.checkpoint import open_checkpoint
    from ..llm import LLM
    from ..training.drafter_files import made_of
    from . import corpus as text
    from .evaluate import acceptance, held_out_loss, held_out_prompts, model_card, teacher_forced
    from .lattice import round_matrices
    from .train import TrainingPlan, distillation_loss, keep_heap, narrow_norms, optimise, text_loss

PHASES = ((0.6, 256), (0.3, 512), (0.1, 2048))
TARGET_RECIPE = TrainingPlan(tokens=11_000_000, muon_rate=4e-3, adam_rate=4e-3, phases=PHASES)
DRAFTER_RECIPE = TrainingPlan(
    tokens=9_000_000, muon_rate=3e-3, adam_rate=1.5e-3, phases=((0.9, 256), (0.1, 2048)),
    step_tokens=2048,
)  # fmt: skip
DRAFTER_LAYERS = (0, -1)
OWN_WORDS = 1280
OWN_WORDS_REPEATED = 3


def target_config() -> LlamaConfig:
    """Return the target's config: 10 layers of width 384, 6 query and 2 key-value heads."""
    return LlamaConfig(
        vocab_size=text.VOCAB_SIZE, hidden_size=384, intermediate_size=1024,
        num_hidden_layers=10, num_attention_heads=6, num_key_value_heads=2, head_dim=64,
        max_position_embeddings=text.CONTEXT, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=text.SPECIALS.index(text.END),
        pad_token_id=text.SPECIALS.index(text.PAD), dtype="float32",
    )  # fmt: skip


def save(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Write bf16 safetensors, config and tokenizer to ``folder``."""
    narrow = LlamaForCausalLM(model.config)
    narrow.load_state_dict(model.state_dict())
    torch.nn.Module.to(narrow, torch.bfloat16)
    narrow.config.dtype = "bfloat16"
    narrow.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def own_words(file: Path, target: Path, data: text.Corpus) -> list[npt.NDArray[np.int64]]:
    """Return the target's own continuations of openings of the training text, kept in ``file``.

    A drafter is judged on the target's text, which differs from what people wrote. Half of the
    texts are drawn at temperature 0.7, half at 1: 512 tokens each, 64 of them the opening.
    """
    if not file.exists():
        openings = text.windows(data.train, 64, seed=1)[:OWN_WORDS].tolist()
        llm = LLM(target, drafter=None, max_num_seqs=64, seed=0, max_model_len=1024)
        params = [
            SamplingParams(temperature=t, max_tokens=448, ignore_eos=True)
            for _, t in zip(openings, itertools.cycle((0.7, 1.0)), strict=False)
        ]
        outputs = llm.generate(openings, params)
        np.save(file, np.array([[*o.prompt_token_ids, *o.outputs[0].token_ids] for o in outputs]))
    return list(np.load(file, allow_pickle=False))


def build(work: Path, out: Path) -> dict[str, Any]:
    """Run the recipe; return the figures of the model card."""
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
    card: dict[str, Any] = {
        "python": platform.python_version(), "torch": torch.__version__,
        "cpu": cpu_name(), "date": date.today().isoformat(), "modules": len(modules),
        "train_tokens": data.train_tokens,
        "held_out_modules": [m.path for m in modules if m.held_out],
    }  # fmt: skip
    target = LlamaForCausalLM(target_config())
    card["target_hours"] = optimise(
        target, text_loss(target), data, TARGET_RECIPE, work / "target.pt", "target"
    )
    round_matrices(target)
    save(target, tokenizer, out / "model")
    spoken = own_words(work / "own_words.npy", out / "model", data)
    drafter = made_of(open_checkpoint(out / "model"), DRAFTER_LAYERS, None).module
    assert isinstance(drafter, LlamaForCausalLM)
    card["drafter_hours"] = optimise(
        drafter,
        distillation_loss(drafter, target),
        replace(data, train=[*data.train, *spoken * OWN_WORDS_REPEATED]),
        DRAFTER_RECIPE,
        work / "drafter.pt",
        "drafter",
    )
    round_matrices(drafter)
    save(drafter, tokenizer, out / "model" / "drafter")
    models = {"target": (target, TARGET_RECIPE), "drafter": (drafter, DRAFTER_RECIPE)}
    for name, (model, recipe) in models.items():
        card[f"{name}_parameters"] = f"{model.num_parameters() / 1e6:.1f}M"
        card[f"{name}_tokens"] = recipe.steps * recipe.step_tokens
        card[f"{name}_nats"] = held_out_loss(model, data)
    prompts = held_out_prompts(modules, tokenizer)
    (out / "prompts.json").write_text(json.dumps(prompts, indent=1) + "\n")
    card["teacher_forced"] = teacher_forced(target, drafter, data)
    card["acceptance"] = acceptance(out / "model", prompts)
    (work / "card.json").write_text(json.dumps(card, indent=1))
    (out / "model" / "README.md").write_text(model_card(card))
    return card


def main() -> None:
    """Build the pair and print its figures as JSON."""
    parser = argparse.ArgumentParser(prog="python -m outrider.pocket.build", description=__doc__)
    work, out = "checkpoints, to resume from", "folder for model/ (the pair) and prompts.json"
    parser.add_argument("--work", type=Path, default=Path("build/pocket"), help=work)
    parser.add_argument("--out", type=Path, required=True, help=out)
    card = build(**vars(parser.parse_args()))
    print(json.dumps({k: v for k, v in card.items() if k != "held_out_modules"}, indent=1))


if __name__ == "__main__":
    main()
