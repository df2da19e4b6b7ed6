"""One request from its first byte to its last: identity, outcome, span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDict
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind, Status, StatusCode

from services.conductor.gateway import metrics
from services.conductor.gateway.answer import Answer
from services.conductor.gateway.errors import Fault, fault_of
from services.conductor.gateway.objectives import Objectives
from services.conductor.gateway.tenants import Tenant
from shared.telemetry import tracer


@dataclass
class Exchange:
    """``unique`` names the request in the mesh; ``id`` is what the client reads, its own id where it sent a sane one.
    ``arrived``: monotonic seconds. ``outcome`` becomes a label."""

    unique: str
    id: str
    route: str
    arrived: float
    outcome: str = "ok"
    added: float = 0.0  # seconds of the gateway's own before the first token can leave, tokenizing apart
    tenant: Tenant = field(default_factory=Tenant)
    objectives: Objectives = field(default_factory=Objectives)
    span: trace.Span = field(default=trace.INVALID_SPAN)

    def failed(self, fault: Fault) -> None:
        self.outcome = fault.code
        if not self.span.is_recording():
            return
        self.span.set_attribute("error.type", fault.code)
        self.span.set_attribute("http.response.status_code", fault.status)
        if fault.status >= 500:
            self.span.set_status(Status(StatusCode.ERROR, fault.code))

    def cancelled(self) -> None:
        self.outcome = "cancelled"
        if not self.span.is_recording():
            return
        self.span.set_attribute("error.type", "cancelled")
        self.span.set_status(Status(StatusCode.ERROR, "the client went away"))

    def close(self, now: float) -> None:
        metrics.REQUESTS.labels(self.route, self.outcome).inc()
        metrics.DURATION.labels(self.route).observe(now - self.arrived)

    @contextmanager
    def traced(self, request: web.BaseRequest, operation: str) -> Iterator[None]:
        """The request's root span, under the client's ``traceparent`` where it sent one."""
        sane = CIMultiDict((name, value) for name, value in request.headers.items() if value.isascii())
        parent = propagate.extract(sane)  # its readers of headers fail over other bytes
        name = f"{request.method} {request.path}"
        with tracer().start_as_current_span(
            name, parent, SpanKind.SERVER, record_exception=False, set_status_on_exception=False
        ) as span:
            self.span = span
            span.set_attributes({"http.request.method": request.method, "url.path": request.path})
            span.set_attribute("gen_ai.operation.name", operation)
            try:
                yield
            except (asyncio.CancelledError, ConnectionError):
                self.cancelled()
                raise
            except Exception as error:
                self.failed(fault_of(error))
                raise

    def describe(self, model: str, answer: Answer) -> None:
        """What was answered, in the words of OpenTelemetry's conventions for generative AI."""
        reasons = [transcript.finish for transcript in answer.transcripts if transcript.finish]
        self.span.set_attributes(
            {
                "gen_ai.request.model": model,
                "gen_ai.response.model": model,
                "gen_ai.usage.input_tokens": answer.prompt_tokens,
                "gen_ai.usage.output_tokens": answer.completion_tokens,
                "gen_ai.response.finish_reasons": reasons,
                "mooncake.cached_tokens": answer.cached_tokens,
            }
        )
