"""The conductor's dispatcher: keeps the picture of the mesh, and gives every request a run."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Iterable
from functools import partial
from typing import Any

from services.conductor.dispatch import events, metrics, picture
from services.conductor.dispatch.gatekeeper import Gatekeeper
from services.conductor.dispatch.heartbeat import Heartbeat
from services.conductor.dispatch.keeper import HotKeeper
from services.conductor.dispatch.lists import LiveLists
from services.conductor.dispatch.matching import AgentTable, Matcher, NoIndex
from services.conductor.dispatch.mesh import Mesh, spawn_in
from services.conductor.dispatch.placing import Placer
from services.conductor.dispatch.roster import Change, Roster, State
from services.conductor.dispatch.run import Run
from services.conductor.dispatch.settings import DispatchSettings
from services.conductor.dispatch.sharing import Sharing
from services.conductor.dispatch.telling import Teller
from services.conductor.dispatch.watch import Watch
from services.conductor.generation import Generation, Readiness, Token
from services.conductor.scheduling import Ledger, PolicyOptions, Scheduler, policy
from shared.blocks import Namespace
from shared.bus import Bus
from shared.errors import BusDown, Contended, Draining, InternalError, MooncakeError, StaleIncarnation, Unavailable
from shared.latency import DecodeModel, PrefillModel
from shared.messages import AnyMessage, AttemptMessage, Gone, Load, Promises, Ref, TokenBatch
from shared.metadata import Metadata
from shared.records import DECODE, PREFILL, AgentRecord, ConductorRecord, InstanceRecord
from shared.tasks import end
from shared.telemetry import held_gauge, log

UNFITTED_PREFILL = PrefillModel(0.02, 2e-4, 0.0)
UNFITTED_DECODE = DecodeModel(0.02, 0.001, 0.0)
"""For instances that have not measured themselves: right in order, so that choices are sane."""

WHY = {
    "starting": "this conductor is starting",
    "draining": "this conductor is ending",
    "no_prefill": "no prefill instance is there yet",
    "no_decode": "no decode instance is there yet",
}
"""What keeps every request from being served, for people."""

logger = log("dispatch")


class MeshDispatcher:
    """Implements ``services.conductor.generation.Dispatcher``.

    Owns nothing that is passed in. ``me``: this conductor on the bus. ``matcher``: index mirror. ``metadata``: where
    instances and agents register; without it, somebody else hands their records in. ``start`` serves ``me.id`` on the
    bus and starts the heartbeat; ``close`` ends every run.
    """

    def __init__(
        self,
        settings: DispatchSettings,
        bus: Bus,
        me: Ref,
        matcher: Matcher | None = None,
        metadata: Metadata | None = None,
    ) -> None:
        options = PolicyOptions(threshold=settings.kvcache_balancing_threshold, rng=random.Random())
        self.settings = settings
        self.agents = AgentTable()
        self.roster = Roster(settings.suspect_after_s, settings.dead_after_s, settings.hung_after_s)
        ledger = Ledger(settings.link_rate)
        scheduler = Scheduler(policy(settings.policy, options), settings.admission_thrift)
        placer = Placer(scheduler, ledger, self.roster, self.agents, matcher or NoIndex(), settings)
        teller = Teller(bus, settings.ask_timeout_s, settings.ask_patience_s, self._no_responders)
        tasks: set[asyncio.Task[Any]] = set()
        spawn = partial(spawn_in, tasks)
        self.keeper = HotKeeper(me, bus, settings, self.roster, ledger, self.agents, placer.matcher, spawn)
        self.sharing = Sharing(me, bus, ledger, spawn, self.keeper.asked)
        gatekeeper = Gatekeeper(settings, ledger)
        parts = (self.roster, LiveLists(), ledger, placer, teller, self.sharing, gatekeeper)
        self.mesh = Mesh(me, bus, settings, *parts, tasks=tasks)
        self._heartbeat = Heartbeat(self.mesh, self.apply, self._not_held)
        self._metadata = metadata
        self._loops: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._draining = False
        self._metadata_up = True
        self.conductors: list[ConductorRecord] = []
        self._held = held_gauge("attempts")
        held_gauge("listed_attempts").follow(lambda: len(self.mesh.lists))
        held_gauge("reservations").follow(lambda: len(ledger.open_bookings))

    # -- life ------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.mesh.bus.on_change(self._bus_changed)
        self._bus_changed(self.mesh.bus.connected)
        await self.mesh.bus.serve(self.mesh.me.id, self._receive)
        loop = asyncio.get_running_loop()
        self._loops = [loop.create_task(self._heartbeat.run()), loop.create_task(self.mesh.gatekeeper.backlog.watch())]
        self._loops += [loop.create_task(one.run(self._metadata)) for one in (self.sharing, self.keeper)]
        if self._metadata:
            self._loops.append(loop.create_task(Watch(self, self._metadata).run()))

    async def close(self, drain: float = 0.0) -> None:
        """Take no new work, let running requests end for up to ``drain`` seconds, then cancel the rest."""
        self._draining = True
        if self.mesh.runs and drain > 0:
            self._idle.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(drain):
                    await self._idle.wait()
        for run in list(self.mesh.runs.values()):
            run.abandon(Draining("the conductor is shutting down"))
        await end(*self._loops)
        if self.mesh.tasks:
            await asyncio.wait(self.mesh.tasks, timeout=2.0)

    # -- the seam to the gateway -----------------------------------------------------------------------

    @property
    def namespace(self) -> Namespace:
        namespace = self.roster.namespace
        if namespace is None:
            raise Unavailable("no instance is registered", field="no_instance", retry_after_ms=1000)
        return namespace

    @property
    def context_length(self) -> int:
        lengths = [member.record.context_length for member in self.roster.accepted()]
        if not lengths:
            raise Unavailable("no instance is registered", field="no_instance", retry_after_ms=1000)
        return min(lengths)

    def readiness(self) -> Readiness:
        reasons = [reason for reason, holds in self._obstacles() if holds]
        return Readiness(not reasons, reasons, [] if self._metadata_up else ["metadata_down"])

    def _obstacles(self) -> Iterable[tuple[str, bool]]:
        roles = {member.record.role for member in self.roster.accepted() if member.open}
        yield "starting", not self._loops
        yield "draining", self._draining
        yield "bus_down", not self.mesh.bus.connected
        yield "no_prefill", PREFILL not in roles
        yield "no_decode", DECODE not in roles

    def consider(
        self, prompt_bytes: int, slo_ttft_ms: int = 0, ticket: int = 0, prompt_tokens: int = 0, priority: int = 0
    ) -> None:
        self._require_service()
        blocks = -(-(prompt_tokens + 1) // self.namespace.block_size)
        now = asyncio.get_running_loop().time()
        self.mesh.gatekeeper.consider(now, prompt_bytes, slo_ttft_ms, ticket, prompt_tokens, blocks, priority)

    def _require_service(self) -> None:
        """Raises what keeps a new request from being served, the most telling first."""
        obstacles = [reason for reason, holds in self._obstacles() if holds]
        if "bus_down" in obstacles:
            raise BusDown("the bus is down", retry_after_ms=1000)
        if obstacles:
            raise Unavailable(f"{obstacles[0]}: {WHY[obstacles[0]]}", field=obstacles[0], retry_after_ms=1000)

    async def generate(self, generation: Generation) -> AsyncGenerator[Token, None]:
        self._require_service()
        if generation.id in self.mesh.runs:
            raise InternalError(f"request id {generation.id} is in use")
        run = Run(self.mesh, generation, asyncio.get_running_loop().time())
        self.mesh.runs[generation.id] = run
        self._held.inc()
        outcome = "cancelled"
        tokens = run.tokens()
        try:
            async for token in tokens:
                yield token
            outcome = "completed"
        except MooncakeError as e:
            outcome = "rejected" if isinstance(e, Contended | Unavailable) else "failed"
            raise
        finally:
            await tokens.aclose()
            self._ended(generation.id, outcome)

    def _ended(self, id: str, outcome: str) -> None:
        del self.mesh.runs[id]
        self._held.dec()
        metrics.REQUESTS.labels(outcome).inc()
        self.mesh.counts.failed += outcome == "failed"
        self.mesh.counts.cancelled += outcome == "cancelled"
        if not self.mesh.runs:
            self._idle.set()

    def cluster(self) -> dict[str, Any]:
        return picture.cluster(self.mesh, self.agents, self.conductors, self.keeper.summary(), self.readiness())

    # -- what the bus brings ---------------------------------------------------------------------------

    async def _receive(self, message: AnyMessage) -> AnyMessage | None:
        if message.target.incarnation != self.mesh.me.incarnation:  # rule: incarnation
            metrics.STALE.inc()
            if isinstance(message, AttemptMessage):
                raise StaleIncarnation("this conductor is another incarnation")
            return None  # tokens: one message a step, and nobody waits for an answer
        if isinstance(message, TokenBatch):
            self._heard(message.sender, None)
            now = asyncio.get_running_loop().time()
            for entry in message.entries:
                if run := self.mesh.runs.get(entry.request):
                    run.arrived(events.Arrived(entry.attempt, message.sender, entry.output, entry.usage, now))
                else:
                    metrics.STALE.inc()
        elif isinstance(message, Promises):
            self.sharing.receive(message)
        elif isinstance(message, Gone):
            error = MooncakeError.from_wire(message.error)
            self._tell(message.request, events.GivenUp(message.attempt, message.sender, error))
        return None

    def _tell(self, request: str, event: events.Event) -> None:
        run = self.mesh.runs.get(request)
        if run:
            run.inbox.put(event)
        else:
            metrics.STALE.inc()

    def _not_held(self, ref: Ref, request: str, attempt: int) -> None:
        self._tell(request, events.NotHeld(attempt, ref))

    def _heard(self, ref: Ref, load: Load | None) -> None:
        self.apply(self.roster.heard(ref, load, asyncio.get_running_loop().time()))

    def _no_responders(self, ref: Ref) -> None:
        self.apply(self.roster.no_responders(ref, asyncio.get_running_loop().time()))

    def _bus_changed(self, up: bool) -> None:
        self.roster.bus(up, asyncio.get_running_loop().time())
        for run in self.mesh.runs.values():
            run.inbox.put(events.BusChanged(up))

    # -- what the metadata store says ------------------------------------------------------------------

    def metadata_changed(self, up: bool) -> None:
        """While it is away the last known records stand, as long as their instances are heard."""
        self._metadata_up = up

    def replace_instances(self, records: list[InstanceRecord]) -> None:
        self.apply(self.roster.replace_all(records, asyncio.get_running_loop().time()))

    def put_agent(self, record: AgentRecord) -> None:
        self.agents.put(record)
        self._put_source(record.ref.id)

    def remove_agent(self, id: str) -> None:
        self.agents.remove(id)
        self.mesh.ledger.agents.remove(id)

    def replace_agents(self, records: list[AgentRecord]) -> None:
        self.mesh.placer.matcher.living({record.code for record in records})
        for id in self.agents.records.keys() - {record.ref.id for record in records}:
            self.remove_agent(id)
        for record in records:
            self.put_agent(record)

    def replace_conductors(self, records: list[ConductorRecord]) -> None:
        self.conductors = records
        self.sharing.living(record.ref for record in records)

    def _put_source(self, agent: str) -> None:
        record = self.agents.records.get(agent)
        if record:
            prefill = any(seat.agent == agent for seat in self.mesh.ledger.prefills.seats.values())
            disk = record.ssd.read_rate if record.ssd else 0.0
            self.mesh.ledger.put_agent(agent, record.rate, record.backlog_bytes, prefill, disk)

    def apply(self, changes: list[Change]) -> None:
        """Carry what became of instances into the ledger, and to the runs that are on them."""
        for change in changes:
            record = change.member.record
            if change.kind in ("joined", "updated"):
                self._seat(record, change.member.load)
            elif change.kind == "died":
                self._dead(record.ref)
            elif change.kind == "left":
                self.mesh.ledger.remove(record.ref.id)
                self.mesh.lists.drop(record.ref)
            if change.kind != "left" and change.member.state is not State.REFUSED:
                self.mesh.ledger.set_open(record.ref.id, change.member.open)
            if change.kind != "updated":
                refused = {"refused": change.member.refused} if change.member.refused else {}
                logger.info(f"instance {change.kind}", role=record.role, id=record.ref.id, **refused)

    def _seat(self, record: InstanceRecord, load: Load) -> None:
        ledger, id = self.mesh.ledger, record.ref.id
        fresh = id not in ledger.prefills.seats and id not in ledger.decodes.seats
        if record.role == PREFILL:
            ledger.put_prefill(id, record.agent.id, record.prefill or UNFITTED_PREFILL)
            self._put_source(record.agent.id)
        elif record.role == DECODE:
            ledger.put_decode(id, record.decode or UNFITTED_DECODE)
        if fresh:
            ledger.report(id, load, asyncio.get_running_loop().time())

    def _dead(self, ref: Ref) -> None:
        for run in self.mesh.runs.values():
            run.inbox.put(events.Died(ref))
