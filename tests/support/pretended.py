"""A device that is not there: tensors that say they are elsewhere, and refuse those of the CPU.

PyTorch's own ``meta`` device lends its name, since backward passes run for it as for the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

PRETENDED = torch.device("meta")


class Elsewhere(Tensor):
    """A tensor of the pretended device; ``inner`` has its values."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        """Return a tensor that looks like ``inner`` but for its device."""
        made = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=PRETENDED,
            storage_offset=inner.storage_offset(),
        )  # fmt: skip
        made.inner = inner
        return made  # type: ignore[no-any-return]

    def tolist(self) -> Any:
        """Return the values, as a tensor of a GPU does."""
        return self.inner.tolist()

    @classmethod
    def __torch_dispatch__(cls, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run a call on the values."""
        return run(call, args, kwargs or {})


def run(call: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run a call on the values of its tensors. Raises AssertionError: some are of the CPU."""
    flat: list[Any] = []
    tree_map(flat.append, (args, kwargs))
    elsewhere = [each for each in flat if isinstance(each, Elsewhere)]
    made = any(isinstance(each, torch.device) and each == PRETENDED for each in flat)
    copies = call.overloadpacket in (torch.ops.aten._to_copy, torch.ops.aten.copy_)
    for each in flat:
        if isinstance(each, Tensor) and not isinstance(each, Elsewhere) and elsewhere:
            assert copies or not each.ndim, f"{call} mixes tensors of two devices"
    back = copies and kwargs.get("device") == torch.device("cpu")
    inner_args, inner_kwargs = tree_map(_inner, (args, kwargs))
    result = call(*inner_args, **inner_kwargs)
    if call.overloadpacket is torch.ops.aten.copy_:
        return args[0]
    there = made or (bool(elsewhere) and not back)
    return tree_map(lambda x: Elsewhere(x) if there and type(x) is Tensor else x, result)


def _inner(value: Any) -> Any:
    if isinstance(value, Elsewhere):
        return value.inner
    is_there = isinstance(value, torch.device) and value == PRETENDED
    return torch.device("cpu") if is_there else value


class _Factories(TorchDispatchMode):
    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(call, args, kwargs or {})


@contextmanager
def pretended() -> Iterator[None]:
    """Have tensors be made on the pretended device meanwhile."""
    made = torch.tensor  # asks no mode for tensors of ``meta``

    def there(values: Any, **options: Any) -> Tensor:
        return made(values, **{**options, "device": "cpu"}).to(PRETENDED)

    with patch("torch.tensor", there), _Factories(), PRETENDED:
        yield


def placed(module: nn.Module) -> None:
    """Move a module to the pretended device."""
    for each in module.modules():
        for name, parameter in [*each._parameters.items()]:
            if parameter is not None:
                there = nn.Parameter(Elsewhere(parameter.detach()), parameter.requires_grad)
                each._parameters[name] = there
        for name, buffer in [*each._buffers.items()]:
            each._buffers[name] = None if buffer is None else Elsewhere(buffer)
