"""A model of where a drafter runs on CPUs: with the target, on own cores, or on those and ahead.

Together, a step is K passes of the drafter and one verification, each on all cores. On its own
cores, a drafter that drafts ahead hides its passes behind the verification on the other cores, if
the whole draft and the guessed token after it are right.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from .catalogue import Device, Shape
from .roofline import Machine

TOGETHER, APART, AHEAD, SOCKET = "together", "own cores", "own cores, ahead", "own socket, ahead"
"""The names of placements."""
SATURATED = 0.5
"""Share of a socket's cores that suffices for its whole memory bandwidth: assumed."""
SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)
"""Shares of the cores that a drafter may get."""
LENGTHS = range(1, 9)


@dataclass(frozen=True)
class Cpus:
    """Sockets of one kind; of each, ``cores`` of ``all_cores`` are used."""

    device: Device
    all_cores: int
    cores: int
    sockets: int = 1

    def part(self, share: float) -> Device:
        """Return a share of one socket's used cores as a device."""
        of_socket = share * self.cores / self.all_cores
        flops = {name: each * of_socket for name, each in self.device.flops.items()}
        bandwidth = self.device.bandwidth * min(1.0, of_socket / SATURATED)
        return replace(self.device, flops=flops, bandwidth=bandwidth)


@dataclass(frozen=True)
class Placed:
    """A placement's best draft length, and its tokens per second over those of plain decoding.

    ``share`` is the share of a socket's used cores that the drafter has; 1 is a socket of its own.
    """

    name: str
    speedup: float
    k: int
    share: float | None = None


@dataclass(frozen=True)
class Pair:
    """A target and a drafter whose tokens each have the same chance of acceptance."""

    target: Shape
    drafter: Shape
    chance: float
    dtype: str
    context: float = 1024
    batch: int = 1

    def tokens(self, k: int) -> float:
        """Return the expected tokens of a step."""
        return sum(self.chance**i for i in range(k + 1))

    def forward(self, shape: Shape, machine: Machine, rows: int) -> float:
        """Return the seconds of a forward of ``rows`` rows of each sequence."""
        context = self.batch * self.context * machine.context(shape)
        return machine.forward(shape, self.batch * rows) + context

    def verify(self, machine: Machine, k: int) -> float:
        """Return the seconds in which the target verifies drafts."""
        return self.forward(self.target, machine, 1 + k)

    def drafting(self, machine: Machine) -> float:
        """Return the seconds of a drafter's pass."""
        return machine.device.draft_pass + self.forward(self.drafter, machine, 1)


def placements(pair: Pair, cpus: Cpus) -> list[Placed]:
    """Return the result of each placement on some CPUs, against plain decoding on all of them."""
    whole = Machine(cpus.part(1), cpus.sockets, pair.dtype)
    alone = replace(whole, count=1)
    machines = (whole, alone)
    host = cpus.device.step + cpus.device.per_sequence * pair.batch
    plain = host + min(pair.verify(machine, 0) for machine in machines)

    def best(name: str, share: float | None, seconds: dict[int, float]) -> Placed:
        k = max(seconds, key=lambda length: pair.tokens(length) / seconds[length])
        return Placed(name, pair.tokens(k) * plain / seconds[k], k, share)

    each = min(pair.drafting(machine) for machine in machines)
    together = {
        k: host + k * each + min(pair.verify(machine, k) for machine in machines) for k in LENGTHS
    }
    found = [best(TOGETHER, None, together)]
    for ahead in (False, True):
        name = AHEAD if ahead else APART
        split = [
            best(name, share, dict(_split(pair, cpus, share, ahead, host))) for share in SHARES
        ]
        found.append(max(split, key=lambda placed: placed.speedup))
    if cpus.sockets > 1:
        seconds = {k: _ahead(pair, k, pair.drafting(alone), pair.verify(alone, k)) for k in LENGTHS}
        found.append(best(SOCKET, 1.0, {k: host + s for k, s in seconds.items()}))
    return found


def _split(
    pair: Pair, cpus: Cpus, share: float, ahead: bool, host: float
) -> Iterator[tuple[int, float]]:
    """Yield draft length and seconds of a step, the drafter on ``share`` of each socket's cores."""
    rest, own = (Machine(cpus.part(each), cpus.sockets, pair.dtype) for each in (1 - share, share))
    each = pair.drafting(own)
    for k in LENGTHS:
        verify = pair.verify(rest, k)
        if not ahead:
            yield k, host + k * each + verify
            continue
        # Both models read from the same memory.
        read = (k + 1) * own.weights(pair.drafter) / Machine(cpus.part(1), cpus.sockets).bandwidth
        yield k, host + _ahead(pair, k, each, verify + read)


def _ahead(pair: Pair, k: int, each: float, verify: float) -> float:
    """Return the seconds of a step whose drafting a right guess hides behind verification.

    After a wrong guess, the running pass must end first: half a pass on average.
    """
    chance = pair.chance ** ((k + 1) * pair.batch)
    late = max(0.0, (k + 1) * each - verify)
    return verify + chance * late + (1 - chance) * (k + 0.5) * each
