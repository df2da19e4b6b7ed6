"""The store agent of a node: everything wired together, in the order in which it starts and stops."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import uuid
from collections.abc import AsyncIterator, Awaitable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Self

from services.store import metrics
from services.store.directory import Directory, LocalDirectory
from services.store.fetcher import Fetcher
from services.store.guard import StoreGuard
from services.store.landing_control import LandingControl
from services.store.local_service import LocalService
from services.store.local_socket import LocalSocket
from services.store.object_service import ObjectService
from services.store.peer_service import PeerService
from services.store.peers import PeerCalls
from services.store.rates import Rate
from services.store.reader import RemoteReader
from services.store.removal import Removal
from services.store.replication import Replication
from services.store.settings import StoreSettings
from services.store.slab import Slab
from services.store.slabs import Slabs
from services.store.ssd.tier import SsdTier
from services.store.streamer import Streamer
from services.store.tenants import Share, Shares
from services.store.transfer.base import Peer
from services.store.transfer.engine import Engine
from services.store.transfer.limits import Limits
from services.store.transfer.policy import TransportPolicy
from services.store.transfer.tls import Tls
from services.store.transfer.topology.override import read_topology
from shared.addresses import reachable
from shared.errors import MooncakeError
from shared.index import code
from shared.messages import Ref
from shared.records import AgentRecord, NicRecord, SlabRecord
from shared.telemetry import log

logger = log("store")

TICK = 0.1
"""Seconds between looks at expired leases, watermarks and gauges."""

THREADS = 2


class Agent:
    """Use :func:`run_agent`. ``directory`` is what it knows of the mesh. ``refused`` is set when the mesh does not want
    this agent any more: another incarnation took its place. Raises ConfigError for a wrong topology file."""

    def __init__(self, settings: StoreSettings, ref: Ref, directory: Directory, metrics: str = "") -> None:
        self.settings = settings
        self.ref = ref
        self.directory = directory
        self._metrics = metrics
        self.topology = read_topology(settings.topology_file)
        self._policy = TransportPolicy.parse(settings.transports)
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="store")
        tenants = Shares.read(
            settings.tenant_quotas, Share(settings.tenant_quota_bytes, settings.tenant_quota_ssd_bytes)
        )
        self.ssd = SsdTier(settings, directory, tenants.ssd(settings.pool_bytes, settings.ssd_bytes))
        self.slabs = Slabs(settings, directory, self._threads, self.ssd.below, tenants.dram())
        self.engine = Engine(
            ref,
            secret=settings.secret.encode(),
            resolve=directory.peer,
            host=settings.host,
            port=settings.port,
            advertise=settings.advertise or reachable(settings.host, settings.redis),
            policy=self._policy,
            guard=StoreGuard(self.slabs),
            on_call=self._on_call,
            streams=settings.data_streams,
            limits=Limits(
                queued=settings.data_queue_bytes,
                connections=settings.data_connections,
                frame=settings.data_frame_timeout,
            ),
            tls=Tls.configured(settings.data_tls_cert, settings.data_tls_key, settings.data_tls_ca),
            rdma_devices=settings.devices,
            topology=self.topology,
        )
        self.slabs.bind(self.engine, self.topology.memory)
        calls = PeerCalls(self.engine)
        self._rate = Rate()
        self._landings = LandingControl(ref, self.engine, calls, settings.drain_timeout)
        self._streamer = Streamer(ref, self.engine, calls, self._landings, self._threads, self._rate)
        reader = RemoteReader(self.engine, calls, settings, self._threads, self._rate, self._carry)
        self._fetcher = Fetcher(ref.id, reader, directory, self._rate)
        replicas = Replication(ref.id, calls, directory, self._fetcher, self.slabs)
        self._peers = PeerService(self.slabs, self._landings, self._streamer, self._fetcher, replicas, self._threads)
        objects = ObjectService(self._fetcher, Removal(calls, directory), replicas)
        self.local = LocalService(self._fetcher, self._landings, self._streamer, directory, objects, self.stats)
        self.slabs.serve(self.local.abort, self._in_use)
        self._socket = LocalSocket(settings.socket, settings.secret, ref, self.slabs.attach, self.local)
        self._backlog = 0
        self._shown, self._ssd_shown = self.stats(), self.ssd.record()
        self._slabs_shown: list[SlabRecord] = []
        self._nics_shown: list[NicRecord] = []
        self.refused: asyncio.Future[MooncakeError] = asyncio.get_running_loop().create_future()

    def _on_call(self, peer: Ref, payload: bytes) -> Awaitable[bytes] | bytes:
        return self._peers.on_call(peer, payload)

    def _carry(self, source: Peer) -> int:
        """Bytes of blocks that may come with that agent's answer: the connection is one of TCP."""
        here = self.engine.peer()
        same_host = bool(source.shm and source.host_id) and source.host_id == here.host_id
        return self.settings.carry_bytes if self._policy.reads_over_tcp(same_host) else 0

    # -- running ---------------------------------------------------------------------------------------

    async def __aenter__(self) -> Self:
        """Raises ConfigError when an address is taken."""
        await self.ssd.open()
        try:
            await self.engine.start()
            self._socket.start()
        except BaseException:
            await self.engine.close()
            await self.ssd.close()
            raise
        self._ticking = asyncio.create_task(self._tick())
        logger.info("agent is up", id=self.ref.id, socket=self.settings.socket, port=self.engine.peer().port)
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._ticking.cancel()
        await self._socket.close()
        await self.local.close()
        await self._fetcher.close()
        await self._streamer.close()
        await self._landings.close()
        await self.ssd.close()
        await self.slabs.close()
        await self.engine.close()
        self._threads.shutdown(wait=True)
        self._show()  # that nothing is held any more

    @property
    def peer(self) -> Peer:
        """How other agents reach this one."""
        return self.engine.peer()

    async def _tick(self) -> None:
        while True:
            try:
                self._look()
            except Exception:  # leases must go on ending, whatever one look found
                logger.exception("a look at the pool failed")
            await asyncio.sleep(TICK)

    def _look(self) -> None:
        self.slabs.look()
        self.ssd.look()
        self._show()

    def _in_use(self, slab: Slab) -> bool:
        return self.local.uses(slab) or bool(self.ssd.writes or self.ssd.reads)

    # -- what is held ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Everything held now, by kind, and the pool's slots by state."""
        registered, to_register = self.engine.registered()
        totals = self.slabs.totals()
        self._backlog = int(totals.pop("leased_bytes"))
        return totals | {
            "store_connections": len(self.local.connections),
            "store_orphans": sum(c.slab.pool.held_by(c.id) for c in self.local.orphans),
            "store_fetches": len(self._fetcher),
            "store_streams": len(self._streamer),
            "store_ssd_writes": self.ssd.writes,
            "store_ssd_reads": self.ssd.reads,
            "ssd_blocks": len(self.ssd.book),
            "ssd_hits": float(self.ssd.tally.read),
            "ssd_skipped": float(self.ssd.tally.skipped),
            "ssd_on": float(self.ssd.on),
            "rdma_registered": registered,
            "rdma_to_register": to_register,
        }

    def record(self) -> AgentRecord:
        """What the mesh is told, from any thread."""
        peer, shown = self.peer, self._shown
        return AgentRecord(
            ref=self.ref,
            node=self.settings.node or socket.gethostname(),
            code=code(self.ref.incarnation),
            host=peer.host,
            port=peer.port,
            host_id=peer.host_id,
            shm=peer.shm,
            transports=list(self._policy.order),
            topology=self.topology.format() if self.topology.nics else {},
            nics=self._nics_shown,
            slots=int(shown["slots"]),
            used=int(shown["store_slots"]),
            slot_bytes=max((slab.stride for slab in self._slabs_shown), default=0),
            backlog_bytes=self._backlog,
            rate=self._rate.value,
            held={kind: shown[kind] for kind in metrics.HELD},
            slabs=self._slabs_shown,
            ssd=self._ssd_shown,
            socket=self.settings.socket,
            metrics=self._metrics,
            pid=os.getpid(),
        )

    def _show(self) -> None:
        stats = self._shown = self.stats()
        self._slabs_shown = self.slabs.records()
        self._ssd_shown = self.ssd.record()
        self._nics_shown = self.engine.nics()
        for kind, gauge in metrics.HELD.items():
            gauge.set(stats[kind])
        for tier, quotas in (("dram", self.slabs.quotas), ("ssd", self.ssd.book.owners.quotas)):
            for tenant, size in quotas.shown().items():
                metrics.TENANT_BYTES.labels(tenant, tier).set(size)
            for tenant, limit in quotas.named.items():
                metrics.TENANT_QUOTA.labels(tenant, tier).set(limit)
        for state, amount in (("free", stats["free"]), ("cached", stats["cached"]), ("used", stats["store_slots"])):
            metrics.SLOTS.labels(state).set(amount)


