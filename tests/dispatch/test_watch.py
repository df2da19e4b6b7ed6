"""The dispatcher over a real metadata store: registrations, restarts, an outage, other conductors."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from services.conductor.dispatch import DispatchSettings, MeshDispatcher
from shared.embedded import RedisServer
from shared.memory_bus import MemoryBus
from shared.messages import Ref
from shared.metadata import Metadata, Reservation
from shared.records import AgentRecord, ConductorRecord
from tests.dispatch.fakes import Fake, FakeDecode, FakePrefill
from tests.dispatch.world import generation

MESH = "m"


@pytest.fixture
def redis() -> Any:
    with RedisServer() as server:
        yield server


async def until(holds: Callable[[], bool], seconds: float = 100.0) -> None:
    async with asyncio.timeout(seconds):
        while not holds():
            await asyncio.sleep(0.02)


class Quick:
    def __init__(self) -> None:
        self.network = MemoryBus()
        self.prefill_seconds = self.step_seconds = 0.001


class Setup:
    """A dispatcher, a fake of each role that answers on the bus, and the metadata store they register in."""

    def __init__(self, metadata: Metadata, dispatcher: MeshDispatcher, fakes: list[Fake]) -> None:
        self.metadata = metadata
        self.dispatcher = dispatcher
        self.fakes = fakes

    def states(self) -> dict[str, str]:
        return {i["id"]: i["state"] for i in self.dispatcher.cluster()["instances"]}


@pytest.fixture
async def setup(redis: RedisServer) -> AsyncIterator[Setup]:
    stage = Quick()
    async with await Metadata.connect(redis.url, MESH) as metadata:
        bus = stage.network.join("conductor")
        dispatcher = MeshDispatcher(DispatchSettings(), bus, Ref("conductor", 1), metadata=metadata)
        fakes: list[Fake] = [await FakePrefill(stage, "p0", 1).start(), await FakeDecode(stage, "d0", 1).start()]
        for fake in fakes:
            await metadata.register(fake.record(), ttl=600)
        await dispatcher.start()
        try:
            yield Setup(metadata, dispatcher, fakes)
        finally:
            await dispatcher.close()
            for fake in fakes:
                fake.kill()


async def test_it_becomes_ready_by_itself(setup: Setup) -> None:
    await until(lambda: setup.dispatcher.readiness().ready)
    assert setup.states() == {"p0": "alive", "d0": "alive"}
    assert setup.dispatcher.context_length == 10_000


def found(setup: Setup, matches: dict[bytes, int]) -> dict[str, int]:
    return dict(setup.dispatcher.agents.matches(tuple(matches), np.array(list(matches.values()))))


async def test_d7_a_restart_in_place_is_seen_and_its_agent_too(setup: Setup) -> None:
    await until(lambda: setup.dispatcher.readiness().ready)
    agent = AgentRecord(ref=Ref("p0-agent", 1), node="n", code=b"a" * 8, host="h", port=1, host_id="h")
    await setup.metadata.register(agent)
    await until(lambda: "p0-agent" in setup.dispatcher.agents.records)
    assert found(setup, {b"a" * 8: 3, b"x" * 8: 9}) == {"p0-agent": 3}
    again = msgspec.structs.replace(agent, ref=Ref("p0-agent", 2), code=b"b" * 8)
    await setup.metadata.register(again)
    await until(lambda: found(setup, {b"b" * 8: 1}) == {"p0-agent": 1})
    assert found(setup, {b"a" * 8: 3}) == {}  # D7: old blocks attract nothing
    await setup.metadata.register(msgspec.structs.replace(setup.fakes[0].record(), ref=Ref("p0", 2)))
    await until(lambda: setup.dispatcher.roster.get(Ref("p0", 2)) is not None)


async def test_e3_an_outage_of_the_store_degrades_and_nothing_else(setup: Setup, redis: RedisServer) -> None:
    await until(lambda: setup.dispatcher.readiness().ready)
    redis.kill()
    await until(lambda: setup.dispatcher.readiness().degraded == ["metadata_down"])
    assert setup.dispatcher.readiness().ready and set(setup.states().values()) == {"alive"}
    redis.start()  # and it comes back empty: nobody has registered again yet
    await until(lambda: not setup.dispatcher.readiness().degraded)
    await asyncio.sleep(1.2)
    assert setup.dispatcher.readiness().ready and set(setup.states()) == {"p0", "d0"}


async def test_who_deregisters_and_falls_silent_is_gone(setup: Setup) -> None:
    await until(lambda: setup.dispatcher.readiness().ready)
    setup.fakes[1].kill()
    await setup.metadata.deregister(setup.fakes[1].record())
    await until(lambda: "d0" not in setup.states())
    assert setup.dispatcher.readiness().reasons == ["no_decode"]


async def test_a_conductor_that_nobody_hears_counts_by_its_reservations(setup: Setup) -> None:
    await until(lambda: setup.dispatcher.readiness().ready)
    for name in ("conductor", "other"):
        await setup.metadata.register(ConductorRecord(ref=Ref(name, 1), node="n", url="u"), ttl=600)
    setup.fakes[0].insist = never  # type: ignore[method-assign]  # the prompt stays in prefill
    stream = setup.dispatcher.generate(generation("r1"))
    first = asyncio.ensure_future(anext(stream))
    await until_async(lambda: reserved(setup.metadata, 1))
    theirs = [Reservation("7", "d0", 7, owner="other"), Reservation("7", "p0", 0, 1500, "other")]
    await setup.metadata.exchange(theirs, ())
    ledger = setup.dispatcher.mesh.ledger
    await until(lambda: ledger.decodes.seats["d0"].coming == 1)
    assert ledger.decodes.seats["d0"].coming_blocks == 7 and ledger.prefills.seats["p0"].coming == 1.5
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    await until_async(lambda: reserved(setup.metadata, 1))  # the other's only
    await until_async(lambda: reserved(setup.metadata, 0))  # nobody renews them
    await until(lambda: not ledger.decodes.seats["d0"].coming and not ledger.prefills.seats["p0"].coming)


async def test_a_loop_that_swallows_a_cancellation_ends_too(setup: Setup) -> None:
    """As redis-py does, when it comes together with an answer."""

    async def deaf() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    setup.dispatcher._loops.append(asyncio.ensure_future(deaf()))
    await asyncio.sleep(0)
    async with asyncio.timeout(100):
        await setup.dispatcher.close()


async def never(id: str, message: Any) -> None:
    await asyncio.sleep(600)


async def reserved(metadata: Metadata, attempts: int) -> bool:
    sums = await metadata.sums()
    return (sums["d0"].attempts if "d0" in sums else 0) == attempts


async def until_async(holds: Callable[[], Awaitable[bool]], seconds: float = 100.0) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():
            await asyncio.sleep(0.05)
