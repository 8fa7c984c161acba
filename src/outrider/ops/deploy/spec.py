"""The neutral spec of a deployment: what is served, by which drafter, on what."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...base.limits import LARGEST_CONTEXT, LARGEST_DRAFT
from ...base.methods import named_method
from ...base.outside.documents import read_toml
from ...errors import ConfigError, no_option, shown

LARGEST_COUNT = 2**20
PART = "deploy"
"""The table of a config of ``outrider serve`` that holds a spec; that command leaves it."""
Range = tuple[int, int, int]
"""First and last batch size, and the draft length for them."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """The target, and the facts of its config that checks need; facts that are None are unknown.

    ``weights_gib`` is the size of its weights as they are served.
    """

    model: str
    revision: str | None = None
    dtype: str = "auto"
    quantization: str | None = None
    attention_heads: int | None = None
    vocab_size: int | None = None
    weights_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Drafter:
    """The drafter.

    Args:
        method: one of ``methods.NAMES``.
        num_speculative_tokens: draft length K.
        schedule: draft lengths by batch size, as ``Range``.
        required: whether a config that never drafts is an error.
        adaptive: the engine chooses the draft length itself.
        tensor_parallel_size: GPUs of the drafter, which must equal the target's.
        other_vocabulary: whether the drafter has another tokenizer.
    """

    method: str = "none"
    model: str | None = None
    num_speculative_tokens: int | None = None
    schedule: tuple[Range, ...] = ()
    required: bool = False
    adaptive: bool = False
    tensor_parallel_size: int | None = None
    quantization: str | None = None
    other_vocabulary: bool | None = None
    attention_heads: int | None = None
    vocab_size: int | None = None
    weights_gib: float | None = None
    prompt_lookup_min: int | None = None
    prompt_lookup_max: int | None = None


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """The split of a model: GPUs of a layer, and stages of layers."""

    tensor: int = 1
    pipeline: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of one replica."""
        return self.tensor * self.pipeline


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Lengths in tokens and sizes of batches; the engine's own default where None."""

    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The share of a GPU's memory that the engine may take, and that memory in GiB."""

    gpu_share: float | None = None
    gpu_gib: float | None = None


@dataclass(frozen=True, kw_only=True)
class Service:
    """The address and the names that clients use, and the number of replicas."""

    name: str = "model"
    namespace: str = "default"
    model_name: str | None = None
    port: int = 8000
    replicas: int = 1
    image: str | None = None


@dataclass(frozen=True, kw_only=True)
class Spec:
    """One deployment. ``engine_version`` is the newest that is recorded unless given."""

    target: Target
    engine: str | None = None
    engine_version: str | None = None
    drafter: Drafter = field(default_factory=Drafter)
    parallel: Parallel = field(default_factory=Parallel)
    limits: Limits = field(default_factory=Limits)
    memory: Memory = field(default_factory=Memory)
    service: Service = field(default_factory=Service)

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


SECTIONS: dict[str, type] = {
    "target": Target, "drafter": Drafter, "parallel": Parallel, "limits": Limits,
    "memory": Memory, "service": Service,
}  # fmt: skip
RANGES: dict[str, tuple[float, float]] = {
    "num_speculative_tokens": (0, LARGEST_DRAFT),
    "max_model_len": (2, LARGEST_CONTEXT),
    "gpu_share": (0.01, 1),
    "port": (1, 65535),
}
"""Ranges of numbers; all others are positive and at most a million."""


def parse(document: Mapping[str, Any], source: str = "the spec") -> Spec:
    """Return the spec of a TOML document.

    Raises:
        ConfigError: a name is unknown, or a value has another type or is out of range.
    """
    parts: dict[str, Any] = {}
    for name, value in document.items():
        if name in SECTIONS:
            if not isinstance(value, Mapping):
                raise ConfigError(f"{source}: {name} is {shown(value)}; write a table, [{name}].")
            parts[name] = _section(SECTIONS[name], name, value, source)
        elif name in ("engine", "engine_version"):
            parts[name] = _text(value, name, source)
        else:
            raise no_option(source, name, ["engine", "engine_version", *SECTIONS])
    if "target" not in parts:
        raise ConfigError(f"{source} names no target; add [target] with model, or give --model.")
    return Spec(**parts)


def read(path: Path) -> dict[str, Any]:
    """Return the TOML document of a file; the table ``deploy`` of one that ``tune`` wrote.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    document = read_toml(path, f"The spec {path}")
    part = document.get(PART)
    return part if isinstance(part, dict) else document


def _section(owner: type, name: str, values: Mapping[str, Any], source: str) -> Any:
    known = {each.name: each for each in fields(owner)}
    given = {}
    for key, value in values.items():
        where = f"{name}.{key}"
        if key not in known:
            raise no_option(f"[{name}] of {source}", key, list(known))
        given[key] = _value(str(known[key].type), value, where, source)
    needed = [n for n, each in known.items() if each.default is MISSING and n not in given]
    if needed:
        raise ConfigError(f"{source} has no {name}.{needed[0]}; add it.")
    if "method" in given:
        given["method"] = named_method(given["method"], f"{source}: drafter.method").name
    return owner(**given)


def _value(kind: str, value: Any, where: str, source: str) -> Any:
    if kind.startswith("str"):
        return _text(value, where, source)
    if kind.startswith("bool"):
        if not isinstance(value, bool):
            raise ConfigError(f"{source}: {where} is {shown(value)}; give true or false.")
        return value
    if kind.startswith("tuple"):
        return _schedule(value, where, source)
    whole = kind.startswith("int")
    least, most = RANGES.get(where.rpartition(".")[2], (1 if whole else 0.001, LARGEST_COUNT))
    number = isinstance(value, int if whole else (int, float)) and not isinstance(value, bool)
    if not number or not least <= value <= most:
        raise ConfigError(
            f"{source}: {where} is {shown(value)}; give a {'whole ' * whole}number from {least:,} "
            f"to {most:,}."
        )
    return value


def _text(value: Any, where: str, source: str) -> str:
    if not isinstance(value, str) or not value.strip() or not value.isprintable():
        raise ConfigError(f"{source}: {where} is {shown(value)}; give a text on one line.")
    if value.startswith("-"):
        raise ConfigError(f"{source}: {where} is {shown(value)}; it must not begin with a hyphen.")
    return value


def _schedule(value: Any, where: str, source: str) -> tuple[Range, ...]:
    """Return a schedule, checked: ranges of batch sizes from 1 on, without gaps."""
    ranges: list[Range] = []
    following = 1
    rows: list[Any] = value if isinstance(value, list) else [value]
    for each in rows:
        whole = isinstance(each, list) and all(type(number) is int for number in each)
        if not whole or len(each) != 3:
            raise ConfigError(
                f"{source}: {where} has {shown(each)}; give lists of three whole numbers, the "
                "first and last batch size and the draft length, as in [[1, 16, 4], [17, 256, 0]]."
            )
        first, last, length = each
        if first != following or last < first or not 0 <= length <= LARGEST_DRAFT:
            raise ConfigError(
                f"{source}: {where} has {shown(each)}; ranges begin at batch size {following}, do "
                f"not go backwards, and draft 0 to {LARGEST_DRAFT} tokens."
            )
        ranges.append((first, last, length))
        following = last + 1
    return tuple(ranges)
