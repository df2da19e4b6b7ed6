"""The gateway's routes, and the path of a request from its bytes to its answer."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from services.conductor.gateway import metrics
from services.conductor.gateway.answer import Answer
from services.conductor.gateway.ask import Ask, ask_chat, ask_completion
from services.conductor.gateway.body import ChatBody, CompletionBody, clip, decode_body
from services.conductor.gateway.choices import fan_out
from services.conductor.gateway.completions import Delivery
from services.conductor.gateway.errors import HttpError, fault_of
from services.conductor.gateway.exchange import Exchange
from services.conductor.gateway.generations import Generations
from services.conductor.gateway.http import REQUEST_ID, error_response, json_response, read_body, request_id
from services.conductor.gateway.objectives import objectives
from services.conductor.gateway.offload import Offload
from services.conductor.gateway.openapi import VERSION, document
from services.conductor.gateway.prompts import Limits, Prepared, prepare, salted
from services.conductor.gateway.schemas import Served
from services.conductor.gateway.shapes import Head, Shape, model_list, model_object, shape
from services.conductor.gateway.tenants import Tenants
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.tokenizing import DetokenizeBody, TokenizeBody, detokenize, tokenize
from services.conductor.generation import Dispatcher, Generation, Readiness
from shared.errors import ModelNotFound, NamespaceMismatch, Unavailable
from shared.metrics_server import render
from shared.telemetry import held_gauge, log, tracer

logger = log("gateway")

MODELS = "/v1/models"
TOKENIZER_MISMATCH = "tokenizer_mismatch"
DRAINING = "draining"
SHUTTING_DOWN = "this server is shutting down"
LONG_BODY = 64 * 1024  # bytes from which on even parsing would hold up the loop
KEYS_INVALID = "api_keys_invalid"

C = TypeVar("C", TokenizeBody, DetokenizeBody)


@dataclass(frozen=True)
class GatewayOptions:
    """``model``: the name that is served. ``tokenizer_print``: fingerprint to compare with the instances'. Seconds and
    bytes; ``default_max_tokens`` caps an answer whose request names no limit."""

    model: str
    tokenizer_print: str = ""
    default_max_tokens: int = 4096
    max_body_bytes: int = 10 * 2**20
    body_timeout: float = 60.0
    request_timeout: float = 3600.0


Handler = Callable[[web.BaseRequest, Exchange], Awaitable[web.StreamResponse]]


class Gateway:
    """Answers every request; :meth:`handle` never raises but for a client that went away."""

    def __init__(
        self, dispatcher: Dispatcher, tokenizer: Tokenizer, tenants: Tenants, offload: Offload, options: GatewayOptions
    ) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._tenants = tenants
        self._offload = offload
        self._options = options
        self._created = int(time.time())
        self._held = held_gauge("gateway_requests")
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[Generations] = set()
        self.in_flight = 0
        self.draining = False
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
        try:
            response = await self._route(request, exchange)
        except (asyncio.CancelledError, ConnectionError):
            exchange.cancelled()
            raise
        except Exception as error:
            response = self._refuse(error, exchange)
        finally:
            exchange.close(time.monotonic())
        if self.draining:
            response.force_close()  # the client's next request belongs on another server
        return response

    def readiness(self) -> Readiness:
        """The dispatcher's, and what the gateway itself has against serving."""
        state = self._dispatcher.readiness()
        own = [DRAINING] if self.draining else []
        if state.ready and self._tokenizer_differs():
            own.append(TOKENIZER_MISMATCH)
        degraded = [*state.degraded, *([KEYS_INVALID] if self._tenants.error else [])]
        reasons = list(dict.fromkeys([*own, *state.reasons]))
        return Readiness(state.ready and not own, reasons, degraded)

    async def drained(self) -> None:
        """Wait until no completion is in flight."""
        await self._idle.wait()

    def cut(self) -> None:
        """No more time: every answer that is not complete ends with an error."""
        for running in self._running:
            running.fail(Unavailable(SHUTTING_DOWN, retry_after_ms=1000))

    # -- routes --------------------------------------------------------------------------------------------

    async def _route(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        path = request.path
        handler: Handler = self._model
        if path.startswith(MODELS + "/"):
            exchange.route, method = "model", "GET"
        elif path in self.routes:
            exchange.route, method, handler = self.routes[path]
        elif path == "*":  # the server as a whole
            method = "GET"
        else:
            raise HttpError(404, "unknown_url", f"Unknown request URL: {clip(request.method, 16)} {clip(path)}")
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
        fault = fault_of(Unavailable(f"not ready: {', '.join(state.reasons)}"))
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

    async def _models(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        self._identify(request, exchange)
        return json_response(msgspec.json.encode(model_list([self._model_object()])), exchange.id)

    async def _model(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        self._identify(request, exchange)
        self._check_model(request.path.removeprefix(MODELS + "/"))
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
            self._check_model(body.model)
        return json_response(await self._offload.run(len(raw), partial(convert, body)), exchange.id)

    def _served(self) -> Served:
        options = self._options
        return Served(options.model, self._tokenizer.vocabulary, options.max_body_bytes, self._tenants.asked)

    def _identify(self, request: web.BaseRequest, exchange: Exchange) -> None:
        """Raises Unauthorized."""
        exchange.tenant = self._tenants.identify(request.headers.get("Authorization", ""))

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

    def _check_model(self, name: str) -> None:
        if name != self._options.model:
            raise ModelNotFound(f"The model `{clip(name)}` does not exist or is not served here.", field="model")

    # -- completions ---------------------------------------------------------------------------------------

    async def _chat(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        with exchange.traced(request, "chat"):
            return await self._answer(request, exchange, lambda raw: ask_chat(decode_body(raw, ChatBody)))

    async def _complete(self, request: web.BaseRequest, exchange: Exchange) -> web.StreamResponse:
        with exchange.traced(request, "text_completion"):
            return await self._answer(request, exchange, lambda raw: ask_completion(decode_body(raw, CompletionBody)))

    async def _answer(
        self, request: web.BaseRequest, exchange: Exchange, parse: Callable[[bytes], Ask]
    ) -> web.StreamResponse:
        self._identify(request, exchange)
        exchange.objectives = objectives(request.headers)
        if self.draining:
            raise Unavailable(SHUTTING_DOWN, retry_after_ms=1000)
        self._begin(1)
        try:
            raw = await self._read(request)
            exchange.added = -time.monotonic()
            ask = await self._offload.run(len(raw), partial(parse, raw)) if len(raw) > LONG_BODY else parse(raw)
            self._check_model(ask.model)
            prepared = await self._prepare(ask, len(raw), exchange)
            return await self._generate(request, exchange, ask, prepared)
        finally:
            self._begin(-1)

    def _begin(self, change: int) -> None:
        self.in_flight += change
        self._held.inc(change)
        if self.in_flight:
            self._idle.clear()
        else:
            self._idle.set()

    async def _prepare(self, ask: Ask, size: int, exchange: Exchange) -> list[Prepared]:
        """Stage 0 of admission, then token ids and keys. Raises Contended, Unavailable, InvalidInput."""
        self._dispatcher.consider(size, exchange.objectives.ttft_ms)
        if self._tokenizer_differs():
            raise Unavailable("this server's tokenizer is not that of the instances")
        namespace = salted(self._dispatcher.namespace, exchange.tenant.salt)
        limits = Limits(self._dispatcher.context_length, self._options.default_max_tokens)
        began = time.monotonic()
        with tracer().start_as_current_span("tokenize") as span:
            work = partial(prepare, ask, self._tokenizer, namespace, limits)
            # Hashing a few thousand ids takes less than to wake a thread.
            prepared = work() if ask.ready and size <= LONG_BODY else await self._offload.run(size, work)
            span.set_attribute("mooncake.prompt_tokens", sum(len(one.tokens) for one in prepared))
        took = time.monotonic() - began
        metrics.TOKENIZE.observe(took)
        exchange.added -= took
        return prepared

    async def _generate(
        self, request: web.BaseRequest, exchange: Exchange, ask: Ask, prepared: list[Prepared]
    ) -> web.StreamResponse:
        choices = fan_out(prepared, ask.n)
        answer = Answer(ask, choices, self._tokenizer, exchange.arrived)
        generations = [_generation(exchange, i, choice) for i, choice in enumerate(choices)]
        exchange.added += time.monotonic()
        try:
            async with Generations(self._dispatcher, generations, ask.n) as running, self._cuttable(running):
                delivery = Delivery(
                    running, answer, self._shape(ask, exchange.unique), exchange.id, self._options.request_timeout
                )
                if not ask.stream:
                    return await delivery.whole()
                response = await delivery.stream(request, ask.include_usage)
                metrics.ADDED.observe(exchange.added + delivery.added)
                if delivery.fault is not None:
                    exchange.failed(delivery.fault)
                return response
        finally:
            metrics.observe(answer)
            exchange.describe(self._options.model, answer)

    @asynccontextmanager
    async def _cuttable(self, running: Generations) -> AsyncIterator[None]:
        self._running.add(running)
        try:
            yield
        finally:
            self._running.discard(running)

    def _shape(self, ask: Ask, unique: str) -> Shape:
        id = ("chatcmpl-" if ask.chat else "cmpl-") + unique
        fingerprint = "fp_" + self._dispatcher.namespace.root().hex()[:12]
        head = Head(id, int(time.time()), self._options.model, fingerprint)
        return shape(ask, head, self._tokenizer.pieces)

    def _tokenizer_differs(self) -> bool:
        try:
            theirs = self._dispatcher.namespace.tokenizer
        except (Unavailable, NamespaceMismatch):
            return False
        return bool(self._options.tokenizer_print) and theirs != self._options.tokenizer_print


def _generation(exchange: Exchange, choice: int, prepared: Prepared) -> Generation:
    """The first choice has the request's own id, which the client can read off the answer."""
    wanted = exchange.objectives
    return Generation(
        id=uuid.uuid4().hex if choice else exchange.unique,
        tokens=prepared.tokens,
        root=prepared.root,
        keys=prepared.keys,
        sampling=prepared.sampling,
        arrived=exchange.arrived,
        tenant=exchange.tenant.name,
        slo_ttft_ms=wanted.ttft_ms,
        slo_tbt_ms=wanted.tbt_ms,
        priority=wanted.priority,
    )
