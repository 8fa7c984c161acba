"""The layers of a checkpoint that predict tokens further on (MTP), and their tensors.

They are those of Qwen3.5: ``mtp.fc`` joins a token's embedding and the target's state before it,
behind a norm each; a layer of attention follows, a norm, and the target's own output matrix. GGUF
files have them as further blocks (``blk.N.nextn.*``), or alone in a file of their own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from ..errors import ModelError
from .architecture import Architecture, Multipliers
from .checkpoint import find_format
from .families import MIXERS
from .files import Files
from .formats.gguf import GGUF
from .formats.gguf_weights import GGUFTensors
from .formats.shared import Format, Tensors

PREFIX = "mtp."
NORMS = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
"""The norms of a token's embedding and of a state."""
IN_GGUF = {
    "fc": "eh_proj", NORMS[0]: "enorm", NORMS[1]: "hnorm", "model.norm": "shared_head_norm",
}  # fmt: skip
"""What GGUF files call the modules outside of layers."""
COMPANION = "mtp-"
"""Beginning of the names of GGUF files that have nothing but MTP layers and what they share."""


def blocks(file: GGUF) -> list[int]:
    """Return the numbers of the blocks of a GGUF file that are MTP layers."""
    found = (
        re.fullmatch(r"blk\.([0-9]{1,4})\.nextn\.eh_proj\.weight", key) for key in file.tensors
    )
    return sorted(int(block[1]) for block in found if block)


def num_layers(files: Files) -> int:
    """Return how many layers of a checkpoint predict tokens further on; 0 where it has none."""
    if files.gguf is not None:
        return len(blocks(files.gguf))
    found = (re.match(r"mtp\.layers\.([0-9]{1,4})\.", name) for name in names_in(files))
    return 1 + max((int(layer[1]) for layer in found if layer), default=-1)


def names_in(files: Files) -> dict[str, str]:
    """Return the names of a checkpoint's tensors, as Qwen3.5 has them, and in its files."""
    own = "model.mtp."
    return {n.removeprefix("model.") if n.startswith(own) else n: n for n in files.tensors}


def has_mtp(files: Files) -> bool:
    """Return True if a checkpoint has such layers, which join embedding and state."""
    if files.gguf is not None:
        return bool(blocks(files.gguf))
    return num_layers(files) > 0 and f"{PREFIX}fc.weight" in names_in(files)


def is_alone(files: Files) -> bool:
    """Return True if a checkpoint has nothing but such layers."""
    if files.gguf is not None:
        return has_mtp(files) and "blk.0.attn_norm.weight" not in files.gguf.tensors
    return has_mtp(files) and all(name.startswith(PREFIX) for name in names_in(files))


def promised(files: Files) -> int:
    """Return how many such layers a checkpoint's config or metadata says that it has."""
    if files.gguf is not None:
        name = files.gguf.fields.text("general.architecture", "")
        return files.gguf.fields.whole(f"{name}.nextn_predict_layers", default=0)
    config = files.config or {}
    text = config.get("text_config")
    own = (config, text if isinstance(text, dict) else {})
    counts = [part.get(key) for part in own for key in COUNTS]
    return max((count for count in counts if type(count) is int), default=0)


def why_none(files: Files) -> str:
    """Return why a checkpoint has no MTP layers that are read, as the end of a sentence."""
    names = files.tensors if files.gguf is None else files.gguf.tensors
    if any(re.search(r"\.(eh_proj|mtp_layers\.\d+|mtp\.layers\.\d+)\.", f".{n}") for n in names):
        return "its MTP layers are of a kind that is not read; only Qwen3.5's are"
    count, place = promised(files), "config" if files.gguf is None else "metadata"
    if count:
        what = f"its {place} promises {count}, but none of its files holds one"
        return f"{what}, so this copy has lost them"
    return "it was published without any"


COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""What configs call the number of such layers."""


def companion(files: Files) -> Files | None:
    """Return the one GGUF file beside a GGUF target that has such layers alone, if there is one."""
    if files.gguf is None or files.folder.name.startswith(COMPANION):
        return None
    near = [Files(path) for path in sorted(files.folder.parent.glob(f"{COMPANION}*.gguf"))]
    of_target = [each for each in near if is_alone(each) and _fits(each.gguf, files.gguf)]
    return of_target[0] if len(of_target) == 1 else None


def _fits(own: GGUF | None, target: GGUF) -> bool:
    """Return True if a file's layers stand behind the target's, and have its embedding."""
    assert own is not None
    table = "token_embd.weight"
    shapes = [file.tensors[table].shape for file in (own, target) if table in file.tensors]
    behind = f"blk.{blocks(own)[0] - 1}.attn_norm.weight" in target.tensors
    return behind and len(shapes) == 2 and shapes[0] == shapes[1]


class MtpTensors(Tensors):
    """The tensors of such layers, by the names that a model of these layers alone would have."""

    def __init__(self, files: Files, format: Format | None = None) -> None:
        super().__init__(files, format)
        names = names_in(files)
        self._entries = {_alone(name): files.tensors[own] for name, own in names.items()}

    def _told(self, name: str) -> str:
        module = name.removeprefix("model.")
        return f"{PREFIX}{module}"

    def has_module(self, module: str) -> bool:
        """Return True if there is a weight of a module, quantised or not."""
        return any(name.startswith(f"{module}.") for name in self._entries)

    def told(self, module: str) -> str:
        """Return what the files call the weight of a module."""
        return self._told(f"{module}.weight")


def _alone(name: str) -> str:
    if not name.startswith(PREFIX):
        return f"target.{name}"
    rest = name.removeprefix(PREFIX)
    return f"model.{rest}" if rest.startswith(("layers.", "norm.")) else rest


class MtpBlocks(GGUFTensors):
    """The tensors of such layers in a GGUF file, by the names of ``MtpTensors``."""

    def __init__(self, file: GGUF, head_dim: int) -> None:
        super().__init__(file, head_dim)
        self._first = blocks(file)[0]

    def is_shifted(self, name: str) -> bool:
        """See ``GGUFTensors``; norms have other names there, by which converters shift them."""
        return super().is_shifted(name) or name.startswith(NORMS)

    def has_module(self, module: str) -> bool:
        """Return True if there is a weight of a module."""
        return self._key(f"{module}.weight") in self._file.tensors

    def told(self, module: str) -> str:
        """Return what the file calls the weight of a module."""
        return self._key(f"{module}.weight")

    def _key(self, name: str) -> str:
        module, _, part = name.rpartition(".")
        if module in IN_GGUF:
            return f"blk.{self._first}.nextn.{IN_GGUF[module]}.{part}"
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        assert layer is not None
        return super()._key(f"model.layers.{self._first + int(layer[1])}.{layer[2]}")


def lacking(files: Files, target: Architecture) -> list[str]:
    """Return the tensors that such layers of a target need and a checkpoint does not hold."""
    source = mtp_tensors(files, target.head_dim)
    heads = [f"self_attn.{name}_proj" for name in "qkvo"]
    heads += ["self_attn.q_norm", "self_attn.k_norm"] if target.layout.qk_norm else []
    parts = ["input_layernorm", "post_attention_layernorm", *heads]
    parts += [f"mlp.{name}_proj" for name in ("gate", "up", "down")]
    modules = ["fc", *NORMS, "model.norm"]
    modules += [f"model.layers.{i}.{part}" for i in range(num_layers(files)) for part in parts]
    return [source.told(module) for module in modules if not source.has_module(module)]


def mtp_tensors(files: Files, head_dim: int) -> MtpTensors | MtpBlocks:
    """Return the tensors of such layers, whose heads have ``head_dim`` elements."""
    if files.gguf is not None:
        return MtpBlocks(files.gguf, head_dim)
    options = (files.config or {}).get("quantization_config")
    return MtpTensors(files, find_format(options, files.folder))


def mtp_files(files: Files) -> list[Path]:
    """Return the files that such layers come from."""
    if files.gguf is not None:
        return [*files.gguf.files]
    return sorted({entry.file.path for entry in files.tensors.values()})


def mtp_architecture(files: Files, target: Architecture) -> Architecture:
    """Return the architecture of such layers of a target. Raises ModelError: it is not known."""
    count = num_layers(files)
    if not count:
        raise ModelError(
            f"{files.folder} has no layers that predict further tokens (mtp.layers.0)."
        )
    full, attention = next(iter(target.attending)), MIXERS["full_attention"]
    return replace(
        target,
        num_layers=count,
        mixers=(attention,) * count,
        kinds=(target.kinds[full],) * count,
        windows=(target.windows[full],) * count,
        mlps=(True,) * count,
        sparse=(False,) * count,
        linear=None,
        multipliers=Multipliers(),
    )
