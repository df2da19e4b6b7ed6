"""The gateway's routes."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web
from opentelemetry import trace

from services.conductor.gateway import metrics
from services.conductor.gateway.ask import ask_chat, ask_completion
from services.conductor.gateway.body import ChatBody, CompletionBody, clip, decode_body
from services.conductor.gateway.completer import Completer
from services.conductor.gateway.errors import HttpError, fault_of
from services.conductor.gateway.exchange import Exchange
from services.conductor.gateway.http import REQUEST_ID, error_response, json_response, read_body, request_id
from services.conductor.gateway.offload import Offload
from services.conductor.gateway.openapi import VERSION, document
from services.conductor.gateway.options import GatewayOptions
from services.conductor.gateway.schemas import Served
from services.conductor.gateway.shapes import model_list, model_object
from services.conductor.gateway.tenants import Tenants
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.tokenizing import DetokenizeBody, TokenizeBody, detokenize, tokenize
from services.conductor.gateway.traces import Traces
from services.conductor.generation import Dispatcher, Readiness
from shared.errors import Unavailable
from shared.metrics_server import render
from shared.telemetry import bound, log

logger = log("gateway")

MODELS = "/v1/models"
TRACE = "/trace"
TOKENIZER_MISMATCH = "tokenizer_mismatch"
DRAINING = "draining"
KEYS_INVALID = "api_keys_invalid"

C = TypeVar("C", TokenizeBody, DetokenizeBody)


Handler = Callable[[web.BaseRequest, Exchange], Awaitable[web.StreamResponse]]


class Gateway:
    """Answers every request; :meth:`handle` never raises but for a client that went away."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        tokenizer: Tokenizer,
        tenants: Tenants,
        offload: Offload,
        options: GatewayOptions,
        traces: Traces | None = None,
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._tenants = tenants
        self._offload = offload
        self._options = options
        self._traces = traces
        metrics.OBJECTIVES.labels("ttft").set(options.slo_ttft)
        metrics.OBJECTIVES.labels("tbt").set(options.slo_tbt)
        self._created = int(time.time())
        self._completer = Completer(dispatcher, tokenizer, offload, options)
        self._openapi = msgspec.json.encode(document(self._served()))
        self.routes: dict[str, tuple[str, str, Handler]] = {
            "/v1/chat/completions": ("chat_completions", "POST", self._chat),
            "/v1/completions": ("completions", "POST", self._complete),
            "/v1/tokenize": ("tokenize", "POST", self._tokenize),
            "/tokenize": ("tokenize", "POST", self._tokenize),
            "/v1/detokenize": ("detokenize", "POST", self._detokenize),
            "/detokenize": ("detokenize", "POST", self._detokenize),
            MODELS: ("models", "GET", self._models),
            "/version": ("version", "GET", self._version),
            "/cluster": ("cluster", "GET", self._cluster),
            "/openapi.json": ("openapi", "GET", self._describe),
            "/health": ("health", "GET", self._health),
            "/ready": ("ready", "GET", self._ready),
            "/metrics": ("metrics", "GET", self._metrics),
        }

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        unique = uuid.uuid4().hex
        exchange = Exchange(unique, request_id(request.headers.get(REQUEST_ID), unique), "unknown", time.monotonic())
        with bound(request=unique):
            response = await self._answered(request, exchange)
        if self.draining:
            response.force_close()  # the client's next request belongs on another server
        return response

    async def _answered(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        try:
            return await self._route(request, exchange)
        except (asyncio.CancelledError, ConnectionError):
            exchange.cancelled()
            raise
        except Exception as error:
            with trace.use_span(exchange.span, end_on_exit=False):  # it has ended; what is logged still belongs to it
                return self._refuse(error, exchange)
        finally:
            exchange.close(time.monotonic())
            with trace.use_span(exchange.span, end_on_exit=False):
                logger.debug("request over", id=exchange.id, route=exchange.route, outcome=exchange.outcome)

    def readiness(self) -> Readiness:
        """The dispatcher's, and what the gateway itself has against serving."""
        state = self._dispatcher.readiness()
        own = [DRAINING] if self.draining else []
        if state.ready and self._completer.tokenizer_differs():
            own.append(TOKENIZER_MISMATCH)
        degraded = [*state.degraded, *([KEYS_INVALID] if self._tenants.error else [])]
        reasons = list(dict.fromkeys([*own, *state.reasons]))
        return Readiness(state.ready and not own, reasons, degraded)

    @property
    def in_flight(self) -> int:
        """Completions under way."""
        return self._completer.in_flight

    @property
    def draining(self) -> bool:
        """Set from outside: nothing new is accepted, and connections end with their answer."""
        return self._completer.draining

    @draining.setter
    def draining(self, value: bool) -> None:
        self._completer.draining = value

    async def drained(self) -> None:
        """Wait until no completion is in flight."""
        await self._completer.drained()

    def cut(self) -> None:
        """No more time: every answer that is not complete ends with an error."""
        self._completer.cut()

    # -- routes --------------------------------------------------------------------------------------------

    async def _route(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        path = request.path
        handler: Handler = self._model
        if path.startswith(MODELS + "/"):
            exchange.route, method = "model", "GET"
        elif path.startswith(TRACE + "/"):
            exchange.route, method, handler = "trace", "GET", self._trace
        elif path in self.routes:
            exchange.route, method, handler = self.routes[path]
        elif path == "*":  # the server as a whole
            method = "GET"
        else:
            asked = f"{clip(request.method, 16)} {clip(path)}"
            raise HttpError(404, "unknown_url", f"Unknown request URL: {asked} (GET /openapi.json lists what there is)")
        allowed = "GET, HEAD, OPTIONS" if method == "GET" else f"{method}, OPTIONS"
        if request.method == "OPTIONS":
            return web.Response(status=204, headers={"Allow": allowed, REQUEST_ID: exchange.id})
        if path == "*" or request.method not in allowed.split(", "):
            message = f"Not allowed to {clip(request.method, 16)} on {clip(path)}"
            raise HttpError(405, "method_not_allowed", message, allow=allowed)
        return await handler(request, exchange)

    def _refuse(self, error: Exception, exchange: Exchange) -> web.Response:
        fault = fault_of(error)
        exchange.failed(fault)
        if fault.status >= 500:
            logger.warning("request failed", id=exchange.id, code=fault.code, exc_info=fault.code == "internal")
        return error_response(fault, exchange.id)

    async def _health(self, _request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        return json_response(b'{"status":"ok"}', exchange.id)

    async def _ready(self, _request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        state = self.readiness()
        picture: dict[str, Any] = {"ready": state.ready, "reasons": state.reasons, "degraded": state.degraded}
        if state.ready:
            return json_response(msgspec.json.encode(picture), exchange.id)
        fault = fault_of(Unavailable(f"not ready: {', '.join(state.reasons)}", field=state.reasons[0]))
        exchange.failed(fault)
        picture |= msgspec.json.decode(fault.envelope())
        return json_response(msgspec.json.encode(picture), exchange.id, fault.status, fault.headers())

    async def _metrics(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        body, content_type = render(request.headers.get("Accept", ""))
        return json_response(body, exchange.id, headers={"Content-Type": content_type})

    async def _describe(self, _request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        return json_response(self._openapi, exchange.id)

    async def _version(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        self._identify(request, exchange)
        return json_response(msgspec.json.encode({"version": VERSION}), exchange.id)

    async def _cluster(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        self._identify(request, exchange)
        state = self.readiness()
        own = {"model": self._options.model, "in_flight": self.in_flight, **msgspec.to_builtins(state)}
        return json_response(msgspec.json.encode(self._dispatcher.cluster() | {"gateway": own}), exchange.id)

    async def _trace(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        self._identify(request, exchange)
        id = request.path.removeprefix(TRACE + "/")
        traced = await self._traces.of(id, exchange.tenant.name) if self._traces is not None else None
        if traced is None or not traced.trace:
            why = "it is not one of the last ones, or its spans are not recorded (trace_requests)"
            if traced is not None and traced.missing:
                why += f", or one of these knows, who did not answer: {', '.join(sorted(traced.missing))}"
            raise HttpError(404, "trace_not_found", f"No trace of request {clip(id)}: {why}.")
        return json_response(msgspec.json.encode(traced), exchange.id)

    @contextmanager
    def _traced(self, request: web.BaseRequest, exchange: Exchange, operation: str) -> Iterator[None]:
        """Under the request's root span. What failed or was slow is sent even where the sampler left it out."""
        left_out = ""
        try:
            with exchange.traced(request, operation):
                left_out = exchange.left_out()
                yield
        finally:
            verdict = exchange.verdict(self._options.slo_ttft, self._options.slo_tbt)
            if verdict:
                metrics.judged(verdict, exchange.tokens)
            if left_out and self._traces is not None and (exchange.faulty or self._slow(exchange, verdict)):
                self._traces.keep(left_out)

    def _slow(self, exchange: Exchange, verdict: str) -> bool:
        """To its first token, or by an objective that it missed."""
        limit = self._options.trace_slow
        return limit > 0 and ((exchange.first or 0.0) > limit or verdict in metrics.MISSED)

    async def _models(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        self._identify(request, exchange)
        return json_response(msgspec.json.encode(model_list([self._model_object()])), exchange.id)

    async def _model(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        self._identify(request, exchange)
        self._completer.check_model(request.path.removeprefix(MODELS + "/"))
        return json_response(msgspec.json.encode(self._model_object()), exchange.id)

    async def _tokenize(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        context = self._context()
        return await self._convert(request, exchange, TokenizeBody, lambda b: tokenize(b, self._tokenizer, context))

    async def _detokenize(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        return await self._convert(request, exchange, DetokenizeBody, lambda b: detokenize(b, self._tokenizer))

    async def _convert(
        self, request: web.BaseRequest, exchange: Exchange, kind: type[C], convert: Callable[[C], bytes]
    ) -> web.StreamResponse:
        """What the tokenizer alone can answer, in one of its threads."""
        self._identify(request, exchange)
        raw = await self._read(request)
        body = await self._offload.run(len(raw), partial(decode_body, raw, kind))
        if body.model is not None:
            self._completer.check_model(body.model)
        return json_response(await self._offload.run(len(raw), partial(convert, body)), exchange.id)

    def _served(self) -> Served:
        options = self._options
        keys, vocabulary = self._tenants.asked, self._tokenizer.vocabulary
        return Served(options.model, vocabulary, options.max_body_bytes, keys, options.objectives)

    def _identify(self, request: web.BaseRequest, exchange: Exchange) -> None:
        """Raises Unauthorized."""
        exchange.tenant = self._tenants.identify(request.headers.get("Authorization", ""))
        if self._traces is not None and exchange.span.is_recording():  # only now: who is nobody fills no memory
            self._traces.name(exchange)

    async def _read(self, request: web.BaseRequest) -> bytes:
        return await read_body(request, self._options.max_body_bytes, self._options.body_timeout)

    def _model_object(self) -> dict[str, Any]:
        return model_object(self._options.model, self._created, self._context())

    def _context(self) -> int | None:
        """Tokens; None while no instance has told it."""
        try:
            return self._dispatcher.context_length
        except Unavailable:
            return None

    async def _chat(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        with self._traced(request, exchange, "chat"):
            self._identify(request, exchange)
            return await self._completer.answer(request, exchange, lambda raw: ask_chat(decode_body(raw, ChatBody)))

    async def _complete(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        with self._traced(request, exchange, "text_completion"):
            self._identify(request, exchange)
            return await self._completer.answer(
                request, exchange, lambda raw: ask_completion(decode_body(raw, CompletionBody))
            )
