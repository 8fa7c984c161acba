"""Audits real servers of the pocket pair: llama.cpp's, vLLM's for CPUs and Outrider's own."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any
from urllib.request import urlopen

import typer

from outrider import pocket
from outrider.audit.endpoint import SAMPLES, EndpointReport, Status, verify_endpoint
from outrider.checkpoints.gguf_export import export_gguf
from outrider.cli.common import write
from outrider.errors import ConfigError

from . import install
from .peers.known import FOLDER
from .plugged import plugged
from .served import Served

START_SECONDS = 300.0
K = "4"
DTYPE = "float32"
GGUF = "BF16"  # holds the pocket pair's weights as they are
DRAFTER = pocket.PATH / "drafter"


@contextmanager
def started(command: list[str], log: Path, environment: dict[str, str]) -> Iterator[str]:
    """Run a server whose command ends with ``--port``, and yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    inherited = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    with log.open("w", encoding="utf-8") as out:
        server = subprocess.Popen(
            [*command, port], stdin=subprocess.DEVNULL, stdout=out, stderr=out,
            env=inherited | environment,
        )  # fmt: skip
        try:
            url, deadline = f"http://127.0.0.1:{port}", time.monotonic() + START_SECONDS
            while time.monotonic() < deadline and server.poll() is None:
                with suppress(OSError), urlopen(f"{url}/health", timeout=5):
                    break
                time.sleep(0.2)
            else:
                said = log.read_text(encoding="utf-8", errors="replace")[-1000:]
                raise ConfigError(f"the server did not come up: {said}")
            yield url
        finally:
            server.terminate()
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


@contextmanager
def llama_cpp(*arguments: str) -> Iterator[str]:
    """Run llama-server on the pocket target; ``{drafter}`` among the arguments is its drafter."""
    with TemporaryDirectory() as name:
        folder = Path(name)
        files = {"target": folder / "target.gguf", "drafter": folder / "drafter.gguf"}
        for file, checkpoint in zip(files.values(), (pocket.PATH, DRAFTER), strict=True):
            export_gguf(checkpoint, file, GGUF)
        command = [
            str(install.program("llama-server")), "--model", str(files["target"]),
            "--alias", "pocket", "--host", "127.0.0.1", "--no-ui", "--metrics", "--parallel", "8",
            "--ctx-size", "8192", "--fit", "off", "--threads", "1", "--threads-batch", "1",
            "--cache-type-k", "f32", "--cache-type-v", "f32",
            *(argument.format(**files) for argument in arguments), "--port",
        ]  # fmt: skip
        with started(command, folder / "log", {}) as url:
            yield url


FILLED = {
    # Each byte of fresh memory is 0x3f: a float32 is 0.747. Bytes that tcmalloc or a cache of
    # small blocks hands out are not filled: vLLM loads the first unless a name stands for it.
    "MALLOC_PERTURB_": str(0x3F ^ 0xFF), "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0",
    "LD_PRELOAD": "/nowhere/libtcmalloc.so",
}  # fmt: skip
"""Variables with which uninitialised memory holds one value, so that vLLM survives its use."""


@contextmanager
def vllm(speculative: dict[str, Any], plugin: bool = False, filled: bool = False) -> Iterator[str]:
    """Run vLLM for CPUs on the pocket target, with Outrider's plugin or without.

    Args:
        speculative: ``speculative_config``, empty for plain decoding.
        plugin: whether Outrider's rule is active.
        filled: whether fresh memory is filled, as ``FILLED`` says.
    """
    python = str(install.VLLM.python)
    command = [
        # -P: beside that script lies a module vllm, which is not the package.
        python, "-P", str(FOLDER / "runners" / "vllm_command.py"), "serve", str(pocket.PATH),
        "--served-model-name", "pocket",
        "--host", "127.0.0.1", "--dtype", DTYPE, "--max-model-len", "512", "--max-num-seqs", "8",
        "--enforce-eager", "--generation-config", "vllm",
        *(["--speculative-config", json.dumps(speculative)] if speculative else []), "--port",
    ]  # fmt: skip
    core = str(min(os.sched_getaffinity(0)))
    environment = {
        "VLLM_CACHE_ROOT": str(install.home() / "vllm" / "cache"), "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": core, "VLLM_NO_USAGE_STATS": "1",
    }  # fmt: skip
    with ExitStack() as stack:
        environment |= FILLED if filled else {}
        if plugin:
            environment |= stack.enter_context(plugged())
        folder = stack.enter_context(TemporaryDirectory())
        yield stack.enter_context(started(command, Path(folder) / "log", environment))


