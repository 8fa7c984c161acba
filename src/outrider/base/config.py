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
        "Draft length K. A named drafter with a K drafts that many tokens in every step. "
        "Otherwise the engine chooses the length at each step: at most K, or 8 without a K "
        "(fewer with some presets).",
        Number(
            1,
            LARGEST_DRAFT,
            "give 1 to {most}, or turn drafting off with drafter=None",
            optional=True,
        ),
    )
    max_draft_nodes: int | None = option(
        None,
        "Most nodes of a draft by drafters model and suffix. With more than "
        "num_speculative_tokens they draft trees; chains unless given.",
        Number(1, LARGEST_DRAFT, "give 1 to {most}, or None for chains", optional=True),
    )
    dtype: str = option(
        "auto",
        "auto, float32, bfloat16 or float16. auto takes the checkpoint's dtype, with two "
        "exceptions: bfloat16 replaces float16, and float32 replaces a dtype that the CPU "
        "cannot compute with. float16 runs through torch, which is slower.",
        choices=("auto", "float32", "bfloat16", "float16"),
    )
    quantization: str | None = option(
        None,
        "Quantise the target's weights at load: int8 or int4, followed by -g32, -g64, -g128 or "
        "-channel for the group size, -zp for zero points, and -a8 for 8-bit activations, as in "
        "int4-g64-zp.",
    )
    activations: str = option(
        "auto",
        "Bits of activations that few-bit weights of the target are multiplied with: 16, 8 or "
        "auto. auto is 8 for GGUF files and where quantization ends in -a8, and 16 otherwise.",
        choices=("auto", "16", "8"),
    )
    kv_cache_dtype: str = option(
        "auto",
        "auto stores keys and values in dtype. int8 stores them in 8 bits, with a scale per 32 "
        "numbers (8.5 bits each), for long contexts; it needs the native step.",
        choices=("auto", "int8"),
    )
    drafter_quantization: str = option(
        "auto",
        "Quantise the drafter's weights at load. auto is int8-a8, int4-a8 beside a target "
        "with quantization, and int4-g32-a8 for a head, where the native step runs the drafter. "
        "none leaves the weights as they are. Output stays the same.",
    )
    drafter_window: int | None = option(
        None,
        "A drafter attends to or looks up only this many last tokens. Unless given, 16,384 for "
        "ngram and suffix, and all for others. Output stays the same.",
        Number(1, LARGEST_CONTEXT, "give 1 to {most} tokens, or None", optional=True),
    )
    threads: int | None = option(
        None,
        "Threads that compute, in the whole process: the first engine of a process decides. "
        "Unless given, OMP_NUM_THREADS or the number of cores. Output stays the same.",
        Number(1, 4096, "give 1 to {most}, or None", optional=True),
    )
    drafter_cpus: str | None = option(
        None,
        "CPUs that run only the drafter's passes, as in 8-15; the target's passes run on the "
        "others. Unless given, both run on all CPUs. Output stays the same.",
    )
    draft_ahead: int | None = option(
        None,
        "With drafter_cpus, most tokens that the drafter drafts ahead while the target verifies "
        "a draft; 0 makes it wait. Unless given, a draft's length plus one, whenever that is "
        "measured to be faster. Output stays the same.",
        Number(0, LARGEST_DRAFT, "give 0 to {most}, or None to have it measured", optional=True),
    )
    suffix_store: int = option(
        0,
        "Most tokens of past outputs that drafter suffix looks up besides the sequence itself, "
        "separated by cache_salt; 0 keeps none. Output stays the same.",
        Number(0, LARGEST_CONTEXT, "give 0 to {most}"),
    )
    preset: str | None = option(
        None,
        "The use case: chat, code, agents, long-context or batch. It sets the longest draft and "
        "the acceptance that is assumed at first. long-context also sets drafter_window, unless "
        "that is given.",
        choices=(*PRESETS, None),
    )
    acceptance_rule: str = option(
        "coupled",
        "coupled: a seed gives the same tokens, whatever drafts. rejection or block: the same "
        "distribution, but other tokens with another drafter or K.",
        choices=ACCEPTANCE_RULES,
    )
    max_model_len: int | None = option(
        None,
        "Most tokens of prompt and output together; the model's context unless given.",
        Number(2, LARGEST_CONTEXT, "give 2 to {most}, or None", optional=True),
    )
    max_num_seqs: int = option(
        32, "Most sequences that are decoded together.", Number(1, 2**16, "give 1 to {most}")
    )
    max_num_batched_tokens: int = option(
        512,
        "Most prompt and decode tokens in a step, drafts not counted: the size of prefill chunks.",
        Number(1, 2**17, "give 1 to {most}"),
    )
    scheduling_policy: str = option(
        "fcfs",
        "fcfs serves requests in order of arrival; priority serves the lowest priority number "
        "first.",
        choices=("fcfs", "priority"),
    )
    enable_prefix_caching: bool = option(
        True, "Share cache pages between sequences that begin alike. Output stays the same."
    )
    repack_cache: bool = option(
        True,
        "Keep packed and quantised weights in the user's cache folder, at most 20 GiB, so that "
        "later starts can map them. Output stays the same.",
    )
    memory: int | float | str | None = option(
        None,
        "Memory of the KV cache: bytes, a text such as 2GiB, or a share of free memory such as "
        "0.5. By default it holds max_num_seqs sequences of 2048 tokens, or one of full length "
        "if that is more, but at most half of free memory. A page takes memory when it is first "
        "used.",
    )
    seed: int | None = option(
        None,
        "Base of the seeds of requests that give none; random unless given.",
        Number(0, LARGEST_SEED, "give a whole number from 0 to {most}", optional=True),
    )
    logprobs_mode: str = option(
        "raw_logprobs",
        "raw_logprobs are computed from the model's own logits, processed_logprobs after "
        "penalties, temperature and truncation.",
        choices=("raw_logprobs", "processed_logprobs"),
    )
    special_tokens_in_text: bool = option(
        True,
        "Read control tokens, such as the end of a turn, where a prompt, a message or a tool "
        "spells them. If false, such text stays plain, and control tokens come only from chat "
        "templates and from prompts of token ids.",
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
        "auto, ngram, suffix, none, a checkpoint's folder or file, retokenize:FOLDER for a "
        "model with another tokenizer, or several joined by + (model+suffix), whose drafts are "
        "merged into trees. auto chooses at each step between lookups, the checkpoint in the "
        "sub-folder or sibling folder drafter, and drafters that are named after it (auto+NAME); "
        "it drafts nothing for a model whose state cannot be rolled back.",
    ),
    _lookup("prompt_lookup_min", "Tokens of drafter ngram's shortest n-gram; 2 unless given."),
    _lookup("prompt_lookup_max", "Tokens of drafter ngram's longest n-gram; 4 unless given."),
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
        "vLLM's name for memory, as a share of free memory.", high=1,
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
