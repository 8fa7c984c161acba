"""Loads the weights of a checkpoint, fused as the forward pass needs them."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from ..base.config import Recipe
from .architecture import Architecture
from .dtypes import FLOAT32, Array
from .expert_weights import ExpertMatrices
from .formats.gguf_weights import EXPERTS, GGUFTensors
from .formats.shared import warn_once
from .matrices import Source, by_kind, numbers, plain, quantized, ranges, stacked
from .quantize import Matrix
from .rope import half_split

TILE = 8
"""Rows that attention always gets, with short tiles padded; so do products whose sums depend on it:
see ``models.transformer.linear``."""
SLOW_TO_QUANTISE = 1 << 26
"""Elements from which quantising shows a progress bar."""

M = TypeVar("M")
V = TypeVar("V")


@dataclass(frozen=True)
class Mlp(Generic[M, V]):
    """A gated MLP; ``gate_up`` stacks gate and up, or is up if a family has no gate."""

    gate_up: M
    gate_up_bias: V | None
    down: M
    down_bias: V | None


@dataclass(frozen=True)
class Experts(Generic[M, V]):
    """A mixture of gated MLPs, and the router that scores them.

    ``gate_up`` [2 * experts * width, hidden] has the gates of all experts, then their ups; ``down``
    [experts * hidden, width] has one expert after the other. The last row of ``router`` scores the
    ``shared`` MLP, if its output is gated. ``choice_bias`` [experts] is added to scores to choose
    experts.
    """

    router: V
    router_bias: V | None
    choice_bias: V | None
    gate_up: M
    gate_up_bias: V | None
    down: M
    down_bias: V | None
    shared: Mlp[M, V] | None


@dataclass(frozen=True)
class LinearWeights(Generic[M, V]):
    """The small weights of linear attention, besides its large matrices.

    ``rates`` [2 * value heads, width] stacks the projections for the strength of an update and its
    decay; for Mamba-2 it is dt alone [value heads, width]. ``decay``, ``dt_bias`` and ``skip``
    (Mamba-2's D) [value heads] are fp32, ``norm`` is [values of all heads].
    """

    rates: M
    decay: V
    dt_bias: V
    norm: V
    skip: V | None


@dataclass(frozen=True)
class Beside(Generic[M]):
    """Attention beside linear attention: its queries, keys and values, and its last product."""

    qkv: M
    output: M


@dataclass(frozen=True)
class LayerWeights(Generic[M, V]):
    """One decoder layer. ``qkv`` stacks the rows of queries, keys and values.

    The elements of a head have the order of ``rope.half_split``. ``input_norm`` and ``mlp_norm``
    come before attention and MLP, ``attention_norm`` and ``output_norm`` after them, if a family
    has them. ``q_norm`` and ``k_norm`` span one head or all. A short convolution has gates and
    inputs [3 * width, width] in place of ``qkv``, and ``taps`` [taps, width], the oldest first.
    Linear attention has queries, keys, values and gates there, and ``linear``. Gates of attention
    come after its queries. ``sinks`` [heads] are scores of a key without a value. A layer may lack
    a mixer or an MLP, or have ``experts`` instead of the MLP.
    """

    input_norm: V | None
    qkv: M | None
    qkv_bias: V | None
    q_norm: V | None
    k_norm: V | None
    output: M | None
    output_bias: V | None
    attention_norm: V | None
    mlp_norm: V | None
    mlp: Mlp[M, V] | None
    output_norm: V | None
    experts: Experts[M, V] | None = None
    taps: V | None = None
    taps_bias: V | None = None
    linear: LinearWeights[M, V] | None = None
    beside: Beside[M] | None = None
    sinks: V | None = None

    def products(self) -> list[M]:
        """Return the matrices that multiply every row."""
        mlp, shared = self.mlp, self.experts.shared if self.experts else None
        inner = [each for m in (mlp, shared) if m for each in (m.gate_up, m.down)]
        rates = self.linear.rates if self.linear else None
        beside = [self.beside.qkv, self.beside.output] if self.beside else []
        all_ = (self.qkv, self.output, *beside, *inner, rates)
        return [each for each in all_ if each is not None]


@dataclass(frozen=True)
class Loader:
    """Reads the weights of a checkpoint layer by layer.

    With ``keeps`` quantised matrices stay quantised, and norms and biases are fp32; otherwise they
    are dequantised. ``recipe`` quantises matrices at reading, except routers, norms and biases.
    """

    source: Source
    architecture: Architecture
    dtype: np.dtype[Any]
    keeps: bool = False
    recipe: Recipe | None = None

    def __post_init__(self) -> None:
        warn_once(self.source.note)

    def get(self, name: str, *size: int) -> Array:
        """Return the norm or bias ``name``, of ``size``."""
        dtype = FLOAT32 if self.keeps else self.dtype
        return self.source.get(name, size, dtype)

    def matrix(self, name: str, outputs: int, inputs: int, recipe: Recipe | None) -> Matrix:
        """Return the matrix ``name``, quantised by ``recipe``, or as stored if that is None."""
        if recipe is not None:
            return quantized(self.source, name, (outputs, inputs), recipe)
        return self.source.matrix(name, (outputs, inputs), self.dtype)

    def _ready(self, matrix: Matrix) -> Matrix:
        """Return ``matrix``, dequantised unless it may stay quantised."""
        if self.keeps and not isinstance(matrix, np.ndarray):
            return matrix
        return np.ascontiguousarray(plain(matrix, self.dtype))

    def norm(self, name: str, size: int | None = None) -> Array:
        """Return a norm's weight, repeated twice for ``transformer.rms_norm``."""
        weight = self.get(f"{name}.weight", size or self.architecture.hidden_size)
        weight = weight + 1 if self.architecture.layout.shifted else weight
        return np.concatenate((weight, weight))

    def _stacked(self, prefix: str, parts: dict[str, int], width: int, fused: str = "") -> Matrix:
        """Return several projections stacked, or ``fused``, the one tensor that holds them."""
        if fused:
            return self.matrix(f"{fused}.weight", sum(parts.values()), width, self.recipe)
        names = {f"{prefix}{p}_proj.weight": rows for p, rows in parts.items()}
        matrices = [self.matrix(name, n, width, self.recipe) for name, n in names.items()]
        return stacked(matrices, self.dtype)

    def _biases(self, prefix: str, parts: dict[str, int], fused: str = "") -> Array:
        if fused:
            return self.get(f"{fused}.bias", sum(parts.values()))
        return np.concatenate([self.get(f"{prefix}{p}_proj.bias", n) for p, n in parts.items()])

    def _rotary_order(self) -> NDArray[np.int64] | None:
        """Return the order of qkv rows that puts heads in the order of ``half_split``, if needed.

        Products of queries and keys do not depend on that order, and all heads are rotated alike.
        """
        a = self.architecture
        if a.rotary_dim == a.head_dim and not a.layout.gated:
            return None
        split, heads = self._head_order(), a.num_heads
        queries = (1 + a.layout.gated) * heads
        rows = np.arange((queries + 2 * a.num_kv_heads) * a.head_dim).reshape(-1, a.head_dim)
        if a.layout.gated:  # each head's queries and gate are split
            rows[:queries] = (
                rows[:queries].reshape(heads, 2, -1).swapaxes(0, 1).reshape(queries, -1)
            )
        rows[:heads] = rows[:heads, split]
        rows[queries : queries + a.num_kv_heads] = rows[queries : queries + a.num_kv_heads, split]
        return rows.ravel()

    def _head_order(self) -> list[int]:
        """Return the order of a head's elements in which they are ``half_split``."""
        a = self.architecture
        return half_split(a.head_dim, a.rotary_dim)

    def _head_norm(self, name: str, size: int) -> Array:
        """Return the norm of queries or keys, in the order of their elements."""
        norm, a = self.norm(name, size), self.architecture
        if a.rotary_dim == a.head_dim or size != a.head_dim:
            return norm
        return np.concatenate(2 * [norm[:size][self._head_order()]])

    def layer(
        self, index: int, inputs: int | None = None, normed: bool = True
    ) -> LayerWeights[Matrix, Array]:
        """Return the weights of one layer; ``inputs`` are its queries', by default its width.

        A layer that is not ``normed`` has no norm before attention.
        """
        base = f"model.layers.{index}."
        match self.architecture.mixers[index]:
            case "conv":
                mixer = self._conv(f"{base}conv.")
            case "linear" if self.architecture.layout.mamba:
                mixer = self._mamba(f"{base}mamba.")
            case "linear":
                mixer = self._delta(f"{base}linear_attn.")
            case "beside":
                attention = self._attention(base, inputs)
                beside = Beside(attention["qkv"], attention["output"])
                mixer = self._mamba(f"{base}mamba.") | {"beside": beside}
            case "none":
                mixer = dict.fromkeys(
                    ("qkv", "qkv_bias", "q_norm", "k_norm", "output", "output_bias")
                )
            case _:
                mixer = self._attention(base, inputs)
        return LayerWeights(**mixer, **self._common(base, index, normed))

    def _attention(self, base: str, inputs: int | None) -> dict[str, Any]:
        """Return the fields of ``LayerWeights`` about attention."""
        a, attn, width = self.architecture, f"{base}self_attn.", self.architecture.hidden_size
        queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
        layout = a.layout
        parts = {"q": queries * (1 + layout.gated), "k": keys, "v": keys}
        fused = layout.fused_heads and f"{base}{layout.fused_heads}"
        qkv = self._stacked(attn, parts, inputs or width, fused)
        bias = self._biases(attn, parts, fused) if a.qkv_bias else None
        order = self._rotary_order()
        if order is not None:
            qkv = qkv[order] if isinstance(qkv, np.ndarray) else qkv.rows(order)
            bias = None if bias is None else bias[order]
        q_width, k_width = (queries, keys) if layout.wide_norms else (a.head_dim, a.head_dim)
        return {
            "qkv": self._ready(qkv),
            "qkv_bias": bias,
            "q_norm": self._head_norm(f"{attn}q_norm", q_width) if layout.qk_norm else None,
            "k_norm": self._head_norm(f"{attn}k_norm", k_width) if layout.qk_norm else None,
            "output": self._ready(self.matrix(f"{attn}o_proj.weight", width, queries, self.recipe)),
            "output_bias": self.get(f"{attn}o_proj.bias", width) if a.output_bias else None,
            "sinks": self.get(f"{attn}sinks", a.num_heads) if layout.sinks else None,
        }

    def _conv(self, base: str) -> dict[str, Any]:
        """Return the fields of ``LayerWeights`` about a short convolution (LFM2)."""
        a, biased = self.architecture, self.architecture.mixer_bias
        width = a.hidden_size
        taps = self.get(f"{base}conv.weight", width, 1, a.conv_taps)
        return {
            "qkv": self._ready(self.matrix(f"{base}in_proj.weight", 3 * width, width, self.recipe)),
            "qkv_bias": self.get(f"{base}in_proj.bias", 3 * width) if biased else None,
            "q_norm": None,
            "k_norm": None,
            "output": self._ready(self.matrix(f"{base}out_proj.weight", width, width, self.recipe)),
            "output_bias": self.get(f"{base}out_proj.bias", width) if biased else None,
            "taps": np.ascontiguousarray(taps[:, 0].T),
            "taps_bias": self.get(f"{base}conv.bias", width) if a.conv_bias else None,
        }

    def _delta(self, base: str) -> dict[str, Any]:
        """Return the fields of ``LayerWeights`` about a gated delta net (Qwen3.5)."""
        a, width = self.architecture, self.architecture.hidden_size
        linear = a.linear
        assert linear is not None
        heads, recipe = linear.value_heads, self.recipe
        mixed, gates = linear.conv_width, linear.values
        if a.layout.grouped:
            whole = self.matrix(f"{base}in_proj_qkvz.weight", mixed + gates, width, recipe)
            each = linear.values // linear.key_heads
            parts = [ranges(whole, by_kind(linear.key_heads, 2 * [linear.key_dim] + 2 * [each]))]
            both = self.matrix(f"{base}in_proj_ba.weight", 2 * heads, width, None)
            kinds = by_kind(linear.key_heads, 2 * [heads // linear.key_heads])
            rates = [plain(ranges(both, kinds), self.dtype)]
        else:
            parts = [
                self.matrix(f"{base}in_proj_qkv.weight", mixed, width, recipe),
                self.matrix(f"{base}in_proj_z.weight", gates, width, recipe),
            ]
            rates = [
                plain(self.matrix(f"{base}in_proj_{n}.weight", heads, width, None), self.dtype)
                for n in "ba"
            ]
        taps = self.get(f"{base}conv1d.weight", mixed, 1, a.conv_taps)
        logs = self.source.get(f"{base}A_log", (heads,), FLOAT32)
        return {
            "qkv": self._ready(stacked(parts, self.dtype)),
            "qkv_bias": None,
            "q_norm": None,
            "k_norm": None,
            "output": self._ready(self.matrix(f"{base}out_proj.weight", width, gates, recipe)),
            "output_bias": None,
            "taps": np.ascontiguousarray(taps[:, 0].T),
            "linear": LinearWeights(
                rates=np.ascontiguousarray(np.concatenate(rates)),
                decay=-np.exp(logs),
                dt_bias=self.source.get(f"{base}dt_bias", (heads,), FLOAT32),
                norm=np.tile(self.get(f"{base}norm.weight", linear.value_dim), heads),
                skip=None,
            ),
        }

    def _mamba(self, base: str) -> dict[str, Any]:
        """Return the fields of ``LayerWeights`` about Mamba-2 (Granite 4-H, Falcon-H1, Nemotron-H).

        Checkpoints have z, x, B, C and dt in that order, and convolve x, B and C.
        """
        a, width = self.architecture, self.architecture.hidden_size
        linear = a.linear
        assert linear is not None
        heads, values, mixed = linear.value_heads, linear.values, linear.conv_width
        keys = linear.key_heads * linear.key_dim
        line = [range(mixed - keys, mixed), range(values, values + keys), range(values)]
        by_x, by_b, by_c = a.convolved
        inputs_by = np.repeat(np.array([by_c, by_b, by_x], FLOAT32), [keys, keys, values])
        parts = [*(range(values + r.start, values + r.stop) for r in line), range(values)]
        steps = [range(values + mixed, values + mixed + heads)]
        name, rows = f"{base}in_proj", values + mixed + heads
        whole = self.matrix(f"{name}.weight", rows, width, None)
        entering = whole
        if self.recipe is not None:
            entering = self.matrix(f"{name}.weight", rows, width, self.recipe)
        bias = self.get(f"{name}.bias", rows) if a.mixer_bias else None
        conv, taps_bias = f"{base}conv1d", None
        if a.conv_bias:
            taps_bias = self.get(f"{conv}.bias", mixed)[numbers(line)]
        dt_bias = self.source.get(f"{base}dt_bias", (heads,), FLOAT32)
        if bias is not None:
            dt_bias = dt_bias + bias[numbers(steps)].astype(FLOAT32)
        taps = self.get(f"{conv}.weight", mixed, 1, a.conv_taps)[numbers(line), 0]
        if a.convolved != (1.0, 1.0, 1.0):
            taps = taps * inputs_by[:, None].astype(taps.dtype)
        norm = np.ones(values, taps.dtype)
        if linear.norm_groups:
            norm = self.get(f"{base}norm.weight", values)
        out = self.matrix(f"{base}out_proj.weight", width, values, self.recipe)
        return {
            "qkv": self._ready(ranges(entering, parts)),
            "qkv_bias": None if bias is None else bias[numbers(parts)],
            "q_norm": None,
            "k_norm": None,
            "output": self._ready(out),
            "output_bias": self.get(f"{base}out_proj.bias", width) if a.mixer_bias else None,
            "taps": np.ascontiguousarray(taps.T),
            "taps_bias": taps_bias,
            "linear": LinearWeights(
                rates=np.ascontiguousarray(plain(ranges(whole, steps), self.dtype)),
                decay=-np.exp(self.source.get(f"{base}A_log", (heads,), FLOAT32)),
                dt_bias=dt_bias,
                norm=norm,
                skip=self.source.get(f"{base}D", (heads,), FLOAT32),
            ),
        }

    def _common(self, base: str, index: int, normed: bool) -> dict[str, Any]:
        """Return the fields of ``LayerWeights`` about its norms and MLP."""
        a, layout = self.architecture, self.architecture.layout
        after, before = layout.norms != "before", layout.norms != "after"
        post = f"{base}post_attention_layernorm"
        if layout.lone:
            norm, lone = self.norm(f"{base}input_layernorm"), a.mlps[index]
            return {
                "input_norm": None if lone else norm,
                "attention_norm": None,
                "mlp_norm": norm if lone else None,
                "mlp": self._mlp(base) if lone and not a.sparse[index] else None,
                "experts": self._experts(base) if a.sparse[index] else None,
                "output_norm": None,
            }
        return {
            "input_norm": self.norm(f"{base}input_layernorm") if before and normed else None,
            "attention_norm": self.norm(post) if after else None,
            "mlp_norm": (
                self.norm(f"{base}pre_feedforward_layernorm" if after else post) if before else None
            ),
            "mlp": None if a.sparse[index] else self._mlp(base),
            "experts": self._experts(base) if a.sparse[index] else None,
            "output_norm": self.norm(f"{base}post_feedforward_layernorm") if after else None,
        }

    def _mlp(self, base: str) -> Mlp[Matrix, Array]:
        a = self.architecture
        fused = a.layout.fused_mlp and f"{base}{a.layout.fused_mlp}"
        return self._gated(f"{base}mlp.", fused, f"{base}{a.layout.down}", a.intermediate_size)

    def _gated(self, prefix: str, fused: str, down: str, inner: int) -> Mlp[Matrix, Array]:
        a, gated = self.architecture, {"gate": inner, "up": inner}
        if a.layout.ungated:
            del gated["gate"]
        width = a.hidden_size
        return Mlp(
            gate_up=self._ready(self._stacked(prefix, gated, width, fused)),
            gate_up_bias=self._biases(prefix, gated, fused) if a.mlp_bias else None,
            down=self._ready(self.matrix(f"{down}.weight", width, inner, self.recipe)),
            down_bias=self.get(f"{down}.bias", width) if a.mlp_bias else None,
        )

    def _experts(self, base: str) -> Experts[Matrix, Array]:
        mixture, layout = self.architecture.mixture, self.architecture.layout.experts
        width = self.architecture.hidden_size
        assert mixture is not None
        assert layout is not None
        if isinstance(self.source, GGUFTensors):
            layout = EXPERTS if layout.gate else replace(EXPERTS, gate="")
        count = mixture.experts
        scores = [self._scores(f"{base}{layout.router}.weight", count)]
        if mixture.shared_gated:
            scores.append(self._scores(f"{base}{layout.shared_gate}.weight", 1))
        bias = self.get(f"{base}{layout.router}.bias", count) if mixture.biased else None
        choice = self.get(f"{base}{layout.bias}", count) if mixture.chosen_by_bias else None
        shared = None
        if mixture.shared:
            fused = layout.shared_fused and f"{base}{layout.shared_fused}"
            down = f"{base}{layout.shared_down}"
            shared = self._gated(f"{base}{layout.shared}", fused, down, mixture.shared)
        own = ExpertMatrices(
            self.source, layout, mixture, width, self.dtype, self.recipe, self.keeps
        )
        gate_up, down_matrix = own.stacked(base)
        biases = own.biases(base) if mixture.biased else (None, None)
        return Experts(
            router=np.ascontiguousarray(np.concatenate(scores)),
            router_bias=bias,
            choice_bias=choice,
            gate_up=self._ready(gate_up),
            gate_up_bias=biases[0],
            down=self._ready(down_matrix),
            down_bias=biases[1],
            shared=shared,
        )

    def _scores(self, name: str, rows: int) -> Array:
        """Return rows of a router, which no recipe quantises."""
        return plain(self.matrix(name, rows, self.architecture.hidden_size, None), self.dtype)

    def table(self, name: str = "model.embed_tokens.weight") -> Matrix:
        """Return the embedding, or the head, [vocabulary, hidden_size]."""
        recipe = None if self.recipe is None else self.recipe.head
        return self.matrix(
            name, self.architecture.vocab_size, self.architecture.hidden_size, recipe
        )

    def head(self, embedding: Matrix) -> Matrix:
        """Return the matrix from hidden states to logits; tied checkpoints use the embedding."""
        tied = self.architecture.tied
        return self._ready(embedding if tied else self.table("lm_head.weight"))


def layer_numbers(architecture: Architecture, doing: str, slow: float) -> Iterable[int]:
    """Yield the layers' numbers, with a progress bar on a terminal from ``slow`` elements up."""
    a = architecture
    quick = a.num_layers * a.hidden_size * a.intermediate_size < slow
    return tqdm(range(a.num_layers), doing, disable=quick or None, leave=False)
