"""``trtllm-build`` of target and drafter, as ``trtllm-serve`` with a YAML config."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ....errors import ConfigError, shown
from ..capabilities import find
from ..engines import trtllm
from ..launch import Launch
from ..spec import Drafter, Spec, Target
from ..yamls import dump
from .rules import Change, table
from .words import Command, count, options

MODES = {"draft_tokens_external": "draft_model", "eagle": "eagle3"}
"""Modes of a build that have a successor, and the method of a spec."""
TARGET, DRAFTER = "TARGET_CHECKPOINT", "DRAFTER_CHECKPOINT"
NUMBERS = ("max_batch_size", "max_num_tokens", "max_seq_len")


def is_build(words: list[str]) -> bool:
    """Return whether words build an engine of TensorRT-LLM."""
    return bool(words) and words[0].rpartition("/")[2] == "trtllm-build"


def serve(builds: list[list[str]]) -> tuple[Launch, list[Change]]:
    """Return the ``trtllm-serve`` that needs none of these builds, and what changed.

    Raises:
        ConfigError: a mode has no successor, or there are more builds than target and drafter.
    """
    parsed = [options(words, set()) for words in builds]
    targets = [each for each in parsed if each.has("--speculative_decoding_mode")]
    others = [each for each in parsed if not each.has("--speculative_decoding_mode")]
    if len(targets) > 1 or len(others) > 1:
        raise ConfigError(
            "There are several builds of targets or of drafters; give one with "
            "--speculative_decoding_mode and at most one without."
        )
    changes: list[Change] = []
    spec, extra = Spec(target=Target(model=TARGET)), {}
    if targets:
        spec = _target(targets[0], spec)
        extra = _numbers(targets[0])
        _explain(targets[0], changes, TARGET)
    if others and targets:
        _explain(others[0], changes, DRAFTER)
        why = "the drafter needs no engine of its own: its checkpoint is named in the config"
        changes.append(Change("the drafter's trtllm-build", f"speculative_model: {DRAFTER}", why))
    elif others:
        extra = _numbers(others[0])
        _explain(others[0], changes, TARGET)
        why = (
            "without a mode this builds a plain engine; if it was the drafter's, drop it and name "
            "its checkpoint as speculative_config.speculative_model of the target's config"
        )
        changes.append(Change("trtllm-build", "trtllm-serve", why))
    engine = find("trtllm")
    config = {**trtllm.config(spec, engine), **extra}
    launch = trtllm.launch(spec, engine)
    return replace(launch, files={trtllm.CONFIG: dump(config)}), changes


def _target(build: Command, spec: Spec) -> Spec:
    mode = build.get("--speculative_decoding_mode") or ""
    if mode not in MODES:
        raise ConfigError(
            f"The mode {shown(mode)} has no successor in TensorRT-LLM {find('trtllm').version}; "
            "take draft_tokens_external, an EAGLE-3 head, MTP or NGram."
        )
    length = _number(build, "max_draft_len")
    if length is None:
        raise ConfigError("The build has no --max_draft_len; add the draft length K.")
    drafter = Drafter(method=MODES[mode], model=DRAFTER, num_speculative_tokens=length)
    return replace(spec, drafter=drafter)


def _numbers(build: Command) -> dict[str, Any]:
    found = {name: _number(build, name) for name in NUMBERS}
    return {name: value for name, value in found.items() if value is not None}


def _number(build: Command, name: str) -> int | None:
    value = build.get(f"--{name}")
    return None if value is None else count(value, f"--{name}")


def _explain(build: Command, changes: list[Change], placeholder: str) -> None:
    rules = table("trtllm").rules
    for flag, value in build.options:
        old = flag if value is True else f"{flag} {value}"
        rule = rules.get(flag)
        if rule is None:
            why = "trtllm-serve builds nothing, and its config has no such field"
            changes.append(Change(old, "nothing", why))
        else:
            new = placeholder if rule.option == "MODEL" else rule.new
            changes.append(Change(old, new, rule.why))
