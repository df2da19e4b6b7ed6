"""One request from its first byte to its last: identity, outcome, span."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from aiohttp import web
from multidict import CIMultiDict, CIMultiDictProxy
from opentelemetry import propagate, trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, Status, StatusCode
from opentelemetry.util.types import AttributeValue

from services.conductor.gateway import metrics
from services.conductor.gateway.answer import Answer
from services.conductor.gateway.ask import Ask
from services.conductor.gateway.errors import Fault, fault_of
from services.conductor.gateway.objectives import Objectives
from shared.api_keys import Tenant
from shared.telemetry import tracer

CONTENDED = 429
"""Not the client's fault, so an error, unlike other statuses of 4xx."""


@dataclass
class Exchange:
    """``unique`` names the request in the mesh; ``id`` is what the client reads, its own id where it sent a sane one.
    ``arrived``: monotonic seconds. ``outcome`` becomes a label. ``ticket``: see Generation."""

    unique: str
    id: str
    route: str
    arrived: float
    outcome: str = "ok"
    added: float = 0.0  # seconds of the gateway's own before the first token can leave, tokenizing apart
    tenant: Tenant = field(default_factory=Tenant)
    objectives: Objectives = field(default_factory=Objectives)
    span: trace.Span = field(default=trace.INVALID_SPAN)
    faulty: bool = False
    status: int = 200
    first: float | None = None  # seconds to the first token
    slowest: float | None = None  # of its choices: mean of the worst tenth of the times between tokens
    tokens: int = 0
    ticket: int = 0

    def failed(self, fault: Fault) -> None:
        self.outcome = fault.code
        self.status = fault.status
        self.faulty = fault.status >= 500 or fault.status == CONTENDED
        if not self.span.is_recording():
            return
        self.span.set_attribute("error.type", fault.code)
        self.span.set_attribute("http.response.status_code", fault.status)
        if self.faulty:
            self.span.set_status(Status(StatusCode.ERROR, fault.code))

    def cancelled(self) -> None:
        self.outcome = "cancelled"
        self.faulty = True
        if not self.span.is_recording():
            return
        self.span.set_attribute("error.type", "cancelled")
        self.span.set_status(Status(StatusCode.ERROR, "the client went away"))

    def verdict(self, ttft: float, tbt: float) -> str:
        """How it stood to its objectives, those of the request or else these (seconds); "" for one that was not valid,
        which says nothing about us."""
        wanted = self.objectives
        if self.outcome == "cancelled":
            return self.outcome
        if self.faulty:
            return "refused" if self.status == CONTENDED else "failed"
        if self.status != 200:
            return ""
        if self.first is None or self.first > (wanted.ttft_ms / 1000 or ttft):
            return "ttft_missed"
        return "tbt_missed" if (self.slowest or 0.0) > (wanted.tbt_ms / 1000 or tbt) else metrics.MET

    def close(self, now: float) -> None:
        metrics.REQUESTS.labels(self.route, self.outcome).inc()
        metrics.DURATION.labels(self.route).observe(now - self.arrived)

    @contextmanager
    def traced(self, request: web.BaseRequest, operation: str) -> Iterator[None]:
        """The request's root span, under the client's ``traceparent`` where it sent one."""
        about = {
            "http.request.method": request.method,
            "url.path": request.path,
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "mooncake",
            "mooncake.request": self.unique,
            "mooncake.request_id": self.id,
        }
        with tracer().start_as_current_span(
            f"{request.method} {request.path}",
            _parent(request.headers),
            SpanKind.SERVER,
            about,
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            self.span = span
            try:
                yield
            except (asyncio.CancelledError, ConnectionError):
                self.cancelled()
                raise
            except Exception as error:
                self.failed(fault_of(error))
                raise

    def left_out(self) -> str:
        """The trace that our sampler left out, "" for one that is sent anyway, or that the client wants not to be."""
        own = self.span.get_span_context()
        parent = getattr(self.span, "parent", None)
        if not self.span.is_recording() or own.trace_flags.sampled or parent is not None:
            return ""
        return format(own.trace_id, "032x")

    def ask(self, ask: Ask) -> None:
        """What was asked for, in the words of OpenTelemetry's conventions for generative AI."""
        if not self.span.is_recording():
            return
        asked: dict[str, AttributeValue | None] = {
            "gen_ai.request.model": ask.model,
            "gen_ai.request.choice.count": ask.n,
            "gen_ai.request.max_tokens": ask.max_tokens,
            "gen_ai.request.temperature": ask.temperature,
            "gen_ai.request.top_p": ask.top_p,
            "gen_ai.request.top_k": ask.top_k,
            "gen_ai.request.seed": ask.seed,
            "gen_ai.request.frequency_penalty": ask.frequency_penalty,
            "gen_ai.request.presence_penalty": ask.presence_penalty,
            "mooncake.stream": ask.stream,
        }
        self.span.set_attributes({name: value for name, value in asked.items() if value is not None})

    def describe(self, model: str, answer: Answer) -> None:
        """What was answered, in the words of OpenTelemetry's conventions for generative AI."""
        self.first = next((pace.ttft for pace in answer.paces if pace.ttft is not None), None)
        self.slowest = max((tbt for pace in answer.paces if (tbt := pace.tbt()) is not None), default=None)
        self.tokens = answer.completion_tokens
        if not self.span.is_recording():
            return
        if answer.said is not None:
            self.span.set_attributes(answer.said.attributes([transcript.finish for transcript in answer.transcripts]))
        reasons = [transcript.finish for transcript in answer.transcripts if transcript.finish]
        self.span.set_attributes(
            {
                "gen_ai.response.model": model,
                "gen_ai.response.id": self.unique,
                "http.response.status_code": 200,
                "gen_ai.usage.input_tokens": answer.prompt_tokens,
                "gen_ai.usage.output_tokens": answer.completion_tokens,
                "gen_ai.response.finish_reasons": reasons,
                "mooncake.cached_tokens": answer.cached_tokens,
            }
        )
        if self.first is not None:
            self.span.set_attribute("gen_ai.response.time_to_first_chunk", self.first)
        if self.slowest is not None:
            self.span.set_attribute("mooncake.tbt_s", self.slowest)


def _parent(headers: CIMultiDictProxy[str]) -> Context:
    """What the client's headers say of its trace, where they are ASCII: their readers fail over other bytes."""
    told = [name for name in propagate.get_global_textmap().fields if name in headers]
    if not told:
        return Context()
    sane = ((name, value) for name in told for value in headers.getall(name) if value.isascii())
    return propagate.extract(CIMultiDict(sane))
