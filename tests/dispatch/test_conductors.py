"""Two conductors over the same instances, in virtual time: D8, one prefill per new prefix, and nothing left behind."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from services.conductor.dispatch import MeshDispatcher
from services.conductor.generation import Generation
from shared.errors import MooncakeError
from shared.memory_bus import Faults
from shared.messages import Load, Ref
from shared.records import ConductorRecord
from shared.virtual_loop import run as run_virtually
from tests.dispatch.fakes import FakeDecode
from tests.dispatch.world import NO_FAULTS, World, put_instance
from tests.held import held_now

NEED = 6
"""Blocks of a request of 10 tokens that may have 12 more."""


class SmallDecode(FakeDecode):
    """Has room for ``total`` blocks, takes what comes, and remembers the most that was ever asked of it."""

    total = 10 * NEED
    most = 0

    def admit(self, message: Any) -> Any:
        held = super().admit(message)
        self.most = max(self.most, NEED * len(self.held))
        return held

    @property
    def load(self) -> Load:
        room = max(self.total - NEED * len(self.held), 0)
        return Load(running=len(self.held), total_blocks=self.total, room_blocks=room)


class Worlds(World):
    """Two dispatchers, who know each other."""

    async def open(self, prefills: int = 2, decodes: int = 2, matcher: Any = None) -> Worlds:
        await super().open(prefills, 0, matcher)
        for i in range(decodes):
            await self.add(SmallDecode, f"d{i}")
        ref = Ref("conductor-2", 78)
        self.second = MeshDispatcher(self.settings, self.network.join(ref.id), ref)
        await self.second.start()
        for fake in self.fakes.values():
            put_instance(self.second, fake.record())
        records = [ConductorRecord(ref=d.mesh.me, node="n", url="u") for d in (self.dispatcher, self.second)]
        for dispatcher in (self.dispatcher, self.second):
            dispatcher.replace_conductors(records)
        await asyncio.sleep(3.0)  # both have heard both, and the load of all
        return self

    async def close(self) -> None:
        await self.second.close()
        await super().close()

    def nothing_held(self) -> bool:
        mesh, ours = self.second.mesh, super().nothing_held()
        return ours and not mesh.runs and not len(mesh.lists) and not mesh.ledger.open_bookings


def play(scenario: Any, faults: Faults = NO_FAULTS, seed: int = 0, **settings: Any) -> None:
    async def main() -> None:
        world = await Worlds(seed, faults, **settings).open()
        try:
            await scenario(world)
            world.network.faults = Faults()
            await world.settle()
            assert world.nothing_held()
            assert not len(world.dispatcher.sharing.others) and not len(world.second.sharing.others)
        finally:
            await world.close()

    run_virtually(main())


async def ask(dispatcher: MeshDispatcher, generation: Generation, give_up: float | None) -> str:
    """How it ended."""
    try:
        async with asyncio.timeout(give_up):
            async for _ in dispatcher.generate(generation):
                pass
        return "completed"
    except TimeoutError:
        return "cancelled"
    except MooncakeError as e:
        return e.code


@pytest.mark.parametrize("delay", [0.0, 0.3])
def test_d8_under_load_no_instance_is_promised_more_than_one_request_too_much(delay: float) -> None:
    """240 requests in four seconds, in bursts, at both; a third are cancelled at random. Late messages: only that
    nothing stays."""

    async def scenario(world: Worlds) -> None:
        chance = random.Random(5)
        tasks = []
        for burst in range(20):
            for i in range(12):
                give_up = chance.uniform(0.0, 0.5) if chance.random() < 1 / 3 else None
                made = world.generation(first=5 + burst * 100 + i * 3000)
                tasks.append(asyncio.ensure_future(ask((world.dispatcher, world.second)[i % 2], made, give_up)))
            await asyncio.sleep(0.2)
        ends = await asyncio.gather(*tasks)
        assert ends.count("completed") > 50 and set(ends) <= {"completed", "cancelled", "contended"}
        if not delay:
            decodes = [fake for fake in world.fakes.values() if isinstance(fake, SmallDecode)]
            assert all(fake.most <= fake.total + NEED for fake in decodes)
            assert max(fake.most for fake in decodes) > decodes[0].total / 2  # else the load was no load

    play(scenario, Faults(delay=delay, longest=0.2))


def test_one_new_prompt_at_both_is_computed_at_one_instance() -> None:
    """That takes 0.2 s; to wait for it there is as quick as to compute it again elsewhere."""

    async def scenario(world: Worlds) -> None:
        for fake in world.fakes.values():
            if isinstance(fake, SmallDecode):
                fake.total = 10_000
        await asyncio.sleep(3.0)  # both know
        first = asyncio.ensure_future(ask(world.dispatcher, world.generation(length=2000), None))
        await asyncio.sleep(0.01)
        second = asyncio.ensure_future(ask(world.second, world.generation(length=2000), None))
        await asyncio.sleep(0.01)
        placed = [run.effort for d in (world.dispatcher, world.second) for run in d.mesh.runs.values()]
        assert len({effort.placement.prefill.id for effort in placed if effort}) == 1 and len(placed) == 2
        assert list(await asyncio.gather(first, second)) == ["completed", "completed"]

    play(scenario)


def test_what_others_placed_is_held_until_they_say_it_is_over() -> None:
    """The gauge is read, not set: nothing of this conductor ends when another one's promise does."""

    async def scenario(world: Worlds) -> None:
        world.prefill_seconds = 1.0
        task = asyncio.ensure_future(ask(world.dispatcher, world.generation(), None))
        await asyncio.sleep(0.1)
        assert held_now()["reservations"] == 1
        assert await task == "completed"
        await asyncio.sleep(2.0)
        assert held_now()["reservations"] == 0

    play(scenario)


def test_a_conductor_that_dies_takes_its_promises_along() -> None:
    async def scenario(world: Worlds) -> None:
        world.prefill_seconds = 1000.0
        task = asyncio.ensure_future(ask(world.dispatcher, world.generation(), None))
        await asyncio.sleep(0.1)
        assert len(world.second.sharing.others) == 1 and world.second.mesh.ledger.open_bookings
        world.network.partition("conductor")  # nobody hears of it any more
        await asyncio.sleep(6.0)
        assert not len(world.second.sharing.others) and not world.second.mesh.ledger.open_bookings
        world.network.heal()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    play(scenario)
