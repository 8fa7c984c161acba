"""The multi-token prediction (MTP) layers of a checkpoint, and their tensors.

``mtp.fc`` joins a token's embedding and the target's state before it, each after a norm; then come
a layer like the target's, a norm, and the target's own output matrix. Names are Qwen3.5's, which
EXAONE 4.5 also has; files of MiMo and GLM-4.5 have others. GGUF files have MTP layers as further
blocks (``blk.N.nextn.*``), or alone in a separate file.

A state is what a norm returns: the target's last norm, or for a drafted token the layers' own, as
in SGLang, llama.cpp and transformers. The versions of vLLM's glm4_moe_mtp.py that were read take
the state before the layers' norm; for GLM-5 vLLM changed that (#47448), since fewer drafts were
accepted. GLM's files repeat the target's embedding and output matrix (``embed_tokens``,
``shared_head.head``). These copies are not read, whatever they hold.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import ModelError
from .architecture import Architecture, ExpertLayout, Multipliers
from .checkpoint import find_format
from .dtypes import FLOAT32
from .families import MIXERS
from .files import Files
from .formats.gguf import GGUF
from .formats.gguf_config import form_of
from .formats.gguf_weights import EXPERTS, GGUFTensors
from .formats.shared import Format, Tensors
from .matrices import plain
from .quantize import Matrix

logger = logging.getLogger("outrider")

TARGET = "target."
NORMS = "pre_fc_norm_embedding", "pre_fc_norm_hidden"
"""The norms of a token's embedding and of a state."""


class Names(NamedTuple):
    """The names of MTP layers in a family's files.

    A name is ``begins`` and a module. ``layers`` in ``begins`` stands for the number of the
    target's layers. ``modules`` has the family's names for some modules, by those of
    ``MtpTensors``; other modules have the same name without ``base``. With ``state_first`` the
    state comes before the embedding where they are joined.
    """

    begins: str
    base: str
    modules: Mapping[str, str]
    state_first: bool = False


FIRST = "model.layers.0."
"""The ``base`` of families with a layer for each further token: only the first one is read."""
USUAL = Names("mtp.", "model.", {name: name for name in ("fc", *NORMS)})
"""Qwen3.5's names."""
IN_GLM = {
    "fc": "eh_proj", NORMS[0]: "enorm", NORMS[1]: "hnorm", "model.norm": "shared_head.norm",
}  # fmt: skip
OTHERS = {
    "mimo": Names(
        "model.mtp_layers.0.",
        FIRST,
        {
            "fc": "input_proj", NORMS[0]: "token_layernorm", NORMS[1]: "hidden_layernorm",
            "model.norm": "final_layernorm",
        },
        state_first=True,
    ),
    "glm4_moe": Names("model.layers.{layers}.", FIRST, IN_GLM),
}  # fmt: skip
"""The names of model types that do not have the usual ones."""
STACKED = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
OF = (*STACKED, "exaone4_5", "exaone4", *OTHERS)
"""Model types that have MTP layers; those in ``STACKED`` have several in sequence."""
IN_GGUF = {**IN_GLM, "model.norm": "shared_head_norm"}
"""GGUF's names for the modules outside of layers."""
PLAIN_TYPES = ("F64", "F32", "F16", "BF16")
COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")
"""Configs' names for the number of MTP layers."""
COMPANION = "mtp-"
"""Beginning of the names of GGUF files with only MTP layers and the tensors that they share."""


def blocks(file: GGUF) -> list[int]:
    """Return the numbers of the blocks of a GGUF file that are MTP layers."""
    found = (
        re.fullmatch(r"blk\.([0-9]{1,4})\.nextn\.eh_proj\.weight", key) for key in file.tensors
    )
    return sorted(int(block[1]) for block in found if block)


def num_layers(files: Files) -> int:
    """Return how many MTP layers of a checkpoint are used in sequence; 0 if it has none.

    Families other than Qwen's have one layer per further token; only the first is used, for all.
    """
    if files.gguf is not None:
        count, stacked = len(blocks(files.gguf)), form_of(files.gguf.metadata).family in STACKED
    else:
        found = (re.match(r"model\.layers\.([0-9]{1,4})\.", name) for name in names_in(files))
        there = {int(layer[1]) for layer in found if layer}
        count = next(number for number in itertools.count() if number not in there)
        stacked = _model_type(files) in STACKED
    return count if stacked else min(count, 1)


def _model_type(files: Files) -> str:
    return str((files.config or {}).get("model_type"))


def own_names(files: Files) -> Names:
    """Return the names of a checkpoint's MTP layers."""
    names = OTHERS.get(_model_type(files), USUAL)
    layers = (files.config or {}).get("num_hidden_layers")
    return names._replace(begins=names.begins.format(layers=layers))


