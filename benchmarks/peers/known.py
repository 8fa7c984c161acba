"""The peers, and how each is started."""

import hashlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from math import prod
from pathlib import Path

from safetensors import safe_open

from outrider.base.config import Recipe
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.export import bits_per_weight
from outrider.checkpoints.formats.gguf import is_gguf, open_gguf
from outrider.native.choice import VARIABLE as OWN_ISA

from .. import install
from ..install import call, home, say

OWN = "outrider"
FILE = "gguf"
"""The dtype of a pair of GGUF files: every engine reads the same bytes, with its own defaults."""
DTYPES = ("float32", "bfloat16", "int8", "int4", "int8-a8", "int4-a8")
"""Behind -a8 stand the same weights; Outrider's activations then have 8 bits, as others' do."""
BITS = {"float32": 32, "bfloat16": 16, "int8": 8, "int4": 4}
PEAKS = {
    "float32": "float32", "bfloat16": "bfloat16", "int8": "digits16", "int4": "digits16",
    "int8-a8": "digits8", "int4-a8": "digits8_codes4", FILE: "digits8",
}  # fmt: skip
"""The products of Outrider's prefill by dtype, as ``native.interface.PEAKS`` names them."""
MODES = (
    "plain", "draft", "draft int8", "draft int4", "ngram", "ngram map-k", "ngram mod", "auto",
)  # fmt: skip
FLASH = ("--flash-attn on", "--flash-attn off")
ONEDNN_ISAS = {"avx2": "AVX2", "avx512bf16": "AVX512_CORE_BF16"}
TORCH_ISAS = {"avx2": "avx2", "avx512bf16": "avx512"}
FOLDER = Path(__file__).parent


def weights_of(dtype: str) -> str:
    """The dtype of the weights alone."""
    return dtype.removesuffix("-a8")


def run_module(python: str | Path, name: str) -> tuple[str, ...]:
    """The command that runs a script of ``runners`` in that Python (3.11 or later)."""
    return (str(python), "-P", "-m", f"runners.{name}")


@dataclass(frozen=True)
class Peer:
    """An engine to measure, by the name that reports say; ``command`` starts its runner.

    Args:
        converter: a script of ``runners`` in the Python given, called with a checkpoint, an output
            folder and a dtype; None for a peer that reads checkpoints as they are.
        missing: why it cannot run here, None if it can.
        batches: True if it takes several prompts at a time.
        threads: True if it can be told how many threads to use; else it takes what it may.
        weights: the file of a conversion that holds the weights.
        heeds: True if it stays within an instruction set that it is told to.
        lengths: True if a process takes another draft length with each call, up to what it was
            opened for, so that one serves all lengths and loads.
        variants: further arguments of its program that are tried, each a text of words.
        drafts: False if it has no speculative mode for these models.
        lookups: kinds of its mode "ngram" beside its first, which are tried on GGUF files.
        server: the command of its server for a GGUF file, without model and port; () if none.
    """

    name: str
    command: tuple[str, ...]
    converter: tuple[str, ...] | None = None
    environment: dict[str, str] = field(default_factory=dict)
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    missing: Callable[[], str | None] = lambda: None
    batches: bool = True
    threads: bool = True
    weights: str = ""
    heeds: bool = False
    lengths: bool = False
    variants: tuple[str, ...] = ("",)
    drafts: bool = True
    lookups: tuple[str, ...] = ()
    server: tuple[str, ...] = ()

    def form(self, dtype: str) -> str:
        """Return what it is given of a dtype: activations are a choice of Outrider's alone."""
        return dtype if self.name == OWN else weights_of(dtype)

    def modes(self, dtype: str) -> tuple[str, ...]:
        """Return the modes of measurement: with drafters of fewer bits where the peer has them."""
        if not self.drafts:
            return ("plain",)
        kinds = {"auto": self.name == OWN and dtype == FILE}
        if dtype == FILE:
            kinds |= {f"ngram {lookup}": True for lookup in self.lookups}
        else:
            most = BITS[weights_of(dtype)]
            kinds |= {f"draft {few}": BITS[few] < most for few in BITS if few in self.dtypes}
        plainly = ("plain", "draft", "ngram")
        return tuple(mode for mode in MODES if mode in plainly or kinds.get(mode))

    def variables(self) -> dict[str, str]:
        """Variables of its processes: they see the runners, and Outrider only for its own."""
        inherited = os.environ.get("PYTHONPATH", "") if self.name == OWN else ""
        path = os.pathsep.join(filter(None, (str(FOLDER), inherited)))
        return {**self.environment, "PYTHONPATH": path}

    def convert(self, checkpoint: Path, dtype: str) -> Path:
        """The checkpoint in the peer's own format: converted once, then found again."""
        if self.converter is None or is_gguf(checkpoint):
            return checkpoint
        folder = self.conversions(checkpoint) / dtype
        if not (folder / "done").exists():
            say(f"{self.name}: converting {checkpoint} to {dtype}")
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            variables = [f"{name}={value}" for name, value in self.variables().items()]
            call("env", *variables, *self.converter, checkpoint, folder, dtype, log=folder / "log")
            (folder / "done").touch()
        return folder

    def conversions(self, checkpoint: Path) -> Path:
        """Return the folder of its conversions, another one when weights or converter change."""
        about = [str(checkpoint.resolve()), *(self.converter or ())]
        for file in sorted(checkpoint.glob("*.safetensors")):
            stat = file.stat()
            about.append(f"{file.name} {stat.st_size} {stat.st_mtime_ns}")
        for environment in install.ENVIRONMENTS.get(self.name, ()):
            about += environment.recipe
        if self.converter:
            script = FOLDER / "runners" / f"{self.converter[-1].rpartition('.')[2]}.py"
            about += [script.read_text(encoding="utf-8")] if script.exists() else []
        key = hashlib.sha256("\n".join(about).encode()).hexdigest()[:16]
        return home() / "converted" / f"{self.name}-{key}"

    def bits_per_weight(self, checkpoint: Path, dtype: str) -> float | None:
        """The size of its weights, converted already where need be; None if unknown.

        A conversion's file over the checkpoint's number of weights; what an engine reads from the
        checkpoint itself, it holds in ``dtype``.
        """
        if is_gguf(checkpoint):
            size = sum(file.stat().st_size for file in weight_files(checkpoint))
            return 8 * size / number_of_weights(checkpoint)
        if self.converter is None:
            if (bits := BITS[weights_of(dtype)]) >= 16:
                return float(bits)
            own = self.name == OWN
            return bits_per_weight(checkpoint, Recipe.parse(weights_of(dtype))) if own else None
        size = (self.conversions(checkpoint) / dtype / self.weights).stat().st_size
        return 8 * size / number_of_weights(checkpoint)


