"""A mass expiry with a real Redis: agents that only lost their way to it are not purged, and come back as they were."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass

import pytest

from services.store.transfer.engine import Engine
from shared.embedded import RedisServer
from shared.errors import PeerGone
from shared.heartbeat import Heartbeat
from shared.index import code, mirror, sparing
from shared.index.lookup import lookup
from shared.index.mirroring import IndexMirror
from shared.index.publishing import IndexPublisher
from shared.index.sparing import Sparing
from shared.index.sweeping import Sweeper
from shared.messages import Ref
from shared.metadata import Metadata
from shared.records import AgentRecord
from tests.index.relay import Relay
from tests.index.test_indexing import keys

pytestmark = pytest.mark.timeout(300)

GRACE = 1.0
SILENCE = 2.0


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not holds():
            await asyncio.sleep(0.02)


@dataclass
class Node:
    """An agent as far as the mesh's metadata goes: a data port, a heartbeat, its entries; all over one relay."""

    ref: Ref
    relay: Relay
    engine: Engine
    publisher: IndexPublisher
    blocks: list[bytes]

    @property
    def code(self) -> bytes:
        return code(self.ref.incarnation)

    def record(self) -> AgentRecord:
        peer = self.engine.peer()
        return AgentRecord(ref=self.ref, node="n", code=self.code, host=peer.host, port=peer.port, host_id="h")


async def nobody(id: str) -> None:
    raise PeerGone(id)


async def node(stack: AsyncExitStack, redis: str, number: int) -> Node:
    ref = Ref(f"node{number}", secrets.randbits(63) | 1)
    relay = await stack.enter_async_context(Relay(redis))
    engine = Engine(ref, secret=b"s", resolve=nobody)  # type: ignore[arg-type]
    await engine.start()
    stack.push_async_callback(engine.close)
    publisher = await stack.enter_async_context(IndexPublisher(relay.url, "m", code(ref.incarnation)))
    made = Node(ref, relay, engine, publisher, keys(50, seed=number))
    await stack.enter_async_context(Heartbeat(relay.url, "m", made.record, interval=0.2, ttl=600.0))
    publisher.committed(b"", made.blocks)
    await publisher.flushed()
    return made


@dataclass
class Conductor:
    metadata: Metadata
    mirror: IndexMirror
    sweeper: Sweeper
    sparing: Sparing

    async def holders(self, node: Node) -> int:
        """Blocks of ``node`` that Redis names it for."""
        return sum(node.code in places for places in await lookup(self.metadata.link, "m", node.blocks))

    async def lose(self, *nodes: Node) -> None:
        """They cannot reach Redis any more, and their registrations have run out."""
        for node in nodes:
            await node.relay.cut()
            await self.metadata.deregister(node.record())

    async def watch(self) -> None:
        """As the dispatcher: who is registered counts."""
        async for snapshot in self.metadata.watch(0.05):
            if snapshot.fresh:
                self.mirror.living({agent.code for agent in snapshot.agents})


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
async def conductor(redis_server: RedisServer, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch) -> Conductor:
    monkeypatch.setattr(mirror, "FORGET_AFTER", GRACE)
    monkeypatch.setattr("shared.index.breaker.ASK_AGAIN", 0.1)
    monkeypatch.setattr(sparing, "ANSWER_TIMEOUT", 30.0)
    url = redis_server.url
    metadata = await stack.enter_async_context(await Metadata.connect(url, "m"))
    await metadata.link.client.flushall()
    follower = await stack.enter_async_context(IndexMirror(url, "m"))
    sweeper = await stack.enter_async_context(Sweeper(metadata, "m", "me", interval=0.1, grace=GRACE))
    breaker = Sparing(metadata, follower.spare, sweeper.spare, interval=0.05, ttl=30.0, silence=SILENCE)
    made = Conductor(metadata, follower, sweeper, await stack.enter_async_context(breaker))
    watching = asyncio.create_task(made.watch())
    stack.callback(watching.cancel)
    return made


async def matched(conductor: Conductor, nodes: list[Node]) -> None:
    """Exactly these are routed to."""
    await until(lambda: set(conductor.mirror.summary()["blocks"]) == {node.code.hex() for node in nodes})
    for node in nodes:
        await until(lambda node=node: conductor.mirror.match(b"".join(node.blocks)) == {node.code: 50})  # type: ignore[misc]


async def test_who_only_lost_redis_is_kept_and_who_is_dead_is_purged(
    redis_server: RedisServer, stack: AsyncExitStack, conductor: Conductor
) -> None:
    nodes = [await node(stack, redis_server.url, number) for number in range(5)]
    await matched(conductor, nodes)
    *cut, other = nodes
    dead = cut[0]
    await conductor.lose(*cut)
    await dead.engine.close()
    await until(lambda: conductor.sparing.breaker.tripped == 1)
    await matched(conductor, [other])  # routed around at once
    assert sparing.SPARED._value.get() >= 3
    await until(lambda: dead.code not in conductor.mirror.columns)  # silent: forgotten, and swept
    await until(lambda: conductor.sweeper.swept == 1)
    assert await conductor.holders(dead) == 0
    assert conductor.sparing.breaker.spared == {each.code for each in cut[1:]}
    assert sparing.ALIVE._value.get() > 0
    assert sparing.SILENT._value.get() > 0
    for each in cut[1:]:
        assert each.code in conductor.mirror.columns  # far beyond the time after which the dead are forgotten
        assert await conductor.holders(each) == 50
        each.relay.mend()
    await matched(conductor, [*cut[1:], other])
    await until(lambda: not conductor.sparing.breaker.spared)
    assert conductor.sweeper.swept == 1
    assert [each.publisher.republished for each in cut[1:]] == [0, 0, 0]  # nothing had to be said again


async def test_one_of_many_is_purged_as_ever(
    redis_server: RedisServer, stack: AsyncExitStack, conductor: Conductor
) -> None:
    nodes = [await node(stack, redis_server.url, number) for number in range(3)]
    await matched(conductor, nodes)
    await conductor.lose(nodes[0])
    await until(lambda: conductor.sweeper.swept == 1 and nodes[0].code not in conductor.mirror.columns)
    assert conductor.sparing.breaker.tripped == 0
    assert await conductor.holders(nodes[0]) == 0
    nodes[0].relay.mend()  # it was alive: it says everything again
    await until(lambda: nodes[0].publisher.republished > 0)
    await matched(conductor, nodes)


async def test_a_flush_alone_purges_nobody(
    redis_server: RedisServer, stack: AsyncExitStack, conductor: Conductor
) -> None:
    """All registrations vanish for a moment: whoever comes back is asked nothing, and all entries return."""
    nodes = [await node(stack, redis_server.url, number) for number in range(4)]
    await matched(conductor, nodes)
    await conductor.metadata.link.client.flushall()
    await until(lambda: all(each.publisher.republished > 0 for each in nodes))
    await matched(conductor, nodes)
    assert [await conductor.holders(each) for each in nodes] == [50] * 4
    assert conductor.sweeper.swept == 0
