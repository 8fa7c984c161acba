"""OpenTelemetry spans, one a call, with attributes of its GenAI conventions and vLLM's latencies.

See https://github.com/open-telemetry/semantic-conventions-genai (inference spans, development).
"""

from collections.abc import Mapping
from typing import Any

from .. import __version__
from ..errors import ConfigError
from .shown import plain, short

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
"""Attributes of a span, keyed by field of ``ApiCall.facts``."""


class Tracer:
    """Sends spans to a collector by OTLP over HTTP, in the background."""

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
        self.provider = TracerProvider(
            resource=Resource.create({"service.name": "outrider", "service.version": __version__})
        )
        self.provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint)))
        self.tracer = self.provider.get_tracer("outrider", __version__)

    def record(
        self,
        route: str | None,
        headers: Mapping[str, str],
        begin: int,
        status: int,
        facts: Mapping[str, Any],
    ) -> None:
        """Export a call's span, a child of the caller's if headers name one (W3C traceparent).

        ``route`` is None for an unknown path, ``begin`` in ns since 1970, ``facts`` those of
        ``ApiCall.facts``.
        """
        from opentelemetry.trace import SpanKind, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        operation = OPERATIONS.get(route, route) if route else "unknown"
        kept: dict[str, Any] = {
            "gen_ai.operation.name": operation, "gen_ai.provider.name": "outrider",
            "http.response.status_code": status,
        }  # fmt: skip
        known = {attribute: facts.get(name) for name, attribute in ATTRIBUTES.items()}
        kept |= {attribute: plain(fact) for attribute, fact in known.items() if fact is not None}
        span = self.tracer.start_span(operation, parent, SpanKind.SERVER, kept, start_time=begin)
        if status >= 400 or facts.get("error"):
            span.set_attribute("error.type", short(str(facts.get("error") or status)))
            span.set_status(StatusCode.ERROR)
        span.end()
