"""Checks of heads whose checkpoints tests write: changes of a file, refusals, unchanged tokens."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.errors import ConfigError, ModelError
from tests.support.commands import outrider

Change = Callable[[dict[str, Any], dict[str, Tensor]], object]
"""Changes the config and the tensors of a checkpoint before they are saved."""


def put(**values: Any) -> Change:
    return lambda config, tensors: config.update(values)


def drop(name: str) -> Change:
    return lambda config, tensors: tensors.pop(name)


def add(name: str, *shape: int) -> Change:
    return lambda config, tensors: tensors.update({name: torch.ones(shape)})


def saved(
    folder: Path, config: dict[str, Any], tensors: dict[str, Tensor], change: Change | None
) -> Path:
    """Save a checkpoint, changed; return its folder."""
    if change is not None:
        change(config, tensors)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changes_no_token(target: Path, head: Path, method: str, temperature: float) -> None:
    """A head drafts, and the target says what it says without it; vLLM's ``method`` means it."""
    assert outrider("drafters", "check", target, "--drafter", head).exit_code == 0
    prompts = ["for word in the", "def greet(name): return f", "abc abc abc", "x"]
    params = [
        SamplingParams(temperature=temperature, max_tokens=40, seed=i, ignore_eos=True)
        for i in range(len(prompts))
    ]

    def outputs(drafter: str | None, **options: Any) -> tuple[list[list[int]], int]:
        llm = LLM(target, drafter, max_model_len=128, memory=2**24, **options)
        found = llm.generate(prompts, params)
        return [[*each.outputs[0].token_ids] for each in found], found[0].metrics.drafted

    plain, _ = outputs("none")
    for options in ({"num_speculative_tokens": 4}, {"max_num_batched_tokens": 16}):
        tokens, drafted = outputs(str(head), **options)
        assert tokens == plain
        assert drafted > 0
    said = {"method": method, "model": str(head), "num_speculative_tokens": 3}
    assert outputs(None, speculative_config=said)[0] == plain


def is_refused(target: Path, head: Path, named: str) -> None:
    """A damaged head is refused in one sentence that has ``named``, by engine and command."""
    with pytest.raises((ModelError, ConfigError), match=named) as caught:
        LLM(target, str(head), memory=2**24)
    assert "\n" not in str(caught.value)
    assert "native step refused" not in str(caught.value)
    done = outrider("drafters", "check", target, "--drafter", head)
    assert done.exit_code == 1
    assert "Traceback" not in done.output
