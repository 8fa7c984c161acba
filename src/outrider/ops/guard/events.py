"""Publishes what the guard does: log, metrics, webhook and audit."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from functools import partial
from math import nan
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, start_http_server

from ...base.outside.http import call
from ...base.outside.text import printable
from ...errors import ConfigError, EndpointError
from .states import MODES
from .store import LONGEST_EVENT, GuardStore, StoreError, finite

logger = logging.getLogger("outrider.guard")
ALERTS = (
    "source", "no_data", "traffic_switch", "drafting_switch", "standby_cold", "no_standby",
    "no_traffic", "both_bad", "forced", "failed", "folder",
)  # fmt: skip
WEBHOOK_SECONDS = 2.0


class Events:
    """Reports each event once: a step when it is made, an alert when it begins and when it ends.

    Each is posted as JSON to the address ``webhook``; a failure of that is only logged.
    """

    def __init__(
        self, store: GuardStore, webhook: str | None = None, *, dry_run: bool = False
    ) -> None:
        self.registry = CollectorRegistry()
        self._store, self._webhook, self._dry_run = store, webhook, dry_run
        self._alerts: dict[str, str] = {}
        self._server: Any = None
        gauge = partial(Gauge, registry=self.registry)
        self._state = gauge("outrider_guard_state", "1 for the state of now.", ["state"])
        self._warm = gauge("outrider_guard_standby_warm", "1 while the standby answers.")
        self._leads = gauge("outrider_guard_leader", "1 while this guard may act.")
        self._alert = gauge("outrider_guard_alert", "1 while this is wrong.", ["alert"])
        labels = ["action", "signal"]
        self._actions = Counter(
            "outrider_guard_actions", "What the guard did.", labels, registry=self.registry
        )
        self._warm.set(nan)
        for alert in ALERTS:
            self._alert.labels(alert).set(0)

    def listen(self, address: str) -> None:
        """Serve the metrics. Raises ConfigError: the address cannot be used."""
        host, _, port = address.rpartition(":")
        try:
            self._server = start_http_server(int(port), host.strip("[]"), self.registry)
        except (OSError, ValueError) as error:  # e.g. a label of a host name that is too long
            why = printable(getattr(error, "strerror", None) or error)
            raise ConfigError(f"listen = {address!r} cannot be served: {why}.") from None

    def close(self) -> None:
        """Stop serving the metrics."""
        if self._server is not None:
            server, thread = self._server
            server.shutdown()
            server.server_close()
            thread.join()

    def gauges(self, mode: str, warm: bool | None, leads: bool) -> None:
        """Set the gauges; ``warm`` is None if the standby was not asked."""
        for each in MODES:
            self._state.labels(each).set(each == mode)
        self._warm.set(nan if warm is None else warm)
        self._leads.set(leads)

    def tell(self, kind: str, text: str, **more: Any) -> None:
        """Report an event: ``kind`` is decided, done, failed, drift, alert, clear or note.

        If the audit cannot be written, the event still goes to log and webhook.
        """
        text = printable(text, LONGEST_EVENT)
        if kind == "done":
            self._actions.labels(more["action"], more["signal"]).inc()
        level = logging.WARNING if kind in ("alert", "failed") else logging.INFO
        logger.log(level, "%s: %s", kind, text)
        entry = {"time": time.time(), "kind": kind, **more, "text": text}
        if self._dry_run:
            entry["dry_run"] = True
        try:
            self._store.record(entry)
        except StoreError as error:
            logger.warning("%s", error)
        if self._webhook is not None:
            self._post(entry)

    def also(self, name: str, text: str) -> None:
        """Raise an alert in addition to the active ones."""
        self.alert({**self._alerts, name: text})

    def alert(self, alerts: Mapping[str, str]) -> None:
        """Report alerts that begin and alerts that end."""
        for name in set(self._alerts) | set(alerts):
            self._alert.labels(name).set(name in alerts)
        for name, text in alerts.items():
            if name not in self._alerts:
                self.tell("alert", text, alert=name)
        for name in self._alerts.keys() - alerts.keys():
            self.tell("clear", f"{name} is over", alert=name)
        self._alerts = dict(alerts)

    def _post(self, entry: dict[str, Any]) -> None:
        try:
            answer = call(str(self._webhook), finite(entry), seconds=WEBHOOK_SECONDS)
            if not answer.ok:
                logger.warning("the webhook answers HTTP %d", answer.status)
        except EndpointError as error:
            logger.warning("the webhook: %s", error)
