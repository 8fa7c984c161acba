"""The protocol of drafters: a specification that can be pickled, and the drafter it makes."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from tokenizers import Tokenizer

from ..base.config import EngineConfig
from ..base.methods import NONE
from ..base.types import Draft, DraftBudget, DraftNodes, Scheduled, SequenceState, StepRecord
from ..checkpoints.files import Files
from ..checkpoints.folders import find_folder
from ..models.base import Model, RowsModel, Store
from ..sampling.shared_noise import Noise


class Drafter(ABC):
    """Proposes tokens for the target to verify.

    A drafter keeps its own state per sequence id and catches up by itself: it may first see a
    sequence in the middle, and see it again after a preemption.
    """

    name: str
    """The name by which requests choose it."""
    max_length: int
    """The longest draft it can make."""
    max_nodes: int
    """The most nodes a draft can have: ``max_length`` for chains, more for trees."""
    target_layers: tuple[int, ...] = ()
    """Layers of the target whose hidden states it wants."""
    rows_at_once: int = 0
    """Rows per sequence of its model if one pass makes a whole draft, else 0."""
    repeats: bool = False
    """True if each pass of its model runs the rows of all earlier passes again."""
    share: float = 1.0
    """Share of a target forward's time that a pass takes, if the drafter runs the target."""
    ahead: int = 0
    """Tokens that it drafts after a draft while the target verifies; they need pages too."""
    ahead_share: float = 0.0
    """Share of its last drafts that was drafted ahead and took no time of the step."""
    catching_up: bool = False
    """True if its last drafts waited for, or took time for, the reading of unread tokens."""

    @property
    def model(self) -> RowsModel | None:
        """The model that it runs, if it runs one."""
        return None

    def attach(self, store: Store) -> None:
        """Receive the target's cache, once: for drafters that run the target itself."""
        return

    def measured(self, row: float) -> None:
        """Take in the cost of one more row of the target's forward, in forwards of one row."""
        return

    @abstractmethod
    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        """Draft within ``budgets[s]`` after the last token of each sequence, with target's noise.

        Sequences in the middle of their prompt have a depth of 0.
        """

    def peek(self, sequence: SequenceState, depth: int) -> DraftNodes | None:
        """Return a chain after one sequence if it costs next to nothing, else None.

        It is scored against the target's tokens, not verified, to learn what drafts would bring.
        """
        return None

    def prepare(self, sequences: Sequence[SequenceState], noise: Noise) -> bool:
        """Do work that drafts need, in every step, chosen or not; return True if it took time.

        All tokens of ``sequences`` except the last one are in the cache.
        """
        return False

    def ready(self, workload: str) -> bool:
        """Return whether it can draft for a workload; the engine chooses it only if it can."""
        return True

    def num_unread(self, sequence: SequenceState) -> int:
        """Return how many tokens of a sequence it must read before it can draft for it."""
        return 0

    def observe(self, record: StepRecord) -> None:
        """Take in a committed step of any drafter; its sequences have their new tokens.

        Its hidden states are those of all layers that any drafter wants.
        """
        return

    def release(self, seq_id: str, ended: bool) -> None:
        """Forget a sequence: it ``ended``, or it was preempted and will come again."""
        return


class ChainDrafter(Drafter):
    """Drafts a chain for each sequence by itself, up to ``max_length`` tokens."""

    def __init__(self, max_length: int) -> None:
        self.max_length = self.max_nodes = max_length
        self._states: dict[str, Any] = {}
        """The state that a drafter keeps of each sequence, by its id."""

    @abstractmethod
    def draft(self, sequence: SequenceState, length: int) -> list[int]:
        """Return up to ``length`` tokens (1 or more) that may follow a sequence."""

    def propose(
        self, batch: Sequence[Scheduled], budgets: Sequence[DraftBudget], noise: Noise
    ) -> Draft:
        return Draft.chains(
            self.draft(item.sequence, budget.depth) if budget.depth else []
            for item, budget in zip(batch, budgets, strict=True)
        )

    def peek(self, sequence: SequenceState, depth: int) -> DraftNodes | None:
        return DraftNodes.chain(self.draft(sequence, depth))

    def release(self, seq_id: str, ended: bool) -> None:
        self._states.pop(seq_id, None)


@dataclass(frozen=True)
class Needs:
    """The needs of a drafter, by which the engine sizes memory."""

    page_bytes: int = 0
    """Bytes of its cache or index for each page of the target's."""
    fixed_bytes: int = 0
    max_nodes: int = 0
    """Most nodes of a draft, 0 for chains."""
    target_layers: tuple[int, ...] = ()
    """Layers whose hidden states it wants."""
    loaded: Any = None
    """Passed on to ``make`` unchanged."""
    scratch_pages: int = 0
    """Pages of the target's cache, after its pool, for use within a call of the drafter."""
    weight_bytes: int = 0
    """Bytes of weights that it does not share with the target."""
    state_bytes: int = 0
    """Bytes of its layers' states for each sequence."""
    note: str = ""
    """Shown about the drafter at start."""


