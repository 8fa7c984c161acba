"""The engine's configuration: frozen, validated when made."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ConfigError, shown
from .limits import ENGINE, check_number

DTYPES = ("auto", "float32", "bfloat16", "float16")
ACCEPTANCE_RULES = ("coupled", "rejection", "block")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
DEFAULT_SHARE = 0.5
LARGEST_MEMORY = 2**50
SCHEDULING_POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")
PRESETS = {"long-context": {"model": 512, "ngram": 4096}}
"""By preset: the window of each kind of drafter, in tokens; measured in docs/performance.md."""
OLD_NAMES = {
    "speculative_model": "drafter",
    "ngram_prompt_lookup_max": "prompt_lookup_max",
    "ngram_prompt_lookup_min": "prompt_lookup_min",
}
"""vLLM's removed names, which still work, with a warning."""


def renewed(name: str, value: Any) -> tuple[str, Any]:
    """Today's name and value of an option; warns where the name is one of ``OLD_NAMES``."""
    if name not in OLD_NAMES:
        return name, value
    today = OLD_NAMES[name]
    warnings.warn(f"{name} is an old name; use {today}.", FutureWarning, 2)
    if today == "drafter" and value == "[ngram]":
        warnings.warn('"[ngram]" is an old spelling; use "ngram".', FutureWarning, 2)
        value = "ngram"
    return today, value


def free_memory() -> int:
    """Bytes this process may still take: the machine's available memory within cgroup limits."""
    page = os.sysconf("SC_PAGE_SIZE")
    free = os.sysconf("SC_AVPHYS_PAGES") * page
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        found = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        free = int(found.group(1)) * 1024 if found else free
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and limit.read_text().strip().isdigit():
        free = min(free, max(0, int(limit.read_text()) - int(used.read_text())))
    return free


def parse_memory(value: int | float | str | None) -> int | None:
    """Bytes for the cache from ``memory``: bytes, a share of free memory, or a text like "2GiB".

    A float in (0, 1] is a share; None leaves the choice to the engine.

    Raises:
        ConfigError: the value is none of these.
    """
    if value is None:
        return None
    if isinstance(value, str):
        found = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmg]i?)?b?\s*", value.lower())
        if found:
            number, unit = float(found.group(1)), found.group(2) or ""
            if not unit and "." in found.group(1) and 0 < number <= 1:
                return parse_memory(number)
            if 0 < int(number * UNITS[unit]) <= LARGEST_MEMORY:
                return int(number * UNITS[unit])
    elif isinstance(value, float) and 0 < value <= 1:
        return int(free_memory() * value)
    elif isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_MEMORY:
        return value
    raise ConfigError(
        f"memory is {shown(value)}; give bytes (2_000_000_000 or '2GiB', at most 1 PiB) or a share "
        "of free memory above 0.0 and at most 1.0."
    )


USUAL_GROUP = {4: 128, 8: None}
"""Inputs that share a scale unless asked otherwise, by bits; None is a whole row."""


