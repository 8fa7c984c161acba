"""Translates ``trtllm-build`` of target and drafter to ``trtllm-serve`` with a YAML config."""

from __future__ import annotations

from ....errors import ConfigError, shown
from ..capabilities import find
from ..engines import Launch, trtllm, trtllm_config
from ..spec import Spec, SpecDrafter, Target
from .rules import Changes, rules_of
from .shell import ShellCommand, count, options

MODE = "--speculative_decoding_mode"
MODES = {"draft_tokens_external": "draft_model", "eagle": "eagle3"}
"""Modes of a build that have a successor, and that method's name in a spec."""
TARGET, DRAFTER = "TARGET_CHECKPOINT", "DRAFTER_CHECKPOINT"
NUMBERS = ("max_batch_size", "max_num_tokens", "max_seq_len")


def serve(builds: list[list[str]]) -> tuple[Launch, Changes]:
    """Return the ``trtllm-serve`` that replaces these builds, and what changed."""
    parsed = [options(words, set()) for words in builds]
    targets = [each for each in parsed if each.has(MODE)]
    others = [each for each in parsed if not each.has(MODE)]
    if len(targets) > 1 or len(others) > 1:
        raise ConfigError(
            "There are several builds of targets or of drafters; give one with "
            "--speculative_decoding_mode and at most one without."
        )
    changes = Changes()
    drafter = _drafter(targets[0]) if targets else SpecDrafter()
    spec = Spec(target=Target(model=TARGET), drafter=drafter)
    main = (targets or others)[0]
    sizes = {name: _number(main, name) for name in NUMBERS}
    _explain(main, changes, TARGET)
    if others and targets:
        _explain(others[0], changes, DRAFTER)
        changes.note("drafter_build", model=DRAFTER)
    elif others:
        changes.note("plain_build")
    config = trtllm_config(spec, find("trtllm"))
    config |= {name: size for name, size in sizes.items() if size is not None}
    return trtllm(spec, config), changes


def _drafter(build: ShellCommand) -> SpecDrafter:
    mode = build.get(MODE) or ""
    if mode not in MODES:
        raise ConfigError(
            f"The mode {shown(mode)} has no successor in TensorRT-LLM {find('trtllm').version}; "
            "take draft_tokens_external, an EAGLE-3 head, MTP or NGram."
        )
    length = _number(build, "max_draft_len")
    if length is None:
        raise ConfigError("The build has no --max_draft_len; add the draft length K.")
    return SpecDrafter(method=MODES[mode], model=DRAFTER, num_speculative_tokens=length)


def _number(build: ShellCommand, name: str) -> int | None:
    value = build.get(f"--{name}")
    return None if value is None else count(value, f"--{name}")


def _explain(build: ShellCommand, changes: Changes, placeholder: str) -> None:
    """Add the change of each option of a build; ``placeholder`` stands for its checkpoint."""
    rules = rules_of("trtllm")
    for flag, value in build.options:
        old, rule = flag if value is True else f"{flag} {value}", rules.get(flag)
        if rule is None:
            changes.note("no_field", old=old)
        else:
            changes.add(old, placeholder if rule.option == "MODEL" else rule.new, rule.why)
