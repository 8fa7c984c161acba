"""Reads small drafters as modules of transformers, makes them of target layers, writes them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ..checkpoints.checkpoint import Checkpoint, open_checkpoint
from ..checkpoints.configs import PlainConfig, whole
from ..checkpoints.dtypes import BFLOAT16, FLOAT32, cast
from ..checkpoints.export import written_config
from ..checkpoints.extras import KEY
from ..checkpoints.files import Files
from ..checkpoints.matrices import plain
from ..checkpoints.tokenizers import differences, has_tokenizer, save_tokenizer
from ..errors import ConfigError
from .head_files import write_checkpoint

FAMILIES = "llama", "mistral", "qwen2", "qwen3"
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
OTHER = "give another drafter, or none to begin with the target's layers"
"""The remedy for a drafter that cannot be trained."""
GATE, UP, DOWN = (f"mlp.{part}_proj.weight" for part in ("gate", "up", "down"))


class SmallModel(NamedTuple):
    """A drafter in training, in fp32: transformers' module, and the fields of its config.json."""

    module: nn.Module
    config: dict[str, Any]


def config_of(
    target: Checkpoint, begin: Path | None, layers: Sequence[int] = (), neurons: int | None = None
) -> dict[str, Any]:
    """Return the config of the drafter in ``begin``, or of a new one, see ``made_of``.

    Raises ConfigError: its family cannot be trained.
    """
    if begin is None:
        return _made_config(target, layers, neurons)[0]
    return _config(open_checkpoint(begin), OTHER)


def read_drafter(folder: Path, target: Files) -> SmallModel:
    """Return the drafter in ``folder``, which may be a GGUF file or quantised otherwise.

    Raises ConfigError: its family cannot be trained, or its tokenizer is not the target's.
    """
    files = Files(folder)
    checkpoint = open_checkpoint(files)
    config = _config(checkpoint, OTHER)
    if has_tokenizer(files) and has_tokenizer(target):
        entries = differences(target, files)
        if entries:
            raise ConfigError(
                f"{folder} has another tokenizer than the target ({'; '.join(entries[:3])}); give "
                "a drafter with the target's, or none to begin with the target's layers."
            )
    module = module_of(config)
    _fill(module, ((n, _read(checkpoint, n, *p.shape)) for n, p in module.named_parameters()))
    return SmallModel(module, config)


def made_of(target: Checkpoint, layers: Sequence[int], neurons: int | None) -> SmallModel:
    """Return a drafter with the embedding, head and norm of a target, and some of its layers.

    Layers below 0 count from the last. Each MLP keeps its ``neurons`` strongest neurons, see
    ``strongest``; None keeps as many as the hidden size.
    """
    config, chosen, inner = _made_config(target, layers, neurons)
    width, kept = config["hidden_size"], config["intermediate_size"]
    module = module_of(config)
    values: dict[str, Tensor] = {}
    for name, parameter in module.named_parameters():
        match = LAYER.fullmatch(name)
        if match is None:
            values[name] = _read(target, name, *parameter.shape)
        elif match[2] not in (GATE, UP, DOWN):
            source = f"model.layers.{chosen[int(match[1])]}.{match[2]}"
            values[name] = _read(target, source, *parameter.shape)
    for place, layer in enumerate(chosen):
        gate, up = (_read(target, f"model.layers.{layer}.{n}", inner, width) for n in (GATE, UP))
        down = _read(target, f"model.layers.{layer}.{DOWN}", width, inner)
        best = strongest(gate, up, down, kept)
        for part, value in ((GATE, gate[best]), (UP, up[best]), (DOWN, down[:, best])):
            values[f"model.layers.{place}.{part}"] = value
    _fill(module, values.items())
    return SmallModel(module, config)


def _made_config(
    target: Checkpoint, layers: Sequence[int], neurons: int | None
) -> tuple[dict[str, Any], list[int], int]:
    """Return a new drafter's config, the target layers that it has, and the target's MLP width."""
    config = _config(target, "name a drafter to begin with (--from)")
    count, inner, width = (
        config[name] for name in ("num_hidden_layers", "intermediate_size", "hidden_size")
    )
    if not layers or not all(-count <= each < count for each in layers):
        told = ", ".join(map(str, layers)) or "none"
        raise ConfigError(
            f"layers are {told}; give some of 0 to {count - 1}, or of -{count} to -1."
        )
    chosen = [each % count for each in layers]
    config["num_hidden_layers"] = len(chosen)
    config["intermediate_size"] = min(inner, neurons or width)
    if config.get("layer_types"):
        config["layer_types"] = [config["layer_types"][each] for each in chosen]
    return config, chosen, inner


def strongest(gate: Tensor, up: Tensor, down: Tensor, count: int) -> Tensor:
    """Return the neurons of an MLP with the largest product of their weights' norms, ascending."""
    strength = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    best: Tensor = strength.topk(count).indices
    return best.sort().values


def save_drafter(
    config: Mapping[str, Any], values: Iterable[tuple[str, Tensor]], target: Files, folder: Path
) -> None:
    """Write a drafter to a folder: its weights in bf16, its config and the target's tokenizer.

    ``values`` are the names and values of its parameters, which are cast one at a time.
    """
    tensors = {name: cast(value.numpy(), BFLOAT16) for name, value in values}
    write_checkpoint(folder, {**config, "dtype": "bfloat16"}, tensors)
    if has_tokenizer(target):
        save_tokenizer(target, folder)


def _config(checkpoint: Checkpoint, remedy: str) -> dict[str, Any]:
    """Return the config of a model. Raises ConfigError: its family cannot be trained."""
    kind = checkpoint.config.model_type
    if kind not in FAMILIES or checkpoint.architecture is None:
        raise ConfigError(
            f"{checkpoint.folder} is a {kind!r} model as configured; small drafters of "
            f"{', '.join(FAMILIES)} are trained: {remedy}."
        )
    config = written_config(checkpoint.config)
    for name in ("quantization_config", KEY):  # measured figures are another model's
        config.pop(name, None)
    return config


def module_of(config: Mapping[str, Any]) -> nn.Module:
    """Return the module that a config describes, in fp32."""
    named = {name: value for name, value in config.items() if name != "dtype"}
    module: nn.Module = AutoModelForCausalLM.from_config(
        whole(PlainConfig(**named)), dtype=torch.float32
    )
    return module.eval()


def _read(checkpoint: Checkpoint, name: str, *shape: int) -> Tensor:
    """Return a tensor of a checkpoint in fp32, dequantised."""
    source = checkpoint.tensors
    array = (
        plain(source.matrix(name, (shape[0], shape[1]), FLOAT32), FLOAT32)
        if len(shape) == 2
        else source.get(name, shape, FLOAT32)
    )
    return torch.from_numpy(np.array(array, np.float32))


@torch.no_grad()
def _fill(module: nn.Module, values: Iterable[tuple[str, Tensor]]) -> None:
    """Set a module's parameters, one at a time."""
    parameters = dict(module.named_parameters())
    for name, value in values:
        parameters[name].copy_(value)
