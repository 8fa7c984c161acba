"""The types that packages share: requests, sequences, plans, drafts, verdicts, events.

Uses the standard library only, so that every package may import it. Types that are made for every
sequence or token of a step are no frozen dataclasses, which take three times as long to make.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

from ..errors import RequestError, shown
from ..params import SamplingParams as SamplingParams
from .limits import REQUEST, SPECULATION, TOKEN_ID, check_ids, check_numbers, refuse, wrong_ids
from .trees import depths, is_chain

K = TypeVar("K")
Folder = str | Path
"""The path of a checkpoint: a folder or a GGUF file."""


class Origin(StrEnum):
    """The origin of an emitted token."""

    ACCEPTED = "accepted"
    """A draft token that the target agreed with."""
    BONUS = "bonus"
    """The target's own token at the end of a verify step with a draft."""
    PLAIN = "plain"
    """The target's own token in a step without a draft."""


class Start(NamedTuple):
    """The time at which a sequence left the queue, and how many of its tokens were cached."""

    scheduled: float
    cached_tokens: int


class Detokenizing(Protocol):
    """The text of a sequence: its deltas, and the stop string that ends it."""

    writes: bool

    def push(self, token: int, may_stop: bool) -> tuple[str, bool]: ...
    def flush(self) -> str: ...
    @property
    def stopped_by(self) -> str | None: ...


class LogitsPipeline(Protocol):
    """A sequence's logits pipeline, see ``sampling.pipeline.SequencePipeline``."""

    @property
    def error(self) -> str | None: ...
    @property
    def native_handle(self) -> int: ...
    @property
    def has_grammar(self) -> bool: ...
    @property
    def penalises(self) -> bool: ...
    def masks(self, tokens: list[int], paths: Any) -> list[Any]: ...
    def apply(self, logits: Any, tokens: list[int], paths: list[list[int]]) -> Any: ...
    def fit(
        self, tokens: list[int], nodes: list[int], parents: list[int], length: int
    ) -> tuple[list[int], list[int]]: ...


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log probability of a token and its rank, 1 for the likeliest; names follow vLLM."""

    logprob: float
    rank: int
    decoded_token: str | None = None


Logprobs = dict[int, Logprob]
"""By token id: the sampled token first, then the likeliest in order."""


@dataclass(frozen=True)
class Speculation:
    """The drafting that one request wants; its output does not depend on it.

    ``drafter`` names one of the engine's, ``num_speculative_tokens`` is the longest draft, 0 or
    more; None takes the engine's. ``prediction`` are ids that the output is expected to resemble,
    for drafter "prediction".
    """

    enabled: bool = True
    drafter: str | None = None
    num_speculative_tokens: int | None = None
    prediction: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name, kind, remedy in (
            ("enabled", bool, "give True or False"),
            ("drafter", str | None, "give a drafter's name, or None"),
            ("prediction", list | tuple, TOKEN_ID.remedy),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind):
                refuse(self, name, value, remedy)
        check_numbers(self, SPECULATION)
        check_ids(self, "prediction", self.prediction)

    def length(self, most: int) -> int:
        """Return the longest draft, if the engine drafts at most ``most`` tokens."""
        if not self.enabled:
            return 0
        longest = self.num_speculative_tokens
        return most if longest is None else min(most, longest)


DEFAULT_SPECULATION = Speculation()
"""A request that leaves drafting to the engine."""


@dataclass(frozen=True)
class Request:
    """One prompt to continue, checked and with its seed, see ``InputProcessor.request``.

    Requests wait by ``priority``, lowest first, then by order of arrival. Only requests with the
    same ``cache_salt`` share cached prefixes. The output of an ``offline`` request is not read
    before its batch is done, so that it may wait for the prompts of others.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    eos_token_ids: frozenset[int] = frozenset()
    speculation: Speculation = DEFAULT_SPECULATION
    priority: int = 0
    cache_salt: str = ""
    offline: bool = False

    def __post_init__(self) -> None:
        check_numbers(self, REQUEST)

    @cached_property
    def end_token_ids(self) -> frozenset[int]:
        """Ids that end the output: EOS unless ignored, and the request's stop tokens."""
        eos = frozenset() if self.params.ignore_eos else self.eos_token_ids
        return eos | frozenset(self.params.stop_token_ids or ())


