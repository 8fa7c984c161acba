"""The parts of a server that its calls share."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..async_llm import AsyncLLM
from ..errors import shown
from .admission import Lease, Queue
from .errors import Refusal
from .metrics import Metrics
from .settings import Settings
from .tally import Stats
from .texts import Texts


@dataclass
class Service:
    """The engine, the limits, the counters, and the queue of waiting calls."""

    llm: AsyncLLM
    settings: Settings
    metrics: Metrics
    stats: Stats = field(default_factory=Stats)
    draining: bool = False
    queue: Queue = field(init=False)
    texts: Texts = field(init=False)

    def __post_init__(self) -> None:
        limits = self.settings
        self.queue = Queue(limits.max_queued_requests, limits.max_queued_tokens)
        self.texts = Texts(self.llm.inputs)

    @property
    def name(self) -> str:
        """The model's first name."""
        return self.settings.names[0]

    def check_model(self, name: str | None) -> None:
        """Refuse another model than the one that is served.

        Raises:
            Refusal: 404.
        """
        if name is not None and name not in self.settings.names:
            raise Refusal(
                f"there is no model {shown(name)} here; this server has {self.name!r}.",
                "model", 404, "model_not_found",
            )  # fmt: skip

    def admit(self, sequences: int) -> Lease:
        """Return the lease of a call's sequences, which wait in the queue from now on.

        Raises:
            Refusal: 429 for a full queue, 503 while the server drains or the engine starts.
        """
        if self.draining:
            raise Refusal("the server is shutting down; send the call elsewhere.", status=503)
        if self.llm.ready is None:
            raise Refusal("the engine is starting; send the call again.", status=503)
        return self.queue.enter(sequences)
