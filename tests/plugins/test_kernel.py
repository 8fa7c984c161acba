"""The Triton kernel: interpreted on a CPU, or on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import outrider
from benchmarks.install import TRITON

SOURCE = Path(outrider.__file__).parents[1]
PYTHON = sys.executable if find_spec("triton") else TRITON.python if TRITON.ready else None


pytestmark = pytest.mark.skipif(PYTHON is None, reason="Triton is not installed; run: make clients")


def said_by(script: str, **variables: str) -> str:
    environment = os.environ | {"PYTHONPATH": str(SOURCE), **variables}
    command = [PYTHON, Path(__file__).with_name(script)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    return ended.stdout or ended.stderr


def test_the_kernel_draws_what_torch_draws() -> None:
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    assert said_by("kernel_product.py", **interpreted) == "equal\n"


def test_the_kernel_compiles_without_a_gpu_and_fuses_nothing(tmp_path: Path) -> None:
    assert said_by("kernel_compiled.py", TRITON_CACHE_DIR=str(tmp_path)) == "compiled\n"
