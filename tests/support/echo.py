"""An engine without a model, for tests of the server's front."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, cast

from outrider.async_llm import AsyncLLM
from outrider.base.types import Event, Logprob, Origin
from outrider.engine.control.switch import SpeculationState
from outrider.engine.setup import set_up
from outrider.engine.worker.messages import Ready
from outrider.frontend.outputs import RequestState

ANSWER = 40, 41, 42


class Echo(AsyncLLM):
    """A model without a worker that always gives the same tokens."""

    def _new_worker(self) -> Any:
        facts = set_up(self.spec.model, self.spec.drafter, self.spec.options).facts
        self._post.message(cast(Any, None), facts)

    def launch(self) -> None:
        state = SpeculationState(False, "none", 1)
        self.ready = Ready(("none",), ("none",), state, "", 4096, self.inputs.max_model_len, 4)
        self.speculation = state

    def shutdown(self) -> None:
        pass

    def answer(self, state: RequestState) -> Sequence[int]:
        """The tokens of each sample, of which the last one is not shown."""
        return ANSWER

    async def run(
        self, state: RequestState, body: str | None = None
    ) -> AsyncGenerator[list[Event], None]:
        request = state.request
        for sample in range(request.params.n):
            answer = self.answer(state)
            for place, token in enumerate(answer, 1):
                end = "stop" if place == len(answer) else None
                asked = request.params.logprobs is not None
                logprobs = {token: Logprob(0.0, 1)} if asked else None
                event = Event(request.id, sample, token, "", Origin.PLAIN, end, logprobs=logprobs)
                yield [state.take(event)]


class Scripted(Echo):
    """One that says ``script``, up to the call's ``max_tokens``, and keeps the requests."""

    script = ""

    def answer(self, state: RequestState) -> Sequence[int]:
        self.asked = state.request
        assert self.inputs.codec is not None
        ids = self.inputs.codec.encode(self.script, False, rendered=True)
        end = min(self.inputs.eos_token_ids)
        return [*ids, end]
