"""Hot prefixes are kept by one conductor, which has a lease in Redis: it has copies made and surplus ones dropped."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from services.conductor.dispatch import metrics
from services.conductor.dispatch.matching import AgentTable, Matcher
from services.conductor.dispatch.roster import Roster
from services.conductor.dispatch.settings import DispatchSettings
from services.conductor.scheduling import Ledger
from services.conductor.scheduling.heat import Heat
from services.conductor.scheduling.keeping import Bring, Drop, Home, Keeping, KeepOptions
from shared.blocks import KEY
from shared.bus import Bus
from shared.errors import MooncakeError, Unavailable
from shared.messages import Promise, Ref, Replicas, ReplicasDone
from shared.metadata import Metadata
from shared.records import PREFILL
from shared.telemetry import log

LEASE = "hot-keeper"
LEASE_TTL = 4.0
PERIOD = 1.0
ANSWER_WITHIN = 30.0

MOST_WAITING = 64
"""Drops that wait for an instance that is at work."""

MOST_ASKED = 4096
"""Requests in a period whose chains are looked at; what is hot shows in fewer."""

AT_A_TIME = 64
"""Chains marked before the loop breathes."""

logger = log("dispatch")


class HotKeeper:
    """``asked`` hears of each placement of any conductor, so that whoever gets the lease knows what is hot."""

    def __init__(
        self,
        me: Ref,
        bus: Bus,
        settings: DispatchSettings,
        roster: Roster,
        ledger: Ledger,
        agents: AgentTable,
        matcher: Matcher,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self.holder = ""
        self._me, self._bus = me, bus
        self._roster, self._ledger, self._agents, self._matcher = roster, ledger, agents, matcher
        self._spawn = spawn
        self._heat = Heat()
        self._keeping = Keeping(
            KeepOptions(settings.hot_rate, settings.hot_copies, float(settings.hot_bytes_per_s), settings.hot_cool_s)
        )
        self._asked: deque[bytes] = deque(maxlen=MOST_ASKED)
        self._under_way: dict[str, deque[Replicas]] = {}  # of an instance at work: what it is told next
        self._on = settings.hot_rate > 0

    def asked(self, promise: Promise) -> None:
        if self._on and promise.keys:
            self._asked.append(promise.keys)

    def summary(self) -> Mapping[str, Any]:
        """``conductor``: id of who keeps, "" while nobody does. ``chains``, ``copies``: as that one has it."""
        chains = self._keeping.chains.values()
        return {
            "conductor": self.holder,
            "chains": len(chains),
            "copies": sum(len(kept.lengths) for kept in chains),
        }

    async def run(self, metadata: Metadata | None) -> None:
        loop = asyncio.get_running_loop()
        while self._on:
            await asyncio.sleep(PERIOD)
            try:
                await self._mark(loop.time())
                self.holder = await metadata.lease_holder(LEASE, self._me.id, LEASE_TTL) if metadata else self._me.id
                self._keep(loop.time())
            except Unavailable:
                self.holder = ""
            except Exception:
                logger.exception("hot prefixes were not looked after")

    async def _mark(self, now: float) -> None:
        for number in range(len(self._asked)):
            self._heat.asked(self._asked.popleft(), now)
            if number % AT_A_TIME == AT_A_TIME - 1:
                await asyncio.sleep(0)
        self._heat.tidy(now)

    def _keep(self, now: float) -> None:
        """Only who has the lease; what another one kept before is in the index for all to see."""
        namespace = self._roster.namespace
        mine = self.holder == self._me.id
        if not mine or namespace is None:
            self._keeping.chains.clear()
        else:
            hot = self._heat.hot(self._keeping.least, now)
            block_bytes = namespace.geometry.slot_bytes
            for order in self._keeping.plan(
                hot, self._homes(now), self._held, lambda key: self._heat.rate(key, now), block_bytes, now
            ):
                self._send(order, block_bytes)
        metrics.HOT_KEEPER.set(mine)
        metrics.HOT_CHAINS.set(len(self._keeping.chains))

    def _homes(self, now: float) -> list[Home]:
        """One a node."""
        prefills = self._ledger.prefills
        busy = dict(zip(prefills.ids, prefills.queue(now).tolist(), strict=True))
        homes: dict[str, Home] = {}
        for id, member in self._roster.members.items():
            if member.record.role == PREFILL and member.open and id in busy:
                homes.setdefault(member.record.agent.id, Home(id, member.record.agent.id, busy[id]))
        return list(homes.values())

    def _held(self, keys: bytes) -> Mapping[str, int]:
        return self._agents.matches(*self._matcher.lengths(keys))

    def _send(self, order: Bring | Drop, block_bytes: int) -> None:
        """An instance is at work on one order at a time. A copy that it cannot bring now is asked for again by itself,
        what it is to drop is not."""
        member = self._roster.members.get(order.instance)
        if member is None:
            return
        ref = member.record.ref
        if isinstance(order, Bring):
            message = Replicas(
                sender=self._me, target=ref, before=order.before, bring=order.keys, sources=list(order.sources)
            )
        else:
            message = Replicas(sender=self._me, target=ref, drop=order.keys, keep=order.keep)
        if (waiting := self._under_way.get(order.instance)) is not None:
            if message.drop and len(waiting) < MOST_WAITING:
                waiting.append(message)
            return
        self._under_way[order.instance] = deque([message])
        self._spawn(self._ordered(order.instance, block_bytes))

    async def _ordered(self, instance: str, block_bytes: int) -> None:
        waiting = self._under_way[instance]
        try:
            while waiting:
                await self._order(instance, waiting.popleft(), block_bytes)
        finally:
            del self._under_way[instance]

    async def _order(self, instance: str, message: Replicas, block_bytes: int) -> None:
        try:
            answer = await self._bus.request(message.target.id, message, ANSWER_WITHIN)
        except MooncakeError as e:
            logger.debug("no answer about hot blocks", instance=instance, error=e.code)
            return
        if isinstance(answer, ReplicasDone):
            metrics.HOT_BLOCKS.labels("brought").inc(answer.fetched)
            metrics.HOT_BLOCKS.labels("dropped").inc(answer.dropped)
            metrics.HOT_BLOCKS.labels("failed").inc(max(len(message.bring) // KEY - answer.there, 0))
            metrics.HOT_BYTES.inc(answer.fetched * block_bytes)
