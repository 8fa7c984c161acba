"""The perplexity that few bits lose in Outrider's native step and in the peers' own engines.

Everybody reads the same windows of ids, in its own engine and from its own conversion, so that
activations have the bits that the engine gives them; the reference is our float32. A recipe stands
beside the peer's dtype of the nearest size, where one is near.
"""

import gc
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

from outrider import pocket
from outrider.base.config import Recipe
from outrider.bench.machine import machine
from outrider.bench.quality import LEAST, METHOD, WINDOW, cut, distribution, interval, loss
from outrider.checkpoints.export import bits_per_weight
from outrider.checkpoints.tokenizers import read_codec
from outrider.cli.common import JsonFile, write_json
from outrider.errors import OutriderError
from outrider.llm import LLM

from .. import install
from ..common import table
from . import known
from .command import chosen

RECIPES = "int8,int8-a8,int8-g32-a8,int4,int4-a8,int4-g32-a8"
FEW = ("int8", "int4")
NEAR = 0.15
"""Bits per weight between which two are of equal size."""
READERS = {"llama.cpp": "llamacpp_losses", "openvino": "openvino_losses"}


def our_losses(windows: Sequence[Sequence[int]], recipe: str | None) -> list[float]:
    """Return mean nats by window of the pocket target: in float32, or quantised beside bfloat16."""
    llm = LLM(
        pocket.PATH, drafter=None, dtype="bfloat16" if recipe else "float32", quantization=recipe,
        max_num_seqs=1,
    )  # fmt: skip
    found = [loss(distribution(llm.engine.model, window), window) for window in windows]
    del llm
    gc.collect()
    return found


def their_losses(
    peer: known.Peer, dtype: str, windows: Sequence[Sequence[int]], place: Path
) -> list[float]:
    """Return mean nats by window of a peer's own conversion in its own engine."""
    asked, told = place / "windows.json", place / "losses.json"
    asked.write_text(json.dumps(windows), encoding="utf-8")
    lcpp = install.home() / install.LLAMA_CPP.name
    variables = {
        **peer.variables(),
        "LLAMA_CPP_LIB_PATH": str(install.program("x").parent),
        "PEER_SOURCE": str(lcpp / f"llama_cpp_python-{install.LLAMA_CPP_PYTHON}.tar.gz"),
    }
    command = known.run_module(peer.command[0], READERS[peer.name])
    said = [f"{name}={value}" for name, value in variables.items()]
    log = install.home() / "logs" / f"{peer.name}-{dtype}-losses.log"
    folder = peer.convert(pocket.PATH, dtype)
    install.call("env", *said, *command, folder, asked, told, log=log)
    return [float(nats) for nats in json.loads(told.read_text(encoding="utf-8"))]


def lost(nats: Sequence[float], than: Sequence[float]) -> list[float]:
    """Return the share of the perplexity that is lost beside other losses, and its interval."""
    mean, bounds = interval([a - b for a, b in zip(nats, than, strict=True)])
    return [math.expm1(value) for value in (mean, *bounds)]


def rows(
    exact: Sequence[float],
    losses: Mapping[tuple[str, str], Sequence[float]],
    bits: Mapping[tuple[str, str], float],
) -> list[dict[str, Any]]:
    """Return a row for each engine and dtype; ours say whom they stand beside, and by how much."""
    found = []
    for key, nats in losses.items():
        engine, name = key
        row: dict[str, Any] = {
            "engine": engine, "weights": name, "bits_per_weight": bits[key],
            "perplexity_loss": lost(nats, exact), "beside": None, "more_than_beside": None,
        }  # fmt: skip
        others = {k: abs(bits[k] - bits[key]) for k in losses if k[0] != known.OWN}
        near = min(others, key=lambda k: others[k], default=None)
        if engine == known.OWN and near and others[near] <= NEAR:
            row["beside"] = " ".join(near)
            row["more_than_beside"] = lost(nats, losses[near])
        found.append(row)
    return found


def percent(values: Sequence[float] | None) -> str:
    """Return a share and its interval in words."""
    if values is None:
        return ""
    mean, low, high = (100 * value for value in values)
    return f"{mean:.2f} % [{low:.2f} {high:.2f}]"


def main(
    quantization: Annotated[str, typer.Option(help="Our recipes, with commas.")] = RECIPES,
    peers: Annotated[
        str, typer.Option(help="Peers with commas; those that are not installed are left out.")
    ] = "llama.cpp,openvino",
    windows: Annotated[
        int, typer.Option(min=LEAST, help=f"Windows of {WINDOW} tokens that are read.")
    ] = 40,
    json_: JsonFile = None,
) -> None:
    """Measure what few bits lose here and in other engines, on the pocket target."""
    recipes = {name: Recipe.parse(name) for name in quantization.split(",")}
    engines = known.peers()
    asked = chosen(peers, tuple(READERS), "--peers")
    text = cut(pocket.held_out(), read_codec(pocket.PATH), WINDOW, windows)
    losses: dict[tuple[str, str], list[float]] = {}
    bits: dict[tuple[str, str], float] = {}
    exact = our_losses(text, None)
    for name, recipe in recipes.items():
        losses[known.OWN, name] = our_losses(text, name)
        bits[known.OWN, name] = bits_per_weight(pocket.PATH, recipe)
    with TemporaryDirectory() as place:
        for name in asked:
            if reason := engines[name].missing():
                install.say(f"{name}: skipped: {reason}")
                continue
            for dtype in FEW:
                try:
                    nats = their_losses(engines[name], dtype, text, Path(place))
                except OutriderError as error:
                    install.say(f"{name} {dtype}: skipped: {error}")
                    continue
                losses[name, dtype] = nats
                bits[name, dtype] = engines[name].bits_per_weight(pocket.PATH, dtype) or 0.0
    found = rows(exact, losses, bits)
    report = {"machine": machine(), "windows": len(text), "method": METHOD, "rows": found}
    if json_:
        write_json(report, json_)
    if json_ != "-":
        names = (
            "engine",
            "weights",
            "bits per weight",
            "perplexity lost",
            "beside",
            "more than it",
        )
        print("\n".join(table(names, (
            [row["engine"], row["weights"], f"{row['bits_per_weight']:.2f}",
             percent(row["perplexity_loss"]), row["beside"] or "", percent(row["more_than_beside"])]
            for row in found
        ))))  # fmt: skip
