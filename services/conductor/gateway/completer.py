"""A completion from the bytes of its request to its answer, and how many of them are under way."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial

from aiohttp import web

from services.conductor.gateway import metrics
from services.conductor.gateway.answer import Answer
from services.conductor.gateway.ask import Ask
from services.conductor.gateway.body import clip, most_urgent
from services.conductor.gateway.chains import Chains
from services.conductor.gateway.choices import fan_out
from services.conductor.gateway.completions import Delivery
from services.conductor.gateway.content import Said, asked
from services.conductor.gateway.exchange import Exchange
from services.conductor.gateway.generations import Generations
from services.conductor.gateway.http import read_body
from services.conductor.gateway.objectives import objectives
from services.conductor.gateway.offload import Offload
from services.conductor.gateway.options import GatewayOptions
from services.conductor.gateway.prompts import Limits, Prepared, prepare, salted
from services.conductor.gateway.shapes import Head, Shape, shape
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.generation import Dispatcher, Generation
from shared.errors import ModelNotFound, NamespaceMismatch, Unavailable
from shared.telemetry import held_gauge, tracer

SHUTTING_DOWN = "this server is shutting down"
LONG_BODY = 64 * 1024  # bytes from which on even parsing would hold up the loop


class Completer:
    """``draining``: set from outside; nothing new is accepted then."""

    def __init__(self, dispatcher: Dispatcher, tokenizer: Tokenizer, offload: Offload, options: GatewayOptions) -> None:
        self._dispatcher = dispatcher
        self._tokenizer = tokenizer
        self._offload = offload
        self._options = options
        self._chains = Chains()
        self._held = held_gauge("gateway_requests")
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[Generations] = set()
        self.in_flight = 0
        self.draining = False

    async def drained(self) -> None:
        """Wait until no completion is in flight."""
        await self._idle.wait()

    def cut(self) -> None:
        """No more time: every answer that is not complete ends with an error."""
        for running in self._running:
            running.fail(Unavailable(SHUTTING_DOWN, field="draining", retry_after_ms=1000))

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound."""
        if name != self._options.model:
            raise ModelNotFound(f"The model `{clip(name)}` does not exist or is not served here.", field="model")

    def tokenizer_differs(self) -> bool:
        """Whether the instances tokenize otherwise than this gateway would."""
        try:
            theirs = self._dispatcher.namespace.tokenizer
        except (Unavailable, NamespaceMismatch):
            return False
        return bool(self._options.tokenizer_print) and theirs != self._options.tokenizer_print

    async def answer(
        self, request: web.BaseRequest, exchange: Exchange, parse: Callable[[bytes], Ask]
    ) -> web.StreamResponse:
        """The answer, sent or to be sent. Raises what keeps a request from being accepted, before its head is sent."""
        exchange.objectives = objectives(request.headers, self._options.objectives)
        if self.draining:
            raise Unavailable(SHUTTING_DOWN, field="draining", retry_after_ms=1000)
        self._begin(1)
        try:
            raw = await read_body(request, self._options.max_body_bytes, self._options.body_timeout)
            exchange.added = -time.monotonic()
            exchange.ticket = hash((exchange.route, exchange.tenant.name, raw))
            if len(raw) > LONG_BODY:
                self._consider(raw, exchange, 0, most_urgent(raw))  # a thread is no place to wait for a refusal
                ask = await self._offload.run(len(raw), partial(parse, raw))
            else:
                ask = parse(raw)
            self.check_model(ask.model)
            self._consider(raw, exchange, ask.least_tokens, ask.priority)
            exchange.ask(ask)
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

    def _consider(self, raw: bytes, exchange: Exchange, tokens: int, priority: int) -> None:
        """Stage 0 of admission. ``tokens``: that the prompt has at least; ``priority``: it has at most. Raises
        Contended, Unavailable."""
        self._dispatcher.consider(len(raw), exchange.objectives.ttft_ms, exchange.ticket, tokens, priority)

    async def _prepare(self, ask: Ask, size: int, exchange: Exchange) -> list[Prepared]:
        """Token ids and keys. Raises Contended, Unavailable, InvalidInput."""
        if self.tokenizer_differs():
            raise Unavailable("this server's tokenizer is not that of the instances", field="tokenizer_mismatch")
        namespace = salted(self._dispatcher.namespace, exchange.tenant.salt)
        limits = Limits(self._dispatcher.context_length, self._options.default_max_tokens)
        began = time.monotonic()
        # What a chat template complains of may quote the conversation.
        with tracer().start_as_current_span("tokenize", record_exception=False, set_status_on_exception=False) as span:
            work = partial(prepare, ask, self._tokenizer, namespace, limits, self._chains.keys)
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
        answer = Answer(ask, choices, self._tokenizer, exchange.arrived, self._content(exchange, ask, len(choices)))
        generations = [_generation(exchange, i, choice, ask.priority) for i, choice in enumerate(choices)]
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

    def _content(self, exchange: Exchange, ask: Ask, choices: int) -> Said | None:
        """Where the operator wants to read prompts and answers in the trace."""
        if not self._options.trace_content or not exchange.span.is_recording():
            return None
        exchange.span.set_attributes(asked(ask.prompts, self._tokenizer.decode))
        return Said(choices)

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


def _generation(exchange: Exchange, choice: int, prepared: Prepared, priority: int) -> Generation:
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
        priority=priority,
        ticket=hash((exchange.ticket, choice)) if choice else exchange.ticket,
    )
