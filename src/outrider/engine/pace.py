"""What steps cost here, measured as they run: how long a chunk may be, what drafts bring.

Nothing of it touches the output: a row's bits do not depend on the chunk that it came in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

SMOOTHING = 0.1
"""Weight of the newest measurement."""
FEWEST_ROWS = 16
"""A chunk is never shorter, so that prompts get on."""
COUNTED_ROWS = 32
"""Steps of fewer committed rows tell nothing of what a prompt's row costs."""
STALL_SECONDS, STALL_STEPS = 0.02, 2.0
"""How long running streams may wait for a chunk: the longer of the two."""
PROBED = 256
"""Steps with drafts until one without measures again what plain decoding would take."""


def smoothed(before: float | None, value: float) -> float:
    """The running mean."""
    return value if before is None else before + SMOOTHING * (value - before)


@dataclass
class Pace:
    """How many committed rows a step may have while others decode. Times in seconds."""

    per_row: float | None = None
    decode: float | None = None

    def observe(self, rows: int, decoding: int, seconds: float) -> None:
        """Note a step of ``rows`` committed rows, ``decoding`` of them of streams that run."""
        if rows == decoding:
            self.decode = smoothed(self.decode, seconds)
        elif rows - decoding >= COUNTED_ROWS:
            self.per_row = smoothed(self.per_row, seconds / rows)

    def chunk(self, most: int) -> int:
        """Rows of prompts that may go beside running streams, ``most`` while nothing is known."""
        if self.per_row is None:
            return most
        allowed = max(STALL_SECONDS, STALL_STEPS * (self.decode or 0.0))
        return min(most, max(FEWEST_ROWS, int(allowed / self.per_row)))


@dataclass
class Gain:
    """What drafts bring, by drafter: emitted tokens times a plain step's time over the time taken.

    A plain step's time depends on how many sequences decode together, so it is kept for each
    number; steps without drafts measure it, one in ``PROBED`` on purpose.
    """

    speedups: dict[str, float] = field(default_factory=dict)
    _plain: dict[int, float] = field(default_factory=dict)
    _since: dict[int, int] = field(default_factory=dict)

    def due(self, decoding: int) -> bool:
        """Whether the next step of so many sequences should go without drafts."""
        return decoding not in self._plain or self._since.get(decoding, 0) >= PROBED

    def plain(self, decoding: int, seconds: float) -> None:
        """Note a step without drafts."""
        self._plain[decoding] = smoothed(self._plain.get(decoding), seconds)
        self._since[decoding] = 0

    def drafted(self, drafter: str, decoding: int, emitted: int, seconds: float) -> None:
        """Note a step with drafts of one drafter that emitted so many tokens."""
        self._since[decoding] = self._since.get(decoding, 0) + 1
        plain = self._plain.get(decoding)
        if plain is not None:
            gain = emitted / decoding * plain / seconds
            self.speedups[drafter] = smoothed(self.speedups.get(drafter), gain)
