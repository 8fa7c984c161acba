"""Puts Outrider's functions into SGLang's modules as these are imported."""

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ..common import patching
from ..common.patching import Patch, changing
from ..common.signatures import Surface
from ..common.start import SGLANG_VARIABLE, stop

SURFACE = Surface("SGLang", "sglang", SGLANG_VARIABLE)
VERIFIED = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
"""Algorithms whose drafts SGLang verifies by ``eagle_sample``; others have their own rules."""


def install() -> None:
    """Change SGLang, or end the process with a sentence where it is not one that was tested."""
    patching.install(SURFACE, PATCHES)


def checked(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a constructor that looks at the server's arguments first."""

    def __init__(self: Any, server_args: Any, *args: Any, **named: Any) -> None:
        check_arguments(server_args)
        original(self, server_args, *args, **named)

    return __init__


def _batch_info(module: ModuleType) -> None:
    from . import requests

    info = module.SamplingBatchInfo
    made = requests.from_schedule_batch(info.from_schedule_batch.__func__)
    info.from_schedule_batch = classmethod(made)


def _sampler(module: Any) -> None:
    from . import sampling

    own, original = module.Sampler, module.create_sampler
    capture = getattr(module, "_SamplingMaskCapture", None)
    wrappers = {
        "_preprocess_logits": sampling.preprocess_logits,
        "_sample_from_probs": sampling.sample_from_probs(capture),
        "forward": sampling.forward,
    }
    for name, wrapper in wrappers.items():
        setattr(own, name, wrapper(getattr(own, name)))

    def create_sampler(*args: Any, **named: Any) -> Any:
        made = original(*args, **named)
        if any(getattr(type(made), name) is not getattr(own, name) for name in wrappers):
            stop(
                f"{type(made).__module__}.{type(made).__qualname__} draws tokens itself, and "
                "Outrider does not know how; choose another --sampling-backend, or unset "
                f"{SGLANG_VARIABLE}."
            )
        return made

    module.create_sampler = create_sampler


CHANGES = {
    "managers.scheduler": {"Scheduler.__init__": "hooks:checked"},
    "managers.tokenizer_manager": {"TokenizerManager.__init__": "hooks:checked"},
    "sampling.sampling_params": {"SamplingParams.verify": "requests:verify"},
    "speculative.eagle_utils": {
        "eagle_sample": "sampling:eagle_sample",
        "verify_tree_greedy_func": "sampling:verify_tree_greedy",
    },
}
PATCHES: dict[str, Patch] = {
    f"sglang.srt.{name}": changing(functions, __package__) for name, functions in CHANGES.items()
} | {"sglang.srt.sampling.sampling_batch_info": _batch_info, "sglang.srt.layers.sampler": _sampler}


def check_arguments(args: Any) -> None:
    """Note if the server speculates; end the process where another rule would draw tokens."""
    from . import requests

    asked = getattr(args, "speculative_algorithm", None)
    requests.speculates = asked is not None
    if asked is not None and str(asked).upper() not in VERIFIED:
        stop(
            f"--speculative-algorithm {asked} verifies drafts by a rule of its own, which Outrider "
            f"does not know; choose one of {', '.join(VERIFIED)}, or unset {SGLANG_VARIABLE}."
        )
    for name, wanted in OPTIONS.items():
        value = getattr(args, name, wanted)
        if value not in (wanted, None):
            stop(
                f"--{name.replace('_', '-')} {value} draws or accepts tokens by another rule than "
                f"Outrider's; leave it out, or unset {SGLANG_VARIABLE}."
            )
    if float(os.environ.get("SGLANG_SIMULATE_ACC_LEN") or -1) > 0:
        stop(
            "SGLANG_SIMULATE_ACC_LEN makes up which drafts are accepted; unset it, or unset "
            f"{SGLANG_VARIABLE}."
        )


OPTIONS: dict[str, Any] = {
    "speculative_use_rejection_sampling": False,
    "speculative_use_block_verification": False,
    "speculative_accept_threshold_single": 1.0,
    "speculative_accept_threshold_acc": 1.0,
    "enable_watermark": False,
    "rl_on_policy_target": None,
}
"""Options of the server, and the values with which the rule can stand in for SGLang's own."""
