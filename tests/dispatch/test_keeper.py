"""The keeper of hot prefixes over a real Redis: one conductor keeps, copies come and go, another takes over."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any

import numpy as np
import pytest

from services.conductor.dispatch import DispatchSettings, keeper
from services.conductor.dispatch.keeper import HotKeeper
from services.conductor.dispatch.matching import AgentTable, NoIndex
from services.conductor.dispatch.roster import Roster
from services.conductor.scheduling import Ledger
from services.conductor.scheduling.keeping import Drop
from shared.blocks import KEY, chain_keys, split_keys
from shared.embedded import RedisServer
from shared.latency import PrefillModel
from shared.memory_bus import MemoryBus
from shared.messages import AnyMessage, Promise, Ref, Replicas, ReplicasDone
from shared.metadata import Metadata
from shared.records import AgentRecord
from shared.tasks import end
from tests.dispatch.fakes import NAMESPACE, FakePrefill

HOT = chain_keys(NAMESPACE.root(), np.arange(20, dtype=np.uint32), NAMESPACE.block_size)
NODES = 3


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


async def until(holds: Callable[[], bool], seconds: float = 100.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


class Stage:
    """Prefill nodes that carry orders out at once, and an index that knows it."""

    prefill_seconds = step_seconds = 0.001

    def __init__(self) -> None:
        self.network = MemoryBus()
        self.blocks: list[set[bytes]] = [set() for _ in range(NODES)]
        self.codes = tuple(f"{i:08d}".encode() for i in range(NODES))
        self.orders: list[Replicas] = []
        self.fakes: list[FakePrefill] = []

    async def open(self) -> Stage:
        for at in range(NODES):
            self.fakes.append(await Node(self, f"p{at}", at).start())
        return self

    def copies(self) -> int:
        return sum(set(split_keys(HOT)) <= blocks for blocks in self.blocks)


class Node(FakePrefill):
    def __init__(self, stage: Stage, id: str, at: int) -> None:
        super().__init__(stage, id, 1)
        self.stage, self.at = stage, at

    async def handle(self, message: AnyMessage) -> AnyMessage | None:
        if not isinstance(message, Replicas):
            return await super().handle(message)
        mine = self.stage.blocks[self.at]
        self.stage.orders.append(message)
        brought, dropped = split_keys(message.bring), [key for key in split_keys(message.drop) if key in mine]
        mine.update(brought)
        left = [key for key in dropped if sum(key in one for one in self.stage.blocks) > message.keep]
        mine.difference_update(left)
        done, whom = len(brought), message.sender
        return ReplicasDone(sender=self.ref, target=whom, there=done, fetched=done, dropped=len(left))


class Index(NoIndex):
    def __init__(self, stage: Stage) -> None:
        self.stage = stage

    def lengths(self, keys: bytes) -> tuple[tuple[bytes, ...], np.ndarray]:
        chain = split_keys(keys)
        held = [next((n for n, k in enumerate(chain) if k not in one), len(chain)) for one in self.stage.blocks]
        return self.stage.codes, np.array(held)


class Conductor:
    """The keeper's part of one, and its loop."""

    def __init__(self, name: str, stage: Stage, metadata: Metadata) -> None:
        settings = DispatchSettings(hot_rate=1.0, hot_cool_s=0.1)
        roster, ledger, agents, now = Roster(3, 10, 60), Ledger(), AgentTable(), asyncio.get_running_loop().time()
        for fake, code in zip(stage.fakes, stage.codes, strict=True):
            record = fake.record()
            roster.put(record, now)
            ledger.put_prefill(fake.ref.id, record.agent.id, PrefillModel(0.01, 1e-4, 0.0))
            agents.put(AgentRecord(ref=record.agent, node=fake.ref.id, code=code, host="h", port=1, host_id="h"))
        self.tasks: set[asyncio.Task[None]] = set()
        me, bus = Ref(name, 1), stage.network.join(name)
        self.keeper = HotKeeper(me, bus, settings, roster, ledger, agents, Index(stage), self.spawn)
        self.task = asyncio.create_task(self.keeper.run(metadata))

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def asked(self, times: int) -> None:
        for number in range(times):
            self.keeper.asked(Promise(number, "p0", "d0", 1.0, 1.0, 1.0, 1, 1.0, keys=HOT))

    async def close(self) -> None:
        await end(self.task, *self.tasks)


@pytest.fixture
async def two(redis: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Stage, list[Conductor]]]:
    monkeypatch.setattr(keeper, "PERIOD", 0.05)
    monkeypatch.setattr(keeper, "LEASE_TTL", 1.0)
    stage = await Stage().open()
    async with await Metadata.connect(redis, "keeper") as metadata:
        conductors = [Conductor(name, stage, metadata) for name in ("one", "two")]
        yield stage, conductors
        for conductor in conductors:
            await conductor.close()
        for fake in stage.fakes:
            fake.kill()


async def test_one_keeps_and_the_other_takes_over(two: tuple[Stage, list[Conductor]]) -> None:
    stage, conductors = two
    stage.blocks[1].update(split_keys(HOT))
    for conductor in conductors:
        conductor.asked(200)  # some 14 a second, as both were told
    await until(lambda: stage.copies() == NODES)
    first = stage.orders[0].sender.id
    assert {order.sender.id for order in stage.orders} == {first}
    await until(lambda: all(c.keeper.summary()["conductor"] == first for c in conductors))
    assert all(order.sources == ["p1-agent"] and not order.before for order in stage.orders[:1])
    keeps, other = sorted(conductors, key=lambda c: c.keeper.summary()["chains"], reverse=True)
    assert keeps.keeper.summary() == {"conductor": first, "chains": 1, "copies": NODES}
    await keeps.close()
    stage.blocks[0].clear()  # that node has lost everything
    await until(lambda: stage.copies() == NODES)
    assert stage.orders[-1].sender.id != first and other.keeper.summary()["conductor"] == stage.orders[-1].sender.id


async def test_what_has_cooled_down_goes_but_for_one(two: tuple[Stage, list[Conductor]]) -> None:
    stage, conductors = two
    for blocks in stage.blocks:
        blocks.update(split_keys(HOT))
    for conductor in conductors:
        conductor.asked(35)
    await until(lambda: any(c.keeper.summary()["chains"] for c in conductors))
    for conductor in conductors:  # as if half a minute had passed
        marks = conductor.keeper._heat._marks
        for mark in marks.values():
            mark.weight = 1.0
    await until(lambda: stage.copies() == 1)
    assert all(order.keep == 1 and order.drop for order in stage.orders) and len(HOT) == 5 * KEY
    await until(lambda: not any(c.keeper.summary()["chains"] for c in conductors))


async def test_what_a_busy_instance_is_to_drop_waits_for_its_turn(two: tuple[Stage, list[Conductor]]) -> None:
    """Of a chain with graded copies several runs go at once: none of them is lost."""
    stage, (one, other) = two
    for blocks in stage.blocks:
        blocks.update(split_keys(HOT))
    await other.close()
    parts = [HOT[at * KEY : (at + 1) * KEY] for at in range(5)]
    for part in parts:
        one.keeper._send(Drop("p0", part, 1), NAMESPACE.block_bytes)
    assert len(one.tasks) == 1, "an instance is at work on one order at a time"
    await until(lambda: not stage.blocks[0])
    assert [order.drop for order in stage.orders] == parts
    await until(lambda: not one.keeper._under_way)
