"""A config that needs no transformers, which takes two seconds to import."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from .activations import auto_config

if TYPE_CHECKING:
    from transformers import PretrainedConfig


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
