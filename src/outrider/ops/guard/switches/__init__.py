"""The switches with which the guard makes changes."""

from __future__ import annotations

from ..policy import Policy
from .base import TrafficSwitch


def traffic_switch(policy: Policy) -> TrafficSwitch | None:
    """Return the switch that a policy names; None for none."""
    from .haproxy import HAProxy
    from .httproute import HTTPRoute
    from .webhook import Webhook

    traffic = policy.traffic
    if traffic.kind == "haproxy":
        return HAProxy(traffic)
    if traffic.kind == "httproute":
        return HTTPRoute(traffic)
    return Webhook(traffic) if traffic.kind == "webhook" else None
