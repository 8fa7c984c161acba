"""One look at everything: figures, switches, and models that answer."""

from __future__ import annotations

from ...base.outside.http import call
from ...base.outside.sockets import Deadline
from ...errors import EndpointError
from .policy import GuardedServer, Policy
from .sources import FigureSource
from .states import Observation, Place, Side, State
from .switches.base import SwitchError, TrafficSwitch
from .switches.speculation import Speculation


def look(
    state: State, policy: Policy, source: FigureSource, drafting: Speculation | None,
    traffic: TrafficSwitch | None, now: float,
) -> Observation:  # fmt: skip
    """Return what is true now; whatever does not answer leaves a sentence on why."""
    trouble = drafting_trouble = traffic_trouble = None
    engine, standby, drafts, weights, answers = Side(), Side(), None, None, None
    try:
        engine, standby = source.read(now)
    except EndpointError as error:
        trouble = str(error)
    if drafting is not None:
        try:
            drafts = drafting.read()
        except SwitchError as error:
            drafting_trouble = str(error)
    if traffic is not None:
        try:
            weights = traffic.read()
        except SwitchError as error:
            traffic_trouble = str(error)
    warm = policy.standby is not None and is_warm(policy.standby, policy.probe_timeout)
    due = state.traffic.level == Place.STANDBY and (
        now >= state.traffic.retry_at or not warm or (standby.errors or 0) > 0
    )
    if due or (trouble is None and engine.up is not True):
        answers = is_warm(policy.engine, policy.probe_timeout)
    return Observation(
        engine, standby, trouble, drafts, drafting_trouble, weights, traffic_trouble, warm, answers
    )


def is_warm(server: GuardedServer, seconds: float) -> bool:
    """Return whether a server's model writes a token within ``seconds``; first ask for its name."""
    url, deadline = server.url.rstrip("/").removesuffix("/v1"), Deadline(seconds)
    try:
        models = call(f"{url}/v1/models", key=server.key, seconds=seconds).json()
        name = models["data"][0]["id"]
        body = {"model": name, "prompt": "Hello", "max_tokens": 1, "temperature": 0}
        left = deadline.left()
        answer = call(f"{url}/v1/completions", body, key=server.key, seconds=left)
        return answer.ok and bool(answer.json()["choices"])
    except (EndpointError, LookupError, TypeError, TimeoutError):
        return False
