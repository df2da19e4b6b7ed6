"""A conductor put together: bus, metadata, index mirror, dispatcher, gateway; and how it starts and ends."""

from __future__ import annotations

import asyncio
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.conductor.dispatch import MeshDispatcher
from services.conductor.fellows import Fellows
from services.conductor.gateway.content import is_wanted
from services.conductor.gateway.gateway import Gateway
from services.conductor.gateway.http import Deadlines
from services.conductor.gateway.offload import Offload
from services.conductor.gateway.options import GatewayOptions
from services.conductor.gateway.server import GatewayServer, Listen
from services.conductor.gateway.tenants import Tenants
from services.conductor.gateway.tokenizer import Tokenizer
from services.conductor.gateway.traces import Traces
from services.conductor.settings import ConductorSettings
from shared.ending import until_told
from shared.fingerprint import tokenizer_fingerprint
from shared.heartbeat import Heartbeat
from shared.index.mirroring import IndexMirror
from shared.index.sparing import Sparing
from shared.index.sweeping import Sweeper
from shared.messages import Ref
from shared.metadata import Metadata
from shared.metrics_server import MetricsServer
from shared.model import DEFAULT_MODEL, default_folder, resolve_model, served_name
from shared.nats_bus import NatsBus
from shared.records import ConductorRecord
from shared.telemetry import log

logger = log("conductor")

MODEL_POLL_S = 0.5
"""Seconds between looks for a model that somebody else brings."""


class Stopping:
    """Told twice at most: the first time to drain, the second time to be quick about it."""

    def __init__(self) -> None:
        self.drain = asyncio.Event()
        self.now = asyncio.Event()

    def tell(self) -> None:
        (self.now if self.drain.is_set() else self.drain).set()


@dataclass(frozen=True)
class Words:
    """What the conductor needs of the model: its tokenizer, and that tokenizer's fingerprint."""

    tokenizer: Tokenizer
    fingerprint: str


def load_words(model: str, fetch: bool = True) -> Words:
    """Blocking. Raises ConfigError for a model that is not to be had, or has no tokenizer."""
    folder = resolve_model(model, fetch=fetch)
    return Words(Tokenizer.load(folder), tokenizer_fingerprint(folder))


async def find_words(settings: ConductorSettings) -> Words:
    """Waits first, as long as the settings say, for somebody else to bring the default model. Raises ConfigError."""
    until = time.monotonic() + settings.model_wait_s
    if settings.model in ("", DEFAULT_MODEL) and settings.model_wait_s and default_folder() is None:
        logger.info("waiting for the model", model=DEFAULT_MODEL, seconds=settings.model_wait_s)
        while default_folder() is None and time.monotonic() < until:  # noqa: ASYNC110 - a folder tells nobody
            await asyncio.sleep(MODEL_POLL_S)
    return await asyncio.to_thread(load_words, settings.model, settings.model_wait_s == 0)


async def run(settings: ConductorSettings, stopping: Stopping) -> None:
    """Serve until told to stop, then drain. Starts without NATS and Redis, and is not ready until they are there."""
    listening = asyncio.Event()

    async def serve() -> None:
        async with (
            MetricsServer(settings.metrics_host, settings.metrics_port) as metrics,
            conductor(settings, await find_words(settings), metrics) as server,
        ):
            logger.info("conductor listening", url=server.url)
            listening.set()
            await stopping.drain.wait()
            await drain(server, settings, stopping)

    await until_told(asyncio.create_task(serve()), stopping.drain, listening.is_set)


async def drain(server: GatewayServer, settings: ConductorSettings, stopping: Stopping) -> None:
    """Readiness falls first; then the streams end by themselves, or at the timeout, or when told to stop again."""

    async def gently() -> None:
        deadline = time.monotonic() + settings.drain_delay_s
        await server.drain(settings.drain_timeout_s)
        await asyncio.sleep(deadline - time.monotonic())

    tasks = [asyncio.create_task(gently()), asyncio.create_task(stopping.now.wait())]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()


