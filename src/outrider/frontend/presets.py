"""Sampling defaults that come with a checkpoint."""

from pathlib import Path
from typing import Any

from ..base.fields import Fields, read_object
from ..checkpoints.formats.gguf import is_gguf, open_gguf
from ..errors import ConfigError, ModelError
from ..params import DISTRIBUTION, SAMPLING, SamplingParams

FILE = "generation_config.json"
IN_GGUF = {
    f"general.sampling.{key}": name
    for key, name in (("temp", "temperature"), ("top_k", "top_k"), ("top_p", "top_p"),
                      ("min_p", "min_p"), ("penalty_repeat", "repetition_penalty"))
}  # fmt: skip
"""Names of ``SamplingParams``, keyed by llama.cpp's keys in a GGUF file's metadata."""


TYPED_AT: dict[str, Any] = {"temperature": 0.7}
"""Defaults for text that people read as it comes, if the checkpoint has none.

API and Python calls have OpenAI's and vLLM's default instead, a temperature of 1, at which small
models ramble.
"""


def sampling_defaults(model: Path) -> dict[str, Any]:
    """Return the sampling defaults of a checkpoint's folder or GGUF file, {} if it has none.

    Their names are those of ``SamplingParams``. If a GGUF file has no such keys, the file ``FILE``
    beside it is read. Raises ConfigError: a file is damaged, or a value is out of range.
    """
    if is_gguf(model):
        found = _checked(_of_gguf(model), str(model))
        return found or sampling_defaults(model.parent)
    file = model / FILE
    return of_file(file) if file.is_file() else {}


def of_file(file: Path) -> dict[str, Any]:
    """Return the sampling defaults in a ``generation_config.json``.

    Raises ConfigError: the file is missing or damaged, or a value is out of range.
    """
    try:
        config = read_object(file)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    defaults = {n: config[n] for n in DISTRIBUTION if config.get(n) is not None}
    if config.get("max_new_tokens") is not None:
        defaults["max_tokens"] = config["max_new_tokens"]
    return _checked(defaults, str(file))


def _of_gguf(file: Path) -> dict[str, Any]:
    metadata = open_gguf(file).metadata
    return {name: metadata[key] for key, name in IN_GGUF.items() if metadata.get(key) is not None}


def _checked(defaults: dict[str, Any], where: str) -> dict[str, Any]:
    """Return defaults whose kinds and ranges ``SamplingParams`` takes."""
    fields = Fields(defaults, where)
    try:
        for name in defaults:
            fields.whole(name, -1) if SAMPLING[name].whole else fields.number(name)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    SamplingParams(**defaults)
    return defaults
