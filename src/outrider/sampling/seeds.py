"""Seeds for requests without one."""

import secrets

from .philox import WORD, check, philox

SEED_STREAM = 2**32 - 1  # the stream of seeds; noise uses the lower ones


def request_seed(engine_seed: int, index: int) -> int:
    """Return the seed of the `index`-th request (from 0) of an engine with `engine_seed`.

    With Philox words r under key = engine seed (low word first) and counter = (index low word,
    index high word, 0, SEED_STREAM), it is r[0] + 2^32 * (r[1] mod 2^21), below 2^53. No noise
    has SEED_STREAM, so it never meets the shared noise of a request seeded like the engine.
    """
    check("engine seed", engine_seed, 64)
    check("request index", index, 64)
    counter = (index & WORD, index >> 32, 0, SEED_STREAM)
    low, high, *_ = philox(counter, (engine_seed & WORD, engine_seed >> 32))
    return int(low) | (int(high) & (2**21 - 1)) << 32


def fresh_seed() -> int:
    """Return a seed from the operating system in [0, 2^53), which JSON clients keep exactly."""
    return secrets.randbits(53)
