"""Makes a random head with the ``speculators`` package: ``TARGET OUT FLAGS``.

Runs in an environment of that package, and imports nothing of Outrider. Beside the checkpoint it
writes ``expected.st``: tokens, the target's hidden states, the head's fused states, and the logits
of each step, or of each depth of a pass, of the package's own forward. Rows of depths that the
package leaves out are NaN. The head is of EAGLE-3, or of P-EAGLE with the flag ``parallel``.
"""

import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save_file
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.losses import resolve_loss_config
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.proposals.greedy import GreedyTokenProposalConfig
from transformers import AutoModelForCausalLM, LlamaConfig

STEPS, LENGTH, DRAFTED, MASK = 4, 17, 97, 7
WHOLE = {"num_depths": STEPS, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
"""Nearly all rows stand at every depth."""


def main(target_folder: str, out: str, flags: str) -> None:
    torch.manual_seed(0)
    options = json.loads(flags)
    layers, parallel = options.pop("layers"), options.pop("parallel", False)
    depth, window = options.pop("depth", 1), options.pop("window", None)
    kinds = {"layer_types": ["sliding_attention"] * depth, "use_sliding_window": True}
    seen = {} if window is None else {"sliding_window": window, **kinds}
    if parallel:
        options["mask_token_id"] = MASK
    target = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()
    c = target.config
    shape = LlamaConfig(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, intermediate_size=48,
        num_hidden_layers=depth, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, max_position_embeddings=64, rms_norm_eps=1e-5, **seen,
    )  # fmt: skip
    shape._attn_implementation = "eager"
    config = (PEagleSpeculatorConfig if parallel else Eagle3SpeculatorConfig)(
        transformer_layer_config=shape,
        draft_vocab_size=DRAFTED,
        eagle_aux_hidden_state_layer_ids=layers,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle" if parallel else "eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=STEPS)],
            default_proposal_method="greedy",
            verifier=VerifierConfig.from_pretrained(target_folder),
        ),
        **options,
    )
    head = (PEagleDraftModel if parallel else Eagle3DraftModel)(config).float().eval()
    kept = torch.randperm(c.vocab_size)[:DRAFTED].sort().values
    known = torch.zeros(c.vocab_size, dtype=torch.bool)
    known[kept] = True
    head.load_vocab_mappings(known, kept - torch.arange(DRAFTED))
    with torch.no_grad():
        for name, weight in head.named_parameters():
            if not name.startswith("verifier"):
                noise = torch.randn_like(weight)
                scale = 0.2 if weight.ndim == 1 else 0.5 if "embed" in name else 1.2
                weight.copy_(noise * scale / (1 if weight.ndim == 1 else weight.shape[1] ** 0.5))
                weight.add_(weight.ndim == 1)
    head.save_pretrained(out)
    tokens = torch.randint(c.vocab_size, (1, LENGTH))
    found: list[torch.Tensor] = []
    fused: list[torch.Tensor] = []
    head.lm_head.register_forward_hook(lambda module, inputs, output: found.append(output))
    head.fc.register_forward_hook(lambda module, inputs, output: fused.append(output))
    parts = [target.model.embed_tokens, *target.model.layers]  # before the last norm
    states: dict[int, torch.Tensor] = {}
    for number, part in enumerate(parts):
        part.register_forward_hook(
            lambda module, inputs, output, number=number: states.__setitem__(number, output)
        )
    with torch.no_grad():
        target(tokens)
        hidden = torch.cat([states[layer] for layer in layers], -1)
        # Row i reads token i + 1 beside the hidden states of token i.
        rows = LENGTH - 1
        read = hidden[:, :rows], tokens[:, 1:], torch.zeros(1, rows, dtype=torch.long)
        if parallel:
            torch.manual_seed(1)
            loss = resolve_loss_config("kl_div", "eager")  # the usual one needs a GPU
            said = states[len(states) - 1][:, 1:]
            head(*read, verifier_last_hidden_states=said, loss_config=loss, **WHOLE)
            found = by_depth(found[0][0], rows)
        else:
            head(*read, ttt_steps=STEPS)
    expected = {
        "tokens": tokens[0], "hidden": hidden[0], "fused": fused[0][0, :rows],
        **{f"logits {step}": logits.view(rows, -1) for step, logits in enumerate(found)},
        "kept": kept,
    }  # fmt: skip
    save_file({n: t.contiguous() for n, t in expected.items()}, Path(out) / "expected.st")


def by_depth(logits: torch.Tensor, rows: int) -> list[torch.Tensor]:
    """Return logits [rows, .] of each depth of a pass, by the row that it begins behind."""
    torch.manual_seed(1)
    anchors, depths = generate_cod_sample_indices(rows, torch.ones(1, rows), **WHOLE)
    found = [torch.full((rows, logits.shape[-1]), torch.nan) for _ in range(STEPS)]
    for row, anchor, depth in zip(logits, anchors.tolist(), depths.tolist(), strict=True):
        found[depth][anchor] = row
    return found


main(*sys.argv[1:])
