"""Measures what steps cost as they run: the length of prompt chunks, the speedup of drafts.

None of it changes the output: a row's bits do not depend on its chunk.
"""

from collections.abc import Set
from dataclasses import dataclass, field

SMOOTHING = 0.1
"""Weight of the newest measurement."""
FEWEST_ROWS = 16
"""Fewest rows of a chunk, so that prompts make progress."""
COUNTED_ROWS = 32
"""Fewest committed rows of a step that counts for the cost of a prompt's row."""
STALL_SECONDS, STALL_STEPS = 0.02, 2.0
"""Longest wait of running streams for a chunk: the longer of the two."""
FIRST_PROBE, PROBE_STEPS = 64, 256
"""Steps with drafts before the first step that measures plain decoding, and before the next."""


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)


@dataclass
class StepCosts:
    """Running means over the steps of one engine.

    ``speedups`` holds by drafter how much faster than plain its steps emit: emitted tokens times
    the seconds of a plain step over the seconds taken. A plain step's time depends on how many
    sequences decode together, so it is kept for each number.
    """

    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    speedups: dict[str, float] = field(default_factory=dict)
    seconds_per_row: float | None = None
    decode_seconds: float | None = None
    _plain: dict[int, float] = field(default_factory=dict)
    _since_probe: dict[int, int] = field(default_factory=dict)

    def max_chunk(self, most: int) -> int:
        """Return the rows of prompts that may run beside streams, ``most`` if not measured yet."""
        if self.seconds_per_row is None:
            return most
        allowed = max(STALL_SECONDS, STALL_STEPS * (self.decode_seconds or 0.0))
        return min(most, max(FEWEST_ROWS, int(allowed / self.seconds_per_row)))

    def probe_due(self, decoding: int) -> bool:
        """Return True if the next step of so many sequences should go without drafts."""
        due = PROBE_STEPS if decoding in self._plain else FIRST_PROBE
        return self._since_probe.get(decoding, 0) >= due

    def observe(
        self,
        rows: int,
        decoding: int,
        emitted: int,
        drafters: Set[str],
        seconds: float,
        draft_seconds: float,
        verify_seconds: float,
    ) -> None:
        """Take in one step.

        Args:
            rows: committed rows.
            decoding: sequences that decode.
            emitted: emitted tokens.
            drafters: who drafted.
            seconds: the whole step's.
            draft_seconds, verify_seconds: the shares of drafting and verifying.
        """
        self.draft_seconds += draft_seconds
        self.verify_seconds += verify_seconds
        if rows != decoding:
            if rows - decoding >= COUNTED_ROWS:
                self.seconds_per_row = _smoothed(self.seconds_per_row, seconds / rows)
            return
        self.decode_seconds = _smoothed(self.decode_seconds, seconds)
        if not drafters:
            self._plain[decoding] = _smoothed(self._plain.get(decoding), seconds)
            self._since_probe[decoding] = 0
        elif len(drafters) == 1:
            (drafter,) = drafters
            self._since_probe[decoding] = self._since_probe.get(decoding, 0) + 1
            plain = self._plain.get(decoding)
            if plain is not None:
                speedup = emitted / decoding * plain / seconds
                self.speedups[drafter] = _smoothed(self.speedups.get(drafter), speedup)
