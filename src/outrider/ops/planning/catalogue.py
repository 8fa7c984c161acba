"""Shapes of models and figures of devices, from the catalogue or a config.json."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from ...base.methods import BY_NAME, LOOKUPS
from ...base.outside.documents import read_json
from ...base.outside.text import printable
from ...base.tables import table
from ...errors import ConfigError, ModelError, shown

LARGEST_SIZE = 1e15
LARGEST_CONFIG_BYTES = 10_000_000
EAGLE_VOCABULARY = 32_000
"""Default number of tokens that an EAGLE-3 head can draft, as in published heads."""
FUSED_STATES = 3
"""Hidden states of the target that an EAGLE-3 head fuses into one."""


data = partial(table, "outrider.ops.planning")


@dataclass(frozen=True)
class Shape:
    """The sizes of a model that determine the cost of a forward.

    Every ``expert_step``-th layer is sparse. Attention reads ``inputs`` concatenated hidden states;
    ``fused`` states are first projected into one. Without ``embeds`` the embedding is the target's;
    with ``lends`` so is the output matrix.
    """

    name: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool = False
    gated: bool = True
    experts: int = 0
    active_experts: int = 0
    expert_inner: int = 0
    shared_inner: int = 0
    expert_step: int = 1
    inputs: int = 1
    fused: int = 0
    embeds: bool = True
    lends: bool = False

    @property
    def _sparse_layers(self) -> int:
        return self.layers // self.expert_step if self.experts else 0

    @property
    def _expert(self) -> int:
        return 3 * self.hidden * self.expert_inner

    @property
    def _always(self) -> int:
        """Parameters that every forward reads: all except the experts and the embedding."""
        width, sparse = self.heads * self.head_dim, self._sparse_layers
        attention = self.inputs * self.hidden * (width + 2 * self.kv_heads * self.head_dim)
        attention += width * self.hidden
        dense = (3 if self.gated else 2) * self.hidden * self.inner
        beside = self.hidden * (3 * self.shared_inner + self.experts)
        parameters = self.layers * attention + (self.layers - sparse) * dense + sparse * beside
        return parameters + self.vocabulary * self.hidden + self.fused * self.hidden**2

    @property
    def parameters(self) -> int:
        """All parameters except norms and biases."""
        embedding = 0 if self.tied or not self.embeds else self.vocabulary * self.hidden
        lent = self.vocabulary * self.hidden if self.lends else 0
        return self._always + self._sparse_layers * self.experts * self._expert + embedding - lent

    @property
    def sizes(self) -> Shape:
        """The shape for comparisons: without its name, and with tied embeddings.

        GGUF files of tied models may store the output matrix again.
        """
        return replace(self, name="", tied=True)

    @property
    def active(self) -> int:
        """Parameters by which one row is multiplied."""
        return self._always + self._sparse_layers * self.active_experts * self._expert

    def read(self, rows: int) -> float:
        """Return the parameters that a forward reads; of the experts, those expected to be used."""
        share = 1 - (1 - self.active_experts / self.experts) ** rows if self.experts else 0.0
        return self._always + self._sparse_layers * self.experts * share * self._expert

    @property
    def kv_values(self) -> int:
        """Values that the KV cache holds for a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Device:
    """A device: bytes, bytes/s, FLOP/s by dtype, seconds, and the shares of peak that are reached.

    ``layer`` is the least time of a layer; ``step`` and ``per_sequence`` are the time of a step
    besides its forwards; ``draft_pass`` is the overhead of a drafter's pass.
    """

    name: str
    memory: float
    bandwidth: float
    flops: Mapping[str, float]
    link: float
    link_latency: float
    bandwidth_efficiency: float
    compute_efficiency: float
    memory_share: float
    layer: float
    step: float
    per_sequence: float
    draft_pass: float


def _unknown(kind: str, name: str, known: Mapping[str, Any], more: str) -> ConfigError:
    near = get_close_matches(name, list(known), 1)
    hint = f"did you mean {near[0]!r}?" if near else more
    return ConfigError(f"there is no {kind} {shown(name)} in the catalogue; {hint}")


def find_device(name: str) -> Device:
    """Return a device of the catalogue."""
    devices, assumed = data("hardware")["device"], data("hardware")["assumed"]
    entry = devices.get(name.lower())
    if entry is None:
        raise _unknown("device", name, devices, f"known are {', '.join(devices)}.")
    shares = {key: value for key, value in assumed.items() if not isinstance(value, dict)}
    own = {key: value for key, value in entry.items() if key not in ("kind", "source", "half")}
    return Device(name.lower(), **own, **shares, **assumed[entry["kind"]])


