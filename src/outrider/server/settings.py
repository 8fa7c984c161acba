"""The settings of a server, without those of its engine."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..text.calls import Form
from ..text.reasoning import ReasoningForm
from .answer import Detail
from .record import Recording


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A server's settings; names and meanings are those of ``server/options.py``.

    Responses name the model as the call did, else by the first of ``names``. Histograms of accepted
    tokens go up to the ``longest`` draft. ``max_tokens`` of ``defaults`` bounds every call. Servers
    of one ``fingerprint`` give the same text for a seed. ``write_timeout`` is for clients that do
    not read. ``slo`` has the latencies of a good request in seconds, by ttft and tpot.
    """

    names: tuple[str, ...]
    longest: int = 0
    detail: Detail = "summary"
    tool_form: Form = "hermes"
    reasoning: ReasoningForm | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fingerprint: str = ""
    api_keys: tuple[str, ...] = ()
    max_queued_requests: int = 256
    max_queued_tokens: int = 1 << 20
    max_body: int = 4 << 20
    header_timeout: float = 10.0
    body_timeout: float = 30.0
    write_timeout: float = 60.0
    max_connections: int = 1024
    host: str = "127.0.0.1"
    allowed_hosts: tuple[str, ...] = ()
    allowed_origins: tuple[str, ...] = ()
    root_path: str = ""
    slo: Mapping[str, float] = field(default_factory=dict)
    request_timeout: float | None = None
    log_interval: float = 0.0
    metrics_port: int | None = None
    otlp_traces_endpoint: str | None = None
    share_prefix_cache: bool = False
    shutdown_timeout: float = 30.0
    recording: Recording | None = None
    load_drafters: Path | None = None
    store_responses: int = 0
