"""Records the cases of ``outrider ops diagnose``: real servers of the pocket pair with one fault.

A case is what ``outrider ops diagnose ENDPOINT --save FILE`` writes while the server is under load,
and what it shows. Cases that this machine cannot provoke are written by hand and say "synthetic".
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from outrider import pocket
from outrider.base.threads import cpu_name
from outrider.checkpoints.files import read_header, save_file
from outrider.cli.common import write
from outrider.ops.diagnose.diagnose import compare, derive, judge
from outrider.ops.diagnose.endpoint import Endpoint
from outrider.ops.diagnose.facts import Value, check_thresholds
from outrider.ops.diagnose.observation import Observation, ask

from .common import POCKET, PROMPTS, read_prompts
from .served import Served

FOLDER = Path("tests/data/cases")
SECONDS = 300.0
TARGET, DRAFTER = "{target}", "{drafter}"
"""In a recipe's arguments: copies of the pocket pair whose weights have noise."""
SEED = 0
WARM_UP = 2
"""Requests before those that count."""


@dataclass(frozen=True)
class Recipe:
    """A server with a fault, and the load that shows it: the symptoms that must be shown ``fire``.

    ``arguments`` are of ``outrider serve``, behind the model; ``body`` of each request, beside the
    prompt. ``noise`` is the deviation of the noise on a drafter's weights, in deviations of each
    tensor; ``plain`` the arguments of a server to compare with; ``facts`` what one would state;
    ``prompts`` are those of the pocket pair unless given.
    """

    name: str
    arguments: tuple[str, ...]
    fires: tuple[str, ...]
    body: dict[str, Any] = field(default_factory=dict)
    at_once: int = 1
    noise: float = 0.0
    plain: tuple[str, ...] | None = None
    facts: dict[str, Value] = field(default_factory=dict)
    prompts: tuple[str, ...] = ()


def _k(length: int, drafter: str = "model") -> tuple[str, ...]:
    return "--drafter", drafter, "--num-speculative-tokens", str(length)


NONE = ("--drafter", "none")
RECIPES = (
    Recipe("healthy", _k(2), (), plain=NONE),
    Recipe("wrong-drafter", _k(4, DRAFTER), ("acceptance-near-zero",), noise=3.0),
    Recipe("weak-drafter", _k(4, DRAFTER), ("acceptance-low",), noise=0.5),
    Recipe("long-drafts", _k(32), ("acceptance-low",), at_once=16, plain=NONE),
    Recipe("hot", _k(8), ("acceptance-low",), {"temperature": 2.0}, facts={"temperature": 2.0}),
    Recipe(
        "slow-drafter", _k(4, TARGET), ("slower-than-plain", "ttft-worse"), at_once=8, noise=0.02,
        plain=NONE,
    ),
    Recipe("saturated", _k(8), ("slower-than-plain",), at_once=32, plain=NONE),
    Recipe(
        "loop", _k(8, "suffix"), ("acceptance-near-one",),
        {"max_tokens": 400, "ignore_eos": True}, prompts=("x = 1\n" * 40,) * 8,
    ),
    Recipe("no-drafter", NONE, ("speculation-inactive",)),
    Recipe(
        "preempted", (*_k(2), "--memory", "6MB"), ("kv-preemption",), {"ignore_eos": True},
        at_once=16,
    ),
    Recipe("few-slots", (*_k(2), "--max-num-seqs", "2"), ("kv-fragmentation",), at_once=8),
    Recipe(
        "other-weights", (*_k(2), "--quantization", "int4"), ("output-differs",), plain=NONE,
    ),
)  # fmt: skip


def noisy(source: Path, to: Path, deviation: float) -> Path:
    """Copy a checkpoint with noise on its weights; return the copy."""
    shutil.copytree(source, to, ignore=shutil.ignore_patterns("drafter"))
    draw = np.random.default_rng(SEED)
    file = to / "model.safetensors"
    weights = {name: entry.read() for name, entry in read_header(file).items()}
    for name, weight in weights.items():
        if weight.ndim == 2:
            wide = weight.astype(np.float32)
            noise = draw.standard_normal(wide.shape, np.float32) * wide.std() * deviation
            weights[name] = (wide + noise).astype(weight.dtype)
    save_file(weights, file, {"format": "pt"})
    return to