ALIASES = (
    ("num_hidden_layers", "n_layer"), ("hidden_size", "n_embd"),
    ("num_attention_heads", "n_head"), ("vocab_size",),
)  # fmt: skip
"""Names of layers, hidden size, heads and vocabulary size, which every config must have."""


def _size(
    config: Mapping[str, Any], names: tuple[str, ...], owner: str, default: int | None
) -> int:
    """Return the first size that is present, else ``default`` if it is given."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None and default is not None:
        return default
    if value is None:
        raise ModelError(f"the config of {owner} has no {names[0]}.")
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < LARGEST_SIZE:
        raise ModelError(f"the config of {owner} has {names[0]} {shown(value)}; give a size.")
    return value


def shape_of(name: str, config: Mapping[str, Any]) -> Shape:
    """Return the shape that a config.json describes."""
    for part in ("text_config", "transformer_layer_config"):
        inner = config.get(part)
        config = {**config, **inner} if isinstance(inner, dict) else config
    if config.get("kv_lora_rank"):
        raise ModelError(f"{name} has latent attention (kv_lora_rank), which is not modelled.")
    layers, hidden, heads, vocabulary = (_size(config, names, name, None) for names in ALIASES)
    inner = ("intermediate_size_mlp", "intermediate_size", "n_inner")
    kv_heads = 1 if config.get("multi_query") else heads
    dense = Shape(
        name, layers, hidden, _size(config, inner, name, 4 * hidden), heads,
        _size(config, ("num_key_value_heads",), name, kv_heads),
        _size(config, ("head_dim",), name, max(1, hidden // heads)), vocabulary,
        tied=config.get("tie_word_embeddings") is True,
        gated=config.get("gated", config.get("model_type") not in ("gpt2", "gpt_bigcode")) is True,
    )  # fmt: skip
    return _with_experts(dense, config)


def _with_experts(dense: Shape, config: Mapping[str, Any]) -> Shape:
    """Return a shape with the experts of the config, if there are any."""
    name = dense.name
    experts = config.get("num_experts") or config.get("num_local_experts")
    if not experts:
        return dense
    inner: tuple[str, ...] = ("moe_intermediate_size", "intermediate_size")
    shared: tuple[str, ...] = ("shared_expert_intermediate_size",)
    if config.get("model_type") in ("llama4", "llama4_text"):
        inner = shared = ("intermediate_size",)
    active = _size(config, ("num_experts_per_tok",), name, None)
    if active > _size({"num_experts": experts}, ("num_experts",), name, None):
        raise ModelError(f"the config of {name} routes a token to {active} of {experts} experts.")
    step = ("expert_layer_step", "interleave_moe_layer_step", "decoder_sparse_step")
    return replace(
        dense, experts=experts, active_experts=active, shared_inner=_size(config, shared, name, 0),
        expert_inner=_size(config, inner, name, None), expert_step=_size(config, step, name, 1),
    )  # fmt: skip


def read_config(name: str) -> dict[str, Any]:
    """Return the config of a model: the catalogue's, a folder's, a GGUF file's, or the hub's."""
    known = data("models")["model"]
    if name.lower() in known:
        return dict(known[name.lower()])
    if name.endswith(".gguf") and os.path.isfile(name):
        from ...checkpoints.formats.gguf import open_gguf  # imports a reader of tensors
        from ...checkpoints.formats.gguf_config import gguf_config

        return vars(gguf_config(open_gguf(Path(name))))
    file = Path(name, "config.json") if os.path.isdir(name) else Path(name)
    if not os.path.isfile(file):
        if "/" not in name or os.path.exists(name):
            hint = "give one of docs/planning.md, or a folder with a config.json."
            raise _unknown("model", name, known, hint)
        file = _hub_config(name)
    what = f"The config {printable(file)}"
    config = read_json(file, what, limit=LARGEST_CONFIG_BYTES, error=ModelError)
    if not isinstance(config, dict):
        raise ModelError(f"{file} holds no config: a JSON object is expected.")
    return config


def _hub_config(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        return Path(hf_hub_download(name, "config.json"))
    except (OSError, ValueError) as error:  # offline, no such repository, or no valid name
        raise ConfigError(
            f"the config of {shown(name)} is neither in a folder nor in the catalogue, and the hub "
            f"does not give it ({type(error).__name__}); give a folder with its config.json."
        ) from None


def find_shape(name: str) -> Shape:
    """Return the shape of a model: see ``read_config``."""
    return shape_of(name, read_config(name))


def eagle1_head(target: Shape) -> Shape:
    """Return the shape of an EAGLE head: one layer that reads embedding and last state fused."""
    return Shape(
        f"EAGLE head of {target.name}", 1, target.hidden, target.inner, target.heads,
        target.kv_heads, target.head_dim, target.vocabulary, fused=2, embeds=False, lends=True,
    )  # fmt: skip


def eagle_head(target: Shape, config: Mapping[str, Any] | None = None) -> Shape:
    """Return the shape of an EAGLE-3 head from its config, else one layer of the target's sizes."""
    name = f"EAGLE-3 head of {target.name}"
    own = replace(target, layers=1) if config is None else shape_of(name, config)
    fewest = min(EAGLE_VOCABULARY, target.vocabulary)
    vocabulary = _size(config or {}, ("draft_vocab_size",), "the EAGLE-3 head", fewest)
    return Shape(
        name, own.layers, own.hidden, own.inner, own.heads, own.kv_heads, own.head_dim, vocabulary,
        inputs=2, fused=FUSED_STATES, embeds=False,
    )  # fmt: skip


