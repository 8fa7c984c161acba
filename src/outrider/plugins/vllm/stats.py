"""The figures of ``outrider observe`` on vLLM's own ``/metrics``, without an exporter beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from prometheus_client import REGISTRY
from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ...ops.alerts.exporter import families
from ...ops.alerts.figures import Figures
from ...ops.alerts.watcher import WINDOW, Window
from ...ops.metrics import Page


class Observed(Collector):
    """Collects what the exporter would, from the metrics of vLLM in the same registry.

    Args:
        registry: vLLM's metrics and this collector are in it.
        model: name of the model where no metric has one.
    """

    def __init__(self, registry: CollectorRegistry, model: str) -> None:
        self._registry = registry
        self._model = model
        self._window = Window(WINDOW)
        self._reading = False

    def collect(self) -> Iterator[Metric]:
        """Yield every family that is known now."""
        found = self.look()
        if found is not None:
            yield from families(found, (found.engine, found.model or self._model))

    def describe(self) -> list[Metric]:
        """Return nothing: what is known changes."""
        return []

    def look(self) -> Figures | None:
        """Return the figures of this moment; None within this function, and where vLLM has none."""
        if self._reading:
            return None  # the registry asks every collector, this one too
        self._reading = True
        try:
            samples = [sample for each in self._registry.collect() for sample in each.samples]
        finally:
            self._reading = False
        return self._window.take(Page(samples), time.monotonic())


_observed: Observed | None = None


def observe(model: str) -> Observed:
    """Return the collector of this process, which is in prometheus-client's own registry."""
    global _observed
    if _observed is None:
        _observed = Observed(REGISTRY, model)
        REGISTRY.register(_observed)
    return _observed


def manager_init(base: type) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return what makes ``StatLoggerManager.__init__`` add Outrider's stat logger.

    Args:
        base: vLLM's ``StatLoggerBase``.
    """

    class OutriderStatLogger(base):  # type: ignore[misc]
        """Looks at vLLM's metrics as often as vLLM logs them, so that rates have a start."""

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            self._observed = observe(str(vllm_config.model_config.served_model_name))

        def record(self, *args: Any, **named: Any) -> None:
            """Do nothing: vLLM counts."""

        def log(self) -> None:
            self._observed.look()

        def log_engine_initialized(self) -> None:
            """Say nothing."""

    def wrapper(original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(
            self: Any,
            vllm_config: Any,
            engine_idxs: Any = None,
            custom_stat_loggers: Any = None,
            *args: Any,
            **named: Any,
        ) -> None:
            loggers = [*(custom_stat_loggers or ()), OutriderStatLogger]
            original(self, vllm_config, engine_idxs, loggers, *args, **named)

        return __init__

    return wrapper
