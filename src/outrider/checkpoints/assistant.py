"""The checkpoint of Gemma 4's assistant: what must be in it, and whether it fits a target.

The assistant is a small Gemma 4 whose layers have no keys and values: each reads those of the
target's last layer of its kind that makes its own. Names are those of Hugging Face's models.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import ModelError
from .configs import ModelConfig
from .formats.shared import REMEDY

if TYPE_CHECKING:
    from .checkpoint import Checkpoint
    from .files import Files

ASSISTANTS = ("gemma4_assistant", "gemma4_unified_assistant")
"""Model types of assistants."""
TARGETS = ("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text")
"""Model types of their targets."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
CENTROIDS, ORDER = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"
"""The rows that choose groups of ids, and the ids, group by group."""
NORMS = (
    "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)  # fmt: skip
ABSENT = ("attention_bias", "enable_moe_block", "use_double_wide_mlp")
"""Options of Gemma 4 that no assistant has."""


class Heads(NamedTuple):
    """The heads of a layer's keys and values, and their size."""

    number: int
    size: int


class Pair(NamedTuple):
    """One thing that an assistant and its target must agree on: what each has, and if it fits."""

    what: str
    own: str
    theirs: str
    fits: bool


def is_assistant(files: Files) -> bool:
    """Return True if a checkpoint is an assistant."""
    return files.gguf is None and (files.config or {}).get("model_type") in ASSISTANTS


def heads_of(text: Any, layer: int) -> Heads:
    """Return the heads of the keys and values that a layer of a text config reads."""
    own = text.per_layer_config[layer]
    return Heads(own.num_key_value_heads, own.head_dim)


def read_layers(text: Any) -> dict[str, int]:
    """Return, by kind, the target's layer whose keys and values an assistant reads."""
    kinds = text.layer_types[: text.num_hidden_layers - text.num_kv_shared_layers]
    return {kind: layer for layer, kind in enumerate(kinds)}  # the last of each kind stays


def pairs(own: ModelConfig, target: ModelConfig) -> Iterator[Pair]:
    """Yield what an assistant and its target must agree on."""
    kind = target.model_type
    yield Pair("family", "Gemma 4 is needed", kind, kind in TARGETS)
    if kind not in TARGETS:
        return
    mine, theirs = own.get_text_config(), target.get_text_config()
    sizes = (
        ("width", own.backbone_hidden_size, theirs.hidden_size),
        ("vocabulary", mine.vocab_size, theirs.vocab_size),
    )
    yield from (Pair(what, str(a), str(b), a == b) for what, a, b in sizes)
    there = read_layers(theirs)
    for name in dict.fromkeys(mine.layer_types):
        here = heads_of(mine, mine.layer_types.index(name))
        other = heads_of(theirs, there[name]) if name in there else None
        said = "none" if other is None else f"{other.number} of {other.size}"
        yield Pair(f"heads of {name}", f"{here.number} of {here.size}", said, here == other)


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors that an assistant needs, by name."""
    config = checkpoint.config
    a, there = config.get_text_config(), checkpoint.tensors.shapes()
    width, inner, backbone = a.hidden_size, a.intermediate_size, config.backbone_hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "pre_projection.weight": (width, 2 * backbone),
        "post_projection.weight": (backbone, width),
        "model.norm.weight": (width,),
        HEAD if HEAD in there else EMBEDDING: (a.vocab_size, width),
    }
    if config.use_ordered_embeddings:
        shapes |= {CENTROIDS: (config.num_centroids, width), ORDER: (a.vocab_size,)}
    for layer in range(a.num_hidden_layers):
        size = heads_of(a, layer).size
        all_heads = a.num_attention_heads * size
        parts: dict[str, tuple[int, ...]] = {f"{norm}.weight": (width,) for norm in NORMS}
        parts |= dict.fromkeys(("mlp.gate_proj.weight", "mlp.up_proj.weight"), (inner, width))
        parts |= {
            "self_attn.q_proj.weight": (all_heads, width),
            "self_attn.q_norm.weight": (size,),
            "self_attn.o_proj.weight": (width, all_heads),
            "mlp.down_proj.weight": (width, inner),
            "layer_scalar": (1,),
        }
        shapes |= {f"model.layers.{layer}.{part}": shape for part, shape in parts.items()}
    return shapes


def missing(checkpoint: Checkpoint) -> dict[str, str]:
    """Return what is wrong with the tensors that an assistant needs, by name."""
    found, wrong = checkpoint.tensors.shapes(), {}
    for name, shape in shapes_of(checkpoint).items():
        if name not in found:
            wrong[name] = "missing"
        elif found[name] != shape:
            wrong[name] = f"{[*found[name]]} instead of {[*shape]}"
    return wrong


def check_assistant(checkpoint: Checkpoint, target: ModelConfig) -> None:
    """Raise ModelError if an assistant is not readable, or not made for a target."""
    folder, config = checkpoint.folder, checkpoint.config
    for what, own, theirs, fits in pairs(config, target):
        if not fits:
            raise ModelError(
                f"{folder}: this assistant does not fit the target ({what}: {own}; the target: "
                f"{theirs}); give the assistant of this target, or leave the drafter out."
            )
    text = config.get_text_config()
    if checkpoint.quantised:
        raise ModelError(f"{folder}: quantised assistants are not read; {REMEDY}.")
    strange = [name for name in ABSENT if getattr(text, name, False)]
    if strange:
        raise ModelError(f"{folder}: an assistant with {strange[0]} is not read; leave it out.")
    if config.use_ordered_embeddings and (
        text.vocab_size % config.num_centroids
        or not 1 <= config.centroid_intermediate_top_k <= config.num_centroids
    ):
        raise ModelError(
            f"{folder}: {text.vocab_size} ids do not fall into num_centroids = "
            f"{config.num_centroids} groups of the same size, or fewer than "
            "centroid_intermediate_top_k; fetch the checkpoint again."
        )