LARGEST_RATIO = 0.3
"""Largest ratio of a drafter's parameters to the target's, both for all and for active ones."""


class Fitting(NamedTuple):
    """A drafter that fits: its name for ``--drafter``, its method, and its name on the hub."""

    drafter: str
    method: str
    checkpoint: str | None


def entry_of(asked: str, target: Shape) -> str | None:
    """Return the catalogue's name of a model; None if it has none.

    A folder or hub name matches the entry with that checkpoint, else one of the same sizes. Of
    several (Qwen2 and Qwen2.5) it is the one whose name it contains, else the newest.
    """
    models, name = data("models")["model"], asked.lower()
    if name in models:
        return name
    for entry, config in models.items():
        if config.get("checkpoint", "").lower() == name:
            return str(entry)
    alike = [each for each in models if shape_of(each, models[each]).sizes == target.sizes]
    # A shape without a published checkpoint is not served.
    served = [each for each in alike if "checkpoint" in models[each]]
    return max(served, key=lambda each: (each in name, _version(each)), default=None)


def _version(entry: str) -> float:
    """Return the first number in a name, such as 3.1 for ``llama-3.1-8b``."""
    number = re.search(r"\d+(\.\d+)?", entry)
    return float(number[0]) if number else 0.0


def checkpoint_of(asked: str) -> str | None:
    """Return what an engine loads: the folder itself, or a name of the hub; None if unknown."""
    config = data("models")["model"].get(asked.lower())
    if config is not None:
        return str(config["checkpoint"]) if "checkpoint" in config else None
    return asked if "/" in asked or os.path.exists(asked) else None


def head_of(asked: str, target: Shape, method: str) -> str | None:
    """Return the hub name of a target's published head; None if none is known."""
    entry = entry_of(asked, target)
    heads = (head for head in data("models")["head"] if head["target"] == entry)
    return next((str(head["checkpoint"]) for head in heads if head["method"] == method), None)


def method_of_head(checkpoint: str) -> str | None:
    """Return the method of a published head; None if the catalogue does not have it."""
    heads = data("models")["head"]
    return next((str(h["method"]) for h in heads if h["checkpoint"] == checkpoint), None)


def heads_of(entry: str | None) -> list[Fitting]:
    """Return all published heads of an entry of the catalogue."""
    return [
        Fitting(head["method"], head["method"], head["checkpoint"])
        for head in data("models")["head"]
        if head["target"] == entry
    ]


def fitting(asked: str, target: Shape) -> list[Fitting]:
    """Return the drafters that fit a target: its heads, models with its tokenizer, lookups."""
    entry, models = entry_of(asked, target), data("models")["model"]
    heads = dict(reversed([(head.method, head) for head in heads_of(entry)]))  # the first of each
    fits = [head for name, head in reversed(heads.items()) if BY_NAME[name].costs]
    tokenizer = models[entry]["tokenizer"] if entry else _tokenizer(target)
    for name, config in models.items():
        same = config["tokenizer"] == tokenizer and "checkpoint" in config and name != entry
        if same and is_small(shape_of(name, config), target):
            fits.append(Fitting(name, "draft_model", config["checkpoint"]))
    return fits + [Fitting(name, name, None) for name in LOOKUPS]


def is_small(shape: Shape, target: Shape) -> bool:
    """Return whether a model is small enough to draft, by its memory and its cost per row."""
    pairs = ((shape.parameters, target.parameters), (shape.active, target.active))
    return all(own <= LARGEST_RATIO * whole for own, whole in pairs)


def _tokenizer(target: Shape) -> str | None:
    """Return the tokenizer of a model outside the catalogue, guessed from its vocabulary's size."""
    models = data("models")["model"].values()
    known = {each["tokenizer"] for each in models if each["vocab_size"] == target.vocabulary}
    return known.pop() if len(known) == 1 else None
