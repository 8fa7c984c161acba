"""How many pages of cache the memory pays for."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import DEFAULT_SHARE, EngineConfig, free_memory, parse_memory
from ..errors import MemoryBudgetError
from ..limits import LARGEST_INT


@dataclass(frozen=True)
class Budget:
    """What the cache was given: told at start."""

    pages: int
    page_size: int
    sequences: int
    target_bytes: int
    drafter_bytes: int

    @property
    def tokens(self) -> int:
        """Tokens that the cache holds at once."""
        return (self.pages - 1) * self.page_size

    def __str__(self) -> str:
        total = self.target_bytes + self.drafter_bytes
        share = self.drafter_bytes / total
        return (
            f"cache: {self.pages - 1} pages of {self.page_size} tokens = {self.tokens} tokens, "
            f"up to {self.sequences} sequences at once, {total / 2**20:.0f} MiB "
            f"({share:.0%} of it the drafter's)"
        )


def plan_budget(
    config: EngineConfig,
    max_length: int,
    target_bytes: int,
    drafter_bytes: int,
    fixed_bytes: int = 0,
) -> Budget:
    """How many pages ``config.memory`` pays for; a page costs target and drafter together.

    Without ``memory``: what ``max_num_seqs`` sequences of full length need, at most half of the
    free memory.

    Raises:
        MemoryBudgetError: not even one sequence of a page fits.
    """
    size = config.page_size
    per_sequence = -(-(max_length + config.num_speculative_tokens) // size)
    most = LARGEST_INT // size  # slots are numbered in int32
    wanted = min(per_sequence * config.max_num_seqs + 1, most)
    each = target_bytes + drafter_bytes
    given = parse_memory(config.memory)
    if given is None:
        given = min(wanted * each, int(free_memory() * DEFAULT_SHARE))
    pages = min(given // each, wanted)
    if pages < 3:
        raise MemoryBudgetError(
            f"memory of {given} bytes holds {given // each} cache pages of {each} bytes, but 3 are "
            f"the least; give {3 * each} bytes or more ({wanted * each} serve every request)."
        )
    free = free_memory() - fixed_bytes
    if pages * each > free:
        raise MemoryBudgetError(
            f"memory asks for {pages * each} bytes of cache, but only {free} are free; give less."
        )
    return Budget(pages, size, config.max_num_seqs, pages * target_bytes, pages * drafter_bytes)
