"""A process that runs native models imports no more of transformers than they use."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DECODES = """
import sys
from outrider import LLM
LLM(sys.argv[1], drafter=sys.argv[2], max_num_seqs=1).generate("ab")
heavy = "transformers.activations", "torch._dynamo", "torch.distributed.tensor", "sympy"
print([name for name in heavy if name in sys.modules])
from transformers.utils import type_validators
names = type_validators.ACT2FN
from transformers.activations import ACT2FN
print(type(names).__name__, list(names) == list(ACT2FN), len(names) == len(ACT2FN) > 0)
print("silu" in names, "no such activation" in names, names["silu"] is not None)
"""


def test_activations_are_imported_when_they_are_looked_at(
    tiny_llama: Path, tiny_drafter: Path
) -> None:
    command = [sys.executable, "-c", DECODES, str(tiny_llama), str(tiny_drafter)]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said == "[]\nActivations True True\nTrue False True\n"
