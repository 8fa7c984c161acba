"""Loads a head with the ``speculators`` package: ``HEAD INPUTS OUT``, with torch.

Runs in an environment of that package, and imports nothing of Outrider. ``INPUTS`` has ``tokens``
[rows] and what the head reads beside them, ``hidden`` [rows, layers * width]; ``OUT`` gets the
logits of each step.
"""

import sys

import torch
from safetensors.torch import load_file, save_file
from speculators import SpeculatorModel
from speculators.models.eagle3 import Eagle3SpeculatorConfig

STEPS = 4


def main(folder: str, inputs: str, out: str) -> None:
    config = Eagle3SpeculatorConfig.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    head = SpeculatorModel.from_pretrained(folder, config=config, dtype=torch.float32).eval()
    given = load_file(inputs)
    found: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output))
    tokens = given["tokens"][None]
    with torch.no_grad():
        head(given["hidden"][None], tokens, torch.zeros_like(tokens), ttt_steps=STEPS)
    rows = tokens.shape[1]
    save_file({f"{i}": x.view(rows, -1).contiguous() for i, x in enumerate(found)}, out)


main(*sys.argv[1:])
