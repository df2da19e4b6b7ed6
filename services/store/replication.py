"""Copies of blocks at other agents: more of them, on nodes that have none, or fewer, never below what must be left."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from services.store import peer_messages as peer
from services.store.ask import Ask
from services.store.directory import Directory
from services.store.fetcher import Fetcher
from services.store.metrics import REPLICAS
from services.store.peers import PeerCalls
from services.store.placement import Place, order_for_more, order_to_drop
from services.store.reader import Wanted
from services.store.slab import AGENT, Slab
from services.store.slabs import Slabs
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass
from shared.errors import DoesNotFit, MooncakeError, Unavailable
from shared.telemetry import log

logger = log("store.replicas")

MOST = 64
"""Copies of one block that may be asked for."""

CALL_TIMEOUT = 2.0
ANSWER = 0.9
"""Share of the asker's time after which an agent answers what it has got to."""

Order = Callable[[Sequence[Place], list[str]], list[str]]


@dataclass
class Copies:
    """Of one block: the agents that have one, those that were asked in this round, and why it is not otherwise."""

    agents: list[str]
    asked: set[str] = field(default_factory=set)
    error: MooncakeError | None = None


class Replication:
    """The asking side (``change``) and what the asked agents do (``bring``, ``drop``)."""

    def __init__(self, me: str, calls: PeerCalls, directory: Directory, fetcher: Fetcher, slabs: Slabs) -> None:
        self._me = me
        self._calls = calls
        self._directory = directory
        self._fetcher = fetcher
        self._slabs = slabs

    async def change(self, slab: Slab, keys: Sequence[bytes], copies: int, timeout: float) -> list[Copies]:
        """Each agent is asked once at most, so that it ends, whatever they answer. Raises Unavailable."""
        deadline = asyncio.get_running_loop().time() + timeout
        places = await self._directory.places()
        found = await self._found(slab, list(dict.fromkeys(keys)), {place.id for place in places})
        more = {key: c for key, c in found.items() if 0 < len(c.agents) < copies}
        fewer = {key: c for key, c in found.items() if len(c.agents) > copies}
        await self._ask(slab, places, more, order_for_more, copies, deadline)
        await self._ask(slab, places, fewer, order_to_drop, copies, deadline)
        for c in more.values():
            self._judge(c, copies, len(places))
        return [found[key] for key in keys]

    async def _found(self, slab: Slab, keys: list[bytes], living: set[str]) -> dict[bytes, Copies]:
        here = slab.contains(keys)
        there = await self._directory.locate(keys)
        return {
            key: Copies([self._me] * own + [id for id in ids if id in living])
            for key, own, ids in zip(keys, here, there, strict=True)
        }

    @staticmethod
    def _judge(c: Copies, copies: int, agents: int) -> None:
        if len(c.agents) >= copies:
            c.error = None
            return
        REPLICAS.labels("short").inc()
        if c.error is None:
            c.error = DoesNotFit(f"{copies} copies are wanted, {agents} agents are there", field="copies")

    async def _ask(
        self, slab: Slab, places: list[Place], found: dict[bytes, Copies], order: Order, copies: int, deadline: float
    ) -> None:
        """Round by round: each block's next agent, all blocks of one agent at a time."""
        while (left := deadline - asyncio.get_running_loop().time()) > 0:
            rounds: dict[str, list[bytes]] = {}
            for key, c in found.items():
                target = None if len(c.agents) == copies else _next(order(places, c.agents), c.asked)
                if target is not None:
                    c.asked.add(target)
                    rounds.setdefault(target, []).append(key)
            if not rounds:
                return
            one = self._more if order is order_for_more else self._fewer
            await asyncio.gather(*(one(slab, at, keys, found, copies, left) for at, keys in rounds.items()))
        for c in found.values():
            if len(c.agents) != copies:
                c.error = c.error or Unavailable("no time was left to ask further agents")

    # -- more ------------------------------------------------------------------------------------------

    async def _more(
        self, slab: Slab, at: str, keys: list[bytes], found: dict[bytes, Copies], copies: int, timeout: float
    ) -> None:
        sources = list(dict.fromkeys(agent for key in keys for agent in found[key].agents))
        try:
            errors = await self._bring_at(slab.namespace, at, keys, sources, timeout)
        except MooncakeError as e:
            logger.info("no copies made at a peer", agent=at, blocks=len(keys), error=e.message)
            errors = [e.code] * len(keys)
        for key, code in zip(keys, errors, strict=True):
            REPLICAS.labels("failed" if code else "made").inc()
            if code:
                found[key].error = MooncakeError.by_code.get(code, MooncakeError)(f"agent {at}: {code}")
            else:
                found[key].agents.append(at)

    async def _bring_at(
        self, namespace: Namespace, at: str, keys: list[bytes], sources: list[str], timeout: float
    ) -> list[str]:
        if at == self._me:
            return await self.bring(namespace, keys, sources, timeout)
        target = await self._directory.peer(at)
        call = peer.Replicate(namespace, b"".join(keys), sources, ANSWER * timeout)
        answer: list[str] = await self._calls.ask(target.ref, call, list[str], timeout)
        return answer

    async def bring(
        self, namespace: Namespace, keys: Sequence[bytes], sources: Sequence[str], timeout: float
    ) -> list[str]:
        """Have these here, and in the index: for each why not, an error's code. Raises ConfigError where there is no
        room for the namespace."""
        slab = await self._slabs.attach(namespace)
        ask = Ask(slab, AGENT, Owner("replica/" + self._me), PoolClass.CACHE)
        try:
            fetched = await self._fetcher.fetch(ask, [Wanted(key, b"") for key in keys], sources, timeout)
        finally:
            ask.give_back()
        await self._told(min(CALL_TIMEOUT, timeout))
        return [f.error for f in fetched]

    async def _told(self, timeout: float) -> None:
        """Who asks again shall find in the index what was done."""
        try:
            await self._directory.flushed(timeout)
        except Unavailable as e:
            logger.info("the index does not know of changed copies yet", error=e.message)

    # -- fewer -----------------------------------------------------------------------------------------

    async def _fewer(
        self, slab: Slab, at: str, keys: list[bytes], found: dict[bytes, Copies], copies: int, timeout: float
    ) -> None:
        try:
            dropped = await self._drop_at(slab, at, keys, copies, timeout)
        except MooncakeError as e:
            logger.info("no copies dropped at a peer", agent=at, blocks=len(keys), error=e.message)
            dropped = [False] * len(keys)
        for key, gone in zip(keys, dropped, strict=True):
            REPLICAS.labels("dropped" if gone else "refused").inc()
            if gone:
                found[key].agents.remove(at)

    async def _drop_at(self, slab: Slab, at: str, keys: list[bytes], copies: int, timeout: float) -> list[bool]:
        if at == self._me:
            return await self.drop(slab, keys, copies)
        target = await self._directory.peer(at)
        call = peer.Drop(slab.name, b"".join(keys), copies)
        answer: list[bool] = await self._calls.ask(target.ref, call, list[bool], min(CALL_TIMEOUT, timeout))
        return answer

    async def drop(self, slab: Slab, keys: Sequence[bytes], keep: int) -> list[bool]:
        """Let go of our copies, where ``keep`` others have one and no hard pin keeps ours. Raises Unavailable."""
        loose = [key for key in keys if not slab.pinned.is_hard(key)]
        allowed = dict(zip(loose, await self._directory.may_drop(loose, keep), strict=True))
        dropped = [allowed.get(key, False) and slab.remove(key) for key in keys]
        if any(dropped):
            await self._told(0.5 * CALL_TIMEOUT)
        return dropped


def _next(order: Sequence[str], asked: set[str]) -> str | None:
    return next((id for id in order if id not in asked), None)