def check_vocabulary(
    name: str, ids: Collection[int], vocabulary: int, param: str | None = None
) -> None:
    """Refuse ids outside a vocabulary of that size; ``param`` is the option that has them."""
    if wrong := wrong_ids(ids, vocabulary):
        raise RequestError(
            f"{name} has token id {', '.join(map(shown, wrong))}, which is out of vocabulary: "
            f"the vocabulary ends at {vocabulary - 1} (it has {vocabulary}).", param,
        )  # fmt: skip


@dataclass
class Counts:
    """Counts of speculation, and their ratios.

    ``drafts`` counts verify steps with a non-empty draft, ``drafted`` adds up the depths of their
    drafts, ``outcomes`` counts drafts by (depth of the draft, accepted tokens).
    """

    steps: int = 0
    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    nodes: int = 0
    emitted: int = 0
    outcomes: dict[tuple[int, int], int] = field(default_factory=dict)

    def record(self, depth: int, nodes: int, accepted: int, emitted: int) -> None:
        """Count one decode step: a draft ``depth`` deep of ``nodes`` nodes, and its result."""
        self.steps += 1
        self.emitted += emitted
        if depth:
            self.drafts += 1
            self.drafted += depth
            self.accepted += accepted
            self.nodes += nodes
            outcome = depth, accepted
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + 1

    def add(self, other: Counts) -> None:
        """Add another's counts to these."""
        for name in ("steps", "drafts", "drafted", "accepted", "nodes", "emitted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for outcome, count in other.outcomes.items():
            self.outcomes[outcome] = self.outcomes.get(outcome, 0) + count

    @property
    def drafted_by_position(self) -> list[int]:
        """The number of drafts that reached depth i + 1."""
        return self._reached([depth for depth, _ in self.outcomes])

    @property
    def accepted_by_position(self) -> list[int]:
        """The number of drafts that were accepted down to depth i + 1."""
        return self._reached([accepted for _, accepted in self.outcomes])

    def _reached(self, ends: list[int]) -> list[int]:
        deepest = max((depth for depth, _ in self.outcomes), default=0)
        pairs = list(zip(ends, self.outcomes.values(), strict=True))
        return [sum(count for end, count in pairs if end > i) for i in range(deepest)]

    @property
    def acceptance_rate(self) -> float | None:
        """accepted / drafted; None when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def acceptance_length(self) -> float | None:
        """1 + accepted / drafts (vLLM's mean acceptance length); None without drafts."""
        return 1 + self.accepted / self.drafts if self.drafts else None

    @property
    def acceptance_by_position(self) -> list[float]:
        """Survival: the share of drafts that reached position i and were accepted up to there."""
        pairs = zip(self.accepted_by_position, self.drafted_by_position, strict=True)
        return [a / d for a, d in pairs]


@dataclass(eq=False)
class SequenceState:
    """One sample of one request while the engine works on it.

    ``tokens`` are committed tokens only: the prompt, then the output, at most ``limit`` of them
    (set by the scheduler). ``num_computed`` have keys and values in the cache, on ``pages``, an
    array that the native step takes as it is. ``keys`` are those of its full pages; other sequences
    can look up the first ``named``. ``states`` are the recurrent states after pages that others
    computed, until its first step. ``has_wishes`` is True if the request does not leave drafting to
    the engine. ``workload`` is equal for sequences that are expected to have similar acceptance.
    """

    id: str
    request: Request
    sample_index: int
    text: Detokenizing
    pipeline: LogitsPipeline = field(repr=False)  # gone when the sequence has ended
    tokens: list[int]
    num_computed: int = 0
    pages: array[int] = field(default_factory=lambda: array("i"))
    counts: Counts = field(default_factory=Counts)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    prompt_logprobs: list[Logprobs | None] = field(default_factory=list)
    prompt_length: int = field(init=False)
    has_wishes: bool = field(init=False)
    workload: str = field(init=False)
    limit: int = field(init=False, default=0)
    start: Start | None = field(init=False, default=None)
    keys: list[bytes] = field(init=False, default_factory=list)
    states: Any = field(init=False, default=None)
    named: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self.prompt_length = len(self.request.prompt_token_ids)
        self.has_wishes = self.request.speculation != DEFAULT_SPECULATION
        warmth = round(2 * min(self.request.params.temperature, 2))
        constrained = self.request.params.structured_outputs is not None
        kind = "constrained" if constrained else "free"
        self.workload = f"{kind} {warmth} {self.request.cache_salt}"

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_length


class DraftBudget(NamedTuple):
    """The limits of a draft: ``depth`` tokens deep, with at most ``nodes`` nodes.

    At each level up to ``width`` nodes are run, each with up to ``branches`` children. ``rates``
    (``native.rates.Rates``, None if unknown) give the probability that a node and all before it are
    accepted: below ``least`` no children are needed, and below ``worth`` the node may be left out.
    ``choices`` (``native.interface.Choices``, None for all) are the only nodes to draft, within the
    limits.
    """

    depth: int
    nodes: int
    width: int = 1
    branches: int = 1
    least: float = 0.0
    worth: float = 0.0
    rates: Any = None
    choices: Any = None


NO_DRAFT = DraftBudget(0, 0)


@dataclass(slots=True, eq=False)
class Scheduled:
    """A sequence's rows in one step: ``count`` committed tokens from ``start`` on.

    ``samples`` is true when the last of them is the sequence's last token, so that the step
    draws; ``drafter`` may draft within ``budget`` after it.
    """

    sequence: SequenceState
    start: int
    count: int
    samples: bool
    drafter: str
    budget: DraftBudget


class Row(NamedTuple):
    """The token that a row of logits decides: the key of its noise.

    ``position`` is the token's index in prompt + output, ``base`` how many tokens were committed
    when the step began; ``greedy`` rows draw no noise.
    """

    sequence_id: str
    seed: int
    sample_index: int
    position: int
    greedy: bool
    base: int


class DraftNodes(NamedTuple):
    """The nodes drafted for one sequence: a tree whose first nodes hang on its last token.

    ``parents[i]`` is the index of node i's parent, -1 for the root; parents come before their
    children, and nodes in a chain follow each other. The other columns are empty where unknown:
    ``margins`` tell how clearly a node was chosen (the gap of log q + g to the next candidate or,
    for drafter suffix, the log odds against siblings), ``survivals`` are the chances that a node
    and all before it are accepted, ``sources`` the drafters that proposed it. ``runs`` are the
    places after the committed tokens at which nodes have keys and values in the drafter's cache, -1
    for none. ``logits``, for the ratio rules, are the processed ones that nodes were drawn from,
    fp32 [nodes, vocabulary]; None if each node was certain.
    """

    tokens: list[int]
    parents: list[int]
    runs: Sequence[int] = ()
    margins: Sequence[float] = ()
    survivals: Sequence[float] = ()
    logits: Any = None
    sources: Sequence[str] = ()

    @staticmethod
    def chain(tokens: list[int]) -> DraftNodes:
        """Return a draft without branches: each node the child of the one before."""
        return DraftNodes(tokens, [*range(-1, len(tokens) - 1)])

    @property
    def depth(self) -> int:
        """The depth of the tree."""
        parents = self.parents
        return len(parents) if is_chain(parents) else max(depths(parents), default=0)


class Draft(list[DraftNodes]):
    """The drafts of the sequences of a step."""

    @staticmethod
    def chains(tokens: Iterable[list[int]]) -> Draft:
        """Return drafts without branches."""
        return Draft(map(DraftNodes.chain, tokens))


NO_NODES = DraftNodes([], [])
"""The draft of a sequence for which nothing is drafted."""


class Drafted(NamedTuple):
    """The draft of a sequence in one step, of which ``accepted`` tokens were emitted."""

    drafter: str
    tokens: list[int]
    depth: int
    accepted: int = 0

    def cut(self, depth: int) -> Drafted:
        """Return the draft cut to ``depth``; a tree keeps all nodes."""
        tokens = self.tokens[:depth] if len(self.tokens) == self.depth else self.tokens
        return Drafted(self.drafter, tokens, depth, min(self.accepted, depth))


class HiddenStates(NamedTuple):
    """The target's residual stream after the layers that drafters want, for the rows of a step.

    ``layers[l]`` is [rows, hidden_size] in the target's dtype; the rows of the batch's i-th
    sequence begin at ``first[i]``: its committed ones, then its nodes.
    """

    layers: Mapping[int, Any]
    first: list[int]


@dataclass(frozen=True)
class Verdict:
    """The acceptance rule's decision on a step, for each scheduled sequence.

    ``tokens`` are to be emitted (empty when the step draws nothing), ``path`` the accepted nodes
    from the root down, ``errors`` says why a sequence cannot go on. ``logprobs`` match the tokens
    if a request asked for them, else None.
    """

    tokens: list[list[int]]
    path: list[list[int]]
    errors: list[str | None]
    logprobs: list[list[Logprobs] | None] = field(default_factory=list)


class Event(NamedTuple):
    """One token of one sample, as it is emitted; ``token_id`` is None if an error ends it.

    ``text`` lags behind the tokens while a character or a stop string is incomplete. The engine
    writes it if the request has stop strings, else the frontend. ``drafted`` is in the first event
    of a sample in a step with a draft, ``start`` in the sample's first event. ``finish_reason``
    ("stop", "length", "error") ends the sample, with its ``counts``. ``stop_reason`` is the stop
    token or string, None for EOS. ``prompt_logprobs`` come with the first token of the first
    sample: None for the prompt's first token. The frontend fills in ``prompt_index``, the prompt's
    place in the call.
    """

    request_id: str
    sample_index: int
    token_id: int | None
    text: str
    origin: Origin
    finish_reason: str | None = None
    error: str | None = None
    counts: Counts | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: list[Logprobs | None] | None = None
    drafted: Drafted | None = None
    start: Start | None = None
    stop_reason: int | str | None = None
    prompt_index: int = 0


class Plan(NamedTuple):
    """One step: the sequences that run, and those whose pages were taken to make room.

    ``rows`` counts the committed rows of the batch, ``decoding`` its sequences whose only row is
    their last token's. Parts of the step record their ``seconds``.
    """

    batch: list[Scheduled]
    preempted: list[SequenceState]
    rows: int
    decoding: int
    seconds: StepSeconds


class StepSeconds:
    """The seconds of a step; its clock runs from when it is made until ``stop``.

    ``draft`` and ``verify`` are those of its parts, ``drafters`` those that each drafter took.
    ``experts`` is the mean number of experts read per layer; None without mixtures.
    """

    __slots__ = ("_begin", "draft", "drafters", "experts", "step", "verify")

    def __init__(self) -> None:
        self.step = self.draft = self.verify = 0.0
        self.drafters: dict[str, float] = {}
        self.experts: float | None = None
        self._begin = time.perf_counter()

    def stop(self) -> None:
        """Note the seconds since the step began."""
        self.step = time.perf_counter() - self._begin


class StepRecord(NamedTuple):
    """One step that was committed: what was planned, drafted, decided and emitted.

    ``states`` are the target's hidden states of the layers that drafters want, None if none are
    wanted. ``drafters`` are the names of those whose drafts were verified, ``ended`` the sequences
    that are done.
    """

    plan: Plan
    draft: Draft
    verdict: Verdict
    states: HiddenStates | None
    events: list[Event]
    ended: list[SequenceState]
    drafters: set[str]

    @property
    def seconds(self) -> StepSeconds:
        """The seconds that the step took."""
        return self.plan.seconds


SAMPLE = attrgetter("sample_index")


def grouped_by(events: Iterable[Event], key: Callable[[Event], K]) -> dict[K, list[Event]]:
    """Return events by a key, such as their request or their sample, in order."""
    groups: dict[K, list[Event]] = {}
    for event in events:
        groups.setdefault(key(event), []).append(event)
    return groups
