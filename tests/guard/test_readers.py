"""Whatever a guard reads, it gives a value or one sentence: in bounded time and memory."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "reading.py"
READERS = ("policies", "pages", "heads", "files", "switches", "haproxy", "documents", "guards")


def read(reader: str, examples: int, seconds: float) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), reader, str(examples)], capture_output=True, text=True,
        timeout=seconds, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_hostile_input_is_a_value_or_a_sentence() -> None:
    read("all", 15, 300)


@pytest.mark.slow
@pytest.mark.parametrize("reader", READERS)
def test_much_hostile_input_is_a_value_or_a_sentence(reader: str) -> None:
    read(reader, 2500, 3600)
