"""A process around an instance: engine, connections, registration, the agent's death, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import uuid
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec

from shared.blocks import Namespace
from shared.bus import Bus
from shared.calibration import latency_models
from shared.early_signals import STOPPING
from shared.ending import until_told
from shared.engines.base import Engine, KVStore, Timed
from shared.engines.calibrate import clock_of, quick_calibrate
from shared.engines.registry import load_engine, subject
from shared.errors import AgentGone, DeadlineExceeded, MooncakeError, NamespaceMismatch, Refused
from shared.heartbeat import Heartbeat
from shared.instance.compute import ComputeThread
from shared.instance.instance import Instance
from shared.instance.pulse import Pulse
from shared.instance.settings import InstanceSettings
from shared.latency import DecodeModel, PrefillModel
from shared.messages import Ref
from shared.metrics_server import DRAINING, STARTING, MetricsServer
from shared.nats_bus import NatsBus
from shared.records import DECODE, PREFILL, InstanceRecord
from shared.tasks import end
from shared.telemetry import log

RETRY_S = 0.2

Connect = Callable[[Namespace], Awaitable[KVStore]]
"""Connects to the node's agent. Raises AgentGone or OSError while there is none, NamespaceMismatch for good."""


@dataclass(frozen=True)
class Parts:
    """What an instance is built from. The engine is bound to the store's pool."""

    ref: Ref
    bus: Bus
    store: KVStore
    engine: Engine
    compute: ComputeThread
    prefill_model: PrefillModel


Build = Callable[[Parts], Instance[Any]]


