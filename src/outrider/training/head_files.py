"""Writes untrained EAGLE-3 heads, reads heads into PyTorch, and writes them as trained."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ..base.kept import part_of
from ..checkpoints.architecture import Architecture
from ..checkpoints.checkpoint import Checkpoint
from ..checkpoints.dtypes import BFLOAT16, FLOAT32, Array, cast
from ..checkpoints.extras import KEY
from ..checkpoints.files import Files, save_file
from ..checkpoints.head_export import (
    SAFEAILAB,
    SPECULATORS,
    mapping,
    plain_name,
    safeailab,
    speculators_config,
    written_whole,
)
from ..checkpoints.head_tensors import HeadTensors, check_tensors, drafted_ids, expected_tensors
from ..checkpoints.heads import EAGLE3, LABELS, PEAGLE, TRAINED, Head, check_target, read_head
from ..checkpoints.matrices import plain
from ..checkpoints.rope import rope_parameters
from ..checkpoints.weights import Loader
from ..errors import ConfigError, ModelError
from .eagle3 import Eagle3

EMBEDDING = "model.embed_tokens.weight"
ALIGNED = 64
"""The number of drafted ids is a multiple of this."""


def frequent_ids(counts: NDArray[np.int64], share: float, most: int) -> NDArray[np.int64]:
    """Return the most frequent ids, which make up a ``share`` of a text, ascending.

    ``counts`` has how often each id occurs. The number of ids is rounded up to a multiple of
    ``ALIGNED``, and at most ``most``.
    """
    order = np.argsort(-counts, kind="stable")
    reached = np.cumsum(counts[order]) >= share * counts.sum()
    size = int(np.argmax(reached)) + 1
    size = min(-(-size // ALIGNED) * ALIGNED, most, len(counts))
    return np.sort(order[:size])


def target_loader(checkpoint: Checkpoint) -> tuple[Architecture, Loader]:
    """Return a target's architecture, and a loader of its weights, dequantised to fp32."""
    a = checkpoint.architecture
    if a is None:
        raise ModelError(
            f"{checkpoint.folder}: heads are trained for models of the native families only; give "
            "one of those, see docs/models.md."
        )
    return a, Loader(checkpoint.tensors, a, FLOAT32, False)


class NewHead(NamedTuple):
    """The description of an untrained head.

    It names ``verifier`` as its target, drafts ``ids`` from the outputs of the target's ``layers``,
    and proposes drafts of ``length`` tokens. SafeAILab's ``layout`` has fewer norms. ``fuse`` is
    the matrix that makes states of those outputs, see ``fitted_fuse``; None draws it at random.
    With a ``mask_token`` it is a P-EAGLE head.
    """

    verifier: str
    ids: NDArray[np.int64]
    layers: Sequence[int]
    length: int
    seed: int
    layout: str = SPECULATORS
    fuse: NDArray[np.float32] | None = None
    mask_token: int | None = None


def write_new_eagle3(folder: Path, checkpoint: Checkpoint, new: NewHead) -> None:
    """Write an untrained EAGLE-3 or P-EAGLE head of a target to a folder.

    Its output head and last norm are the target's.
    """
    a, loader = target_loader(checkpoint)
    config, ids = eagle3_config(checkpoint, a, new), new.ids
    tensors = {} if len(ids) == a.vocab_size else mapping(ids, a.vocab_size)
    head = described(folder, config)
    table, generator = loader.table(), np.random.default_rng(new.seed)
    for name, shape in expected_tensors(head).items():
        own = name.removeprefix("model.")
        if own == "lm_head.weight":
            tensors[own] = plain(loader.head(table), FLOAT32)[ids]
        elif own == "norm.weight":
            tensors[own] = loader.norm("model.norm")[: a.hidden_size]
        elif own == "mask_hidden":
            tensors[own] = generator.standard_normal(shape, np.float32)
        elif len(shape) == 1 and own != "d2t":
            tensors[own] = np.ones(shape, np.float32)
        elif len(shape) == 2:
            made = generator.standard_normal(shape, np.float32)
            tensors[own] = made / np.sqrt(np.float32(shape[1]))
    for name in ("self_attn.o_proj", "mlp.down_proj"):  # at first, the residual stream dominates
        tensors[f"layers.0.{name}.weight"] *= np.float32(0.1)
    if new.fuse is not None:
        tensors["fc.weight"] = new.fuse
    if new.layout == SAFEAILAB:
        config, tensors = safeailab(head, config["transformer_layer_config"], tensors)
    write_checkpoint(folder, config, tensors)


def described(folder: Path, config: dict[str, Any]) -> Head:
    """Return the head that a config describes, which has no tensors yet."""
    files = Files(folder)
    files.config, files.tensors = config, {}  # before they are read
    head = read_head(files)
    assert head is not None
    return head


