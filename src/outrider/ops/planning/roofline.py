"""Modelled costs of steps on a device without measurements, as the controller's cost model.

A forward reads its weights, multiplies each row by the active ones, reduces between devices, and
reads its logits. The times are added: measured forwards are closer to the sum than to the maximum
(docs/planning.md). The KV cache is read once per sequence, whatever the rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Annotated, NamedTuple

from ...engine.control.costs import Costs, Curve, DraftCosts
from ...engine.control.tuning import USUAL
from .catalogue import Device, Shape
from .checks import one_of
from .figure import MODELLED

CURVE_ROWS = (*range(1, 17), *(2**i * j // 4 for i in range(4, 17) for j in (5, 6, 7, 8)))
BYTES = {"fp32": 4.0, "bf16": 2.0, "fp8": 1.0, "int8": 1.0, "int4": 0.5625}
"""Bytes of a weight by dtype; int4 with a scale and a zero point for each group of 32 or 64."""
Dtype = Annotated[str, one_of(BYTES)]
LOGIT_READS = 3
"""Number of times that fp32 logits are written or read until a token is sampled: assumed."""
ACTIVATION = 2
"""Bytes of an activation sent between devices, and of a value in the KV cache."""
MEDUSA_HEADS = 4
LAYERSKIP_SHARE = 0.55
"""Share of the target's time that a pass with skipped sublayers takes: assumed, from SWIFT."""


class Terms(NamedTuple):
    """Seconds of a forward by cause."""

    weights: float
    compute: float
    communication: float
    logits: float


@dataclass(frozen=True)
class Machine:
    """``count`` equal devices that hold a model in shards; ``dtype`` is that of its weights."""

    device: Device
    count: int = 1
    dtype: str = "bf16"

    @property
    def bandwidth(self) -> float:
        """Effective bytes/s of all devices together."""
        return self.count * self.device.bandwidth * self.device.bandwidth_efficiency

    @property
    def flops(self) -> float:
        """Effective FLOP/s of all devices together."""
        each = self.device.flops.get(self.dtype, self.device.flops["bf16"])
        return self.count * each * self.device.compute_efficiency

    @property
    def memory(self) -> float:
        """Bytes that a server may use on all devices."""
        return self.count * self.device.memory * self.device.memory_share

    def weights(self, shape: Shape) -> float:
        """Return the bytes of a model's weights."""
        return shape.parameters * BYTES[self.dtype]

    def terms(self, shape: Shape, rows: int) -> Terms:
        """Return the seconds of a forward of ``rows`` rows by cause, without its context."""
        device = self.device
        weights = shape.read(rows) * BYTES[self.dtype] / self.bandwidth
        compute = 2 * shape.active * rows / self.flops
        if (least := shape.layers * device.layer) > weights + compute:
            weights = least - compute
        communication = 0.0
        if self.count > 1:
            message = rows * shape.hidden * ACTIVATION
            ring = 2 * (self.count - 1) / self.count * message / device.link
            communication = 2 * shape.layers * (device.link_latency + ring)
        logits = LOGIT_READS * 4 * rows * shape.vocabulary / self.bandwidth
        return Terms(weights, compute, communication, logits)

    def forward(self, shape: Shape, rows: int) -> float:
        """Return the seconds of a forward of ``rows`` rows, without its context."""
        return sum(self.terms(shape, rows))

    def context(self, shape: Shape) -> float:
        """Return the seconds that each token of a sequence's context adds to a forward."""
        return shape.kv_values * ACTIVATION / self.bandwidth

    def prefill(self, shape: Shape, tokens: int) -> float:
        """Return the seconds to prefill a prompt; only its last row has logits."""
        *body, _ = self.terms(shape, tokens)
        attention = 2 * shape.heads * shape.head_dim * shape.layers * tokens**2
        return sum(body) + attention / self.flops


def curve_of(seconds: Callable[[int], float]) -> Curve:
    """Return a function of the rows as a curve."""
    return Curve(CURVE_ROWS, tuple(map(seconds, CURVE_ROWS)))


def draft_costs(
    method: str, shape: Shape | None, target: Shape, machine: Machine, context: float
) -> DraftCosts:
    """Return the seconds of a drafter on its machine, over sequences of ``context`` tokens.

    Medusa drafts with heads on the target, layerskip with the target's own layers.
    """
    if method == "lookup":
        return DraftCosts(None, USUAL.call, USUAL.per_sequence)
    own = machine.device.draft_pass
    if method == "medusa":
        width, bytes_ = MEDUSA_HEADS * target.hidden, BYTES[machine.dtype]
        parameters = width * (target.hidden + target.vocabulary)
        each = 2 * parameters / machine.flops
        each += LOGIT_READS * 4 * MEDUSA_HEADS * target.vocabulary / machine.bandwidth
        return DraftCosts(None, own + parameters * bytes_ / machine.bandwidth, each)
    share = LAYERSKIP_SHARE if method == "layerskip" else 1.0
    model = target if method == "layerskip" or shape is None else shape
    # A small drafter may be faster on one device, which needs no reduction between devices.
    alone = replace(machine, count=1)

    def seconds(rows: int) -> float:
        seconds_by_machine = [
            each.forward(model, rows) + rows * context * each.context(model)
            for each in ((machine,) if method == "layerskip" else (machine, alone))
        ]
        return own + share * min(seconds_by_machine)

    return DraftCosts(curve_of(seconds))


@dataclass(frozen=True)
class Steps:
    """The seconds of steps with and without drafts, by the controller's cost model.

    ``context`` is the mean tokens of a sequence, ``link`` the time to reach a drafter elsewhere.
    """

    costs: Costs
    name: str
    context: float
    link: float = 0.0
    evidence: str = MODELLED

    def verify(self, batch: int, drafted: float) -> float:
        """Return the seconds in which the target verifies drafts of ``drafted`` mean tokens."""
        rows = batch * (1 + drafted)
        return self.costs.target.at(rows) + self.costs.per_context * self.context * batch

    def draft(self, batch: int, k: int) -> float:
        """Return the seconds of drafting ``k`` tokens for each of ``batch`` sequences."""
        if not k:
            return 0.0
        return self.costs.drafters[self.name].at([batch] * k) + self.link

    def seconds(self, batch: int, k: int, drafted: float | None = None) -> float:
        """Return the seconds of a step; ``drafted`` is the mean tokens of a draft, or ``k``."""
        verify = self.verify(batch, k if drafted is None else drafted)
        return self.draft(batch, k) + verify + self.costs.host_at(batch)


def roofline(
    target: Shape, machine: Machine, method: str, drafter: Shape | None, drafting: Machine,
    context: float,
) -> Steps:  # fmt: skip
    """Return the steps of a target on a machine, and a drafter on the same or another one."""
    elsewhere = drafting.device != machine.device or drafting.count != machine.count
    costs = Costs(
        curve_of(lambda rows: machine.forward(target, rows)),
        {method: draft_costs(method, drafter, target, drafting, context)},
        machine.context(target), machine.device.step, machine.device.per_sequence,
    )  # fmt: skip
    link = 2 * machine.device.link_latency if elsewhere else 0.0
    return Steps(costs, method, context, link)
