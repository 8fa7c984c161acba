"""Which checkpoints run natively, and what their configs say: a row a family.

Names of tensors and options are those of Hugging Face's Llama, Qwen2 and Qwen3.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, StrictDataclassError
from transformers import AutoConfig, PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from ..errors import ModelError

Folder = str | Path
UNREADABLE = (ValueError, KeyError, TypeError, AttributeError, OSError)
ROPE_TYPES = ("default", "linear", "dynamic", "llama3", "yarn")


@dataclass(frozen=True)
class Family:
    """What a family does that its config does not say."""

    qkv_bias: bool | None = None  # None: as the config's attention_bias says
    output_bias: bool | None = None
    qk_norm: bool = False


FAMILIES = {
    "llama": Family(),
    "qwen2": Family(qkv_bias=True, output_bias=False),
    "qwen3": Family(qk_norm=True),
}


@dataclass(frozen=True)
class Shape:
    """One model's architecture, in plain numbers.

    ``head_dim`` and widths are in elements, ``context`` in tokens. ``dtype`` is the checkpoint's.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    context: int
    tied: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    dtype: torch.dtype
    eos_token_ids: frozenset[int]


class Rope:
    """Rotary tables: cos and sin of a row depend on its position and its prompt's length alone.

    The scalings and their attention factor are computed by transformers' own functions. With
    "dynamic" NTK scaling the base grows once max(prompt length, position + 1) exceeds the trained
    context, as in transformers; tied to the row rather than to the forward it comes in, so that
    chunks and drafts cannot change it.
    """

    def __init__(
        self, config: PretrainedConfig, max_length: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        parameters: dict[str, Any] = config.rope_parameters
        self.kind = str(parameters.get("rope_type", "default"))
        if self.kind not in ROPE_TYPES:
            raise ModelError(
                f"rope_type {self.kind!r} is not supported natively; supported are "
                f"{', '.join(ROPE_TYPES)}."
            )
        self._config = config
        self._device = device
        self._trained = int(config.max_position_embeddings)
        self._base = float(parameters["rope_theta"])
        inverse, self._factor = self._frequencies(None)
        self._inverse = inverse
        angles = torch.arange(max_length, device=device).float()[:, None] * inverse[None, :]
        self._table = self._tables(angles).to(dtype)
        self._still = torch.zeros(2, self._table.shape[-1], dtype=dtype, device=device)
        self._still[0] = 1

    def _frequencies(self, length: int | None) -> tuple[torch.Tensor, float]:
        if self.kind == "default":
            dim = head_dim(self._config)
            exponent = torch.arange(0, dim, 2, device=self._device).float() / dim
            return 1.0 / self._base**exponent, 1.0
        inverse, factor = ROPE_INIT_FUNCTIONS[self.kind](self._config, self._device, seq_len=length)
        return inverse.float(), float(factor)

    def _tables(self, angles: torch.Tensor) -> torch.Tensor:
        """cos, and sin with the sign that x1 wants, side by side: [rows, 2, head_dim]."""
        cos, sin = angles.cos() * self._factor, angles.sin() * self._factor
        return torch.stack([torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)], -2)

    def rows(
        self, positions: torch.Tensor, lengths: list[int], turned: int, kept: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """What turns heads by position: x * cos + swapped x * sin.

        Args:
            positions: int64 [rows].
            lengths: the rows' sequence lengths, max(prompt length, position + 1); they matter to
                dynamic scaling only.
            turned, kept: how many heads come first and turn, and how many follow and do not:
                theirs are ones and zeros, so that all heads go through one contiguous product.

        Returns:
            cos and signed sin, [rows, turned + kept, head_dim] each.
        """
        table = self._table.index_select(0, positions)
        if self.kind == "dynamic" and max(lengths) > self._trained:
            inverse = torch.stack([self._dynamic(length) for length in lengths])
            table = self._tables(positions.float()[:, None] * inverse).to(table.dtype)
        still = self._still.expand(len(positions), kept, -1, -1)
        heads = torch.cat([table[:, None].expand(-1, turned, -1, -1), still], 1)
        return heads[:, :, 0].contiguous(), heads[:, :, 1].contiguous()

    def _dynamic(self, length: int) -> torch.Tensor:
        return self._frequencies(length)[0] if length > self._trained else self._inverse


def head_dim(config: PretrainedConfig) -> int:
    """Elements a head."""
    explicit = getattr(config, "head_dim", None)
    return int(explicit or config.hidden_size // config.num_attention_heads)


def find_folder(model: Folder) -> Path:
    """The folder of a checkpoint: ``model`` itself, or the hub's snapshot of that name.

    Raises:
        ModelError: it is neither a folder nor a name that the hub (or its cache) knows.
    """
    path = Path(model).expanduser()
    if path.exists() or not re.fullmatch(r"[\w-][\w.-]*/[\w-][\w.-]*", str(model)):
        return path
    try:
        patterns = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
        return Path(snapshot_download(str(model), allow_patterns=patterns))
    except (OSError, HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"model {str(model)!r} is no folder here, and the hub did not give it: {reason}"
        ) from None


def read_config(folder: Path) -> PretrainedConfig:
    """The checkpoint's config.json.

    Raises:
        ModelError: there is no such folder, no config.json, or it cannot be read.
    """
    if not folder.is_dir():
        raise ModelError(f"model {str(folder)!r} is not a folder; give one with a config.json.")
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; give a Hugging Face checkpoint's folder.")
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except (*UNREADABLE, StrictDataclassError) as error:
        # Of several paragraphs the first says what is wrong, over a line or two.
        reason = " ".join(str(error).strip().split("\n\n")[0].split()) or type(error).__name__
        raise ModelError(f"{folder / 'config.json'} cannot be used: {reason}") from None
    return config


def read_shape(config: PretrainedConfig, folder: Path) -> Shape:
    """What ``config`` says, for the families that run natively.

    Raises:
        ModelError: the family, or an option of it, has no native path.
    """
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ModelError(
            f"{folder}: model_type {config.model_type!r} is not supported; "
            f"supported are {', '.join(FAMILIES)}."
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised:
        method = dict(quantised).get("quant_method", "an unnamed method")
        raise ModelError(
            f"{folder}: weights quantised by {method!r} (quantization_config) are not supported; "
            "give the checkpoint in float32, bfloat16 or float16."
        )
    if getattr(config, "use_sliding_window", False):
        raise ModelError(
            f"{folder}: sliding-window attention (use_sliding_window) is not supported."
        )
    if getattr(config, "hidden_act", "silu") != "silu":
        raise ModelError(f"{folder}: hidden_act {config.hidden_act!r} is not supported, only silu.")
    kv_heads = config.num_key_value_heads or config.num_attention_heads
    if config.num_attention_heads % kv_heads:
        raise ModelError(
            f"{folder}: num_key_value_heads is {kv_heads}, which does not divide "
            f"num_attention_heads ({config.num_attention_heads}); correct its config.json."
        )
    bias = bool(getattr(config, "attention_bias", False))
    return Shape(
        family=config.model_type,
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_hidden_layers,
        num_heads=config.num_attention_heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim(config),
        norm_eps=config.rms_norm_eps,
        context=context_length(config),
        tied=bool(config.tie_word_embeddings),
        qkv_bias=bias if family.qkv_bias is None else family.qkv_bias,
        output_bias=bias if family.output_bias is None else family.output_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
        qk_norm=family.qk_norm,
        dtype=getattr(config, "dtype", None) or torch.float32,
        eos_token_ids=end_token_ids(config, folder),
    )


def end_token_ids(config: PretrainedConfig, folder: Path) -> frozenset[int]:
    """EOS of config.json and of generation_config.json, where chat models list more of them.

    Raises:
        ModelError: generation_config.json is damaged.
    """
    listed = [config.eos_token_id]
    file = folder / "generation_config.json"
    if file.is_file():
        try:
            listed.append(json.loads(file.read_text(encoding="utf-8")).get("eos_token_id"))
        except (ValueError, AttributeError):
            raise ModelError(f"{file} is damaged; fetch the checkpoint again.") from None
    return frozenset(i for ids in listed for i in ([ids] if isinstance(ids, int) else ids or ()))


def context_length(config: PretrainedConfig) -> int:
    """Tokens the model can attend to, its rope scaling included."""
    parameters: dict[str, Any] = config.rope_parameters
    trained = int(config.max_position_embeddings)
    if parameters.get("rope_type") in ("linear", "dynamic", "yarn"):
        original = parameters.get("original_max_position_embeddings") or trained
        return max(trained, int(original * float(parameters.get("factor") or 1.0)))
    return trained
