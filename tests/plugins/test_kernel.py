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


@pytest.mark.skipif(PYTHON is None, reason="Triton is not installed; run: make clients")
def test_the_kernel_draws_what_torch_draws() -> None:
    environment = os.environ | {"PYTHONPATH": str(SOURCE)}
    if not torch.cuda.is_available():
        environment["TRITON_INTERPRET"] = "1"
    script = Path(__file__).with_name("kernel_product.py")
    ended = subprocess.run(
        [PYTHON, script], env=environment, capture_output=True, text=True, check=False
    )
    assert ended.stdout == "equal\n", ended.stderr
