"""Noise, kernel and rule on a device, beside the CPU's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.benchmark import Timer

from outrider.plugins.common import draws
from outrider.plugins.common.gumbel import gumbel_of_tensors
from outrider.sampling.noise import gumbel, gumbel_of_words, quarters_of, words, words_at

from .checks import Part, Skipped

Draw = Callable[
    [torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor
]  # as ``draws.draw``
SEEDS = (0, 1, 2**32, 2**53 - 1, 2**63, 2**64 - 1)
POSITIONS = (0, 1, 7, 2**20, 2**31, 2**32 - 1)
VOCABULARIES = {"cuda": (1, 5, 1003, 32_000, 151_936), "cpu": (1, 5, 1003)}
RANDOM_WORDS = {"cuda": 1 << 24, "cpu": 1 << 16}
SHAPES = {
    "cuda": ((1, 1), (3, 5), (7, 1024), (4, 1027), (5, 4099), (1, 128_256), (40, 151_936)),
    "cpu": ((1, 1), (3, 5), (2, 1027)),
}
"""Rows and vocabulary of draws."""
REQUESTS = {"cuda": (1, 8, 32), "cpu": (1, 2)}
RULE_VOCABULARIES = {"cuda": (32_000, 128_256, 151_936), "cpu": (301,)}
DRAFTED = 4
TIMED_SECONDS = {"cuda": 0.2, "cpu": 0.01}


def compared(
    name: str, got: NDArray[Any], expected: NDArray[Any], figures: dict[str, Any] | None = None
) -> Part:
    """Return the part that compares numbers of the device with the CPU's, bit by bit."""
    found = {"compared": expected.size, **(figures or {})}
    if got.shape != expected.shape or got.dtype != expected.dtype or not expected.size:
        why = f"{got.dtype} {got.shape} cannot be compared with {expected.dtype} {expected.shape}"
        return Part(name, found, why)
    bits = np.dtype(f"i{expected.itemsize}")
    apart = np.flatnonzero(got.reshape(-1).view(bits) != expected.reshape(-1).view(bits))
    if not len(apart):
        return Part(name, found)
    first = apart[0]
    wrong = (
        f"{len(apart)} of {expected.size} differ, first number {first}: "
        f"{got.flat[first]} and not {expected.flat[first]}"
    )
    return Part(name, found, wrong)


def _corners() -> NDArray[np.int64]:
    """Return the words where the noise changes its pieces, and their neighbours."""
    powers = [2**n + d for n in range(33) for d in range(-3, 4)]
    ends = [*range(4096), *range(2**32 - 4096, 2**32)]
    return np.array(sorted({word for word in (*powers, *ends) if 0 <= word < 2**32}), np.int64)


def noise(device: str) -> Iterator[Part]:
    """Yield whether Philox's words and the noise made of them have the CPU's bits."""
    drawn = np.random.default_rng(0).integers(0, 2**32, RANDOM_WORDS[device], np.int64)
    for name, numbers in (("corner words", _corners()), ("random words", drawn)):
        got = gumbel_of_words(torch.from_numpy(numbers).to(device), torch)
        yield compared(name, got.cpu().numpy(), gumbel_of_words(numbers))
    pairs = list(product(SEEDS, POSITIONS))
    seeds, positions = [seed for seed, _ in pairs], [position for _, position in pairs]
    zeros = [0] * len(pairs)
    columns = (positions, zeros, zeros, [s % 2**32 for s in seeds], [s >> 32 for s in seeds])
    rows = torch.tensor(columns, dtype=torch.int64, device=device).T.contiguous()
    signed = torch.tensor([draws.signed(seed) for seed in seeds], device=device)
    where = torch.tensor(positions, device=device)
    for size in VOCABULARIES[device]:
        quarters = torch.arange(quarters_of(size), device=device)[None]
        room = torch.empty((len(rows), quarters.shape[1], 4), dtype=torch.int64, device=device)
        made = words_at(rows, quarters, room)[:, :size].cpu().numpy()
        expected = words(seeds, zeros, positions, size).astype(np.int64)
        yield compared(f"Philox, {size} ids", made, expected)
        g = gumbel_of_tensors(signed, where, size).cpu().numpy()
        yield compared(f"noise, {size} ids", g, gumbel(seeds, zeros, positions, size))


