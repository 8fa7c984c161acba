"""Reads an advice that was saved as JSON, and checks every part of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from ...base.limits import LARGEST_DRAFT
from ...base.methods import NAMES
from ...base.outside.documents import parse_json, read_json
from ...base.outside.text import printable
from ...errors import ConfigError, shown
from .advice import VERSION, Advice
from .checks import one_of, whole
from .figure import Figure
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
    """Return the advice in a text.

    Args:
        text: the output of ``Advice.to_json`` as JSON.
        source: the document's name, for messages.

    Raises:
        ConfigError: it is not an advice, of another version, or damaged; the message says where.
    """
    return _advice(parse_json(text, source, limit=LARGEST, unique=True), source)


def _advice(document: Any, source: str) -> Advice:
    from pydantic import ValidationError

    if not isinstance(document, dict) or not {"version", "verdict"} <= document.keys():
        raise ConfigError(f"{source} is JSON, but not an advice with a version; {WRITE}.")
    if document["version"] != VERSION or isinstance(document["version"], bool):
        raise ConfigError(
            f"{source} is an advice of version {shown(document['version'])}, but this Outrider "
            f"reads version {VERSION}; {WRITE} again."
        )
    try:
        # In JSON mode lists become tuples and keys numbers, and nothing else is converted.
        advice: Advice = _adapter().validate_json(json.dumps(document))
    except ValidationError as error:
        raise _sentence(error.errors(include_url=False)[0], source) from None
    try:
        _check(advice)
    except ConfigError as error:
        raise ConfigError(f"{source}: {error}") from None
    return advice


@cache
def _adapter() -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(Advice)


def _sentence(problem: Any, source: str) -> ConfigError:
    """Return the error for a problem that pydantic found."""
    place = [str(part) if isinstance(part, int) else part for part in problem["loc"]]
    where, last = ".".join(map(printable, place)), str(place[-1]) if place else ""
    kind = problem["type"]
    if kind in ("unexpected_keyword_argument", "extra_forbidden"):
        near = get_close_matches(last, _keys(place[:-1]), 1)
        hint = f"did you mean {near[0]!r}?" if near else f"drop it, or {WRITE} again."
        return ConfigError(f"{source} has a key that no advice has, {where}; {hint}")
    if kind in ("missing", "missing_argument", "missing_keyword_only_argument"):
        return ConfigError(f"{source} has no {where}; {WRITE} again.")
    said = problem["msg"][0].lower() + problem["msg"][1:]
    return ConfigError(f"{source}: {where} is {shown(problem['input'])}: {said}.")


def _keys(place: list[str]) -> list[str]:
    """Return the known keys of the document, or of its part ``deployment``, for a hint."""
    owner: Any = Advice
    for name in place:
        if name.isdecimal():
            continue
        owner = next((each for each in _parts(owner) if each.__name__.lower() == name), None)
    return [each.name for each in fields(owner)] if is_dataclass(owner) else list(Figure._fields)


def _parts(owner: Any) -> Iterator[type]:
    from typing import get_args, get_type_hints

    for hint in get_type_hints(owner).values() if is_dataclass(owner) else ():
        yield from (each for each in (hint, *get_args(hint)) if isinstance(each, type))


def _check(advice: Advice) -> None:
    """Raise ``ConfigError`` for values that have the right type and make no sense."""
    served, traffic = advice.deployment, advice.deployment.traffic
    models = [model for model in (served.target, served.drafter) if model is not None]
    texts = [advice.verdict, advice.target, advice.drafter, served.hardware]
    for text in [*texts, *(each for model in models for each in (model.name, model.checkpoint))]:
        if text is not None and not (text.strip() and text.isprintable()):
            raise ConfigError(f"{shown(text)} is not a single line of text.")
    one_of("deployment.method", served.method, NAMES)
    one_of("deployment.placement", served.placement, PLACEMENTS)
    for name, model in (("target", served.target), ("drafter", served.drafter)):
        if model is not None:
            one_of(f"deployment.{name}.dtype", model.dtype, BYTES)
            whole(f"deployment.{name}.attention_heads", model.attention_heads, MOST_TOKENS)
            whole(f"deployment.{name}.vocab_size", model.vocab_size, MOST_TOKENS)
            _above(f"deployment.{name}.weights_gib", model.weights_gib)
    whole("deployment.tensor_parallel", served.tensor_parallel, MOST_DEVICES)
    whole("deployment.replicas", served.replicas, MOST_REPLICAS)
    whole("deployment.max_model_len", served.max_model_len, 2 * MOST_TOKENS)
    if served.max_num_seqs is not None:
        whole("deployment.max_num_seqs", served.max_num_seqs, MOST_BATCH)
    if served.memory_gib is not None:
        _above("deployment.memory_gib", served.memory_gib)
    for size in traffic.concurrency:
        whole("deployment.traffic.concurrency", size, MOST_BATCH)
    whole("deployment.traffic.input_tokens", traffic.input_tokens, MOST_TOKENS)
    whole("deployment.traffic.output_tokens", traffic.output_tokens, MOST_TOKENS)
    _check_lengths(advice)
    if advice.break_even is not None and not 0 <= advice.break_even.value <= 1:
        raise ConfigError(f"break_even is {advice.break_even.value:g}; give a share from 0 to 1.")


def _above(name: str, value: float) -> None:
    if not 0 < value < 1e9:
        raise ConfigError(f"{name} is {value:g}; give a number above 0.")


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
