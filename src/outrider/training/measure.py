"""Measures a drafter as it is served, by use, and writes figures and draft lengths into it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..base.outside.text import printable
from ..bench.machine import machine
from ..checkpoints.extras import (
    KEY,
    LONGEST_TEXT,
    MOST_MEASURED,
    USES,
    Extras,
    Measured,
    extras_of,
)
from ..checkpoints.files import Files
from ..checkpoints.heads import MEDUSA, read_head
from ..checkpoints.tokenizers import read_codec
from ..drafters.heads import verifier_of
from ..engine.build import load_target
from ..engine.setup import set_up
from ..errors import ConfigError
from .card import add_measured
from .head_files import write_config
from .prompts import digest, read_prompts
from .samples import CONFIG
from .served import MOST_PROMPTS, Served, Serving

LENGTHS = (2, 3, 4, 6)
"""Draft lengths that are tried."""


def measure(
    folder: Path, target: Path | None, prompts: Mapping[str, Path], max_tokens: int,
    told: Callable[[str], None],
) -> Extras:  # fmt: skip
    """Measure the drafter in a folder on prompts by use; write the figures into it and return them.

    By default ``target`` is the one that a head names. The length recommended for a use is the
    fastest one here, for one request at temperature 0. Raises ConfigError: the folder has no
    drafter, or the target or a use is not known.
    """
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder} has no {CONFIG}; give a drafter that outrider train wrote.")
    head = read_head(folder)
    for use in prompts:
        if use not in USES:
            raise ConfigError(f"use {use!r} is not known; give one of {', '.join(USES)}.")
    items = {
        use: read_prompts(file, False, told, remedy="")[:MOST_PROMPTS]
        for use, file in prompts.items()
    }
    if target is None:
        if head is None:
            raise ConfigError(f"{folder} is a small model, which names no target; give --target.")
        target = verifier_of(head).folder
    setup = set_up(target, None, {"max_num_seqs": 1})
    model, codec = load_target(setup.checkpoint, setup.config), read_codec(target)
    most = head.longest if head is not None and head.kind == MEDUSA else None
    lengths = [length for length in LENGTHS if most is None or length <= most] or [most or 1]
    found, extras = dict[str, int](), extras_of(folder)
    for use, file in prompts.items():
        ids = [item.encode(codec) for item in items[use]]
        context = max(map(len, ids)) + max_tokens + 1
        if context > model.shape.context:
            raise ConfigError(
                f"{file} has a prompt of {context - max_tokens - 1} tokens, and {max_tokens} more "
                f"do not fit into the target's context of {model.shape.context}; give shorter "
                "prompts, or a lower --max-tokens."
            )
        serving = Serving(target, model, ids, max_tokens, context)
        told(f"{use}: drafts of {', '.join(map(str, lengths))} tokens in turn")
        greedy = serving.compare(folder, lengths)
        told(f"{use}: drafts of {lengths[-1]} tokens at temperature 1")
        served = [greedy[-1], *serving.measure(folder, lengths[-1], (1.0,))]
        extras = note(folder, use, served, digest(items[use]), file.name)
        speeds = [each.tokens_per_second for each in greedy]
        found[use] = lengths[speeds.index(max(speeds))]
    extras = extras._replace(lengths={**extras.lengths, **found})
    write_extras(folder, extras)
    return extras


def note(folder: Path, use: str, served: Sequence[Served], digest: str, data: str) -> Extras:
    """Write the figures measured on prompts of a use into a drafter; return all its extras."""
    before, here = extras_of(folder), machine()
    where = f"{here['cpu']}, {here['threads']} threads, {here['instruction_set']}"[:LONGEST_TEXT]
    measured = [
        Measured(
            use, each.temperature, each.acceptance_length, tuple(map(float, each.by_position)),
            len(each.lengths), digest, printable(data, LONGEST_TEXT), here["date"][:10], where,
        )
        for each in served
    ]  # fmt: skip
    kept = [each for each in before.measured if each.use != use]
    extras = Extras({**before.lengths}, (*kept, *measured)[-MOST_MEASURED:])
    write_extras(folder, extras)
    return extras


def write_extras(folder: Path, extras: Extras) -> None:
    """Write extras into the config and the card of a drafter."""
    write_config(folder, {**(Files(folder).config or {}), KEY: extras.to_json()})
    add_measured(folder, extras)
