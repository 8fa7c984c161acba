"""The architecture of a native model in plain numbers, and the properties of its family."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

Mixer = Literal["attention", "conv", "linear", "beside", "none"]
"""The mixer of tokens in a layer."""


Router = Literal["softmax", "selected", "sigmoid"]
"""The weights of experts: softmax over all scores, softmax over the chosen ones, or sigmoids."""


@dataclass(frozen=True)
class ExpertLayout:
    """A family's names for the parts of a mixture, and how it weighs experts.

    ``{}`` stands for an expert's number; there may be no ``gate``. ``fused`` are tensors of all
    experts, if a checkpoint has them: gate and up [experts, 2 * width, hidden], and down [experts,
    hidden, width]; if they are ``turned``, inputs come before outputs, and gate and up rows
    alternate. ``bias`` is added to scores only to choose experts. ``shared`` is the MLP that all
    rows share; ``shared_fused`` is its gate and up as one tensor. ``renormalised`` None: the
    config's norm_topk_prob decides. ``grouped``: the config's n_group and topk_group apply.
    """

    router: str = "mlp.gate"
    gate: str = "mlp.experts.{}.gate_proj"
    up: str = "mlp.experts.{}.up_proj"
    down: str = "mlp.experts.{}.down_proj"
    fused: tuple[str, str] = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    bias: str = ""
    shared: str = "mlp.shared_expert."
    shared_fused: str = ""
    shared_down: str = "mlp.shared_expert.down_proj"
    shared_gate: str = ""
    weighed: Router = "softmax"
    renormalised: bool | None = None
    biased: bool = False
    turned: bool = False
    grouped: bool = False


@dataclass(frozen=True)
class Mixture:
    """The sizes of mixtures: a row goes to the ``top`` of ``experts`` whose scores are highest.

    Experts are ``width`` wide, and ``shared`` is the MLP that all rows share (0: none), multiplied
    by the sigmoid of its own score if it is ``shared_gated``. Weights are divided by their sum if
    they are ``renormalised``, and multiplied by ``scale``. ``chosen_by_bias``: a bias is added to
    scores only to choose experts. ``biased``: router and experts have biases. Experts are in
    ``groups``; a row's experts are in the ``top_groups`` with the highest two best scores.
    """

    experts: int
    top: int
    width: int
    router: Router = "softmax"
    renormalised: bool = False
    scale: float = 1.0
    shared: int = 0
    shared_gated: bool = False
    chosen_by_bias: bool = False
    biased: bool = False
    groups: int = 1
    top_groups: int = 1


@dataclass(frozen=True)
class Family:
    """Properties of a family that its configs do not state."""

    qkv_bias: bool | None = None  # None: the config's attention_bias
    output_bias: bool | None = None
    qk_norm: bool = False
    wide_norms: bool = False  # norms of queries and keys span all heads
    fused_heads: str = ""  # the tensor of queries, keys and values, if they are one
    fused_mlp: str = ""  # the tensor of gate and up, if they are one
    down: str = "mlp.down_proj"
    partial: bool = False  # only a part of a head may be rotated
    norms: Literal["before", "around", "after"] = "before"  # attention and MLP
    shifted: bool = False  # norms weigh 1 + w
    scaled: bool = False  # embeddings are multiplied by the root of their width
    gated: bool = False  # attention is multiplied by gates, stored with its queries
    attention_cap: bool = False  # attn_logit_softcapping applies (transformers' Gemma 3 ignores it)
    windowed: bool = False  # sliding_window, if given, is that of every layer
    experts: ExpertLayout | None = None
    sinks: bool = False  # each head has the score of a key without a value
    ungated: bool = False  # MLPs have no gate
    lone: bool = False  # a layer is either a mixer or an MLP, with one norm
    mamba: bool = False  # linear attention is Mamba-2
    grouped: bool = False  # a delta net's inputs are one tensor, grouped by key head
    names: tuple[tuple[str, str], ...] = ()  # Llama's names of modules, and the family's


@dataclass(frozen=True)
class Shape:
    """Vocabulary and context of any model; ``context`` is in tokens, ``dtype`` the checkpoint's."""

    family: str
    vocab_size: int
    context: int
    dtype: np.dtype[Any]
    eos_token_ids: frozenset[int]

    @property
    def stateful(self) -> bool:
        """True if layers have a state for each sequence, which the native step or torch keeps."""
        return False