@contextmanager
def served(recipe: Recipe, arguments: tuple[str, ...], folder: Path) -> Iterator[Served]:
    """Run the recipe's server."""
    copies = {DRAFTER: pocket.PATH / "drafter", TARGET: pocket.PATH}
    given = []
    for text in arguments:
        if text in copies:
            text = str(noisy(copies[text], folder / recipe.name, recipe.noise))
        given.append(text)
    with Served(POCKET, *given) as server:
        yield server


def under_load(server: Served, recipe: Recipe, prompts: list[str]) -> Observation:
    """Return what the server tells in the middle of its load."""
    with httpx.Client(timeout=SECONDS, limits=httpx.Limits(max_connections=None)) as client:

        def complete(prompt: str) -> None:
            body = {"prompt": prompt, "max_tokens": 96, "temperature": 0, **recipe.body}
            client.post(f"{server.url}/v1/completions", json=body).raise_for_status()

        many = prompts * max(1, 2 * recipe.at_once // len(prompts))
        endpoint = Endpoint(server.url)
        with ThreadPoolExecutor(recipe.at_once) as pool:
            list(pool.map(complete, prompts[:WARM_UP]))
            warm = endpoint.metrics()
            calls = [pool.submit(complete, prompt) for prompt in many]
            for number, call in enumerate(as_completed(calls)):
                call.result()
                if number == len(many) * 3 // 4 - 1:
                    observation = ask(endpoint, since=warm)
    return observation


def record(recipe: Recipe, folder: Path, prompts: list[str]) -> dict[str, Any]:
    """Return a recipe's case."""
    with ExitStack() as servers:
        server = servers.enter_context(served(recipe, recipe.arguments, folder))
        observation, plain = under_load(server, recipe, prompts), None
        if recipe.plain is not None:
            other = servers.enter_context(served(recipe, recipe.plain, folder))
            plain = under_load(other, recipe, prompts)
        observation.facts |= recipe.facts
        compare(observation, plain, None)
    observation.where = "the pocket pair"
    derived = dict(observation.facts)
    derive(derived)
    shown = [problem.symptom for problem in judge(derived, check_thresholds({}))]
    return {
        "case": recipe.name,
        "origin": "recorded",
        "recorded_by": f"python -m benchmarks cases {recipe.name}",
        "server": " ".join(("outrider serve POCKET", *recipe.arguments)),
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "fires": sorted(recipe.fires),
        "shown": sorted(shown),
        **observation.saved(),
    }


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help="Cases to record; all unless given.")
    ] = None,
    out: Annotated[Path, typer.Option("--out", help="The folder of cases.")] = FOLDER,
) -> None:
    """Record the cases of outrider ops diagnose that this machine can provoke."""
    known = {recipe.name: recipe for recipe in RECIPES}
    for name in names or []:
        if name not in known:
            raise typer.BadParameter(f"there is no case {name!r}; known: {', '.join(known)}.")
    prompts = read_prompts(PROMPTS)[:8]
    out.mkdir(parents=True, exist_ok=True)
    for name in names or known:
        with tempfile.TemporaryDirectory() as folder:
            case = record(known[name], Path(folder), list(known[name].prompts) or prompts)
        shown = set(case.pop("shown"))
        text = json.dumps(case, indent=1) + "\n"
        (out / f"{name}.json").write_text(text, encoding="utf-8")
        missing = sorted(set(case["fires"]) - shown)
        more = sorted(shown - set(case["fires"]))
        verdict = f"does not show {', '.join(missing)}" if missing else "as expected"
        write(f"{name}: {verdict}" + (f"; also {', '.join(more)}" if more else "") + "\n")
