"""The optimisers of a training, and the running average of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .muon import Muon
from .plan import Plan


class Optimisers:
    """Muon for a module's inner matrices, AdamW for embeddings, output matrices and vectors."""

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        inner: list[nn.Parameter] = []
        outer: list[nn.Parameter] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                inside = parameter.ndim == 2 and "embed" not in name and "head" not in name
                (inner if inside else outer).append(parameter)
        self._all: list[torch.optim.Optimizer] = []
        if inner:
            self._all.append(Muon(inner, plan.rate, momentum=0.95, weight_decay=plan.decay))
        if outer:
            self._all.append(
                torch.optim.AdamW(outer, lr=plan.rate, betas=(0.9, 0.95), weight_decay=0.0)
            )

    def step(self, rate: float) -> None:
        """Update the parameters at a learning rate."""
        for each in self._all:
            for group in each.param_groups:
                group["lr"] = rate
            each.step()

    def state_dict(self) -> list[Any]:
        """Return the states of the optimisers."""
        return [each.state_dict() for each in self._all]

    def load_state_dict(self, states: list[Any]) -> None:
        """Set the states of the optimisers."""
        for each, state in zip(self._all, states, strict=True):
            each.load_state_dict(state)


class Average:
    """A running average (EMA) of a module's parameters, whose decay rises with the steps."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self._module, self._decay = module, decay
        self.values = copied(trained(module))

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Update the average with the parameters after a step."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, value in trained(self._module).items():
            self.values[name].lerp_(value, 1 - decay)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Set the module to the average while the context lasts."""
        own = copied(trained(self._module))
        self._module.load_state_dict(self.values, strict=False)
        try:
            yield
        finally:
            self._module.load_state_dict(own, strict=False)


def trained(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters of a module that are trained, by name."""
    return {n: p.detach() for n, p in module.named_parameters() if p.requires_grad}


def copied(values: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors, by name."""
    return {name: value.clone() for name, value in values.items()}