def microseconds(call: Callable[[], object], device: str) -> float:
    """Return the median time of a call, the device's work included."""
    timer = Timer("call()", globals={"call": call})
    return round(timer.blocked_autorange(min_run_time=TIMED_SECONDS[device]).median * 1e6, 1)


def triton_draw(device: str) -> Draw:
    """Return the kernel's draw on the device; it is interpreted on a CPU."""
    if find_spec("triton") is None:
        raise Skipped("Triton is not installed; run: pip install triton")
    from outrider.plugins.common import kernel  # imports Triton

    if device == "cpu" and not kernel.INTERPRETED:
        raise Skipped("Triton compiles for GPUs only; set TRITON_INTERPRET=1")
    return kernel.draw


def torch_draw(
    z: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor, greedy: torch.Tensor | None
) -> torch.Tensor:
    """Return the draw by torch's operations, which the kernel takes the place of."""
    g = gumbel_of_tensors(seeds, positions, z.shape[1])
    return (z + (g if greedy is None else g.masked_fill_(greedy[:, None], 0))).argmax(-1)


Drawn = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def _asked(rows: int, size: int, scale: float, device: str) -> Drawn:
    """Return logits [rows, size], half of them masked where there is a choice, seeds, positions."""
    generator = torch.Generator().manual_seed(rows * size)
    z = torch.randn(rows, size, generator=generator) * scale
    z[:, 1::2] = -torch.inf
    seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
    positions = torch.randint(0, 2**32, (rows,), generator=generator)
    return z.to(device), seeds.to(device), positions.to(device)


def kernel(device: str) -> Iterator[Part]:
    """Yield whether the Triton kernel draws the CPU's tokens, and its time beside torch's."""
    draw = triton_draw(device)
    for rows, size in SHAPES[device]:
        got, expected = list[torch.Tensor](), list[torch.Tensor]()
        some = torch.arange(rows, device=device) % 2 == 0
        for scale, greedy in product((0.0, 3.0), (None, some)):
            asked = _asked(rows, size, scale, device)
            got.append(draw(*asked, greedy).cpu())
            expected.append(_on_cpu(asked, greedy))
        asked = _asked(rows, size, 3.0, device)
        took = {
            "kernel_us": microseconds(partial(draw, *asked, None), device),
            "torch_us": microseconds(partial(torch_draw, *asked, None), device),
        }
        yield compared(
            f"{rows} rows of {size} ids", torch.cat(got).numpy(), torch.cat(expected).numpy(), took
        )


def _on_cpu(asked: Drawn, greedy: torch.Tensor | None) -> torch.Tensor:
    """Return the tokens that the CPU draws of the same."""
    z, seeds, positions = (each.cpu() for each in asked)
    return draws.draw(z, seeds, positions, None if greedy is None else greedy.cpu())


def _accepted(
    asked: Drawn, drafts: torch.Tensor, counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what the rule makes of drafts [requests, K]: see ``draws.follow``."""
    return draws.follow(draws.draw(*asked, None).view(len(drafts), -1), drafts, counts)


def rule(device: str) -> Iterator[Part]:
    """Yield what drawing and accepting cost, beside an argmax and torch's own sampling."""
    if device != "cpu":
        triton_draw(device)
    for requests, size in product(REQUESTS[device], RULE_VOCABULARIES[device]):
        rows = requests * (1 + DRAFTED)
        asked = _asked(rows, size, 3.0, device)
        on_cpu = _on_cpu(asked, None).view(requests, -1)
        drafts, counts = on_cpu[:, :-1].clone(), torch.full((requests,), DRAFTED)
        drafts[:, DRAFTED // 2] += 1  # refused there, in every request
        expected, _ = draws.follow(on_cpu, drafts, counts)
        ours = partial(_accepted, asked, drafts.to(device), counts.to(device))
        z = asked[0]
        took = {
            "rows": rows,
            "rule_us": microseconds(ours, device),
            "argmax_us": microseconds(partial(z.argmax, -1), device),
            "multinomial_us": microseconds(partial(_sampled, z), device),
        }
        name = f"{requests} requests, K = {DRAFTED}, {size} ids"
        yield compared(name, ours()[0].cpu().numpy(), expected.numpy(), took)


def _sampled(z: torch.Tensor) -> torch.Tensor:
    """Return a sample of each row as torch draws it, without our noise."""
    return z.softmax(-1).multinomial(1)
