"""Thousands of namespaces: those at which nothing goes on are not looked at, and still counted right."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store.agent import Agent
from services.store.census import Census
from services.store.client import StoreClient
from services.store.slab import Slab
from services.store.slabs import COUNTED
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass
from tests.store.conftest import NAMESPACE, STRIDE

Start = Callable[..., Awaitable[Agent]]
KEY = b"k" * 16
amounts = st.dictionaries(st.sampled_from("xyz"), st.integers(0, 9))


@given(st.lists(st.tuples(st.sampled_from("abc"), st.none() | amounts)))
def test_totals_are_the_sum_of_what_was_counted_last(steps: list[tuple[str, dict[str, float] | None]]) -> None:
    census, model = Census("xyz"), dict[str, dict[str, float]]()
    for name, part in steps:
        if part is not None:
            census.count(name, part)
            model[name] = part
        elif model.pop(name, None) is not None:
            census.forget(name)
        assert census.totals == {kind: sum(part.get(kind, 0) for part in model.values()) for kind in "xyz"}


def namespace(number: int) -> Namespace:
    return msgspec.structs.replace(NAMESPACE, model=f"m{number}")


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(100):
        while not condition():
            await asyncio.sleep(0.005)


def looked_at(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Slabs that are looked at from now on."""
    seen: set[str] = set()
    look = Slab.look

    def noted(slab: Slab) -> None:
        seen.add(slab.name)
        look(slab)

    monkeypatch.setattr(Slab, "look", noted)
    return seen


def rest(agent: Agent) -> bool:
    return not agent.slabs._awake


async def test_slabs_rest_until_something_happens_there(start_agent: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    agent = await start_agent(slots=40 * 4, slab_bytes=4 * STRIDE)
    slabs = [await agent.slabs.attach(namespace(number)) for number in range(40)]
    await until(lambda: rest(agent))
    seen = looked_at(agent, monkeypatch)
    agent._look()
    assert not seen
    owner = Owner("request/1")
    held = slabs[7].reserve_now([KEY], 99, owner, PoolClass.CACHE)
    assert held is not None
    agent._look()
    assert seen == {slabs[7].name}
    slabs[7].commit(99, [held[0].hold], b"", [KEY], [10])
    slabs[7].release(99, [held[0].hold])
    await until(lambda: rest(agent))
    assert (agent.stats()["cached"], agent.stats()["free"], agent.stats()["slots"]) == (1, 159, 160)
    assert [record.blocks for record in agent.slabs.records()] == [int(slab is slabs[7]) for slab in slabs]


@pytest.mark.parametrize("hold", ["lease", "pin", "soft pin", "attached"])
async def test_what_ends_by_itself_keeps_its_slab_awake(start_agent: Start, hold: str) -> None:
    agent = await start_agent(slots=64, lease_ttl=0.2)
    client = await StoreClient.connect(agent.settings.socket, NAMESPACE, secret="s")
    (slab,) = agent.slabs.values()
    await client.put([(KEY, b"x")])
    if "pin" in hold:
        await client.pin([KEY], hard=hold == "pin", ttl=0.2)
    if hold == "lease":
        slot = slab.pool.slots.by_key[KEY]
        slab.leases.grant(asyncio.get_running_loop().time(), agent.ref, [slot], 1)
        slab.use([slot])
    if hold == "attached":
        agent._look()
        assert not rest(agent)
    await client.close()
    await until(lambda: rest(agent))
    held = {kind: amount for kind, amount in agent.stats().items() if kind in COUNTED and kind.startswith("store_")}
    assert not any(held.values()) and not len(slab.pinned) and slab.used_at > 0


async def test_a_slab_that_makes_way_is_counted_no_more(start_agent: Start) -> None:
    agent = await start_agent(slots=8, slab_bytes=4 * STRIDE, namespace_idle=0.0)
    for number in range(6):
        slab = await agent.slabs.attach(namespace(number))
        await until(lambda: rest(agent))
        assert (agent.stats()["slots"], agent.stats()["free"]) == (4 * len(agent.slabs), 4 * len(agent.slabs))
        assert [record.segment for record in agent.slabs.records()] == list(agent.slabs)
        assert slab.name in agent.slabs and len(agent.slabs) <= 2
