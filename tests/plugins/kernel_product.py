"""Compares the Triton kernel with torch, in an environment that has Triton."""

import torch

from outrider.plugins.common import draws, kernel

DEVICE = "cpu" if kernel.INTERPRETED else "cuda"


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for rows, size in ((1, 1), (3, 5), (7, 1024), (4, 1027), (5, 4099)):
        for scale in (0.0, 3.0):
            z = (torch.randn(rows, size, generator=generator) * scale).to(DEVICE)
            z[:, 1::2] = -torch.inf
            seeds = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(DEVICE)
            positions = torch.randint(0, 2**32, (rows,), generator=generator).to(DEVICE)
            some = (torch.rand(rows, generator=generator) < 0.5).to(DEVICE)
            for greedy in (None, some):
                got = kernel.draw(z, seeds, positions, greedy)
                z_cpu, mask = z.cpu(), None if greedy is None else greedy.cpu()
                expected = draws.draw(z_cpu, seeds.cpu(), positions.cpu(), mask)
                assert got.tolist() == expected.tolist(), (rows, size, scale)
    print("equal")


if __name__ == "__main__":
    main()