@dataclass(frozen=True)
class LinearAttention:
    """The heads of linear attention, a gated delta net's or Mamba-2's, and their sizes.

    Value heads share key heads: neighbours do or, with ``tiled_heads``, every ``key_heads``-th. In
    Mamba's terms (``mamba``) keys are B, queries C and values x: key heads are groups, and keys
    have the size of the state. The output is normed in ``norm_groups`` (0: not), after its gate if
    ``gate_first``. ``gate_scale`` multiplies gates, ``step_scale`` the inputs of rates.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    tiled_heads: bool = False
    mamba: bool = False
    norm_groups: int = 0
    gate_first: bool = False
    gate_scale: float = 1.0
    step_scale: float = 1.0

    @property
    def conv_width(self) -> int:
        """The channels that are mixed: queries and keys, and values."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """The elements of all value heads."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Multipliers:
    """Factors of the outputs of sublayers, and of the gates of MLPs."""

    attention_out: float = 1.0
    linear_out: float = 1.0
    mlp_out: float = 1.0
    mlp_gate: float = 1.0


@dataclass(frozen=True)
class Architecture(Shape):
    """The architecture of a native model in plain numbers.

    ``head_dim`` and widths are in elements, ``rotary_dim`` of a head's are rotated. By layer,
    ``kinds`` names the rope and ``windows`` the positions a row sees, itself included (None: all).
    ``scale`` multiplies the products of attention; ``attention_cap`` bounds them, ``logits_cap``
    the logits. Queries at position p are multiplied by 1 + ``heat`` * log(1 + p // ``heat_step``).
    ``sparse`` layers have a ``mixture`` of experts. ``mixers`` are what mixes tokens in each layer:
    attention, a short convolution over ``conv_taps`` tokens, linear attention of the sizes
    ``linear`` (with such a convolution), or the latter beside attention; ``mlps`` says which layers
    have an MLP. Mixers with a convolution may have ``mixer_bias`` in their products and
    ``conv_bias`` in the convolution, whose inputs x, B and C are multiplied by ``convolved``.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    norm_eps: float
    activation: str
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    layout: Family
    kinds: tuple[str | None, ...]
    windows: tuple[int | None, ...]
    scale: float
    heat: float
    heat_step: int
    attention_cap: float | None
    logits_cap: float | None
    embedding_scale: float
    residual_scale: float
    logits_scale: float
    sparse: tuple[bool, ...]
    mixture: Mixture | None
    mixers: tuple[Mixer, ...]
    mlps: tuple[bool, ...]
    conv_taps: int
    conv_bias: bool
    mixer_bias: bool
    linear: LinearAttention | None
    convolved: tuple[float, float, float]
    multipliers: Multipliers

    @property
    def attending(self) -> tuple[int, ...]:
        """The layers with attention, which have keys and values in the cache."""
        return tuple(i for i, mixer in enumerate(self.mixers) if mixer in ("attention", "beside"))

    @property
    def stateful(self) -> bool:
        """True if layers have a recurrent state for each sequence."""
        return self.linear is not None or "conv" in self.mixers

    def state_size(self, drafted: int) -> int:
        """Return how many numbers a sequence's states have, with drafts of ``drafted`` tokens."""
        taps, linear = self.conv_taps - 1, self.linear
        size = self.mixers.count("conv") * (taps + 2 * drafted) * self.hidden_size
        if linear is not None:
            keys = linear.key_heads * linear.key_dim
            state = taps * linear.conv_width + linear.values * linear.key_dim
            row = linear.conv_width + keys + linear.values + linear.value_heads
            count = self.mixers.count("linear") + self.mixers.count("beside")
            size += count * (state + 2 * drafted * row)
        return size

    def within(self, window: int | None) -> Architecture:
        """Return it with rows that see at most ``window`` positions, themselves included."""
        if window is None:
            return self
        return replace(self, windows=tuple(min(window, own or window) for own in self.windows))

    @property
    def reach(self) -> int | None:
        """The number of positions a row's logits depend on, itself included; None if all."""
        if self.stateful or None in self.windows:
            return None
        return 1 + sum(window - 1 for window in self.windows if window)
