"""Finds the catalogue's drafters that fit a target: published heads, small models and lookups."""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from ...base.methods import LOOKUPS
from .catalogue import Shape, data, shape_of

LARGEST_RATIO = 0.3
"""Largest ratio of a drafter's parameters to the target's, of all and of those that a row uses."""


class Fitting(NamedTuple):
    """A drafter that fits: its name for ``--drafter``, its method, and its name on the hub."""

    drafter: str
    method: str
    checkpoint: str | None


def entry_of(asked: str, target: Shape) -> str | None:
    """Return the catalogue's name of a model; None if it has none.

    A folder or a name of the hub matches the entry with that checkpoint, or else with the same
    sizes: of several (Qwen2 and Qwen2.5) the one whose name it contains, or else the newest.
    """
    models, name = data("models")["model"], asked.lower()
    if name in models:
        return name
    for entry, config in models.items():
        if config.get("checkpoint", "").lower() == name:
            return str(entry)
    alike = [each for each in models if shape_of(each, models[each]).sizes == target.sizes]
    # Nobody serves a shape that was not published.
    served = [each for each in alike if "checkpoint" in models[each]]
    return max(served, key=lambda each: (each in name, _version(each)), default=None)


def _version(entry: str) -> float:
    """Return the first number in a name, such as 3.1 for ``llama-3.1-8b``."""
    number = re.search(r"\d+(\.\d+)?", entry)
    return float(number[0]) if number else 0.0


def checkpoint_of(asked: str) -> str | None:
    """Return what an engine loads: the folder itself, or a name of the hub; None if unknown."""
    config = data("models")["model"].get(asked.lower())
    if config is not None:
        return str(config["checkpoint"]) if "checkpoint" in config else None
    return asked if "/" in asked or os.path.exists(asked) else None


def head_of(asked: str, target: Shape, method: str) -> str | None:
    """Return the name on the hub of a target's published head; None if none is known."""
    entry = entry_of(asked, target)
    heads = (head for head in data("models")["head"] if head["target"] == entry)
    return next((str(head["checkpoint"]) for head in heads if head["method"] == method), None)


def method_of_head(checkpoint: str) -> str | None:
    """Return the method of a published head; None if the catalogue does not have it."""
    heads = data("models")["head"]
    return next((str(h["method"]) for h in heads if h["checkpoint"] == checkpoint), None)


def fitting(asked: str, target: Shape) -> list[Fitting]:
    """Return the drafters that fit a target: its heads, models of its tokenizer, lookups."""
    entry, models = entry_of(asked, target), data("models")["model"]
    fits = [
        Fitting(head["method"], head["method"], head["checkpoint"])
        for head in data("models")["head"]
        if head["target"] == entry
    ]
    tokenizer = models[entry]["tokenizer"] if entry else _tokenizer(target)
    for name, config in models.items():
        same = config["tokenizer"] == tokenizer and "checkpoint" in config and name != entry
        if same and _small(shape_of(name, config), target):
            fits.append(Fitting(name, "draft_model", config["checkpoint"]))
    return fits + [Fitting(name, name, None) for name in LOOKUPS]


def _small(shape: Shape, target: Shape) -> bool:
    """Return whether a model is small enough to draft, in memory and in the cost of a row."""
    pairs = ((shape.parameters, target.parameters), (shape.active, target.active))
    return all(own <= LARGEST_RATIO * whole for own, whole in pairs)


def _tokenizer(target: Shape) -> str | None:
    """Return the tokenizer of a model outside the catalogue, guessed from its vocabulary's size."""
    models = data("models")["model"].values()
    known = {each["tokenizer"] for each in models if each["vocab_size"] == target.vocabulary}
    return known.pop() if len(known) == 1 else None