@dataclass(frozen=True)
class Recipe:
    """How weights are quantised: what every matrix but the head is made to.

    Args:
        bits: 4 or 8.
        group: inputs that share a scale; None is a whole row ("per channel").
        zeros: whether a group has a zero point of its own.
    """

    bits: int
    group: int | None
    zeros: bool = False

    @staticmethod
    def parse(text: object) -> Recipe:
        """A recipe from its text: int4 or int8, then -g32, -g64, -g128 or -channel, then -zp.

        Without a group int4 has groups of 128, and int8 is per channel.

        Raises:
            ConfigError: the text is no recipe.
        """
        given = text if isinstance(text, str) else ""
        found = re.fullmatch(r"int([48])(?:-(?:g(32|64|128)|(channel)))?(-zp)?", given)
        if found is None:
            raise ConfigError(
                f"quantization is {shown(text)}; give int4 or int8, behind it the group (-g32, "
                "-g64, -g128 or -channel) and -zp for zero points where wanted, as in int4-g64-zp. "
                "A checkpoint whose weights are quantised already needs none."
            )
        bits, group, channel, zeros = found.groups()
        size = None if channel else int(group) if group else USUAL_GROUP[int(bits)]
        return Recipe(int(bits), size, zeros is not None)

    @property
    def head(self) -> Recipe:
        """What head and embedding are made to: 8 bits.

        At 4 the head of the pocket target costs as much perplexity as all else together.
        """
        return self if self.bits == 8 else Recipe(8, USUAL_GROUP[8])

    def bits_per_weight(self, inputs: int) -> float:
        """Bits of a weight in a matrix of so many ``inputs``, its share of scales and zeros too."""
        groups = 1 if self.group is None else -(-inputs // self.group)
        return self.bits + groups * (16 + self.bits * self.zeros) / inputs

    def __str__(self) -> str:
        group = "-channel" if self.group is None else f"-g{self.group}"
        usual = self.group == USUAL_GROUP[self.bits]
        return f"int{self.bits}{'' if usual else group}{'-zp' if self.zeros else ''}"


NO_RECIPES = ("none", "auto")
"""What a drafter's quantization may be besides a recipe's text."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and budgets of one engine.

    Args:
        dtype: "auto" (the checkpoint's; but bfloat16 for float16, which the native step lacks, and
            float32 where the CPU has no arithmetic of the kind), "float32", "bfloat16" or "float16"
            (through torch, slower).
        quantization: makes the target's weights few-bit at load, see ``Recipe.parse``; None leaves
            them as the checkpoint has them.
        drafter_quantization: the same for the drafter's, where it has weights; "auto" makes them
            int8 where the native step runs the drafter and its checkpoint is not quantised, which
            no output depends on; "none" leaves them.
        max_model_len: longest prompt plus output, in tokens; None takes the target's context.
        max_num_seqs: sequences decoded together at most.
        max_num_batched_tokens: committed rows of one step at most: the prefill chunk.
        num_speculative_tokens: the draft length K, 1 or more.
        drafter_window: how many of the last tokens a drafter looks at, 1 or more: no layer of a
            drafter's model attends to more, and prompt lookup searches no more. None is what the
            model's config says, and 16,384 for prompt lookup. Output does not depend on it.
        preset: "long-context" gives the drafter a window that was measured to serve contexts of
            thousands of tokens, unless ``drafter_window`` gives another; None is no preset.
        acceptance_rule: "coupled" (the same seed gives the same tokens whatever drafts), or
            "rejection" or "block" (the target's law, other tokens with another drafter or K).
        memory: what the cache may take, see ``parse_memory``.
        page_size: tokens a cache page holds.
        scheduling_policy: "fcfs" serves requests as they come and refuses a priority other than 0;
            "priority" serves the lowest priority first.
        enable_prefix_caching: sequences with the same beginning share its pages, also when the
            first has ended; output does not depend on it.
        seed: base of the seeds of requests without one; None takes the operating system's.
        logprobs_mode: log probabilities are "raw_logprobs", of the model's own logits, or
            "processed_logprobs", of the law that the options made of them.

    Raises:
        ConfigError: a value is out of its range.
    """

    dtype: str = "auto"
    quantization: str | None = None
    drafter_quantization: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 512
    num_speculative_tokens: int = 4
    drafter_window: int | None = None
    preset: str | None = None
    acceptance_rule: str = "coupled"
    memory: int | float | str | None = None
    page_size: int = 16
    enable_prefix_caching: bool = True
    seed: int | None = None
    logprobs_mode: str = "raw_logprobs"
    scheduling_policy: str = "fcfs"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype is {shown(self.dtype)}; give one of {', '.join(DTYPES)}.")
        if self.acceptance_rule not in ACCEPTANCE_RULES:
            raise ConfigError(
                f"acceptance_rule is {shown(self.acceptance_rule)}; "
                f"give one of {', '.join(ACCEPTANCE_RULES)}."
            )
        if self.logprobs_mode not in LOGPROBS_MODES:
            known = ", ".join(LOGPROBS_MODES)
            raise ConfigError(f"logprobs_mode is {shown(self.logprobs_mode)}; give one of {known}.")
        if self.scheduling_policy not in SCHEDULING_POLICIES:
            known = " or ".join(SCHEDULING_POLICIES)
            raise ConfigError(
                f"scheduling_policy is {shown(self.scheduling_policy)}; give {known}."
            )
        for name, number in ENGINE.items():
            check_number(name, getattr(self, name), number)
        caching: object = self.enable_prefix_caching
        if not isinstance(caching, bool):
            raise ConfigError(f"enable_prefix_caching is {shown(caching)}; give True or False.")
        if self.preset is not None and self.preset not in tuple(PRESETS):
            known = ", ".join(PRESETS)
            raise ConfigError(f"preset is {shown(self.preset)}; give {known}, or None.")
        parse_memory(self.memory)
        if self.quantization is not None:
            Recipe.parse(self.quantization)
        if self.drafter_quantization not in NO_RECIPES:
            Recipe.parse(self.drafter_quantization)

    def window_of(self, drafter: str) -> int | None:
        """How many of the last tokens a drafter of that name looks at; None: not limited here."""
        if self.drafter_window is None and self.preset is not None:
            return PRESETS[self.preset].get(drafter)
        return self.drafter_window

    def model_length(self, context: int) -> int:
        """The longest sequence, given the target's ``context``; checks what depends on it.

        Raises:
            ConfigError: max_model_len is above the context, or K does not fit into it.
        """
        length = self.max_model_len if self.max_model_len is not None else context
        if length > context:
            raise ConfigError(
                f"max_model_len is {length}, but the model's context is {context} tokens; "
                "give at most that."
            )
        if self.num_speculative_tokens >= length:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, which does not fit "
                f"into the context of {length} tokens; give 1 to {length - 1}."
            )
        return length
