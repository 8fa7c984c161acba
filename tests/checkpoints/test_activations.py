"""A process that runs native models imports no more of transformers than they use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from transformers.activations import ACT2FN

from outrider.checkpoints.configs import Activations

DECODES = """
import sys
from outrider import LLM
LLM(sys.argv[1], drafter=sys.argv[2], max_num_seqs=1).generate("ab")
from transformers.utils import type_validators
heavy = "transformers.activations", "torch._dynamo", "torch.distributed.tensor", "sympy"
print(type(type_validators.ACT2FN).__name__, [name for name in heavy if name in sys.modules])
"""


def test_decoding_imports_nothing_that_runs_activations(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    command = [sys.executable, "-c", DECODES, str(tiny_llama), str(tiny_drafter)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "Activations []\n"


def test_activations_are_those_of_transformers() -> None:
    names = Activations()
    assert list(names) == list(names.keys()) == list(ACT2FN)
    assert len(names) == len(ACT2FN) > 0
    assert "silu" in names
    assert "no such activation" not in names
    assert type(names["silu"]) is type(ACT2FN["silu"])
