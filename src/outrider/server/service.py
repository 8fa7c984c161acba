"""The parts of a server that its calls share."""

from functools import partial

from ..async_llm import AsyncLLM
from ..errors import shown
from .admission import Lease, Queue
from .errors import Refusal
from .metrics import Metrics, Stats
from .record import Recorder
from .recorded import recorded
from .responses.store import Store
from .settings import Settings
from .texts import Texts


class Service:
    """The engine, the limits, the counters, and the queue of waiting calls.

    Raises ConfigError: the folder for recordings cannot be written to.
    """

    def __init__(self, llm: AsyncLLM, settings: Settings) -> None:
        self.llm = llm
        self.settings = settings
        self.name = settings.names[0]
        self.metrics = Metrics(llm, self.name, settings.slo)
        self.stats = Stats()
        self.draining = False
        self.queue = Queue(settings.max_queued_requests, settings.max_queued_tokens)
        self.texts = Texts(llm.inputs)
        self.responses = Store(settings.store_responses, len(settings.api_keys))
        self.recorder = Recorder(settings.recording) if settings.recording else None
        if self.recorder is not None:
            self.metrics.others.append(partial(recorded, self.recorder))

    def check_model(self, name: str | None) -> None:
        """Refuse any model but the one that is served. Raises Refusal: 404."""
        if name is not None and name not in self.settings.names:
            raise Refusal(
                f"there is no model {shown(name)} here; this server has {self.name!r}.",
                "model", 404, "model_not_found",
            )  # fmt: skip

    def admit(self, sequences: int) -> Lease:
        """Return the lease of a call's sequences in the queue. Raises Refusal: 429 or 503."""
        if self.draining:
            raise Refusal("the server is shutting down; send the call elsewhere.", status=503)
        if self.llm.ready is None:
            raise Refusal("the engine is starting; send the call again.", status=503)
        return self.queue.enter(sequences)
