"""Configs without what transformers imports beside them.

Every config of transformers takes the names of activations from ``transformers.activations``, which
brings torch's compiler, its distributed tensors and sympy along: seconds and memory for each
process. A ``PlainConfig`` needs no transformers, which takes two seconds to import.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_ACTIVATIONS = "transformers.activations"
_CHECKS = "transformers.utils.type_validators"


class Activations(Mapping[str, Any]):
    """``transformers.activations.ACT2FN``, imported when it is looked at."""

    def __getitem__(self, name: str) -> Any:
        return import_module(_ACTIVATIONS).ACT2FN[name]

    def __iter__(self) -> Iterator[str]:
        return iter(import_module(_ACTIVATIONS).ACT2FN)

    def __len__(self) -> int:
        return len(import_module(_ACTIVATIONS).ACT2FN)


def auto_config() -> Any:
    """Return transformers' ``AutoConfig``, imported without what runs activations."""
    if _CHECKS not in sys.modules and _ACTIVATIONS not in sys.modules:
        stand_in = ModuleType(_ACTIVATIONS)
        stand_in.__dict__["ACT2FN"] = Activations()
        sys.modules[_ACTIVATIONS] = stand_in
        try:
            import_module(_CHECKS)
        except ImportError:  # a version that takes more from there imports it whole, later
            sys.modules.pop(_CHECKS, None)
        finally:
            del sys.modules[_ACTIVATIONS]
    return import_module("transformers").AutoConfig


class PlainConfig(SimpleNamespace):
    """The options of the native family ``model_type``, read as ``PretrainedConfig``'s are."""

    attribute_map: ClassVar[dict[str, str]] = {}
    is_encoder_decoder = False

    def get_text_config(self, decoder: bool = True) -> PlainConfig:
        """Return the config of the part that decodes, which is the whole."""
        return self


def is_plain(config: Any) -> bool:
    """Return whether a config is a ``PlainConfig``, of a native family."""
    return isinstance(config, PlainConfig)


def whole(config: Any) -> PretrainedConfig:
    """Return ``config`` as transformers has it, with its defaults; its checks may raise."""
    if not is_plain(config):
        return cast("PretrainedConfig", config)
    options = dict(vars(config))
    complete: PretrainedConfig = auto_config().for_model(options.pop("model_type"), **options)
    return complete
