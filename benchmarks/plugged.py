"""vLLM with Outrider's plugin: an environment, and its speed beside vLLM without the plugin."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated, Any, NamedTuple

import typer
from tokenizers import Tokenizer

import outrider
from outrider import native, pocket
from outrider.bench.intervals import shown
from outrider.bench.machine import machine
from outrider.cli.common import Out, numbers, write, write_json
from outrider.errors import ConfigError

from . import install
from .common import PROMPTS, Length, Prompts, Rounds, Tokens, in_turns, ratio, read_prompts, table
from .peers.known import peers
from .peers.session import Answer, Session

SOURCE = Path(outrider.__file__).parents[1]
PLUGIN = """\
[vllm.general_plugins]
outrider = outrider.plugins.vllm.plugin:register
"""
MODES = ("plain", "draft", "ngram")
COLUMNS = ("drafts", "T", "batch", "tokens/s without", "with", "ratio")
CHOSEN = (
    "drafts", "T", "batch", "tokens/s without drafts", "at K", "chosen up to K",
    "chosen over none", "chosen over K",
)  # fmt: skip
DRAFTER = pocket.PATH / "drafter"


class Variant(NamedTuple):
    """A vLLM that is measured.

    ``mode`` is one of ``MODES``, ``chosen`` lets the controller choose up to K, and ``eager`` runs
    as vLLM does with drafts: without compiling the model.
    """

    mode: str
    plugin: bool = True
    chosen: bool = False
    eager: bool = False


def variants(mode: str, lengths: bool) -> dict[str, Variant]:
    """Return by name what is compared in a mode; the last one is compared with the others."""
    if lengths:
        return {
            "none": Variant("plain", eager=True),
            "fixed": Variant(mode),
            "chosen": Variant(mode, chosen=True),
        }
    return {"without": Variant(mode, False), "with": Variant(mode)}


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


def session(stack: ExitStack, folder: Path, spec: dict[str, Any], variant: Variant) -> Session:
    """Start vLLM as a variant says; ``spec`` is the rest of the runner's first line."""
    peer = peers()["vllm"]
    variables = peer.variables()
    if variant.plugin:
        own = stack.enter_context(plugged())
        path = os.pathsep.join((variables["PYTHONPATH"], own["PYTHONPATH"]))
        variables |= own | {"PYTHONPATH": path}
    log = folder / f"{'-'.join(map(str, variant))}.log"
    asked = variant._asdict()
    del asked["plugin"]
    made = Session(peer.command, spec | asked, log, variables)
    stack.callback(made.close)
    return made


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
            "--lengths", help="With the plugin: the controller's lengths, beside K and no drafts."
        ),
    ] = False,
    out: Out = None,
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
    cells = []
    head, rule = table(CHOSEN if lengths else COLUMNS, [])
    write(f"{head}\n{rule}\n")
    for mode in MODES[1:] if lengths else MODES:
        with TemporaryDirectory() as folder, ExitStack() as stack:
            engines = {
                name: session(stack, Path(folder), spec, variant)
                for name, variant in variants(mode, lengths).items()
            }
            for heat in heats:
                for size in sizes:
                    cell = _cell(engines, prompts, size, tokens, heat, rounds)
                    cells.append({"mode": mode, "temperature": heat, "batch": size, **cell})
                    write(f"{_row(cells[-1])}\n")
    compared = "lengths" if lengths else "plugin"
    report = {"machine": machine(), "compared": compared, "k": length, "tokens": tokens}
    write_json({**report, "cells": cells}, out)


def _row(cell: dict[str, Any]) -> str:
    """Return the line of a cell."""
    values = [cell["mode"], cell["temperature"], cell["batch"]]
    values += [f"{speed:.0f}" for speed in cell["speeds"].values()]
    for each in cell["ratios"].values():
        values.append(f"{each['ratio']:.3f} {shown(each['interval'], '.3f')}")
    return list(table([], [values]))[-1]


def _cell(
    engines: dict[str, Session],
    prompts: list[list[int]],
    size: int,
    tokens: int,
    heat: float,
    rounds: int,
) -> dict[str, Any]:
    """Return the decode speeds of engines, and the last one's over each other; prompts rotate."""

    def run(name: str, number: int) -> float:
        start = number % len(prompts)
        chosen = (prompts * 2)[start : start + size]
        return speed(engines[name].run(chosen, tokens, heat, 0))

    speeds = in_turns(engines, run, rounds)
    *others, last = engines
    return {
        "speeds": {name: median(each) for name, each in speeds.items()},
        "ratios": {name: ratio(speeds[last], speeds[name]) for name in others},
    }