class Host:
    """Runs one instance until SIGTERM or SIGINT; :meth:`run` returns the exit code."""

    def __init__(self, role: str, settings: InstanceSettings, connect: Connect, build: Build) -> None:
        self.role, self.settings = role, settings
        self._connect, self._build = connect, build
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        self._refused: Refused | None = None
        self._ready = False
        self._service: Instance[Any] | None = None
        self._log = log(role)
        self._ref = Ref(settings.id or uuid.uuid4().hex, secrets.randbits(64) | 1)
        self._compute = ComputeThread(role)

    async def run(self) -> int:
        serving = asyncio.create_task(self._serve())
        for number in STOPPING:
            self._loop.add_signal_handler(number, self._stop.set)
        try:
            await until_told(serving, self._stop, lambda: self._ready)
            if self._refused is not None:
                raise self._refused
        except MooncakeError as e:
            self._log.error("cannot go on", error=e.code, field=e.field, reason=e.message)
            return 1
        finally:
            self._compute.close()
        return 0

    async def _serve(self) -> None:
        settings = self.settings
        async with contextlib.AsyncExitStack() as stack:
            metrics = await stack.enter_async_context(MetricsServer(settings.metrics_host, settings.metrics_port))
            metrics.hindrances = self._hindrances
            engine, models = await self._compute.run(self._load_engine)
            bus = await NatsBus.connect(settings.nats, settings.mesh, name=self.role, timeout=settings.agent_timeout_s)
            stack.push_async_callback(bus.close)
            store = await self._open_store(engine, settings.agent_timeout_s)
            service = self._service = self._build(Parts(self._ref, bus, store, engine, self._compute, models[0]))
            await bus.serve(self._ref.id, service.handle)
            record = self._record(service, engine, models, metrics.address(settings.redis))
            heart = Heartbeat(
                settings.redis,
                settings.mesh,
                record,
                interval=settings.heartbeat_s,
                patience=settings.registration_timeout_s,
                on_refused=self._on_refused,
            )
            await self._live(service, heart, engine)

    def _hindrances(self) -> list[str]:
        service = self._service
        if service is None:
            return [STARTING]
        own = {STARTING: not self._ready, DRAINING: service.draining, "no_agent": service.closed is not None}
        return [reason for reason, holds in own.items() if holds]

    def _load_engine(self) -> tuple[Engine, tuple[PrefillModel, DecodeModel]]:
        """On the compute thread, like every later step."""
        with uncollected():
            engine = load_engine(self.settings)
        if isinstance(engine, Timed):
            return engine, engine.latency
        if self.settings.latency_model:
            return engine, latency_models(self.settings.latency_model, subject(engine, self.settings))
        clock = clock_of(engine, self.settings.threads, self.settings.device)
        return engine, quick_calibrate(engine, None, self.settings.calibrate_s, clock)

    def _record(
        self, service: Instance[Any], engine: Engine, models: tuple[PrefillModel, DecodeModel], metrics: str
    ) -> Callable[[], InstanceRecord]:
        """Makes the record of each heartbeat, in its thread: only reads what one assignment replaces whole."""
        namespace = engine.namespace.deployment()
        base = InstanceRecord(
            ref=self._ref,
            role=self.role,
            node=self.settings.node,
            model=self.settings.served_name or getattr(engine, "name", "") or self.settings.model,
            namespace=namespace,
            proof=namespace.proof(),
            agent=service.store.agent,
            context_length=service.context_length,
            prefill=models[0] if self.role == PREFILL else None,
            decode=models[1] if self.role == DECODE else None,
            metrics=metrics,
            pid=os.getpid(),
        )

        def record() -> InstanceRecord:
            load = msgspec.structs.replace(
                service.snapshot, progress=self._compute.progress, busy=self._compute.busy, draining=service.refuses
            )
            return msgspec.structs.replace(
                base, agent=service.store.agent, context_length=service.context_length, load=load
            )

        return record

    # -- while it runs -----------------------------------------------------------------------------------------------

    async def _live(self, service: Instance[Any], heart: Heartbeat, engine: Engine) -> None:
        """Until told to stop; then hand everything over."""
        background = [asyncio.create_task(work) for work in service.background()]
        background.append(asyncio.create_task(self._watch_agent(service, engine)))
        try:
            async with heart:
                self._ready = True
                self._log.info("ready", id=self._ref.id, model=self.settings.model, agent=service.store.agent.id)
                await self._until_stopped(background)
                self._log.info("draining", attempts=len(service.table))
                await service.drain()
        finally:
            await end(*background)
            with contextlib.suppress(MooncakeError):
                await close_store(service.store)

    async def _until_stopped(self, background: list[asyncio.Task[None]]) -> None:
        """Raises what a background task died of: none of them should."""
        stop = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([stop, *background], return_when=asyncio.FIRST_COMPLETED)
        stop.cancel()
        for task in done - {stop}:
            task.result()

    def _on_refused(self, error: Refused) -> None:
        """In the heartbeat's thread: another incarnation has our id, or the mesh another namespace."""
        self._refused = error
        self._loop.call_soon_threadsafe(self._stop.set)

    # -- the agent -----------------------------------------------------------------------------------------------------

    async def _open_store(self, engine: Engine, timeout: float) -> KVStore:
        """Connect, waiting for the agent if need be, and bind the engine to its pool."""
        loop = asyncio.get_running_loop()
        until = loop.time() + timeout
        while True:
            try:
                return await self._bound(await self._connect(engine.namespace.deployment()), engine)
            except NamespaceMismatch:
                raise
            except (AgentGone, DeadlineExceeded, OSError) as e:
                if loop.time() > until:
                    raise AgentGone(f"no store agent at {self.settings.agent} within {timeout:g} s: {e}") from e
            await asyncio.sleep(RETRY_S)

    async def _bound(self, store: KVStore, engine: Engine) -> KVStore:
        """``store``, whose pool the engine has mapped. Where it cannot, nobody else would close it."""
        try:
            await self._compute.run(partial(engine.bind, store.pool))
        except BaseException:
            with contextlib.suppress(MooncakeError):
                await close_store(store)
            raise
        return store

    async def _watch_agent(self, service: Instance[Any], engine: Engine) -> None:
        """For ever: see to it that nobody waits for an agent that died or was stopped."""
        pulse = Pulse()
        with contextlib.closing(pulse):
            while True:
                await asyncio.sleep(RETRY_S / 2)
                if service.store.closed:
                    await self._change_agent(service, engine)
                else:
                    pulse.look(service.store, self._loop.time())
                    await self._judge(service, pulse)

    async def _judge(self, service: Instance[Any], pulse: Pulse) -> None:
        """A silent agent: no new work, and in the end none at all, until it answers again."""
        silent = service.closed is not None
        if silent and not pulse.suspected:
            service.closed = None
            self._log.info("store agent answers again")
        elif not silent and pulse.suspected:
            service.closed = AgentGone("the node's store agent does not answer")
            self._log.warning("store agent silent", attempts=len(service.table))
        if pulse.dead and len(service.table):
            await service.abandon(AgentGone("the node's store agent does not answer"))

    async def _change_agent(self, service: Instance[Any], engine: Engine) -> None:
        """The agent died: give everything up, drain on the old mapping, then bind to its successor's pool."""
        gone = AgentGone("the node's store agent is gone")
        self._log.warning("store agent gone", attempts=len(service.table))
        service.closed = gone
        await service.abandon(gone)
        await self._compute.run(engine.unbind)
        await close_store(service.store)
        service.attach(await self._open_store(engine, float("inf")))
        service.closed = None
        self._log.info("store agent back", agent=service.store.agent.id)


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """What begins to live here is no garbage. An engine's library makes 370,000 objects that stay: looking through
    them costs a tenth of its import, and later, a quarter of a second in which no loop of this process turns."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


async def close_store(store: KVStore) -> None:
    """Close the connection where the store has one to close."""
    close = getattr(store, "close", None)
    if close is not None:
        await close()
