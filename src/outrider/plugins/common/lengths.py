"""Draft lengths for the steps of another engine, from Outrider's controller.

The other engine tells what a step took in all. So a controller counts drafting as part of its rows,
and each power of two of the batch has its own; what is learned of acceptance they share.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...engine.control.choices import Method, Stream
from ...engine.control.controller import Controller
from ...engine.control.costs import CostModel, Costs, Curve, DraftCosts, Mean, MeasuredCosts
from ...engine.control.survival import Survival

PRIORS = {
    "ngram": 0.5, "suffix": 0.6, "custom_class": 0.6, "draft_model": 0.65, "medusa": 0.65,
    "eagle3": 0.8,
}  # fmt: skip
"""P(accept) that is expected of vLLM's methods at first, as of our drafters of their kind."""
ROW_SECONDS = Curve((1, 8, 64, 512), (0.02, 0.021, 0.03, 0.15))
"""Seconds by rows until some are measured: what a step of few rows takes hardly varies."""
SPIKE_FACTOR = 2.0  # times the mean that a measurement counts at most, once that is known


class StepDraft(NamedTuple):
    """A sequence's drafted tokens of a step: how many might have been, were, and stand."""

    id: str
    asked: int
    drafted: int
    accepted: int


class Lengths:
    """Chooses how far the sequences of a step draft; ``method`` is who drafts, as in vLLM."""

    def __init__(self, longest: int, method: str) -> None:
        self._name = method
        self._longest = longest
        self._survival = Survival(PRIORS)
        self._controllers: dict[int, Controller] = {}
        self._drafting: dict[int, Mean] = {}
        """Seconds of a drafted token, by power of two of the batch."""

    def choose(self, contexts: Mapping[str, int], most: int) -> list[int]:
        """Return the draft length, up to ``most``, of each sequence of the next step."""
        bound = min(most, self._longest)
        if not contexts or not bound:
            return [0] * len(contexts)
        streams = [Stream(id, "", size, (self._name,), bound) for id, size in contexts.items()]
        controller = self._controller(len(streams))
        if not controller.costs.measured(len(streams)):
            return [0] * len(streams)  # without knowing plain steps, nothing can be compared
        return [choice.depth for choice in controller.decide(streams)]

    def observe(self, drafts: Sequence[StepDraft], seconds: float | None, ahead: int = 0) -> None:
        """Take in the drafts of each sequence that decoded in a step.

        The step took ``seconds``, None where that tells nothing, as beside a prompt. Where it
        drafts for the next one, that was ``ahead`` tokens more than the step before did.
        """
        for id, asked, _, accepted in drafts:
            self._survival.observe(self._name, "", id, asked, accepted)
        if seconds is None or not drafts:
            return
        controller = self._controller(len(drafts))
        rows = len(drafts) + sum(each.drafted for each in drafts)
        expected = controller.costs.verify(rows, 0)
        seconds = self._aligned(controller, len(drafts), rows, seconds, ahead)
        controller.costs.observe_verify(rows, 0, seconds)
        emitted = len(drafts) + sum(each.accepted for each in drafts)
        controller.trials.observe(seconds, emitted)
        drafts_by_choice = any(each.asked for each in drafts) and not controller.tries
        drafting = seconds if drafts_by_choice else 0.0
        slow = seconds / expected if expected else 1.0
        controller.observe(len(drafts), emitted, drafting, seconds, slow)

    def _aligned(
        self, controller: Controller, batch: int, rows: int, seconds: float, ahead: int
    ) -> float:
        """Return the seconds of a step with the drafting of its own rows, not of the next one's."""
        token = self._drafting.setdefault(batch.bit_length(), Mean(SPIKE_FACTOR))
        if ahead and controller.costs.measured(rows):
            token.take(max(0.0, (seconds - controller.costs.verify(rows, 0)) / ahead))
        return max(seconds - ahead * token.value, 0.0)

    def release(self, id: str) -> None:
        """Forget a sequence that ended."""
        for controller in self._controllers.values():
            controller.release(id)

    def _controller(self, batch: int) -> Controller:
        size = batch.bit_length()
        if size not in self._controllers:
            costs = Costs(ROW_SECONDS, {self._name: DraftCosts()}, host=0.0, host_per_sequence=0.0)
            methods = {self._name: Method((self._name,), self._longest)}
            model = CostModel(costs, target=MeasuredCosts(ROW_SECONDS, SPIKE_FACTOR))
            self._controllers[size] = Controller(model, self._survival, methods)
        return self._controllers[size]
