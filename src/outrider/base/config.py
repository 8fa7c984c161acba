"""The engine's options: one table, frozen and validated when made."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from ..errors import ConfigError, shown
from .cpus import Placement, parse_cpus, placement
from .groups import memory_left
from .limits import LARGEST_CONTEXT, LARGEST_DRAFT, LARGEST_SEED, LOOKUP, Number
from .options import Option, check_fields, option, options_of

POCKET = "pocket"
"""The name of the bundled pair, the default model."""
BUNDLED = Path(__file__).parents[1] / "pocket" / "model"
"""The folder of the bundled target; its drafter is in the sub-folder ``drafter``."""
ACCEPTANCE_RULES = ("coupled", "rejection", "block")
UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}
DEFAULT_SHARE = 0.5
"""Largest share of free memory that a cache takes if option memory is not given."""
USUAL_LENGTH = 2048
"""Tokens for which such a cache has room, for each of ``max_num_seqs`` sequences."""
LARGEST_MEMORY = 2**50


@dataclass(frozen=True)
class Preset:
    """A use: the longest draft for it, and the prior of P(accept).

    ``windows`` are the numbers of last tokens that each kind of drafter sees.
    """

    longest: int
    accepted: float
    windows: Mapping[str, int] = field(default_factory=dict)


PRESETS = {
    "chat": Preset(5, 0.6),
    "code": Preset(8, 0.75),
    "agents": Preset(7, 0.7),
    "long-context": Preset(8, 0.65, {"model": 512, "ngram": 4096}),
    "batch": Preset(2, 0.6),
}
LONGEST_DRAFT = 8
"""Most tokens drafted per step, if the engine chooses."""


def free_memory() -> int:
    """Return the bytes this process may still take: available memory within cgroup limits."""
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        match = re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())
        free = int(match.group(1)) * 1024 if match else free
    left = memory_left()
    return free if left is None else min(free, left)


def parse_memory(value: int | float | str | None) -> int | None:
    """Return the cache's bytes from ``memory``: bytes, a share of free memory, or a text ("2GiB").

    A float in (0, 1] is a share; None leaves the choice to the engine. Others are refused.
    """
    if value is None:
        return None
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,30}(?:\.\d{1,30})?)\s*([kmg]i?)?b?\s*", value.lower())
        if match:
            number, unit = float(match.group(1)), match.group(2) or ""
            if not unit and "." in match.group(1) and 0 < number <= 1:
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
"""Default number of inputs that share a scale, by bits; None is a whole row."""


@dataclass(frozen=True)
class Recipe:
    """A quantisation of weights to 4 or 8 bits, for every matrix but the head.

    ``group`` inputs share a scale; None is a whole row ("per channel"). With ``zeros`` a group has
    a zero point; with ``coarse`` the native step gives activations 8 bits, not 16.
    """

    bits: int
    group: int | None
    zeros: bool = False
    coarse: bool = False

    @staticmethod
    def parse(text: object) -> Recipe:
        """Return the recipe of a text: int4 or int8, then the group, then -zp, then -a8.

        The group is -g32, -g64, -g128 or -channel. Without one int4 has groups of 128, and int8 is
        per channel. A text that is no recipe is refused.
        """
        name = text if isinstance(text, str) else ""
        match = re.fullmatch(r"int([48])(?:-(?:g(32|64|128)|(channel)))?(-zp)?(-a8)?", name)
        if match is None:
            raise ConfigError(
                f"quantization is {shown(text)}; give int4 or int8, behind it the group (-g32, "
                "-g64, -g128 or -channel), -zp for zero points and -a8 for activations of 8 bits "
                "where wanted, as in int4-g64-zp. A checkpoint whose weights are quantised already "
                "needs none."
            )
        bits, group, channel, zeros, coarse = match.groups()
        size = None if channel else int(group) if group else USUAL_GROUP[int(bits)]
        return Recipe(int(bits), size, zeros is not None, coarse is not None)

    @property
    def head(self) -> Recipe:
        """The recipe of head and embedding: 8 bits.

        At 4 bits the pocket target's head costs as much perplexity as all else together.
        """
        return self if self.bits == 8 else Recipe(8, USUAL_GROUP[8])

    def bits_per_weight(self, inputs: int) -> float:
        """Return the bits of a weight in a matrix of ``inputs`` columns, with scales and zeros."""
        groups = 1 if self.group is None else -(-inputs // self.group)
        return self.bits + groups * (16 + self.bits * self.zeros) / inputs

    def __str__(self) -> str:
        group = "-channel" if self.group is None else f"-g{self.group}"
        usual = self.group == USUAL_GROUP[self.bits]
        ends = "-zp" * self.zeros + "-a8" * self.coarse
        return f"int{self.bits}{'' if usual else group}{ends}"


NO_RECIPES = ("none", "auto")
"""Values of a drafter's quantization besides recipes."""
AUTOMATIC = {"auto": "int8-a8", "auto-few": "int4-a8"}
"""Recipes of a drafter's checkpoint beside a target of 16 or 32 bits, and of fewer."""
HEADS = "int4-g32-a8"
"""The recipe of heads: a pass reads half as much as in int8, and drafts are hardly worse."""


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Limits and budgets of one engine; every field with a help text is an option of ``LLM``.

    Values out of range are refused. ``page_size`` is how many tokens a page of the cache holds.
    """

    num_speculative_tokens: int | None = option(
        None,
        "Draft length K. A named drafter with a K drafts that many tokens in every step; "
        "otherwise the engine chooses the length at each step, up to K or, without one, up to 8 "
        "(preset may say less).",
        Number(
            1,
            LARGEST_DRAFT,
            "give 1 to {most}, or turn drafting off with drafter=None",
            optional=True,
        ),
    )
    max_draft_nodes: int | None = option(
        None,
        "Nodes of a draft of drafters model and suffix, at most; more than num_speculative_tokens "
        "draft trees. Chains unless given.",
        Number(1, LARGEST_DRAFT, "give 1 to {most}, or None for chains", optional=True),
    )
    dtype: str = option(
        "auto",
        "auto, float32, bfloat16 or float16. auto is the checkpoint's, but bfloat16 for float16, "
        "and float32 where the CPU has no arithmetic of the kind; float16 runs through torch, "
        "slower.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "Quantise the target's weights at load: int8 or int4, with -g32, -g64, -g128 or -channel "
        "for the group, -zp for zero points, and -a8 for activations of 8 bits, as in int4-g64-zp.",
    )
    activations: str = option(
        "auto",
        "Bits of activations in products with the target's few-bit weights: 16 or 8. auto is 8 "
        "where quantization ends in -a8 and for the codes of a GGUF file, and 16 otherwise.",
        choices=("auto", "16", "8"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "auto keeps keys and values in dtype, int8 in codes of 8 bits, 32 of which share a scale: "
        "8.5 bits a number, for long contexts. It needs the native step.",
        choices=("auto", "int8"),
    )
    drafter_quantization: str = option(
        "auto",
        "The same for the drafter's weights. auto is, where the native step runs the drafter, "
        "int8-a8, with activations of 8 bits, int4-a8 for a checkpoint beside a target that "
        "quantization makes few-bit, and int4-g32-a8 for a head. none leaves the weights as they "
        "are. Output stays the same.",
    )
    drafter_window: int | None = option(
        None,
        "Number of last tokens that a drafter attends to or looks up; all unless given, and 16,384 "
        "for ngram and suffix. Output stays the same.",
        Number(1, LARGEST_CONTEXT, "give 1 to {most} tokens, or None", optional=True),
    )
    threads: int | None = option(
        None,
        "Threads that the engine keeps busy, of the whole process; OMP_NUM_THREADS, or as many as "
        "there are cores, unless given. The first engine of a process decides. Output stays the "
        "same.",
        Number(1, 4096, "give 1 to {most}, or None", optional=True),
    )
    drafter_cpus: str | None = option(
        None,
        "CPUs that run the passes of a drafter's checkpoint and nothing else, as in 8-15; the "
        "target's passes run on the others. Both run on all unless given. Output stays the same.",
    )
    draft_ahead: int | None = option(
        None,
        "With drafter_cpus, tokens that a drafter drafts behind a draft while the target verifies "
        "it, at most; 0 lets it wait. Unless given they are a draft's and one more, in stretches "
        "where that is measured to be faster. Output stays the same.",
        Number(0, LARGEST_DRAFT, "give 0 to {most}, or None to have it measured", optional=True),
    )
    suffix_store: int = option(
        0,
        "Tokens of past outputs that drafter suffix looks up beside the sequence itself, apart by "
        "cache_salt; 0 keeps none. Output stays the same.",
        Number(0, LARGEST_CONTEXT, "give 0 to {most}"),
    )
    preset: str | None = option(
        None,
        "The use: chat, code, agents, long-context or batch. It sets how long drafts may become "
        "and what is expected of them at first; long-context also sets a drafter's window, "
        "unless drafter_window is given.",
        choices=(*PRESETS, None),
    )
    acceptance_rule: str = option(
        "coupled",
        "coupled (the same seed gives the same tokens whatever drafts), or rejection or block (the "
        "same distribution, other tokens with another drafter or K).",
        choices=ACCEPTANCE_RULES,
    )
    max_model_len: int | None = option(
        None,
        "Longest prompt plus output, in tokens; the model's context unless given.",
        Number(2, LARGEST_CONTEXT, "give 2 to {most}, or None", optional=True),
    )
    max_num_seqs: int = option(
        32, "Most sequences decoded together.", Number(1, 2**16, "give 1 to {most}")
    )
    max_num_batched_tokens: int = option(
        512,
        "Most committed rows of a step: the prefill chunk.",
        Number(1, 2**17, "give 1 to {most}"),
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs serves requests in order of arrival, priority the lowest priority first.",
        choices=("fcfs", "priority"),
    )
    enable_prefix_caching: bool = option(
        True, "Sequences with the same beginning share its cache pages. Output stays the same."
    )
    repack_cache: bool = option(
        True,
        "Weights that are packed or quantised at load are kept in the user's cache folder, 20 GiB "
        "at most, and later starts map them. Output stays the same.",
    )
    memory: int | float | str | None = option(
        None,
        "Memory of the cache: bytes, a text such as 2GiB, or a share of free memory such as 0.5. "
        "By default it has room for max_num_seqs sequences of 2048 tokens, or for one of full "
        "length if that is more, but takes at most half of what is free. A page takes memory when "
        "it is first used.",
    )
    seed: int | None = option(
        None,
        "Base of the seeds of requests without one; random unless given.",
        Number(0, LARGEST_SEED, "give a whole number from 0 to {most}", optional=True),
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "raw_logprobs (of the model's own logits) or processed_logprobs (after penalties, "
        "temperature and truncation).",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    special_tokens_in_text: bool = option(
        True,
        "Control tokens, such as the end of a turn, that are spelled in a prompt, a message or a "
        "tool count as control tokens. With false they are plain text; then control tokens come "
        "only from chat templates and from prompts of token ids.",
    )
    page_size: int = option(16, "", Number(1, 2**14, "give 1 to {most}"))

    def __post_init__(self) -> None:
        check_fields(self)
        parse_memory(self.memory)
        if self.quantization is not None:
            Recipe.parse(self.quantization)
        if self.drafter_quantization not in NO_RECIPES:
            Recipe.parse(self.drafter_quantization)
        if self.drafter_cpus is not None:
            parse_cpus(self.drafter_cpus)
        elif self.draft_ahead:
            raise ConfigError(
                "draft_ahead is given, but a drafter drafts ahead on CPUs of its own only; give "
                "drafter_cpus too, or leave it out."
            )

    @property
    def placement(self) -> Placement | None:
        """The CPUs of target and drafter; None if they share all. Raises ConfigError."""
        return None if self.drafter_cpus is None else placement(self.drafter_cpus)

    @property
    def coded_cache(self) -> bool:
        """True if keys and values are codes of 8 bits."""
        return self.kv_cache_dtype == "int8"

    @property
    def drafter_recipe(self) -> str:
        """The quantization of a drafter's checkpoint: ``drafter_quantization``, with auto resolved.

        A step reads the drafter once per draft token, and the target once. If the target's weights
        have few bits, the drafter's share is so large that 4 bits gain more than the one or two
        draft tokens in a hundred that they cost.
        """
        few = self.drafter_quantization == "auto" and self.quantization is not None
        return "auto-few" if few else self.drafter_quantization

    def window_of(self, drafter: str) -> int | None:
        """Return the number of last tokens that a drafter of that name sees; None is no limit."""
        if self.drafter_window is None and self.preset is not None:
            return PRESETS[self.preset].windows.get(drafter)
        return self.drafter_window

    @property
    def max_draft_length(self) -> int:
        """The longest draft of this engine, in tokens."""
        if self.num_speculative_tokens is not None:
            return self.num_speculative_tokens
        return LONGEST_DRAFT if self.preset is None else PRESETS[self.preset].longest

    def model_length(self, context: int) -> int:
        """Return the longest sequence in the target's ``context``; refuse what does not fit."""
        length = self.max_model_len if self.max_model_len is not None else context
        if length > context:
            raise ConfigError(
                f"max_model_len is {length}, but the model's context is {context} tokens; "
                "give at most that."
            )
        if (self.num_speculative_tokens or 0) >= length:
            raise ConfigError(
                f"num_speculative_tokens is {self.num_speculative_tokens}, which does not fit "
                f"into the context of {length} tokens; give 1 to {length - 1}."
            )
        return length


