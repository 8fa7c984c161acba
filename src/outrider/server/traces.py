"""OpenTelemetry spans, one a call, with the attributes of its GenAI conventions.

They are what https://github.com/open-telemetry/semantic-conventions-genai calls inference spans
(status: development); those of latency are vLLM's; what has no name there is ``outrider.``'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.trace import Span

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/completions": "text_completion"}
ATTRIBUTES = {
    "model": "gen_ai.request.model", "served_model": "gen_ai.response.model",
    "id": "gen_ai.response.id", "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "finish_reasons": "gen_ai.response.finish_reasons", "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature", "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k", "n": "gen_ai.request.choice.count",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "queue_seconds": "gen_ai.latency.time_in_queue",
    "ttft_seconds": "gen_ai.latency.time_to_first_token",
    "drafted": "outrider.draft_tokens", "accepted": "outrider.accepted_tokens",
    "acceptance_length": "outrider.acceptance_length", "error": "error.type",
}  # fmt: skip
"""From what a call tells of itself."""


class CallSpan:
    """The span of one call."""

    def __init__(self, span: Span) -> None:
        self.span = span

    def end(self, status: int, facts: Mapping[str, Any]) -> None:
        """Close it with what came of the call."""
        from opentelemetry.trace import StatusCode

        self.span.set_attribute("http.response.status_code", status)
        for name, attribute in ATTRIBUTES.items():
            if facts.get(name) is not None:
                self.span.set_attribute(attribute, facts[name])
        if status >= 400 or facts.get("error"):
            self.span.set_attribute("error.type", str(facts.get("error") or status))
            self.span.set_status(StatusCode.ERROR)
        self.span.end()


class Tracer:
    """Sends spans to a collector by OTLP over HTTP, in the background.

    Args:
        endpoint: as in http://localhost:4318/v1/traces.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """

    def __init__(self, endpoint: str) -> None:
        try:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
        except ImportError:
            raise ConfigError(
                "otlp_traces_endpoint needs OpenTelemetry; run: pip install 'outrider[otel]'"
            ) from None
        about = Resource.create({"service.name": "outrider", "service.version": __version__})
        self.provider = TracerProvider(resource=about)
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self.tracer = self.provider.get_tracer("outrider", __version__)

    def start(self, path: str, headers: Mapping[str, str]) -> CallSpan:
        """Begin a call's span, below the caller's where its headers name one (W3C traceparent)."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        operation = OPERATIONS.get(path, path)
        span = self.tracer.start_span(operation, parent, SpanKind.SERVER)
        span.set_attributes(
            {"gen_ai.operation.name": operation, "gen_ai.provider.name": "outrider"}
        )
        return CallSpan(span)

    def shutdown(self) -> None:
        """Send what is left."""
        self.provider.shutdown()
