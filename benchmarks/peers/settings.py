"""What is measured: loads, options, settings, and a setting run once."""

from dataclasses import dataclass

from outrider.errors import ConfigError

from .pairs import PROMPT_TOKENS, PROMPTS
from .session import Answer

LENGTHS = (2, 4, 6, 8)
LONGEST = 32
MOST_THREADS = 1024


@dataclass(frozen=True)
class Load:
    """The load of an engine.

    "decode" runs the pair's prompts, one by one; "batch" ``size`` prompts at once; "prefill" one
    prompt of ``size`` tokens, for one output token.
    """

    kind: str
    size: int = 1

    @property
    def name(self) -> str:
        return self.kind if self.kind == "decode" else f"{self.kind} {self.size}"


DECODE = Load("decode")
KINDS = ("plain", "fixed", "auto")
EVERY = Load("every")
"""What a process that serves all loads and draft lengths is opened for."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """The settings of a measurement; ``dtypes`` are those of ``known.DTYPES``.

    ``concurrency`` are numbers of requests at a time, 1 being the load "decode"; ``prefill`` is the
    tokens of the prompt of that load, 0 for none; other prompts are cut to ``prompt_tokens``.
    ``batch_tokens`` are the output tokens of each of several requests, ``max_tokens`` unless given.
    The search tries draft lengths ``lengths`` and thread counts ``threads`` (1 and all cores unless
    given), and of the mode "draft" every kind of drafter. ``isa`` is the instruction set that every
    side was told to stay within.
    """

    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    concurrency: tuple[int, ...] = (1,)
    prefill: int = 0
    prompt_tokens: int = PROMPT_TOKENS
    rounds: int = 7
    max_tokens: int = 128
    batch_tokens: int | None = None
    temperature: float = 0.0
    modes: tuple[str, ...] = ("plain", "draft", "ngram")
    lengths: tuple[int, ...] = LENGTHS
    threads: tuple[int, ...] = ()
    isa: str | None = None

    def __post_init__(self) -> None:
        for name, least in (
            ("rounds", 1), ("max_tokens", 2), ("temperature", 0), ("prefill", 0),
            ("prompt_tokens", 1), ("batch_tokens", 2),
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise ConfigError(f"{name} is {value}; give {least} or more.")
        for size in self.concurrency:
            if not 1 <= size <= PROMPTS:
                raise ConfigError(f"concurrency is {size}; give numbers from 1 to {PROMPTS}.")
        for count in self.threads:
            if not 1 <= count <= MOST_THREADS:
                raise ConfigError(f"a thread count is {count}; give 1 to {MOST_THREADS}.")
        for length in self.lengths:
            if not 1 <= length <= LONGEST:
                raise ConfigError(f"a draft length is {length}; give numbers from 1 to {LONGEST}.")

    def tokens(self, load: Load) -> int:
        """Return the output tokens of each prompt."""
        if load.kind == "prefill":
            return 1
        return (load.kind == "batch" and self.batch_tokens) or self.max_tokens

    @property
    def loads(self) -> tuple[Load, ...]:
        """The loads of every engine."""
        prefill = [Load("prefill", self.prefill)] if self.prefill else []
        return (*(DECODE if n == 1 else Load("batch", n) for n in self.concurrency), *prefill)


@dataclass(frozen=True)
class Setting:
    """A peer in one dtype, mode and load, with one of its ``variants``.

    ``k`` is the draft length, 0 in the modes "plain" and "auto".
    """

    peer: str
    dtype: str
    mode: str
    load: Load
    k: int
    threads: int
    variant: str = ""

    @property
    def kind(self) -> str:
        """What is compared with its like: "plain", "auto", or "fixed" for a draft length."""
        return self.mode if self.k == 0 else "fixed"


@dataclass
class Trial:
    """A setting run once: an answer a prompt, under the load "batch" one for all."""

    load: Load
    answers: list[Answer]

    @property
    def speed(self) -> float:
        """Tokens/s, what is compared under that load.

        decode: (N-1)/(T(N)-T(1)) over all prompts; batch: the output of all requests over T(N);
        prefill: prompt tokens over T(1).
        """
        if self.load.kind == "batch":
            return self.end_to_end
        if self.load.kind == "prefill":
            return self.load.size / sum(a.seconds for a in self.answers)
        tokens = sum(len(ids) - 1 for ids in self.outputs)
        return tokens / max(sum(a.behind_first for a in self.answers), 1e-9)

    @property
    def end_to_end(self) -> float:
        return sum(map(len, self.outputs)) / sum(a.seconds for a in self.answers)

    @property
    def ttft(self) -> float | None:
        """T(1), s: the mean over prompts, or of all that start together; None: not measured."""
        firsts = [a.first for a in self.answers if a.first is not None]
        return sum(firsts) / len(firsts) if firsts else None

    @property
    def others(self) -> float:
        return max(a.others for a in self.answers)

    @property
    def outputs(self) -> list[list[int]]:
        return [ids for answer in self.answers for ids in answer.ids]