def names_in(files: Files) -> dict[str, str]:
    """Map the names that a model of MTP layers alone would have to the names in the files.

    Other tensors have names that begin with ``TARGET``.
    """
    begins, base, modules, _ = own_names(files)
    usual = {own: name for name, own in modules.items()}

    def alone(name: str) -> str:
        nested = name.startswith(f"model.{USUAL.begins}")
        own = name.removeprefix("model.") if nested else name
        if not own.startswith(begins):
            return f"{TARGET}{name}"
        module, _, part = own.removeprefix(begins).rpartition(".")
        return f"{usual.get(module, f'{base}{module}')}.{part}"

    return {alone(name): name for name in files.tensors}


def has_mtp(files: Files) -> bool:
    """Return True if a checkpoint has MTP layers, which join embedding and state."""
    if files.gguf is not None:
        return bool(blocks(files.gguf))
    return _model_type(files) in OF and num_layers(files) > 0 and "fc.weight" in names_in(files)


def is_alone(files: Files) -> bool:
    """Return True if a checkpoint has nothing but MTP layers."""
    if files.gguf is not None:
        return has_mtp(files) and "blk.0.attn_norm.weight" not in files.gguf.tensors
    return has_mtp(files) and not any(name.startswith(TARGET) for name in names_in(files))


def promised(files: Files) -> int:
    """Return how many MTP layers a checkpoint's config or metadata claims."""
    if files.gguf is not None:
        name = files.gguf.fields.text("general.architecture", "")
        count = files.gguf.metadata.get(f"{name}.nextn_predict_layers")
        return count if type(count) is int else 0
    config = files.config or {}
    text = config.get("text_config")
    own = (config, text if isinstance(text, dict) else {})
    counts = [part.get(key) for part in own for key in COUNTS]
    return max((count for count in counts if type(count) is int and count > 0), default=0)


def why_none(files: Files) -> str:
    """Return why a checkpoint has no usable MTP layers, as the end of a sentence."""
    if files.gguf is None and _model_type(files) in OF and num_layers(files):
        return f"its MTP layers lack {mtp_tensors(files, 0).told('fc')}, so this copy is damaged"
    names = files.tensors if files.gguf is None else files.gguf.tensors
    if any(re.search(r"\.(eh_proj|mtp_layers\.\d+|mtp\.layers\.\d+)\.", f".{n}") for n in names):
        kinds = "those of Qwen3.5, EXAONE, MiMo and GLM-4.5 are"
        return f"its MTP layers are of a kind that is not read; {kinds}"
    count, place = promised(files), "config" if files.gguf is None else "metadata"
    if count:
        what = f"its {place} promises {count}, but none of its files holds one"
        return f"{what}, so this copy has lost them"
    return "it was published without any"


def companion(files: Files) -> Files | None:
    """Return the GGUF file beside a GGUF target that has only MTP layers, if there is just one."""
    if files.gguf is None or files.folder.name.startswith(COMPANION):
        return None
    near = [Files(path) for path in sorted(files.folder.parent.glob(f"{COMPANION}*.gguf"))]
    of_target = [each for each in near if _goes_with(each, files.gguf)]
    return of_target[0] if len(of_target) == 1 else None


def _goes_with(own: Files, target: GGUF) -> bool:
    """Return True if a file has MTP layers of a target; log a file that cannot be read."""
    try:
        return is_alone(own) and _fits(own.gguf, target)
    except ModelError as error:
        logger.warning("%s is left out: %s", own, error)
        return False


def _fits(own: GGUF | None, target: GGUF) -> bool:
    """Return True if a file's layers follow the target's, with embeddings of the same shape."""
    assert own is not None
    table = "token_embd.weight"
    shapes = [file.tensors[table].shape for file in (own, target) if table in file.tensors]
    behind = f"blk.{blocks(own)[0] - 1}.attn_norm.weight" in target.tensors
    return behind and len(shapes) == 2 and shapes[0] == shapes[1]