def memory_of(needs: Needs) -> str:
    """Return the memory that a drafter takes, in words."""
    parts = (
        (needs.weight_bytes, "of weights"),
        (needs.page_bytes, "a page"),
        (needs.state_bytes, "a sequence"),
        (needs.fixed_bytes, "once"),
    )
    return ", ".join(f"{_bytes(count)} {what}" for count, what in parts if count) or "none"


def _bytes(count: int) -> str:
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"


@dataclass(frozen=True)
class DrafterContext:
    """The parts that a drafter is made from.

    Args:
        model: the target.
        tokenizes: returns the target's tokenizer; None for a model without text.
        config: limits of the engine.
        max_model_len: longest sequence, in tokens.
        needs_logits: drafts must carry the distributions that they were drawn from.
        num_pages: of the target's pool, after which scratch pages begin; 0 in a call of ``needs``.
        needs: what ``DrafterSpec.needs`` returned.
    """

    model: Model
    tokenizes: Callable[[], Tokenizer] | None
    config: EngineConfig
    max_model_len: int
    needs_logits: bool = False
    num_pages: int = 0
    needs: Needs = Needs()

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The target's tokenizer, built at the first access; None for a model without text."""
        return None if self.tokenizes is None else self.tokenizes()


class DrafterSpec(ABC):
    """A user's choice of drafter: small, picklable, made before anything is loaded.

    Specifications are registered under the entry-point group ``outrider.drafters``.
    """

    name: ClassVar[str]
    """The name by which requests choose the drafter."""
    wants: ClassVar[str] = ""
    """Its needs, in a line for ``outrider drafters``."""
    costs: ClassVar[str] = ""
    """The cost of a draft, in a few words."""
    suits: ClassVar[str] = ""
    """The texts that it suits, in a line."""
    options: ClassVar[str] = ""
    """The form of its options, in a line; empty where it has none."""
    prior: ClassVar[float] = 0.5
    """P(accept) of a token that it drafts, before anything is seen."""
    kind: ClassVar[str] = "checkpoint"
    """The word for its checkpoint."""
    proposes: ClassVar[str] = ""
    """Its kind and its proposal, for ``outrider explain``; ``{k}`` stands for the tokens."""
    by_folder: ClassVar[bool] = False
    """True if a checkpoint's folder chooses it; its name then means the folder beside the
    target."""
    retokenizes: ClassVar[bool] = False
    """True if its checkpoint has a tokenizer of its own."""
    auto: bool = False
    """True if it stands for whatever drafters are available, perhaps none."""
    members: tuple["DrafterSpec", ...] = ()
    """The drafters that it is made of; none for a single one."""
    placed: ClassVar[bool] = False
    """True if its model's passes run on the CPUs that ``EngineConfig.drafter_cpus`` names."""
    folder: Path | None = None
    """Its checkpoint, whose tokenizer must be the target's unless it ``retokenizes``."""

    @cached_property
    def files(self) -> Files:
        """The files of its checkpoint, each of which is read once."""
        assert self.folder is not None
        return Files(self.folder)

    @classmethod
    def recognise(cls, option: str | Path) -> Self | None:
        """Return the drafter that ``LLM(drafter=option)`` means, None if it means another one.

        By default the option must be the drafter's name.
        """
        return cls() if option == cls.name else None

    def needs(self, context: DrafterContext) -> Needs:
        """Return what the drafter needs from the engine; loads what it must to know that.

        Raises ModelError or ConfigError if it cannot draft for this target.
        """
        return Needs()

    @abstractmethod
    def make(self, context: DrafterContext) -> Drafter:
        """Return the drafter of one engine."""


@dataclass(frozen=True)
class FolderSpec(DrafterSpec):
    """A drafter that a checkpoint's folder chooses."""

    by_folder = True
    folder: Path

    @classmethod
    def of(cls, files: Files) -> Self | None:
        """Return the drafter of a checkpoint that may be opened already; None if it is another's.

        Raises ModelError if the checkpoint is damaged.
        """
        spec = cls(files.folder)
        vars(spec)["files"] = files  # the cached property
        return spec


def checkpoint_files(option: str | Path) -> Files | None:
    """Return the files of the checkpoint that an option names, None for a bare word."""
    if isinstance(option, str) and "/" not in option and not Path(option).exists():
        return None
    return Files(find_folder(option))


@dataclass(frozen=True)
class NoSpec(DrafterSpec):
    """Plain decoding."""

    name = NONE
    wants = "nothing"
    costs = "nothing"
    suits = "batches so large that every row costs time, and comparisons"

    def make(self, context: DrafterContext) -> Drafter:
        return NoDrafter(0)


class NoDrafter(ChainDrafter):
    """Drafts nothing: plain decoding on the same path."""

    name = NONE

    def draft(self, sequence: SequenceState, length: int) -> list[int]:
        return []
