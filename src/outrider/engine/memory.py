"""Sizes the cache: pages for target and drafters, beside the memory that a step needs."""

from collections.abc import Collection
from dataclasses import dataclass, replace

from ..base.config import DEFAULT_SHARE, USUAL_LENGTH, EngineConfig, free_memory, parse_memory
from ..base.limits import LARGEST_INT
from ..checkpoints.architecture import Architecture, Shape
from ..drafters.base import Needs
from ..errors import MemoryBudgetError
from ..models.base import Model
from ..models.native_store import HIDDEN_ROWS

BATCHED = "max_num_batched_tokens"
STATES_SHARE = 0.25
"""Share of the free memory for sequences' states; it limits how many sequences run at once."""
SNAPSHOTS = 16
"""Most snapshots of sequences' states that the prefix cache has room for."""
LEAST_PAGES = 3  # pages that a cache must have


@dataclass(frozen=True)
class Budget:
    """The pages of the cache and their bytes, shown at start; ``scratch`` pages are extra.

    ``state_bytes`` are for all sequences' states beside their pages, ``snapshot_bytes`` for states
    in the prefix cache. ``added`` has a text on each drafter with weights of its own.
    """

    pages: int
    page_size: int
    sequences: int
    target_bytes: int
    drafter_bytes: int
    scratch: int = 0
    state_bytes: int = 0
    snapshot_bytes: int = 0
    added: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds at once."""
        return (self.pages - 1) * self.page_size

    def __str__(self) -> str:
        total = self.target_bytes + self.drafter_bytes
        share = self.drafter_bytes / total
        cache = (
            f"cache: {self.pages - 1} pages of {self.page_size} tokens = {self.tokens} tokens, "
            f"up to {self.sequences} sequences at once, {total / 2**20:.0f} MiB "
            f"once it is full ({share:.0%} of it for drafters); option memory sets its size"
        )
        states = (
            f"states of layers that are no attention: {self.state_bytes / 2**20:.0f} MiB, "
            f"and up to {self.snapshot_bytes / 2**20:.0f} MiB for the prefix cache"
        )
        return "; ".join((cache, *([states] if self.state_bytes else []), *self.added))


def most_nodes(config: EngineConfig, needs: Collection[Needs], together: int = 1) -> int:
    """Return the most nodes of a draft that merges up to ``together`` drafters."""
    most = config.max_draft_length * together
    return max([most, *(each.max_nodes for each in needs)])


def usual_pages(
    config: EngineConfig, max_length: int, needs: Collection[Needs], together: int = 1
) -> int:
    """Return the pages of a cache of default size, with room for drafts.

    It holds ``max_num_seqs`` sequences of ``USUAL_LENGTH``, or one of full length if that is more.
    """
    nodes, size = most_nodes(config, needs, together), config.page_size
    usual = -(-(min(max_length, USUAL_LENGTH) + nodes) // size)
    most = max(-(-(max_length + nodes) // size), usual * config.max_num_seqs)
    return max(LEAST_PAGES, most + 1)


def working_bytes(
    config: EngineConfig,
    vocab_size: int,
    hidden_size: int,
    needs: Collection[Needs],
    together: int = 1,
    per_row: int = 0,
) -> int:
    """Return the most bytes of a step's logits and hidden states, plus ``per_row`` for each row.

    Decoding sequences have a row of logits for their last token and for each draft node, twice
    where raw ones are kept for log probabilities. A prompt whose log probabilities are wanted has
    one for each of its tokens.
    """
    layers = {layer for each in needs for layer in each.target_layers}
    decoding = config.max_num_seqs * (1 + most_nodes(config, needs, together))
    rows = decoding + config.max_num_batched_tokens
    numbers = (rows + decoding) * vocab_size
    return 4 * (numbers + (rows + HIDDEN_ROWS) * len(layers) * hidden_size) + rows * per_row


def seat_bytes(shape: Shape) -> int:
    """Return the bytes of a row's activations in its experts; 0 without a mixture.

    Per expert: input, output and inner values in fp32; input and inner values again as digits.
    """
    if not isinstance(shape, Architecture) or shape.mixture is None:
        return 0
    mixture = shape.mixture
    return mixture.top * 4 * (3 * shape.hidden_size + 2 * mixture.width)


def _smaller_choice(
    config: EngineConfig, model: Model, needs: Collection[Needs], together: int, room: int
) -> str:
    """Return advice on smaller options with which a step fits in ``room`` bytes."""
    sizes, seats = (model.shape.vocab_size, model.hidden_size), seat_bytes(model.shape)
    sequences, rows = config.max_num_seqs, config.max_num_batched_tokens
    while sequences > 1 or rows > 1:
        sequences, rows = max(1, sequences // 2), rows if sequences > 1 else rows // 2
        smaller = replace(config, max_num_seqs=sequences, max_num_batched_tokens=rows)
        if working_bytes(smaller, *sizes, needs, together, seats) <= room:
            fewer = "" if rows == config.max_num_batched_tokens else f" and {BATCHED}={rows}"
            return f"max_num_seqs={sequences}{fewer} would fit."
    return "free memory, or take a model with a smaller vocabulary."


def _plan_states(
    config: EngineConfig, model: Model, needs: Collection[Needs], nodes: int, available: int
) -> tuple[int, int, int]:
    """Return how many sequences run at once, the bytes of their states, and of snapshots."""
    each = model.state_bytes(nodes) + sum(need.state_bytes for need in needs)
    room = int(STATES_SHARE * available)
    if not each:
        return config.max_num_seqs, 0, 0
    sequences = max(1, min(config.max_num_seqs, room // each))
    kept = min(SNAPSHOTS * model.kept_state_bytes, room // 2)
    return sequences, sequences * each, kept if config.enable_prefix_caching else 0


def plan_budget(
    config: EngineConfig,
    max_length: int,
    model: Model,
    needs: Collection[Needs],
    together: int = 1,
    freed: int = 0,
) -> Budget:
    """Return the pages that ``config.memory`` has room for; target and drafters share page ids.

    They are at most those of ``max_num_seqs`` sequences of full length with drafts. Without
    ``config.memory`` it is ``usual_pages``, in at most half of the memory left after fixed needs.
    ``freed`` bytes count as free too. Raises MemoryBudgetError if fewer than ``LEAST_PAGES`` fit,
    or ``config.memory`` is more than what is free.
    """
    size = config.page_size
    per_sequence = -(-(max_length + most_nodes(config, needs, together)) // size)
    scratch = max((each.scratch_pages for each in needs), default=0)  # drafters take turns
    most = LARGEST_INT // size - scratch  # slots are numbered in int32
    wanted = min(max(LEAST_PAGES, per_sequence * config.max_num_seqs + 1), most)
    target_bytes = model.page_bytes(size)
    drafter_bytes = sum(each.page_bytes for each in needs)
    each = target_bytes + drafter_bytes
    once = scratch * target_bytes + sum(each.fixed_bytes for each in needs)  # of drafters
    available = free_memory() + freed
    nodes = most_nodes(config, needs, together)
    sequences, states, snapshots = _plan_states(config, model, needs, nodes, available)
    once += states + snapshots
    sizes = model.shape.vocab_size, model.hidden_size
    working = working_bytes(config, *sizes, needs, together, seat_bytes(model.shape))
    fixed = working + once
    free = max(0, available - fixed)
    given = parse_memory(config.memory)
    if given is None:
        least = int(LEAST_PAGES * each / DEFAULT_SHARE)
        if free < least:
            raise MemoryBudgetError(
                f"{fixed} bytes for logits and drafters and {least} for a cache are the least that "
                f"is needed, and {fixed + least - available} of them are missing; "
                f"{_smaller_choice(config, model, needs, together, available - least - once)}"
            )
        usual = usual_pages(config, max_length, needs, together)
        given = min(usual * each, int(free * DEFAULT_SHARE))
    pages = min(given // each, wanted)
    if pages < LEAST_PAGES:
        raise MemoryBudgetError(
            f"memory of {given} bytes holds {given // each} cache pages of {each} bytes, but "
            f"{LEAST_PAGES} are the least; give {LEAST_PAGES * each} bytes or more "
            f"({wanted * each} serve every request)."
        )
    if pages * each > free:
        room = available - LEAST_PAGES * each - once
        raise MemoryBudgetError(
            f"memory asks for {pages * each} bytes of cache, but only {free} are free beside "
            f"{fixed} for logits and drafters: {pages * each - free} are missing; "
            + (
                f"memory={free // each * each} would fit."
                if free >= LEAST_PAGES * each
                else _smaller_choice(config, model, needs, together, room)
            )
        )
    own = pages * drafter_bytes
    return Budget(*(pages, size, sequences, pages * target_bytes, own, scratch), states, snapshots)
