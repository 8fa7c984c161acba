"""The controller's draft lengths for vLLM's scheduler.

vLLM drafts the same number of tokens for all requests of a step: ``num_speculative_tokens``, or
what ``num_speculative_tokens_per_batch_size`` says for the batch, which its scheduler keeps as
``dynamic_sd_lookup``. Where that option is given, its lengths are the most that are drafted, and
the controller chooses up to them.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from ..common.lengths import Lengths, StepDraft
from ..common.start import stop


class Lookup(Sequence[int]):
    """By the number of requests in a step, how many tokens each drafts, at most vLLM's own."""

    def __init__(
        self, most: Sequence[int], lengths: Lengths, running: Callable[[], Sequence[Any]]
    ) -> None:
        self._most = most
        self.lengths = lengths
        self._running = running
        self._asked = 0
        self._last = 0.0

    def __len__(self) -> int:
        return len(self._most)

    def __getitem__(self, batch: Any) -> Any:
        contexts = {each.request_id: each.num_tokens for each in self._running()[:batch]}
        return max(self.lengths.choose(contexts, self._most[batch]), default=0)

    def observe(self, scheduled: Any, sampled: Any) -> None:
        """Take in a step that ran: vLLM's ``SchedulerOutput`` and ``ModelRunnerOutput``."""
        now = time.perf_counter()
        took, self._last = now - self._last, now
        # A step verifies what was asked in the one before, and drafts what is asked in it.
        asked, self._asked = self._asked, scheduled.num_spec_tokens_to_schedule
        drafts, alone = [], True
        for id, rows in scheduled.num_scheduled_tokens.items():
            drafted = len(scheduled.scheduled_spec_decode_tokens.get(id, ()))
            place = sampled.req_id_to_index.get(id)
            tokens = sampled.sampled_token_ids[place] if place is not None else ()
            if rows != 1 + drafted or not tokens:
                alone = False  # a prompt, or a request that was preempted
            else:
                drafts.append(StepDraft(id, max(asked, drafted), drafted, len(tokens) - 1))
        self.lengths.observe(drafts, took if alone else None, self._asked - asked)
        for id in scheduled.finished_req_ids:
            self.lengths.release(id)


def scheduler_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Scheduler.__init__`` with the controller behind vLLM's lookup, where it has one."""

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        original(self, *args, **named)
        if not hasattr(self, "dynamic_sd_lookup"):
            stop("vLLM's scheduler has no dynamic_sd_lookup; install its release.")
        if self.dynamic_sd_lookup is not None:
            method = self.vllm_config.speculative_config.method
            lengths = Lengths(max(self.dynamic_sd_lookup), method)
            self.dynamic_sd_lookup = Lookup(self.dynamic_sd_lookup, lengths, lambda: self.running)

    return __init__


def update_from_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Scheduler.update_from_output`` that tells the controller of each step."""

    def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        if isinstance(self.dynamic_sd_lookup, Lookup) and model_runner_output.sampled_token_ids:
            self.dynamic_sd_lookup.observe(scheduler_output, model_runner_output)
        return original(self, scheduler_output, model_runner_output)

    return update_from_output