@asynccontextmanager
async def conductor(settings: ConductorSettings, words: Words, metrics: MetricsServer) -> AsyncIterator[GatewayServer]:
    """All parts, each closed before what it stands on. ``metrics`` is told what keeps it from serving."""
    me = Ref(settings.id or uuid.uuid4().hex, secrets.randbits(63))
    async with AsyncExitStack() as stack:
        metadata = await stack.enter_async_context(await Metadata.connect(settings.redis, settings.mesh, timeout=0))
        bus = await NatsBus.connect(settings.nats, settings.mesh, name=f"conductor-{me.id}", timeout=0)
        await stack.enter_async_context(bus)
        dispatcher = await _dispatcher(settings, me, metadata, bus, stack)
        offload = Offload(settings.tokenizer_threads, settings.tokenizer_backlog, settings.tokenizer_backlog_bytes)
        stack.callback(offload.close)
        tenants = _tenants(settings.api_keys)
        fellows = Fellows(bus, me, metadata.conductors)
        traces = await stack.enter_async_context(Traces(partial(metrics_addresses, dispatcher), fellows))
        await fellows.serve(traces.here)
        gateway = Gateway(dispatcher, words.tokenizer, tenants, offload, _options(settings, words), traces)
        metrics.hindrances = partial(hindrances, gateway)
        server = await stack.enter_async_context(GatewayServer(gateway, _listen(settings)))
        heartbeat = _heartbeat(settings, me, server.url)
        heartbeat.start()
        stack.push_async_callback(asyncio.to_thread, heartbeat.stop)
        yield server


def hindrances(gateway: Gateway) -> list[str]:
    """Why a request would not be served now; nothing when it would."""
    state = gateway.readiness()
    return [] if state.ready else state.reasons


def metrics_addresses(dispatcher: MeshDispatcher) -> list[str]:
    """host:port where instances and agents serve metrics and their spans."""
    picture = dispatcher.cluster()
    return [one["metrics"] for one in (*picture["instances"], *picture["agents"])]


async def _dispatcher(
    settings: ConductorSettings, me: Ref, metadata: Metadata, bus: NatsBus, stack: AsyncExitStack
) -> MeshDispatcher:
    mirror = await stack.enter_async_context(IndexMirror(settings.redis, settings.mesh))
    sweeper = await stack.enter_async_context(Sweeper(metadata, settings.mesh, owner=me.id))
    await stack.enter_async_context(Sparing(metadata, mirror.spare, sweeper.spare))
    dispatcher = MeshDispatcher(settings, bus, me, matcher=mirror, metadata=metadata)
    stack.push_async_callback(dispatcher.close)
    await dispatcher.start()
    return dispatcher


def _tenants(path: str) -> Tenants:
    return Tenants(Path(path).expanduser() if path else None, time.monotonic)


def _heartbeat(settings: ConductorSettings, me: Ref, url: str) -> Heartbeat:
    record = ConductorRecord(ref=me, node=settings.node, url=url, pid=os.getpid())
    return Heartbeat(settings.redis, settings.mesh, lambda: record)


def _options(settings: ConductorSettings, words: Words) -> GatewayOptions:
    return GatewayOptions(
        model=settings.served_model_name or served_name(settings.model),
        tokenizer_print=words.fingerprint,
        default_max_tokens=settings.default_max_tokens,
        max_body_bytes=settings.max_body_bytes,
        body_timeout=settings.body_timeout_s,
        request_timeout=settings.request_timeout_s,
        trace_slow=settings.trace_slow_ms / 1000,
        slo_ttft=settings.slo_ttft_ms / 1000,
        slo_tbt=settings.slo_tbt_ms / 1000,
        objectives=settings.allowed(),
        trace_content=is_wanted(os.environ),
    )


def _listen(settings: ConductorSettings) -> Listen:
    deadlines = Deadlines(
        settings.head_timeout_s, settings.body_timeout_s, settings.stall_timeout_s, settings.idle_timeout_s
    )
    return Listen(settings.host, settings.port, deadlines, settings.reuse_port)
