"""Traces of one process: what is sampled, where spans go, and which recent ones are kept here.

The standard variables of OpenTelemetry decide on exporting: ``OTEL_EXPORTER_OTLP_ENDPOINT``,
``OTEL_EXPORTER_OTLP_PROTOCOL`` (``http/protobuf`` or ``grpc``), ``OTEL_TRACES_SAMPLER`` and the rest of them. Loaded
only where something is recorded: the SDK takes its time.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import AlwaysRecordSampler

from shared.errors import ConfigError
from shared.recent_spans import RecentSpans
from shared.telemetry import gauge

PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")

FLUSH = 2.0
"""Seconds at the end of a process for spans that have not been sent."""

_recent: RecentSpans | None = None


def recent() -> RecentSpans | None:
    """Spans of this process's last requests; None where none are kept."""
    return _recent


def start(service: str, traces: int, sends: bool) -> None:
    """Once in a process; again does nothing. ``traces``: how many are kept here, 0 for none. ``sends``: the variables
    name where to. What the sampler leaves out is recorded all the same where traces are kept, and sent when it turns
    out to matter (:meth:`RecentSpans.keep`). Raises ConfigError."""
    global _recent
    if isinstance(trace.get_tracer_provider(), TracerProvider):
        return
    provider = TracerProvider(resource=Resource.create(identity(service)), shutdown_on_exit=False)
    batches = BatchSpanProcessor(make_exporter(os.environ)) if sends else None
    if batches is not None:
        provider.add_span_processor(batches)
        atexit.register(_flush, provider)
    if traces:
        provider.sampler = AlwaysRecordSampler(provider.sampler)
        _recent = RecentSpans(traces, batches.on_end if batches else None)
        provider.add_span_processor(_recent)
        gauge("recent_spans", "Spans of the last requests that are kept in memory.").set_function(_recent.__len__)
    trace.set_tracer_provider(provider)


def identity(service: str) -> dict[str, str | int]:
    """Which process this is. In containers many have the same pid."""
    named: dict[str, str | int] = {
        "service.name": f"mooncake-{service}",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
    }
    given = os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    if os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in given:
        del named["service.name"]
    return named


def _flush(provider: TracerProvider) -> None:
    """What is left goes out if that is quick: a backend that is gone may not hold up the end of a process."""
    closing = threading.Thread(target=provider.shutdown, daemon=True)
    closing.start()
    closing.join(FLUSH)


def make_exporter(env: Mapping[str, str]) -> SpanExporter:
    """As the variables ask for. Raises ConfigError for a protocol that there is not, or whose package is missing."""
    variable = next((name for name in PROTOCOLS if env.get(name)), PROTOCOLS[-1])
    protocol = env.get(variable) or "http/protobuf"
    if protocol == "http/protobuf":
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        return OTLPSpanExporter()
    if protocol != "grpc":
        raise ConfigError(f"{variable} is {protocol}; http/protobuf and grpc are known", field=variable)
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as GrpcExporter
    except ImportError as e:
        raise ConfigError(
            f"{variable} is grpc, which needs the package opentelemetry-exporter-otlp-proto-grpc", field=variable
        ) from e
    return GrpcExporter()
