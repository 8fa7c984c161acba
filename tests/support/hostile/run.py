"""Runs hostile cases of readers in a process of its own, under limits of time and memory.

    python -m tests.support.hostile.run FOLDER SEED NAME=COUNT...

prints a line of JSON when a reader begins, one for each fault, and one when a reader has ended. A
case that hangs ends the process with the traceback of where it hangs.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import logging
import os
import resource
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings

from outrider.errors import OutriderError
from tests.support.hostile import calls as hostile_calls  # noqa: F401 - enters readers in the table
from tests.support.hostile import documents as hostile_documents  # noqa: F401
from tests.support.hostile import guard as hostile_guard  # noqa: F401
from tests.support.hostile.readers import READERS, misprint

SPARE = 1 << 30
"""Bytes of address space beyond those of a process that has loaded all readers."""
SECONDS = 4.0
"""CPU time of a case at most, on a machine that does other things as well."""
HANGS = 60.0
"""Seconds after which a case hangs."""
STACK = 1000
"""Calls inside each other, as Python has it by default; hypothesis allows itself more."""
HEAVY = ("model:", "drafter:", "deploy: facts", "quantisation", "grammar:")
"""Readers that need torch or transformers, which take longer to load than a fast test may."""
OUT = 100
"""The descriptor of what is found: libraries print what they like to the usual one."""
MOST_FAULTS = 20
"""Of one reader that are printed."""


def outcome(call: Callable[[Any], object], case: Any) -> str:
    """Return "value", "refused", or the fault of a call."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack(0)) + STACK)
    began = time.process_time()
    try:
        call(case)
        said = "value"
    except OutriderError as error:
        wrong = misprint(str(error))
        said = f"{type(error).__name__} {wrong}" if wrong else "refused"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        frames = traceback.extract_tb(error.__traceback__)
        where = [f for f in frames if "/outrider/" in f.filename][-1:] or frames[-1:]
        place = "".join(f"{f.filename.rpartition('/')[2]}:{f.lineno}" for f in where)
        said = f"{place} {type(error).__name__}: {str(error)[:300]}"
    finally:
        sys.setrecursionlimit(limit)
    took = time.process_time() - began
    return said if took <= SECONDS else f"took {took:.1f} s of CPU ({said})"


def attempt(name: str, count: int, number: int, folder: Path) -> dict[str, Any]:
    """Try so many cases of a reader; return how many, and their outcomes."""
    cases, call = READERS[name](folder / name.replace(":", "").replace(" ", "-").replace(".", "-"))
    found: Counter[str] = Counter()
    log = folder / "case"

    @seed(number)
    @settings(
        max_examples=count, database=None, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck), verbosity=Verbosity.quiet,
    )  # fmt: skip
    @given(cases)
    def try_one(case: Any) -> None:
        if sum(found.values()) >= count:
            return
        log.write_bytes(repr(case).encode("utf-8", "backslashreplace")[:20_000])
        faulthandler.dump_traceback_later(HANGS, exit=True)
        said = outcome(call, case)
        faulthandler.cancel_dump_traceback_later()
        kind = said if said in ("value", "refused") else "fault"
        found[kind] += 1
        if kind == "fault" and found[kind] <= MOST_FAULTS:
            shown = log.read_text(errors="replace")
            shown = shown if len(shown) < 1500 else f"{shown[:900]} ... {shown[-500:]}"
            tell({"reader": name, "fault": said, "case": shown})

    try_one()
    return {"reader": name, "cases": sum(found.values()), **found}


def tell(line: dict[str, Any]) -> None:
    os.write(OUT, f"{json.dumps(line)}\n".encode())


def limit_memory() -> None:
    held = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (held + SPARE, held + SPARE))


def _load() -> None:
    """Enter the readers in ``HEAVY``, and load the libraries that no case should have to load."""
    import gguf  # noqa: F401

    import outrider.checkpoints.tokenizers
    import outrider.drafters.check
    import outrider.sampling.grammar
    import outrider.server.build  # noqa: F401
    from tests.support.hostile import models  # noqa: F401


def main(folder: Path, number: int, counts: dict[str, int]) -> None:
    """Try cases of some readers."""
    warnings.simplefilter("ignore")
    os.dup2(1, OUT)
    os.dup2(2, 1)
    logging.disable(logging.CRITICAL)
    if any(name.startswith(HEAVY) for name in counts):
        _load()
    limit_memory()
    for name, count in counts.items():
        tell({"begins": name})
        tell(attempt(name, count, number, folder))


if __name__ == "__main__":
    pairs = [each.rpartition("=") for each in sys.argv[3:]]
    main(Path(sys.argv[1]), int(sys.argv[2]), {name: int(count) for name, _, count in pairs})
