"""The neutral spec of a deployment: what is served, by which drafter, on what."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BeforeValidator, Field

from ...base.cpus import parse_cpus
from ...base.limits import LARGEST_CONTEXT, LARGEST_DRAFT
from ...base.methods import named_method
from ...base.outside.documents import read_toml
from ...base.outside.models import Part, checked
from ...engine.control.schedules import Range, check_ranges
from ...errors import ConfigError, shown

LARGEST_COUNT = 2**20
PART = "deploy"
"""The table in a config of ``outrider serve`` that holds a spec; that command ignores it."""


def _line(text: str) -> str:
    if not text.strip() or not text.isprintable():
        raise ValueError(f"is {shown(text)}; give a text on one line.")
    if text.startswith("-"):
        raise ValueError(f"is {shown(text)}; it must not begin with a hyphen.")
    return text


def _ranges(rows: Any) -> tuple[Range, ...]:
    for each in rows if isinstance(rows, list | tuple) else [rows]:
        whole = isinstance(each, list | tuple) and all(type(number) is int for number in each)
        if not whole or len(each) != 3:
            raise ValueError(
                f"has {shown(each)}; give lists of three whole numbers, the first and last batch "
                "size and the draft length, as in [[1, 16, 4], [17, 256, 0]]."
            )
    return tuple(check_ranges([(first, last, length) for first, last, length in rows]))


def _cpus(text: str) -> str:
    try:
        parse_cpus(text)
    except ConfigError:
        raise ValueError(
            f"is {shown(text)}; give numbers and ranges of CPUs, as in 8-15 or 4,6-7."
        ) from None
    return text


Line = Annotated[str, AfterValidator(_line)]
Count = Annotated[int, Field(ge=1, le=LARGEST_COUNT)]
Size = Annotated[float, Field(ge=0.001, le=LARGEST_COUNT)]


class Target(Part):
    """The target, and what checks need of its config and weights; None is unknown."""

    model: Line
    revision: Line | None = None
    dtype: Line = "auto"
    quantization: Line | None = None
    attention_heads: Count | None = None
    vocab_size: Count | None = None
    weights_gib: Size | None = None


class SpecDrafter(Part):
    """The drafter; ``other_vocabulary`` tells whether it has another tokenizer than the target.

    With ``required`` a config that never drafts is an error; with ``adaptive`` the engine sets K.
    ``cpus`` run its passes and nothing else.
    """

    method: Line = "none"
    model: Line | None = None
    num_speculative_tokens: Annotated[int, Field(ge=0, le=LARGEST_DRAFT)] | None = None
    schedule: Annotated[tuple[Range, ...], BeforeValidator(_ranges)] = ()
    required: bool = False
    adaptive: bool = False
    tensor_parallel_size: Count | None = None
    quantization: Line | None = None
    cpus: Annotated[str, AfterValidator(_cpus)] | None = None
    other_vocabulary: bool | None = None
    attention_heads: Count | None = None
    vocab_size: Count | None = None
    weights_gib: Size | None = None
    prompt_lookup_min: Count | None = None
    prompt_lookup_max: Count | None = None


class Parallel(Part):
    """The split of a model: GPUs of a layer, and stages of layers."""

    tensor: Count = 1
    pipeline: Count = 1

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline


class Limits(Part):
    """Lengths in tokens and sizes of batches; the engine's own default where None."""

    max_model_len: Annotated[int, Field(ge=2, le=LARGEST_CONTEXT)] | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None


class SpecMemory(Part):
    """The share of a GPU's memory that the engine may take, and that memory in GiB."""

    gpu_share: Annotated[float, Field(ge=0.01, le=1)] | None = None
    gpu_gib: Size | None = None


class SpecService(Part):
    """The address and the names that clients use, and the number of replicas."""

    name: Line = "model"
    namespace: Line = "default"
    model_name: Line | None = None
    port: Annotated[int, Field(ge=1, le=65535)] = 8000
    replicas: Count = 1
    image: Line | None = None


class Spec(Part):
    """One deployment. ``engine_version`` is the newest that is recorded unless given."""

    target: Target
    engine: Line | None = None
    engine_version: Line | None = None
    drafter: SpecDrafter = SpecDrafter()
    parallel: Parallel = Parallel()
    limits: Limits = Limits()
    memory: SpecMemory = SpecMemory()
    service: SpecService = SpecService()

    @property
    def drafts(self) -> bool:
        """Return whether the engine drafts at any batch size."""
        lengths = [length for _, _, length in self.drafter.schedule]
        lengths = lengths or [self.drafter.num_speculative_tokens or 0]
        by_itself = self.drafter.num_speculative_tokens is None and not self.drafter.schedule
        return self.drafter.method != "none" and (by_itself or any(lengths))

    @property
    def draft_length(self) -> int | None:
        """The longest draft, in tokens; None leaves it to the engine."""
        if self.drafter.num_speculative_tokens is not None or not self.drafter.schedule:
            return self.drafter.num_speculative_tokens
        return max(length for _, _, length in self.drafter.schedule)


def parse(document: Mapping[str, Any], source: str = "the spec") -> Spec:
    """Return the spec of a TOML document. Raises ConfigError: a name or a value is wrong."""
    for name in Spec.model_fields.keys() - {"engine", "engine_version"}:
        if not isinstance(part := document.get(name, {}), Mapping):
            raise ConfigError(f"{source}: {name} is {shown(part)}; write a table, [{name}].")
    if "target" not in document:
        raise ConfigError(f"{source} names no target; add [target] with model, or give --model.")
    spec = checked(Spec, document, source)
    method = named_method(spec.drafter.method, f"{source}: drafter.method").name
    return spec.model_copy(update={"drafter": spec.drafter.model_copy(update={"method": method})})


def read(path: Path) -> dict[str, Any]:
    """Return a file's TOML document; only the table ``deploy`` if it has one, as from ``tune``."""
    document = read_toml(path, f"The spec {path}")
    part = document.get(PART)
    return part if isinstance(part, dict) else document


GIB = 2**30
Model = TypeVar("Model", Target, SpecDrafter)


def filled(spec: Spec) -> Spec:
    """Return the spec with facts from local checkpoints added; values that it states stay."""
    target, drafter = _filled(spec.target), _filled(spec.drafter)
    return spec.model_copy(update={"target": target, "drafter": drafter})


def _filled(model: Model) -> Model:
    if model.model is None:
        return model
    config, size = _config(model.model), _bytes(model.model)
    names = {"attention_heads": "num_attention_heads", "vocab_size": "vocab_size"}
    facts: dict[str, Any] = {name: config.get(key) for name, key in names.items()}
    facts = {name: value for name, value in facts.items() if type(value) is int and value > 0}
    facts |= {"weights_gib": size / GIB} if size else {}
    unknown = {name: value for name, value in facts.items() if getattr(model, name) is None}
    return model.model_copy(update=unknown)


def _bytes(folder: str) -> int:
    """Return the bytes of a folder's weights; 0 if there are none or they cannot be read."""
    try:
        files = [file for file in Path(folder).glob("*.safetensors") if file.is_file()]
        return sum(file.stat().st_size for file in files)
    except OSError:  # a hub name may be no valid path, such as one that is too long
        return 0


def _config(folder: str) -> dict[str, Any]:
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(config, dict):
        return {}
    text = config.get("text_config")
    return {**text, **config} if isinstance(text, dict) else config
