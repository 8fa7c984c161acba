"""The inputs of an advice that other tools need: models, machine, traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from ...base.methods import NAMES
from ...base.outside.models import DataPart
from .catalogue import Shape, checkpoint_of, find_device, head_of
from .checks import MOST_TOKENS, Batch, Devices, Gibibytes, OneLine, Tokens, one_of
from .forecast import Forecast
from .roofline import BYTES, Dtype
from .situation import Placement, PlannedDrafter, Situation

GIB = 2**30
MOST_SEQUENCES = 256
"""Most sequences at once that an advice gives a server, however many fit."""


@dataclass(frozen=True)
class ServedModel(DataPart):
    """A model as it was named, and as it is served; an engine loads ``checkpoint``, if known."""

    name: OneLine
    checkpoint: OneLine | None
    dtype: Dtype
    attention_heads: Tokens
    vocab_size: Tokens
    weights_gib: Gibibytes


@dataclass(frozen=True)
class ServedTraffic(DataPart):
    """Sequences at once with the share of time of each number, and tokens of a request."""

    concurrency: dict[Batch, float]
    input_tokens: Tokens
    output_tokens: Tokens
    tasks: dict[str, float]
    temperature: float
    max_ttft: float | None = None
    max_tpot: float | None = None


@dataclass(frozen=True)
class Deployment(DataPart):
    """One replica of an advice.

    ``drafter`` is None if there is no model or head, or its shape is not known; ``hardware`` and
    ``memory_gib`` (of one device) if costs were measured, or no device was named. ``max_model_len``
    is the tokens of a request, ``max_num_seqs`` the sequences of that length that fit.
    """

    target: ServedModel
    method: Annotated[str, one_of(NAMES)]
    drafter: ServedModel | None
    other_vocabulary: bool
    placement: Placement
    hardware: OneLine | None
    memory_gib: Gibibytes | None
    tensor_parallel: Devices
    max_model_len: Annotated[int, Field(ge=1, le=2 * MOST_TOKENS)]
    max_num_seqs: Batch | None
    traffic: ServedTraffic
    replicas: Annotated[int, Field(ge=1, le=2**20)] = 1


def deployment_of(
    situation: Situation, target: Shape, drafter: PlannedDrafter, outlook: Forecast | None,
    drafts: bool,
) -> Deployment:  # fmt: skip
    """Return the deployment that a situation describes; ``drafts`` says whether it speculates."""
    memory = outlook.memory if outlook is not None else None
    fit = None
    if memory is not None:
        most = memory.speculative if drafts else memory.plain
        fit = max(1, int(min(most, MOST_SEQUENCES)))
    device = None if situation.hardware is None else find_device(situation.hardware)
    asked = str(situation.target)
    return Deployment(
        _model(asked, situation.dtype, target, checkpoint_of(asked)),
        drafter.name, _drafter(situation, target, drafter), drafter.prior == "retokenize",
        situation.placement, None if device is None else device.name,
        None if device is None else device.memory / GIB,
        situation.tensor_parallel, situation.input_tokens + situation.output_tokens, fit,
        ServedTraffic(
            dict(situation.concurrency), situation.input_tokens, situation.output_tokens,
            dict(situation.tasks), situation.temperature, situation.max_ttft, situation.max_tpot,
        ),
    )  # fmt: skip


def _model(name: str, dtype: str, shape: Shape, checkpoint: str | None) -> ServedModel:
    weights = shape.parameters * BYTES[dtype] / GIB
    return ServedModel(name, checkpoint, dtype, shape.heads, shape.vocabulary, weights)


def _drafter(situation: Situation, target: Shape, drafter: PlannedDrafter) -> ServedModel | None:
    """Return the drafter's model. A head that is given by its method comes from the catalogue."""
    if drafter.shape is None:
        return None
    name = str(situation.drafter)
    checkpoint = checkpoint_of(name) or head_of(str(situation.target), target, drafter.name)
    return _model(name, situation.dtype_of(drafter), drafter.shape, checkpoint)
