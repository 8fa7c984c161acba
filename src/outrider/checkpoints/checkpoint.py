"""An opened checkpoint: everything in its files except the bytes of its tensors."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..base.fields import one_line
from ..errors import ModelError, shown
from .architecture import Architecture, Shape
from .claims import check_claims
from .configs import WRAPPERS, ModelConfig, auto_config, plain_config
from .families import read_shape
from .files import Files, files_of
from .formats.compressed import Compressed, Fp8
from .formats.gguf_config import gguf_config
from .formats.gguf_weights import GGUFTensors
from .formats.grouped import Awq, Gptq
from .formats.mxfp4 import Mxfp4
from .formats.shared import REMEDY, Format, Tensors, warn_once

logger = logging.getLogger("outrider")

FORMATS: dict[str, Callable[[Mapping[str, Any], Path], Format]] = {
    "gptq": Gptq,
    "awq": Awq,
    "compressed-tensors": Compressed,
    "fp8": Fp8,
    "fbgemm_fp8": Fp8,
    "mxfp4": Mxfp4,
}
"""The formats of quantised checkpoints, by the name in ``quantization_config``."""


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in ``folder``, which may be a GGUF file.

    ``shape`` is an ``Architecture`` if the model is of a native family; ``tensors`` reads the
    weights.
    """

    folder: Path
    config: ModelConfig
    shape: Shape
    tensors: Tensors | GGUFTensors

    @property
    def architecture(self) -> Architecture | None:
        """The architecture of a native model; None for one that transformers runs."""
        return self.shape if isinstance(self.shape, Architecture) else None

    @property
    def quantised(self) -> bool:
        """True if its files may hold quantised matrices."""
        of_config = getattr(self.config, "quantization_config", None)
        return isinstance(self.tensors, GGUFTensors) or bool(of_config)


def open_checkpoint(folder: Path | Files) -> Checkpoint:
    """Return the checkpoint in ``folder``, whose files may be opened already."""
    files = files_of(folder)
    if files.gguf is not None:
        described = gguf_config(files.gguf)
        shape = read_shape(described, files.folder)
        head_dim = shape.head_dim if isinstance(shape, Architecture) else 1
        return Checkpoint(files.folder, described, shape, GGUFTensors(files.gguf, head_dim))
    config, shape = _model(files)
    format = find_format(getattr(config, "quantization_config", None), files.folder)
    wrapped = isinstance(shape, Architecture) and config.model_type in WRAPPERS
    if isinstance(shape, Architecture) and wrapped:
        config, shape = _text_part(config, shape, files)
    names = shape.layout.names if isinstance(shape, Architecture) else ()
    tensors = Tensors(files, format, wrapped, names)
    if isinstance(shape, Architecture):
        warn_once(_ignored(tensors, files, shape.num_layers))
    return Checkpoint(files.folder, config, shape, tensors)


def _ignored(tensors: Tensors, files: Files, layers: int) -> str | None:
    """Return a warning about layers beyond those of the config, MTP layers excepted."""
    further = (files.config or {}).get("num_nextn_predict_layers")
    known = layers + (further if isinstance(further, int) else 0)
    for name in tensors.names:
        layer = re.match(r"model\.layers\.([0-9]{1,9})\.", name)
        if layer and int(layer[1]) >= known:
            return (
                f"{tensors.folder} has a tensor {name!r}, but num_hidden_layers is {layers}: "
                "layers beyond are ignored."
            )
    return None


def _text_part(
    config: ModelConfig, shape: Architecture, files: Files
) -> tuple[ModelConfig, Architecture]:
    """Return config and shape of the text part, tied if no file has a head: defaults differ."""
    options = getattr(config, "quantization_config", None)
    text: ModelConfig = config.get_text_config(decoder=True)
    if options:
        text.quantization_config = options
    text.tie_word_embeddings = not any("lm_head.weight" in name for name in files.tensors)
    return text, replace(shape, tied=text.tie_word_embeddings)


def find_format(options: Mapping[str, Any] | None, where: Path) -> Format | None:
    """Return the format that a config's ``quantization_config`` names; None if it is empty."""
    if not options:
        return None
    method = str(options.get("quant_method", "an unnamed method"))
    if method not in FORMATS:
        raise ModelError(
            f"{where}: weights quantised by {shown(method)} (quantization_config) are not read, "
            f"only by {', '.join(FORMATS)}; {REMEDY}."
        )
    return FORMATS[method](options, where)


def _model(files: Files) -> tuple[ModelConfig, Shape]:
    """Return config and shape of the model in a folder; transformers reads foreign ones."""
    folder = files.folder
    if not folder.is_dir():
        raise ModelError(
            f"model {str(folder)!r} is not a folder; give one with a config.json, or a .gguf file."
        )
    if files.config is None:
        raise ModelError(
            f"{folder} has no config.json; give a Hugging Face checkpoint's folder or a .gguf file."
        )
    check_claims(files.config, files)
    plain = plain_config(files.config, str(folder / "config.json"))
    if plain is not None:
        shape = read_shape(plain, folder)
        if isinstance(shape, Architecture):
            if "auto_map" in files.config:
                logger.info("%s: its own code (auto_map) is ignored.", folder)
            return plain, shape
    config = _foreign(folder, files.config)
    return config, read_shape(config, folder)


def _foreign(folder: Path, options: Mapping[str, Any]) -> ModelConfig:
    """Return the config of a model that is not native, as transformers reads it."""
    kind = shown(options.get("model_type"))
    reader = auto_config(f"{folder}: a {kind} model, as configured,")
    try:
        config: ModelConfig = reader.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # of whatever kind transformers' checks raise
        if "auto_map" in options:
            raise ModelError(
                f"{folder} needs Python code of its own (auto_map in config.json), which is never "
                "run; give a checkpoint that transformers has code for."
            ) from None
        raise ModelError(f"{folder / 'config.json'} cannot be used: {one_line(error)}.") from None
    if "auto_map" in options:
        logger.info("%s: its own code (auto_map) is ignored; transformers' is run.", folder)
    return config
