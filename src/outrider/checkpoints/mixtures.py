"""Mixtures of experts: families' names for their parts, and configs' options."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..base.fields import Fields
from ..base.limits import LARGEST_INT
from .architecture import ExpertLayout, Family, Mixture
from .configs import MOE

MOST_EXPERTS = 1 << 16
WIDEST = LARGEST_INT // 2
"""Most elements of a row: twice as many, for gate and up, still fit in 32 bits."""
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Configs' names for the number of experts."""
QWEN_MOE = ExpertLayout()
SHARING = ExpertLayout(shared_gate="mlp.shared_expert_gate", renormalised=True)
NEXT = ExpertLayout(shared_gate="mlp.shared_expert_gate")
MIXTRAL = ExpertLayout(
    "block_sparse_moe.gate", "block_sparse_moe.experts.{}.w1", "block_sparse_moe.experts.{}.w3",
    "block_sparse_moe.experts.{}.w2", renormalised=True,
)  # fmt: skip
GRANITE_MOE = ExpertLayout(
    router="block_sparse_moe.router.layer",
    fused=("block_sparse_moe.input_linear.weight", "block_sparse_moe.output_linear.weight"),
    shared_fused="shared_mlp.input_linear", shared_down="shared_mlp.output_linear",
    weighed="selected",
)  # fmt: skip
GPT_OSS = ExpertLayout(router="mlp.router", weighed="selected", biased=True, turned=True)
LFM2_MOE = ExpertLayout(
    "feed_forward.gate", "feed_forward.experts.{}.w1", "feed_forward.experts.{}.w3",
    "feed_forward.experts.{}.w2",
    ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"),
    bias="feed_forward.expert_bias", weighed="sigmoid",
)  # fmt: skip
GLM4_MOE = ExpertLayout(
    bias="mlp.gate.e_score_correction_bias", shared="mlp.shared_experts.",
    shared_down="mlp.shared_experts.down_proj", weighed="sigmoid", grouped=True,
)  # fmt: skip
NEMOTRON_MOE = ExpertLayout(
    "mixer.gate", "", "mixer.experts.{}.up_proj", "mixer.experts.{}.down_proj",
    bias="mixer.gate.e_score_correction_bias", shared="mixer.shared_experts.",
    shared_down="mixer.shared_experts.down_proj", weighed="sigmoid", grouped=True,
)  # fmt: skip


def read_mixture(values: Fields, family: Family, kinds: Sequence[str]) -> dict[str, Any]:
    """Return the fields of ``Architecture`` about experts; ``kinds`` are those of layers."""
    layout, dense = family.experts, {"sparse": (False,) * len(kinds), "mixture": None}
    names = [name for name in COUNTS if name in values]
    if layout is None or not names:
        return dense
    count = values.whole(names[0], 0, MOST_EXPERTS)
    sparse = tuple(k == MOE for k in kinds) if family.lone else _sparse(values, len(kinds))
    if not count or not any(sparse):
        return dense
    own = "moe_intermediate_size" in values
    width = values.whole("moe_intermediate_size" if own else "intermediate_size", 1, WIDEST)
    shared = values.whole("shared_expert_intermediate_size", 0, WIDEST, 0)
    shared = values.whole("shared_intermediate_size", 0, WIDEST, shared)
    if "moe_shared_expert_intermediate_size" in values:  # 0 means the width of the others
        shared = values.whole("moe_shared_expert_intermediate_size", 0, WIDEST)
        shared = shared or values.whole("intermediate_size", 1, WIDEST)
    shared = shared or width * values.whole("n_shared_experts", 0, WIDEST // width, 0)
    if (2 * width + 1) * count > WIDEST or values.whole("hidden_size", 1) * count > WIDEST:
        raise values.refuse(names[0], f"experts of at most {WIDEST} outputs in all")
    top = values.whole("num_experts_per_tok", 1, count)
    groups, top_groups = _groups(values, count, top) if layout.grouped else (1, 1)
    return {
        "sparse": sparse,
        "mixture": Mixture(
            experts=count,
            top=top,
            groups=groups,
            top_groups=top_groups,
            width=width,
            router=layout.weighed,
            renormalised=(
                values.flag("norm_topk_prob", False)
                if layout.renormalised is None
                else layout.renormalised
            ),
            scale=values.number("routed_scaling_factor", 1.0),
            shared=shared,
            shared_gated=bool(shared and layout.shared_gate),
            chosen_by_bias=bool(layout.bias) and values.flag("use_expert_bias", True),
            biased=layout.biased,
        ),
    }


def _groups(values: Fields, experts: int, top: int) -> tuple[int, int]:
    """Return the number of groups of experts, and the number that a row goes to."""
    groups = values.whole("n_group", 1, experts, 1)
    if groups == 1:
        return 1, 1
    size, rest = divmod(experts, groups)
    if rest or size < 2:
        raise values.refuse("n_group", f"a divisor of {experts} up to {experts // 2}")
    chosen = values.whole("topk_group", 1, groups)
    if chosen * size < top:
        raise values.refuse("topk_group", f"groups of {top} experts, num_experts_per_tok, or more")
    return groups, chosen


def _sparse(values: Fields, layers: int) -> tuple[bool, ...]:
    """Return which layers are mixtures."""
    step = values.whole("decoder_sparse_step", 1, default=1)
    dense = values.listed("mlp_only_layers", int) if "mlp_only_layers" in values else []
    first = values.whole("num_dense_layers", default=0)
    first = values.whole("first_k_dense_replace", default=first)
    return tuple(i >= first and i not in dense and (i + 1) % step == 0 for i in range(layers))