def new_ref(settings: StoreSettings) -> Ref:
    """Each start is a new incarnation."""
    return Ref(settings.id or uuid.uuid4().hex, secrets.randbits(63) | 1)


@asynccontextmanager
async def run_agent(
    settings: StoreSettings, directory: LocalDirectory | None = None, metrics: str = ""
) -> AsyncIterator[Agent]:
    """A running agent. Without ``directory`` it registers in the mesh's metadata and block index (Redis at
    ``settings.redis``; raises Unavailable when that does not answer); with one, it is known to that alone.
    ``metrics``: host:port where this process serves them."""
    ref = new_ref(settings)
    if directory is not None:
        directory.id = ref.id
        async with Agent(settings, ref, directory) as agent:
            directory.join(agent.peer, settings.node)
            try:
                yield agent
            finally:
                directory.leave()
        return
    async with _registered(settings, ref, metrics) as agent:
        yield agent


@asynccontextmanager
async def _registered(settings: StoreSettings, ref: Ref, metrics: str) -> AsyncIterator[Agent]:
    from services.store.registration import Registration  # Redis is not needed by an agent that stands alone

    registration = Registration(settings.redis, settings.mesh, ref, settings.registration_timeout_s)
    agent = Agent(settings, ref, registration, metrics)
    async with agent, registration.entered(agent.record, agent.refused.set_result):
        yield agent
