"""vLLM with Outrider's plugin: an environment, and its speed beside vLLM without the plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from tokenizers import Tokenizer

import outrider
from outrider import native, pocket
from outrider.bench.machine import machine
from outrider.cli.common import JsonFile, numbers, write, write_json
from outrider.errors import ConfigError

from . import install
from .common import PROMPTS, Length, Prompts, Rounds, Tokens, measured, ratio, read_prompts, table
from .peers.known import peers
from .peers.session import Answer, Session

SOURCE = Path(outrider.__file__).parents[1]
PLUGIN = """\
[vllm.general_plugins]
outrider = outrider.vllm.plugin:register
"""
MODES = ("plain", "draft", "ngram")
COLUMNS = ("drafts", "T", "batch", "tokens/s without", "with", "ratio")
CHOSEN = ("drafts", "T", "batch", "tokens/s at K", "chosen up to K", "ratio")
DRAFTER = pocket.PATH / "drafter"


@contextmanager
def plugged() -> Iterator[dict[str, str]]:
    """Yield the variables with which vLLM's environment has this source as an installed plugin."""
    with TemporaryDirectory() as folder:
        info = Path(folder) / "outrider-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: outrider\nVersion: 0.1.0\n", encoding="utf-8")
        (info / "entry_points.txt").write_text(PLUGIN, encoding="utf-8")
        # An editable installation has its native step in another folder than its source.
        package = Path(folder) / "outrider"
        (package / "native").mkdir(parents=True)
        for entry in (SOURCE / "outrider").iterdir():
            if entry.name != "native":
                (package / entry.name).symlink_to(entry)
        for home in map(Path, native.__path__):
            for entry in home.iterdir():
                if not (package / "native" / entry.name).is_symlink():
                    (package / "native" / entry.name).symlink_to(entry)
        yield {"PYTHONPATH": folder, "OUTRIDER_VLLM": "1"}


class Engines:
    """vLLM in a mode of drafting, twice: with the plugin and without.

    Args:
        stack: closes them.
        folder: for their logs.
        mode: one of ``MODES``.
        spec: the rest of the runners' first line.
        lengths: compare draft lengths that the controller chooses with a fixed one instead, both
            with the plugin.
    """

    def __init__(
        self, stack: ExitStack, folder: Path, mode: str, spec: dict[str, Any], lengths: bool
    ) -> None:
        peer = peers()["vllm"]
        own = stack.enter_context(plugged())
        self.sessions: dict[bool, Session] = {}
        for active in (False, True):
            variables = peer.variables()
            if active or lengths:
                path = os.pathsep.join((variables["PYTHONPATH"], own["PYTHONPATH"]))
                variables |= own | {"PYTHONPATH": path}
            log = folder / f"{mode}-{active}.log"
            chosen = {"mode": mode, "chosen": lengths and active}
            session = Session(peer.command, spec | chosen, log, variables)
            stack.callback(session.close)
            self.sessions[active] = session

    def run(
        self, active: bool, prompts: list[list[int]], tokens: int, temperature: float
    ) -> Answer:
        """Run the prompts together."""
        return self.sessions[active].run(prompts, tokens, temperature, 0)


def speed(answer: Answer) -> float:
    """Return decode tokens a second: (N - 1) / (T(N) - T(1)) of each prompt, together."""
    tokens = sum(len(ids) - 1 for ids in answer.ids)
    return tokens / answer.behind_first


def main(
    file: Prompts = PROMPTS,
    length: Length = 4,
    tokens: Tokens = 128,
    rounds: Rounds = 9,
    temperature: Annotated[str, typer.Option(help="Temperatures, separated by commas.")] = "0,0.8",
    batch_size: Annotated[str, typer.Option(help="Prompts at a time, likewise.")] = "1,4",
    lengths: Annotated[
        bool,
        typer.Option(
            "--lengths", help="With the plugin: lengths of the controller beside a fixed one."
        ),
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure vLLM with the plugin beside vLLM without it, in turns, on one core each."""
    if why := install.missing("vllm"):
        raise ConfigError(f"vllm is {why}.")
    heats = numbers(temperature, float, "--temperature")
    sizes = numbers(batch_size, int, "--batch-size")
    tokenizer = Tokenizer.from_file(str(pocket.PATH / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in read_prompts(file)]
    longest = max(map(len, prompts)) + tokens
    spec = {
        "target": str(pocket.PATH), "drafter": str(DRAFTER), "dtype": "float32",
        "drafter_dtype": "float32", "k": length, "threads": 1, "context": longest,
        "parallel": max(sizes),
    }  # fmt: skip
    found = []
    head, rule = table(CHOSEN if lengths else COLUMNS, [])
    write(f"{head}\n{rule}\n")
    for mode in MODES[1:] if lengths else MODES:
        with TemporaryDirectory() as folder, ExitStack() as stack:
            engines = Engines(stack, Path(folder), mode, spec, lengths)
            for heat in heats:
                for size in sizes:
                    cell = _cell(engines, prompts, size, tokens, heat, rounds)
                    found.append({"mode": mode, "temperature": heat, "batch": size, **cell})
                    write(f"{_row(found[-1])}\n")
    compared = "lengths" if lengths else "plugin"
    report = {"machine": machine(), "compared": compared, "k": length, "tokens": tokens}
    write_json({**report, "cells": found}, json_file)


def _row(cell: dict[str, Any]) -> str:
    """Return the line of a cell."""
    low, high = cell["interval"] or (0.0, 0.0)
    values = (
        cell["mode"], cell["temperature"], cell["batch"], f"{cell['without']:.0f}",
        f"{cell['with']:.0f}", f"{cell['ratio']:.3f} [{low:.3f} {high:.3f}]",
    )  # fmt: skip
    return list(table(COLUMNS, [values]))[-1]


def _cell(
    engines: Engines, prompts: list[list[int]], size: int, tokens: int, heat: float, rounds: int
) -> dict[str, Any]:
    """Return the decode speeds of both engines, and their ratio; the prompts take turns."""

    def run(number: int, active: bool) -> float:
        start = number % len(prompts)
        chosen = (prompts * 2)[start : start + size]
        return speed(engines.run(active, chosen, tokens, heat))

    speeds = measured({active: partial(run, active=active) for active in (False, True)}, rounds)
    with_, without = speeds[True], speeds[False]
    return {"with": median(with_), "without": median(without), **ratio(with_, without)}
