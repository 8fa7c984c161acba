"""A question to ``advise``: target, drafter, machine, traffic, and what matters."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field

from ...base.methods import BY_NAME, TABLE, find_method
from ...base.outside.models import check_fields
from ...engine.control.costs import Costs
from ...engine.control.kept_costs import read_costs
from ...errors import ConfigError, shown
from . import catalogue
from .acceptance import Acceptance, prior
from .catalogue import Shape, find_device
from .checks import Amount, Batch, Devices, Share, Tokens, one_of
from .figure import MEASURED
from .roofline import BYTES, Dtype, Machine, Steps, roofline

PRIORITIES = ("latency", "throughput", "memory", "zero loss")
PLACEMENTS = ("same", "own", "cpu")
CPU = "xeon-8480"
"""The default device of a drafter that is placed on a CPU."""
Placement = Annotated[str, one_of(PLACEMENTS)]
SAME_VOCABULARY = 0.01
"""Vocabularies whose sizes differ by a smaller share are taken for one vocabulary, padded."""


class PlannedDrafter(NamedTuple):
    """A drafter: the kind that sets its costs, its model if any, its prior and its name."""

    method: str
    shape: Shape | None
    prior: str
    name: str


@dataclass(frozen=True)
class Situation:
    """A question to ``advise``; it is checked on creation.

    A model is a name in the catalogue, a folder with a config.json, or a hub name. A drafter may
    also be a method; None asks for the catalogue's best. ``profile`` is measured costs, or the file
    in which ``outrider serve`` keeps them; it replaces the roofline. ``concurrency`` is the share
    of time by number of sequences, ``tasks`` the shares of traffic. Times are in seconds, the price
    in dollars per device hour, ``longest`` in tokens.

    Raises ConfigError: an input is wrong; ModelError: a config.json cannot be used.
    """

    target: str | Path
    drafter: str | Path | None = None
    hardware: str | None = None
    tensor_parallel: Devices = 1
    dtype: Dtype = "bf16"
    drafter_dtype: Dtype | None = None
    profile: Path | Costs | None = None
    concurrency: Mapping[Batch, Amount] = field(default_factory=lambda: {1: 1.0})
    input_tokens: Tokens = 512
    output_tokens: Tokens = 256
    tasks: Mapping[str, Amount] = field(default_factory=lambda: {"conversation": 1.0})
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    max_ttft: Amount | None = None
    max_tpot: Amount | None = None
    priority: Annotated[str, one_of(PRIORITIES)] = "latency"
    acceptance: Acceptance | None = None
    placement: Placement = "same"
    drafter_hardware: str | None = None
    fine_tune: bool = False
    utilisation: Share | None = None
    memory_used: Share | None = None
    price: Amount | None = None
    longest: Annotated[int, Field(ge=1, le=64)] = 8

    def __post_init__(self) -> None:
        check_fields(self)
        if sum(self.concurrency.values()) <= 0:
            raise ConfigError(
                "no concurrency has a share above 0; give one, such as 8 or 1=0.7,16=0.3."
            )

    @property
    def context(self) -> float:
        """Mean tokens of a sequence while it decodes."""
        return self.input_tokens + self.output_tokens / 2

    def target_shape(self) -> Shape:
        """Return the target's shape."""
        shape = catalogue.find_shape(str(self.target))
        if shape.heads % self.tensor_parallel:
            raise ConfigError(
                f"tensor_parallel is {self.tensor_parallel}, which does not divide the target's "
                f"{shape.heads} attention heads; give another."
            )
        return shape

    def find_drafter(self, target: Shape) -> PlannedDrafter:
        """Return the drafter of a target."""
        name = str(self.drafter)
        named = catalogue.method_of_head(name) or name
        method = None if os.path.exists(name) else find_method(named)
        if method is not None:
            if method.costs in (None, "model"):
                known = ", ".join(m.name for m in TABLE if m.costs not in (None, "model"))
                raise ConfigError(
                    f"drafter {shown(name)} is a method whose name does not tell its costs; "
                    f"give a model of the catalogue, a folder with a config.json, or {known}."
                )
            heads = {"eagle": catalogue.eagle1_head, "eagle3": catalogue.eagle_head}
            shape = heads[method.name](target) if method.name in heads else None
            return PlannedDrafter(str(method.costs), shape, str(method.costs), method.name)
        config = catalogue.read_config(name)
        words = f"{config.get('architectures')} {config.get('speculators_model_type')}"
        if "eagle" in words.lower():
            head = catalogue.eagle_head(target, config)
            return PlannedDrafter("eagle3", head, "eagle3", "eagle3")
        shape = catalogue.shape_of(name, config)
        apart = abs(shape.vocabulary - target.vocabulary) > SAME_VOCABULARY * target.vocabulary
        return PlannedDrafter("model", shape, "retokenize" if apart else "model", "draft_model")

    def dtype_of(self, drafter: PlannedDrafter) -> str:
        """Return the dtype of a drafter's weights; by default the target's, or for heads bf16."""
        head = BY_NAME[drafter.name].head and BYTES[self.dtype] < BYTES["bf16"]
        # Heads are published in bf16, whatever the target's dtype is.
        return self.drafter_dtype or ("bf16" if head else self.dtype)

    def machines(self, drafter: PlannedDrafter) -> tuple[Machine, Machine] | None:
        """Return the target's machine and the drafter's; None if no hardware was named."""
        if self.hardware is None:
            return None
        device = find_device(self.hardware)
        machine = Machine(device, self.tensor_parallel, self.dtype)
        dtype = self.dtype_of(drafter)
        if self.placement == "same" or drafter.shape is None:
            return machine, Machine(device, self.tensor_parallel, dtype)
        named = self.drafter_hardware or (CPU if self.placement == "cpu" else self.hardware)
        return machine, Machine(find_device(named), 1, dtype)

    def costs(self) -> Costs:
        """Return the measured costs."""
        known = self.profile
        return known if isinstance(known, Costs) else read_profile(Path(known or ""))

    def steps(self, target: Shape, drafter: PlannedDrafter) -> Steps | None:
        """Return the costs of steps: measured, else modelled; None if neither is possible."""
        if self.profile is not None:
            costs = self.costs()
            name = drafter_in(costs, str(self.drafter), drafter)
            return Steps(costs, name, self.context, evidence=MEASURED)
        machines = self.machines(drafter)
        if machines is None:
            return None
        machine, own = machines
        return roofline(target, machine, drafter.method, drafter.shape, own, self.context)

    def expected(self, drafter: PlannedDrafter) -> Acceptance:
        """Return the acceptance that was given, else the prior."""
        return self.acceptance or prior(drafter.prior, self.tasks, self.temperature)


def read_profile(file: Path) -> Costs:
    """Return the measured costs in a file."""
    costs = read_costs(file)
    if costs is None:
        raise ConfigError(
            f"{file} holds no measured costs; outrider serve keeps them in ~/.cache/outrider/costs."
        )
    return costs


def drafter_in(costs: Costs, asked: str, drafter: PlannedDrafter) -> str:
    """Return the drafter's name in the costs: its own, its method's, or the only model's."""
    names = [n for n in (asked, drafter.name, drafter.method) if n in costs.drafters]
    models = [name for name, each in costs.drafters.items() if each.passes is not None]
    if len(models) == 1 and drafter.method in ("model", "eagle", "eagle3"):
        names += models
    if names:
        return names[0]
    raise ConfigError(
        f"the profile has no drafter {shown(asked)}; it has {', '.join(costs.drafters) or 'none'}."
    )
