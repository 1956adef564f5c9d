"""Traces from a request to the phases of the engine (OpenTelemetry), for operators who have a collector.

An optional extra: ``pip install 'bitfoundry[tracing]'``. ``OTEL_EXPORTER_OTLP_ENDPOINT`` says where spans go, as
everywhere else; ``BITFOUNDRY_TRACE_FILE`` writes them as JSON lines instead. With neither nothing is imported.
A job keeps the ``traceparent`` (W3C) of the request that made it, so that its attempts belong to the same trace.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from api.settings import Settings
from quantcore.errors import ConfigError

_tracer: Any = None


def configure(settings: Settings, service: str) -> None:
    """Start tracing this process if it is configured. Raises ConfigError if the extra is missing."""
    global _tracer
    endpoint = os.environ.get("OTEL_EXPORTER_OTLP_ENDPOINT")
    if settings.trace_file is None and not endpoint:
        return
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter, SimpleSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "Tracing is configured, but OpenTelemetry is not installed.",
            code="tracing_not_installed",
            hint="pip install 'bitfoundry[tracing]', or unset OTEL_EXPORTER_OTLP_ENDPOINT and BITFOUNDRY_TRACE_FILE.",
        ) from error
    provider = TracerProvider(resource=Resource.create({"service.name": service}))
    if settings.trace_file is not None:
        out = settings.trace_file.open("a", buffering=1)
        lines = ConsoleSpanExporter(out=out, formatter=lambda span: span.to_json(indent=None) + "\n")
        provider.add_span_processor(SimpleSpanProcessor(lines))
    else:
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    _tracer = provider.get_tracer("bitfoundry")


def is_on() -> bool:
    return _tracer is not None


def span(
    name: str, *, parent: str | None = None, kind: str = "internal", **attributes: Any
) -> AbstractContextManager[Any]:
    """Open a span, as ``with span("plan")``, below the present one, or below ``parent``, a traceparent."""
    return nullcontext() if _tracer is None else _span(name, parent, kind, attributes)


@contextmanager
def _span(name: str, parent: str | None, kind: str, attributes: Mapping[str, Any]) -> Iterator[Any]:
    from opentelemetry.trace import SpanKind

    options = {"kind": SpanKind[kind.upper()], "attributes": attributes, "context": _context_of(parent)}
    with _tracer.start_as_current_span(name, **options) as opened:
        yield opened


def current() -> str | None:
    """Return the traceparent of the present span, for work that continues elsewhere."""
    if _tracer is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier)
    return carrier.get("traceparent")


class Phases:
    """Spans of an engine's phases, from its events: one a phase, each until the next begins."""

    def __init__(self) -> None:
        self._open: Any = None

    def enter(self, phase: str) -> None:
        self.leave()
        if _tracer is not None:
            self._open = _tracer.start_span(f"engine.{phase}")

    def leave(self) -> None:
        if self._open is not None:
            self._open.end()
            self._open = None


def _context_of(traceparent: str | None) -> Any:
    if traceparent is None:
        return None
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    return TraceContextTextMapPropagator().extract({"traceparent": traceparent})