class MtpTensors(Tensors):
    """The tensors of MTP layers, by the names that a model of these layers alone would have."""

    def __init__(self, files: Files, format: Format | None = None) -> None:
        super().__init__(files, format)
        self._own_names = own_names(files)
        self._entries = {name: files.tensors[own] for name, own in names_in(files).items()}

    def matrix(self, name: str, shape: tuple[int, int], dtype: np.dtype[Any] | None) -> Matrix:
        """See ``Tensors``; the matrix that joins embedding and state reads the embedding first."""
        matrix = super().matrix(name, shape, dtype)
        if not self._own_names.state_first or name != "fc.weight":
            return matrix
        return np.roll(plain(matrix, dtype or FLOAT32), shape[1] // 2, 1)

    def _told(self, name: str) -> str:
        begins, base, modules, _ = self._own_names
        module, _, part = name.rpartition(".")
        return f"{begins}{modules.get(module, module.removeprefix(base))}.{part}"

    def has_module(self, module: str) -> bool:
        """Return True if there is a weight of a module, quantised or not."""
        return any(name.startswith(f"{module}.") for name in self._entries)

    def shape_of(self, module: str) -> tuple[int, ...] | None:
        """Return the shape of a module's weight; None if it is quantised."""
        entry = self._entries.get(f"{module}.weight")
        return entry.shape if entry is not None and entry.type in PLAIN_TYPES else None

    def told(self, module: str) -> str:
        """Return the files' name for the weight of a module."""
        return self._told(f"{module}.weight")


class MtpBlocks(GGUFTensors):
    """The tensors of MTP layers in a GGUF file, by the names of ``MtpTensors``."""

    def __init__(self, file: GGUF, head_dim: int) -> None:
        super().__init__(file, head_dim)
        self._first = blocks(file)[0]

    def is_shifted(self, name: str) -> bool:
        """See ``GGUFTensors``; includes norms with other names, which converters shift by name."""
        return super().is_shifted(name) or name.startswith(NORMS)

    def has_module(self, module: str) -> bool:
        """Return True if there is a weight of a module."""
        return self._key(f"{module}.weight") in self._file.tensors

    def shape_of(self, module: str) -> tuple[int, ...]:
        """Return the shape of a module's weight."""
        return self._file.tensors[self._key(f"{module}.weight")].shape

    def told(self, module: str) -> str:
        """Return the file's name for the weight of a module."""
        return self._key(f"{module}.weight")

    def _key(self, name: str) -> str:
        module, _, part = name.rpartition(".")
        if module in IN_GGUF:
            return f"blk.{self._first}.nextn.{IN_GGUF[module]}.{part}"
        layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", name)
        assert layer is not None
        return super()._key(f"model.layers.{self._first + int(layer[1])}.{layer[2]}")


def shapes_of(
    target: Architecture, layers: int, experts: ExpertLayout | None = None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights that MTP layers of a target need, by module.

    ``experts`` has the names of a mixture's parts, by default those of the target's family.
    """
    a, width, inner = target, (target.hidden_size,), target.intermediate_size
    queries, keys = a.num_heads * a.head_dim, a.num_kv_heads * a.head_dim
    after = a.layout.norms == "after"
    norms = "post_feedforward_layernorm" if after else "input_layernorm"
    each: dict[str, tuple[int, ...]] = dict.fromkeys((norms, "post_attention_layernorm"), width)
    if a.layout.qk_norm:
        each |= dict.fromkeys(("self_attn.q_norm", "self_attn.k_norm"), (a.head_dim,))
    each["self_attn.q_proj"] = (queries * (1 + a.layout.gated), *width)
    each |= dict.fromkeys(("self_attn.k_proj", "self_attn.v_proj"), (keys, *width))
    each["self_attn.o_proj"] = (*width, queries)
    mlp, down = "mlp.", "mlp.down_proj"
    if a.mixture is not None:  # experts may be one tensor or many: their loader checks them
        experts = experts or a.layout.experts
        assert experts is not None
        each[experts.router] = (a.mixture.experts, *width)
        mlp, down, inner = experts.shared, experts.shared_down, a.mixture.shared
    if inner:
        each |= dict.fromkeys((f"{mlp}gate_proj", f"{mlp}up_proj"), (inner, *width))
        each[down] = (*width, inner)
    bases = [f"model.layers.{number}." for number in range(layers)]
    shapes = {f"{base}{part}": shape for base in bases for part, shape in each.items()}
    shapes |= dict.fromkeys((*NORMS, "model.norm"), width)
    return {**shapes, "fc": (*width, 2 * a.hidden_size)}


def lacking(files: Files, target: Architecture) -> dict[str, str]:
    """Return what is wrong with the tensors that MTP layers of a target need, by name."""
    source, wrong = mtp_tensors(files, target.head_dim), {}
    experts = None if files.gguf is None else EXPERTS
    for module, shape in shapes_of(target, num_layers(files), experts).items():
        if not source.has_module(module):
            wrong[source.told(module)] = "missing"
        elif (own := source.shape_of(module)) not in (None, shape):
            wrong[source.told(module)] = f"{list(own or ())} instead of {list(shape)}"
    return wrong


def mtp_tensors(files: Files, head_dim: int) -> MtpTensors | MtpBlocks:
    """Return the tensors of MTP layers, whose heads have ``head_dim`` elements."""
    if files.gguf is not None:
        return MtpBlocks(files.gguf, head_dim)
    options = (files.config or {}).get("quantization_config")
    return MtpTensors(files, find_format(options, files.folder))


def mtp_files(files: Files) -> list[Path]:
    """Return the files that MTP layers come from."""
    if files.gguf is not None:
        return [*files.gguf.files]
    return sorted({entry.file.path for entry in files.tensors.values()})


def mtp_architecture(files: Files, target: Architecture) -> Architecture:
    """Return the architecture of MTP layers of a target. Raises ModelError: it is not known."""
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
        sparse=(target.mixture is not None,) * count,
        linear=None,
        multipliers=Multipliers(),
    )