def _lookup(name: str, help: str) -> Option:
    return Option(name, int, None, help, LOOKUP[name].least, LOOKUP[name].most)


ENGINE_OPTIONS = (
    Option(
        "drafter", str, "auto",
        "auto, ngram, suffix, none, a checkpoint's folder or file, retokenize:FOLDER for one with "
        "another tokenizer, or several joined by + "
        "(model+suffix), whose drafts are merged into trees. auto chooses at each step among all "
        "that are at hand: the checkpoint in the sub-folder or sibling drafter, lookups, and what "
        "is named after it (auto+NAME); nothing for a model whose state cannot be rolled back.",
    ),
    _lookup("prompt_lookup_min", "Shortest n-gram of drafter ngram, in tokens; 2 unless given."),
    _lookup("prompt_lookup_max", "Longest n-gram of drafter ngram, in tokens; 4 unless given."),
    Option(
        "speculative_config", str, None,
        "vLLM's JSON object, instead of drafter and num_speculative_tokens: method "
        "ngram, suffix, draft_model, eagle3 or medusa.",
    ),
    Option(
        "tokenizer", str, None,
        "Folder of a tokenizer, instead of the checkpoint's own.",
    ),
    Option(
        "gpu_memory_utilization", float, None,
        "vLLM's name for memory as a share.", high=1,
    ),
    *options_of(EngineConfig),
)  # fmt: skip
"""Every option of ``LLM``, ``AsyncLLM``, the commands and the server's engine."""


class EngineOptions(TypedDict, total=False):
    """The keyword arguments of ``LLM`` and ``AsyncLLM`` besides model and drafter."""

    num_speculative_tokens: int | None
    max_draft_nodes: int | None
    prompt_lookup_min: int | None
    prompt_lookup_max: int | None
    speculative_config: dict[str, object] | str | None
    tokenizer: str | Path | None
    gpu_memory_utilization: float
    dtype: str
    quantization: str | None
    activations: str
    kv_cache_dtype: str
    drafter_quantization: str
    drafter_window: int | None
    threads: int | None
    drafter_cpus: str | None
    draft_ahead: int | None
    suffix_store: int
    preset: str | None
    acceptance_rule: str
    max_model_len: int | None
    max_num_seqs: int
    max_num_batched_tokens: int
    scheduling_policy: str
    enable_prefix_caching: bool
    repack_cache: bool
    memory: int | float | str | None
    seed: int | None
    logprobs_mode: str
    special_tokens_in_text: bool
