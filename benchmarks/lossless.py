"""Runs lossless-bench: engines with drafts against themselves without, on the pocket pair.

Each engine is started twice, with drafts and without. ``outrider verify --endpoint`` audits the
first with the second as its reference. All seeds are fixed: a second run gives the same verdicts.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer

import outrider
from outrider import pocket
from outrider.audit.endpoint import SAMPLES, verify_endpoint
from outrider.audit.faults import FAULTS
from outrider.bench.machine import machine
from outrider.cli.common import write
from outrider.errors import ConfigError

from . import install
from .audits import DRAFT, DRAFTER, DTYPE, NGRAM, SPECULATIVE, K, llama_cpp, own, started, vllm
from .common import table
from .faulty import VARIABLE
from .peers.known import FOLDER, peers
from .served import Served

LAWS = ("temperature 1", "temperature 0.5", "top_k 2", "top_p 0.7")
SEED = 0
RESULTS = Path(__file__).parent / "results" / "lossless"
COLUMNS = ("T = 0", "T > 0", "per seed", "structured")
FAULT = "fault-"
COMMAND = "python -m benchmarks lossless "
REPOSITORY, REVISION = "outrider/pocket", "0" * 40
Running = Callable[[], AbstractContextManager[str]]


@contextmanager
def openvino(mode: str) -> Iterator[str]:
    """Run OpenVINO GenAI's pipeline behind a server of ours."""
    peer = peers()["openvino"]
    target, drafter = (str(peer.convert(folder, DTYPE)) for folder in (pocket.PATH, DRAFTER))
    script = str(FOLDER / "runners" / "openvino_server.py")
    command = [
        str(install.OPENVINO.python), "-P", script, target, drafter, mode, K, "--port",
    ]  # fmt: skip
    with TemporaryDirectory() as folder, started(command, Path(folder) / "log", {}) as url:
        yield url


@contextmanager
def transformers(**drafts: int) -> Iterator[str]:
    """Run ``transformers serve`` on the pocket target, whose generation config asks for drafts."""
    with TemporaryDirectory() as name:
        cache = Path(name) / f"models--{REPOSITORY.replace('/', '--')}"  # it lists what is cached
        folder = cache / "snapshots" / REVISION
        folder.mkdir(parents=True)
        (cache / "refs").mkdir()
        (cache / "refs" / "main").write_text(REVISION, encoding="utf-8")
        for file in pocket.PATH.iterdir():
            if file.is_file() and file.name != "generation_config.json":
                (folder / file.name).symlink_to(file)
        ends = json.loads((pocket.PATH / "generation_config.json").read_text(encoding="utf-8"))
        asked = {"do_sample": True, "top_k": 0, **drafts}
        config = json.dumps({**ends, **asked})
        (folder / "generation_config.json").write_text(config, encoding="utf-8")
        command = [
            sys.executable, "-m", "transformers.cli.transformers", "serve", REPOSITORY,
            "--dtype", DTYPE, "--device", "cpu", "--host", "127.0.0.1", "--port",
        ]  # fmt: skip
        environment = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": name}
        with started(command, Path(name) / "log", environment) as url:
            yield url


class FaultyServed(Served):
    """Outrider's server with the fault that ``VARIABLE`` names."""

    module = "benchmarks.faulty"


RATIO = ("--drafter", str(DRAFTER), "--num-speculative-tokens", K, "--acceptance-rule", "rejection")


@contextmanager
def faulty(name: str) -> Iterator[str]:
    """Run Outrider's server on the pocket pair with a fault."""
    words = ("--model", str(pocket.PATH), "--dtype", DTYPE, *RATIO)
    with FaultyServed(*words, **{VARIABLE: name}) as server:
        yield server.url


@dataclass(frozen=True)
class Engine:
    """An engine: its version, its drafts, and what runs it with them and without.

    ``absent`` says why it is not run.
    """

    name: str
    version: Callable[[], str]
    drafts: str
    peer: str = ""
    drafted: Running | None = None
    plain: Running | None = None
    absent: str = ""


def ours() -> str:
    """Return the version of this source."""
    return f"outrider {outrider.__version__}"


def of_package(name: str) -> str:
    """Return the version of a package of this environment."""
    return f"{name} {version(name)}"


def requirement(text: str) -> str:
    """Return a pinned requirement as a table says it."""
    return text.replace("==", " ")


WITHOUT = partial(own, "--drafter", "none")
OPENVINO = partial(requirement, install.OPENVINO.requirements[1])
LLAMA_CPP = partial(requirement, install.LLAMA_CPP_SOURCE[0])
VLLM = partial(requirement, install.VLLM.requirements[1])
COUPLED = ("--drafter", str(DRAFTER), "--num-speculative-tokens", K)
MISTRAL_RS = "its package drafts by MTP layers alone, which the pocket pair has not"
ENGINES = {
    engine.name: engine
    for engine in (
        Engine("outrider", ours, "draft model", "", partial(own, *COUPLED), WITHOUT),
        Engine(
            "outrider-ratio", ours, "draft model, ratio rule", "", partial(own, *RATIO), WITHOUT
        ),
        Engine(
            "llama.cpp", LLAMA_CPP, "draft model", "llama.cpp", partial(llama_cpp, *DRAFT),
            llama_cpp,
        ),
        Engine(
            "llama.cpp-ngram", LLAMA_CPP, "n-gram", "llama.cpp", partial(llama_cpp, *NGRAM),
            llama_cpp,
        ),
        Engine(
            "transformers", partial(of_package, "transformers"), "prompt lookup", "",
            partial(transformers, prompt_lookup_num_tokens=int(K)), transformers,
        ),
        Engine(
            "openvino", OPENVINO, "draft model", "openvino", partial(openvino, "draft"),
            partial(openvino, "plain"),
        ),
        Engine(
            "openvino-lookup", OPENVINO, "prompt lookup", "openvino", partial(openvino, "lookup"),
            partial(openvino, "plain"),
        ),
        *(
            Engine(
                f"vllm-{mode}{'-outrider' if plugin else ''}", VLLM,
                f"{drafts}{', with the plugin' if plugin else ''}", "vllm",
                partial(vllm, SPECULATIVE[mode], plugin),
                partial(vllm, {}, plugin),
            )
            for plugin in (False, True)
            for mode, drafts in (("draft", "draft model"), ("ngram", "n-gram"))
        ),
        Engine(
            "mistral.rs", partial(requirement, install.MISTRAL_RS.requirements[0]), "",
            absent=MISTRAL_RS,
        ),
        *(
            Engine(f"{FAULT}{name}", ours, f"fault: {name}", "", partial(faulty, name), WITHOUT)
            for name, fault in FAULTS.items()
            if fault.rule is not None
        ),
    )
}  # fmt: skip


