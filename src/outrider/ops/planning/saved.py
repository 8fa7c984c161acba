"""Reads an advice that was saved as JSON, and checks every part of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...base.limits import LARGEST_DRAFT
from ...base.methods import NAMES
from ...base.outside.documents import parse_json, read_json
from ...base.outside.text import printable
from ...errors import ConfigError, shown
from .advice import VERSION, Advice
from .checks import one_of, whole
from .roofline import BYTES
from .rules import LEAVE
from .situation import MOST_BATCH, MOST_DEVICES, MOST_TOKENS, PLACEMENTS

LARGEST = 1 << 20
"""Most bytes of a document; an advice has about 20,000."""
MOST_REPLICAS = 2**20
WRITE = "write one with outrider ops advise --out FILE"


def load_advice(file: Path, option: str = "--advice") -> Advice:
    """Return the advice in a file; ``option`` names it in messages.

    Raises:
        ConfigError: it cannot be read, or is not an advice.
    """
    name = f"{option} {printable(file)}"
    return _advice(read_json(file, name, limit=LARGEST), name)


def read_advice(text: str, source: str) -> Advice:
    """Return the advice in a text, the output of ``Advice.to_json`` as JSON.

    Raises:
        ConfigError: it is not an advice, of another version, or damaged; the message says where.
    """
    return _advice(parse_json(text, source, limit=LARGEST, unique=True), source)


def _advice(document: Any, source: str) -> Advice:
    from ...base.outside.models import checked

    if not isinstance(document, dict) or not {"version", "verdict"} <= document.keys():
        raise ConfigError(f"{source} is JSON, but not an advice with a version; {WRITE}.")
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise ConfigError(
            f"{source} is an advice of version {shown(document['version'])}, but this Outrider "
            f"reads version {VERSION}; {WRITE} again."
        )
    advice = checked(Advice, document, source)
    try:
        _check(advice)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return advice


def _check(advice: Advice) -> None:
    """Raise ``ConfigError`` for values that have the right type and make no sense."""
    served, traffic = advice.deployment, advice.deployment.traffic
    models = {"target": served.target, "drafter": served.drafter}
    known = [model for model in models.values() if model is not None]
    texts = [advice.verdict, advice.target, advice.drafter, served.hardware]
    for text in [*texts, *(each for model in known for each in (model.name, model.checkpoint))]:
        if text is not None and not (text.strip() and text.isprintable()):
            raise ConfigError(f"{shown(text)} is not a single line of text.")
    one_of("deployment.method", served.method, NAMES)
    one_of("deployment.placement", served.placement, PLACEMENTS)
    counts = {
        "tensor_parallel": (served.tensor_parallel, MOST_DEVICES),
        "replicas": (served.replicas, MOST_REPLICAS),
        "max_model_len": (served.max_model_len, 2 * MOST_TOKENS),
        "max_num_seqs": (served.max_num_seqs or 1, MOST_BATCH),
        "traffic.input_tokens": (traffic.input_tokens, MOST_TOKENS),
        "traffic.output_tokens": (traffic.output_tokens, MOST_TOKENS),
    }
    sizes = {"memory_gib": served.memory_gib}
    for name, model in models.items():
        if model is not None:
            one_of(f"deployment.{name}.dtype", model.dtype, BYTES)
            counts[f"{name}.attention_heads"] = model.attention_heads, MOST_TOKENS
            counts[f"{name}.vocab_size"] = model.vocab_size, MOST_TOKENS
            sizes[f"{name}.weights_gib"] = model.weights_gib
    for name, (count, most) in counts.items():
        whole(f"deployment.{name}", count, most)
    for batch in traffic.concurrency:
        whole("deployment.traffic.concurrency", batch, MOST_BATCH)
    for name, size in sizes.items():
        if size is not None and not 0 < size < 1e9:
            raise ConfigError(f"deployment.{name} is {size:g}; give a number above 0.")
    _check_lengths(advice)
    if advice.break_even is not None and not 0 <= advice.break_even.value <= 1:
        raise ConfigError(f"break_even is {advice.break_even.value:g}; give a share from 0 to 1.")


def _check_lengths(advice: Advice) -> None:
    """Raise ``ConfigError`` unless an engine can follow K and its schedule."""
    if not 0 <= advice.k <= LARGEST_DRAFT or (advice.k == 0 and advice.verdict != LEAVE):
        raise ConfigError(f"k is {advice.k}; give a draft length from 1 to {LARGEST_DRAFT}.")
    following = 1
    for first, last, length in advice.schedule:
        if first != following or last < first or not 0 <= length <= LARGEST_DRAFT:
            raise ConfigError(
                f"schedule has {[first, last, length]}; ranges begin at batch size {following}, do "
                f"not go backwards, and draft 0 to {LARGEST_DRAFT} tokens."
            )
        following = last + 1