@contextmanager
def own(*arguments: str) -> Iterator[str]:
    """Run Outrider's server on the pocket pair."""
    with Served("--model", str(pocket.PATH), "--dtype", DTYPE, *arguments) as server:
        yield server.url


DRAFT = ("--spec-type", "draft-simple", "--model-draft", "{drafter}", "--spec-draft-n-max", K)
NGRAM = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3",
         "--spec-ngram-simple-size-m", K)  # fmt: skip
SPECULATIVE: dict[str, dict[str, Any]] = {
    "plain": {},
    "draft": {"method": "draft_model", "model": str(DRAFTER), "num_speculative_tokens": int(K)},
    "ngram": {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4,
              "num_speculative_tokens": int(K)},
}  # fmt: skip
PROPOSER = {"method": "custom_class", "model": "outrider.plugins.vllm.Proposer",
            "num_speculative_tokens": int(K)}  # fmt: skip
SERVERS: dict[str, tuple[str, Callable[[], Any]]] = {
    "llama.cpp-plain": ("llama.cpp", llama_cpp),
    "llama.cpp-draft": ("llama.cpp", lambda: llama_cpp(*DRAFT)),
    "llama.cpp-ngram": ("llama.cpp", lambda: llama_cpp(*NGRAM)),
    **{
        f"vllm-{name}{'-outrider' if plugin else ''}": (
            "vllm", partial(vllm, speculative, plugin)
        )
        for plugin in (False, True)
        for name, speculative in SPECULATIVE.items()
    },
    **{
        f"vllm-draft{'-outrider' if plugin else ''}-filled": (
            "vllm", partial(vllm, SPECULATIVE["draft"], plugin, filled=True)
        )
        for plugin in (False, True)
    },
    "vllm-proposer-outrider": ("vllm", partial(vllm, PROPOSER, True)),
    "outrider-draft": ("", lambda: own("--drafter", str(DRAFTER), "--num-speculative-tokens", K)),
    "outrider-ratio": (
        "",
        lambda: own(
            "--drafter", str(DRAFTER), "--num-speculative-tokens", K, "--acceptance-rule",
            "rejection",
        ),
    ),
}  # fmt: skip
"""By name: the peer that it needs, and what runs it."""


def audited(name: str, laws: list[str], samples: int, seed: int) -> EndpointReport:
    """Return the audit of a server against the pocket target, run plainly here."""
    with SERVERS[name][1]() as url:
        return verify_endpoint(
            url, reference=str(pocket.PATH), laws=laws, samples=samples, seed=seed
        )


def lines(name: str, report: EndpointReport) -> Iterator[str]:
    """Yield a report in Markdown."""
    yield f"{name}: {report.verdict}; {json.dumps(report.speculation)}\n"
    yield "| check | verdict | evidence | samples |\n| -- | -- | -- | -- |\n"
    for result in report.results:
        verdict = f"**{result.status}**" if result.status is Status.FAILED else result.status
        seen = result.seen.replace("|", "\\|").replace("\n", " ")
        yield f"| {result.name} | {verdict} | {seen} | {result.samples} |\n"


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(SERVERS)}; all unless given.")
    ] = None,
    laws: Annotated[
        list[str] | None, typer.Option("--law", help="Test this law; all unless given.")
    ] = None,
    samples: Annotated[int, typer.Option(min=64)] = SAMPLES,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    out: Annotated[Path | None, typer.Option("--out", help="A folder for the reports.")] = None,
) -> None:
    """Audit servers of this machine against the pocket target."""
    for name in names or SERVERS:
        if name not in SERVERS:
            raise typer.BadParameter(f"there is no server {name!r}; known: {', '.join(SERVERS)}.")
        peer = SERVERS[name][0]
        if peer and (why := install.missing(peer)):
            write(f"{name}: skipped: {why}\n")
            continue
        report = audited(name, laws or [], samples, seed)
        if out is not None:
            text = json.dumps(report.as_json(), indent=1) + "\n"
            (out / f"{name}.json").write_text(text, encoding="utf-8")
        for line in lines(name, report):
            write(line)