def write_checkpoint(folder: Path, config: Mapping[str, Any], tensors: dict[str, Array]) -> None:
    """Write config and tensors to a folder, each file whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    with part_of(folder / "model.safetensors") as part:
        save_file(tensors, part, {"format": "pt"})
    write_config(folder, config)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write a config to a folder, whole or not at all."""
    with part_of(folder / "config.json") as part:
        part.write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")


def eagle3_config(checkpoint: Checkpoint, a: Architecture, new: NewHead) -> dict[str, Any]:
    """Return the config of an untrained EAGLE-3 head."""
    parameters = rope_parameters(checkpoint.config)
    theta = parameters.get("rope_theta", 10_000.0)
    names, more = getattr(checkpoint.config, "architectures", None) or [], new.layout == SPECULATORS
    layer = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1,
        "hidden_size": a.hidden_size, "intermediate_size": a.intermediate_size,
        "num_attention_heads": a.num_heads, "num_key_value_heads": a.num_kv_heads,
        "head_dim": a.head_dim, "vocab_size": a.vocab_size, "hidden_act": "silu",
        "rms_norm_eps": a.norm_eps, "max_position_embeddings": a.context,
        "rope_parameters": {"rope_type": "default", "rope_theta": theta}, "rope_theta": theta,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    kind = EAGLE3 if new.mask_token is None else PEAGLE
    masks = {} if new.mask_token is None else {"mask_token_id": new.mask_token}
    return speculators_config(new.verifier, [*names], new.length, kind) | masks | {
        "transformer_layer_config": layer, "draft_vocab_size": len(new.ids),
        "norm_before_residual": more, "norm_before_fc": more, "fc_norm": False,
        "norm_output": more, "embed_requires_grad": False, "target_hidden_size": None,
        # A layer's input is the output of the one before.
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in new.layers],
        "tie_word_embeddings": False, "dtype": "bfloat16",
    }  # fmt: skip


def open_head(folder: Path, kind: str) -> Head:
    """Return the head in a folder. Raises ConfigError: there is none of that ``kind``."""
    head = read_head(folder)
    if head is None or head.kind != kind:
        raise ConfigError(
            f"{folder} is no head of kind {kind}; give such a head, or none to begin a new one."
        )
    return head


def check_head(head: Head, checkpoint: Checkpoint) -> None:
    """Raise ConfigError or ModelError if a head cannot be trained, or is another target's."""
    if head.kind not in TRAINED:
        raise ConfigError(
            f"{head.folder} is a head of {LABELS[head.kind]}, which is not trained here; begin an "
            "EAGLE-3 head."
        )
    target, _ = target_loader(checkpoint)
    check_target(head, target, target.hidden_size, target.num_layers)
    check_tensors(head)
    a = head.architecture
    if a is not None and (a.num_layers != 1 or any(window is not None for window in a.windows)):
        raise ConfigError(
            f"{head.folder} has {a.num_layers} layers, or layers with windows; heads of one layer "
            "that sees all are trained here."
        )


def ids_of(head: Head) -> NDArray[np.int64]:
    """Return the target's ids that a head drafts, in its own order."""
    if head.architecture is None:
        return np.arange(head.vocab_size)
    listed = drafted_ids(HeadTensors(head.files), head)
    return np.arange(head.architecture.vocab_size) if listed is None else np.array(listed, np.int64)


def load_eagle3(head: Head, checkpoint: Checkpoint, context: int) -> Eagle3:
    """Return a head with its weights, for samples up to ``context`` tokens.

    A head without an embedding has the target's.
    """
    source = HeadTensors(head.files)
    if EMBEDDING in source:
        assert head.architecture is not None
        shape = head.vocab_size, head.architecture.hidden_size
        table = source.get(EMBEDDING, shape, FLOAT32)
    else:
        table = plain(target_loader(checkpoint)[1].table(), FLOAT32)
    embedding = torch.from_numpy(np.ascontiguousarray(table))
    module = Eagle3(head, embedding, context)
    for name, parameter in module.named_parameters():
        array = source.get(name, tuple(parameter.shape), FLOAT32)
        with torch.no_grad():
            parameter.copy_(torch.from_numpy(np.ascontiguousarray(array)))
    return module


def save_eagle3(module: Eagle3, values: Mapping[str, torch.Tensor] | None, folder: Path) -> None:
    """Write a trained head to a folder, in bf16 and in the layout of the one it began as.

    ``values`` are parameters to write instead of the module's.
    """
    head = module.head
    source = HeadTensors(head.files)
    names = {plain_name(name): name for name in source.stems}
    fixed = "d2t", "t2d", names.get("embed_tokens.weight", "")
    tensors = {name: source.whole(name) for name in fixed if name in source}
    for name, parameter in module.named_parameters():
        value = parameter if values is None else values.get(name, parameter)
        tensors[names[name]] = cast(value.detach().numpy(), BFLOAT16)
    write_checkpoint(folder, trained_config(head), tensors)


def trained_config(head: Head) -> dict[str, Any]:
    """Return the config of a trained head: the one that it began with, without measured figures."""
    return {name: value for name, value in written_whole(head).items() if name != KEY}