def measured(engine: Engine, samples: int) -> dict[str, Any]:
    """Return an engine's entry: its audit, or why there is none."""
    more = "" if samples == SAMPLES else f" --samples {samples}"
    entry: dict[str, Any] = {
        "engine": engine.name, "version": engine.version(), "drafts": engine.drafts,
        "command": f"{COMMAND}{engine.name}{more}", "samples": samples,
        "machine": machine(),
    }  # fmt: skip
    why = engine.absent or (install.missing(engine.peer) if engine.peer else None)
    if why or engine.drafted is None or engine.plain is None:
        return {**entry, "not_run": why}
    with engine.plain() as reference, engine.drafted() as url:
        report = verify_endpoint(
            url, reference=reference, laws=LAWS, samples=samples, seed=SEED,
            progress=lambda what: install.say(f"{engine.name}: {what}"),
        )  # fmt: skip
    told = json.dumps(report.as_json())
    for address, name in ((url, "the server"), (reference, "plain")):  # ports differ by the run
        told = told.replace(address, name)
    return {**entry, "report": json.loads(told)}


def verdicts(entry: dict[str, Any]) -> list[str]:
    """Return the verdict of each column."""
    if "report" not in entry:
        return ["not run"] * len(COLUMNS)
    return [column["verdict"] for column in entry["report"]["columns"]]


def _cells(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the verdict of each column, with the tokens drafted where the server tells them."""
    drafted = [column["drafted"] for column in entry.get("report", {}).get("columns", [])]
    for verdict, count in zip_longest(verdicts(entry), drafted):
        yield verdict if count is None else f"{verdict} ({count:,})"


def entries(folder: Path) -> list[dict[str, Any]]:
    """Return the result files of a folder in the order of ``ENGINES``."""
    found = {}
    for file in folder.glob("*.json"):
        entry = json.loads(file.read_text(encoding="utf-8"))
        found[entry["engine"]] = entry
    return [found[name] for name in ENGINES if name in found]


def tables(folder: Path) -> dict[str, list[str]]:
    """Return the lines of the page's sections: the engines, what fails them, and the faults."""
    found = entries(folder)
    engines = [entry for entry in found if not entry["engine"].startswith(FAULT)]
    faults = [entry for entry in found if entry["engine"].startswith(FAULT)]
    return {
        "engines": [*_dated(engines), *_table(engines), "", *_why(engines)],
        "faults": [*_dated(faults), *_table(faults), "", *_why(faults)],
    }


def _dated(some: list[dict[str, Any]]) -> Iterator[str]:
    days = sorted({entry["machine"]["date"][:10] for entry in some})
    chips = sorted({f"{e['machine']['cores']} cores of {e['machine']['cpu']}" for e in some})
    if some:
        yield f"{' to '.join(dict.fromkeys((days[0], days[-1])))}, {' and '.join(chips)}."
        yield ""


def _table(some: list[dict[str, Any]]) -> Iterator[str]:
    names = ("engine", "version", "drafts", *COLUMNS, "command", "file")
    rows = []
    for entry in some:
        name, words = entry["engine"], entry["command"].removeprefix(COMMAND)
        file = f"`benchmarks/results/lossless/{name}.json`"
        rows.append(
            [name, entry["version"], entry["drafts"], *_cells(entry), f"`lossless {words}`", file]
        )
    return table(names, rows)


def _why(some: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the witness of each verdict that is not ``holds``."""
    for entry in some:
        if "report" not in entry:
            yield f"- {entry['engine']} was not run: {entry['not_run']}."
            continue
        for column in entry["report"]["columns"]:
            if column["verdict"] != "holds":
                seen = re.sub(r"([\\`*_<\[\]])", r"\\\1", " ".join(column["seen"].split()))
                yield f"- {entry['engine']}, {column['name']}, {column['verdict']}: {seen}"


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(ENGINES)}; all unless given.")
    ] = None,
    samples: Annotated[int, typer.Option(min=64)] = SAMPLES,
    out: Annotated[Path, typer.Option("--out", help="A folder for the result files.")] = RESULTS,
) -> None:
    """Audit engines with drafts against themselves without, and print the tables of a folder."""
    for name in names or ():
        if name not in ENGINES:
            raise typer.BadParameter(f"there is no engine {name!r}; known: {', '.join(ENGINES)}.")
    if not out.is_dir():
        raise ConfigError(f"{out} is no folder; give one for the result files.")
    for name in names or ENGINES:
        text = json.dumps(measured(ENGINES[name], samples), indent=1) + "\n"
        (out / f"{name}.json").write_text(text, encoding="utf-8")
    for lines in tables(out).values():
        write("\n".join(lines) + "\n\n")
