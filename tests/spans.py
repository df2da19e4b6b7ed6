"""Spans that a test looks at, of a provider of its own: the process-wide one can be set only once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter


@contextmanager
def recorded(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> Iterator[InMemorySpanExporter]:
    """What the tracers of ``modules`` end while the block runs."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for module in modules:
        monkeypatch.setattr(module, "tracer", lambda: provider.get_tracer("test"))
    yield exporter
    provider.shutdown()