def weight_files(checkpoint: Path) -> list[Path]:
    """Return the files that hold a checkpoint's weights."""
    if is_gguf(checkpoint):
        return list(open_gguf(checkpoint).files)
    return list(checkpoint.glob("*.safetensors"))


def number_of_weights(checkpoint: Path) -> int:
    """Numbers in a checkpoint's files: tied embeddings count once."""
    if is_gguf(checkpoint):
        return sum(prod(tensor.shape) for tensor in open_gguf(checkpoint).tensors.values())
    total = 0
    for file in weight_files(checkpoint):
        with safe_open(file, framework="np") as opened:
            total += sum(prod(opened.get_slice(n).get_shape()) for n in list(opened.keys()))
    return total


def weights_read(checkpoint: Path) -> int:
    """Return the weights that a step of one token reads: all but an embedding that is no head."""
    config = open_checkpoint(checkpoint).config
    looked_up = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    return number_of_weights(checkpoint) - int(looked_up)


def products_of_prompt(checkpoint: Path, tokens: int) -> int:
    """Return the products with weights that reading a prompt takes: its last row alone has a head.

    Those of attention are left out.
    """
    config = open_checkpoint(checkpoint).config
    head = int(config.vocab_size * config.hidden_size)
    return tokens * (weights_read(checkpoint) - head) + head


def peers(isa: str | None = None) -> dict[str, Peer]:
    """Every peer by name, Outrider itself first; all told to stay within ``isa``, if any."""
    lcpp = install.LLAMA_CPP.python
    ik, mistral = install.IK_LLAMA_CPP, install.MISTRAL_RS
    own, below, onednn, needed = {}, {}, {}, ["llama.cpp"]
    if isa is not None:
        own = {OWN_ISA: isa}
        onednn = {"ONEDNN_MAX_CPU_ISA": ONEDNN_ISAS[isa]}
        below = {"LD_LIBRARY_PATH": str(install.kernels(isa))}
        needed.append(install.LLAMA_CPP_BELOW[isa].name)
    torch = {**onednn, **({"ATEN_CPU_CAPABILITY": TORCH_ISAS[isa]} if isa else {})}
    everyone = (
        Peer(
            OWN, run_module(sys.executable, "own"), None, own, (*DTYPES, FILE), threads=False,
            heeds=True, lengths=True,
        ),
        Peer(
            "transformers", run_module(sys.executable, "transformers"), None, torch, batches=False
        ),
        Peer(
            "llama.cpp", run_module(lcpp, "llamacpp"), run_module(lcpp, "llamacpp_convert"),
            {
                "PEER_SERVER": str(install.program("llama-server")),
                "PEER_VERSION": install.LLAMA_CPP_SOURCE[0].partition("==")[2],
                "PEER_QUANTIZE": str(install.program("llama-quantize")),
                **below,
            },
            (*BITS, FILE), lambda: install.missing(*needed),
            weights="model.gguf", heeds=True, variants=FLASH,
            lookups=("map-k", "mod"),
        ),
        Peer(
            "ik_llama.cpp", run_module(sys.executable, "ik_llamacpp"), None,
            {
                "PEER_SERVER": str(install.program("llama-server", ik)),
                "PEER_VERSION": install.IK_LLAMA_CPP_SOURCE[0].partition("==")[2],
            },
            (FILE,), lambda: install.missing("ik_llama.cpp"), lookups=("map-k", "mod"),
            variants=tuple(f"{flash}{pack}" for pack in (" -rtr", "") for flash in FLASH),
        ),
        Peer(
            "mistral.rs", run_module(mistral.python, "mistralrs"), None, {}, (FILE,),
            lambda: install.missing("mistral.rs"),
            batches=False, threads=False, drafts=False,
        ),
        Peer(
            "openvino", run_module(install.OPENVINO.python, "openvino"),
            run_module(install.EXPORT.python, "openvino_convert"), onednn, tuple(BITS),
            lambda: install.missing("openvino"),
            weights="openvino_model.bin", lengths=True,
        ),
        Peer(
            "vllm", run_module(install.VLLM.python, "vllm"), None,
            {"VLLM_CACHE_ROOT": str(home() / install.VLLM.name / "cache"), **torch},
            missing=lambda: install.missing("vllm"),
        ),
    )  # fmt: skip
    return {peer.name: peer for peer in everyone}
