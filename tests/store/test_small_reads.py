"""Few bytes from another node: they come with the answer, checked like any others; whom to ask is known from before."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.store import peer_messages as wire
from services.store.agent import Agent
from services.store.client import StoreClient
from services.store.fetcher import GUESS_TIMEOUT
from services.store.fetches import Habit
from services.store.slab import Slab
from services.store.transfer.base import Peer
from services.store.transfer.policy import TransportPolicy
from shared.errors import DeadlineExceeded, PeerGone

Key = Callable[[object], bytes]
Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]


def the_slab(agent: Agent) -> Slab:
    return next(iter(agent.slabs.values()))


def count_leases(owner: Agent, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the leases that it grants from now on."""
    granted: list[int] = []
    leases = the_slab(owner).leases
    grant = leases.grant

    def counted(now: float, reader: Any, slots: list[int], size: int) -> Any:
        granted.append(size)
        return grant(now, reader, slots, size)

    monkeypatch.setattr(leases, "grant", counted)
    return granted


def count_lookups(reader: Agent, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Keys of each question to the index from now on."""
    asked: list[int] = []
    locate = reader.directory.locate

    async def counted(keys: Sequence[bytes]) -> list[list[str]]:
        asked.append(len(keys))
        return await locate(keys)

    monkeypatch.setattr(reader.directory, "locate", counted)
    return asked


@pytest.mark.parametrize(
    ("transports", "carry", "leased"),
    [("require:tcp", 10_000, [12_000]), ("require:tcp", 0, [9_000, 12_000]), ("require:shm", 10_000, [9_000, 12_000])],
)
async def test_few_bytes_come_with_the_answer_where_tcp_carries_them(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch, transports: str, carry: int,
    leased: list[int],
) -> None:  # fmt: skip
    a = await start_agent(slots=64, transports=transports)
    b = await start_agent(slots=64, transports=transports, carry_bytes=carry)
    here, there = await connect(a), await connect(b)
    small = [(key(i), bytes([i]) * 3000) for i in range(3)]
    more = [(key(i), bytes([i]) * 3000) for i in range(3, 7)]
    await here.put([*small, *more])
    granted = count_leases(a, monkeypatch)
    assert await there.get([k for k, _ in small]) == [data for _, data in small]
    assert await there.get([key("absent"), *(k for k, _ in more)]) == [None, *(data for _, data in more)]
    assert granted == leased
    sums = [the_slab(agent).pool.slots[slot].checksum for agent in (a, b) for slot in slots_of(agent, small)]
    assert sums[:3] == sums[3:] and None not in sums, "a copy keeps its owner's checksum"
    assert await there.get([k for k, _ in small]) == [data for _, data in small]


def slots_of(agent: Agent, items: Sequence[tuple[bytes, bytes]]) -> list[int]:
    return [the_slab(agent).pool.slots.by_key[k] for k, _ in items]


async def test_a_carried_block_that_is_corrupt_is_refused_and_its_owner_drops_it(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    a, b = await start_agent(transports="require:tcp"), await start_agent(transports="require:tcp", verify="always")
    here, there = await connect(a), await connect(b)
    await here.put([(key(0), b"x" * 100), (key(1), b"y" * 100)])
    slab = the_slab(a)
    slab.memory.range(slab.pool.slots.by_key[key(0)], 100)[50:51] = b"!"
    assert await there.get([key(0), key(1)]) == [None, b"y" * 100]
    while await here.contains([key(0)]) != [False]:
        pass
    assert (await there.stats())["store_holds"] == 0


async def test_an_owner_that_sends_another_length_than_it_says_is_not_believed(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = await start_agent(transports="require:tcp"), await start_agent(transports="require:tcp")
    here, there = await connect(a), await connect(b)
    await here.put([(key(0), b"x" * 100)])
    whole = a._peers._carried

    def short(*args: Any) -> wire.Leased | None:
        leased = whole(*args)
        assert leased is not None and leased.blocks[0] is not None and leased.blocks[0].data is not None
        blocks = [wire.Descriptor(0, 100, 1, None, 100, data=leased.blocks[0].data[:99])]
        return wire.Leased(0, 0.0, [*blocks])

    monkeypatch.setattr(a._peers, "_carried", short)
    assert await there.get([key(0)]) == [None]
    assert (b.stats()["store_holds"], b.stats()["free"]) == (0, b.stats()["slots"])


async def test_leases_that_are_over_are_given_back_with_the_next_or_in_a_moment(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.store.borrowing.LINGER", 1000.0)
    a = await start_agent(transports="require:tcp")
    b = await start_agent(transports="require:tcp", carry_bytes=0)
    here, there = await connect(a), await connect(b)
    await here.put([(key(i), b"x") for i in range(4)])
    for i in range(3):
        assert await there.get([key(i)]) == [b"x"]
        assert a.stats()["store_leases"] == 1, "the one before went with it"
    monkeypatch.setattr("services.store.borrowing.LINGER", 0.0)
    assert await there.get([key(3)]) == [b"x"]
    while a.stats()["store_leases"]:
        await there.contains([])


async def test_who_had_all_of_late_is_asked_before_the_index_and_the_index_where_that_one_has_not(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = [await start_agent(transports="require:tcp", slots=128) for _ in range(3)]
    one, reader, other = await connect(a), await connect(b), await connect(c)
    await one.put([(key(i), b"one") for i in range(20)])
    await other.put([(key(i), b"other") for i in range(20, 30)])
    lookups = count_lookups(b, monkeypatch)
    for i in range(4):
        assert await reader.get([key(i)]) == [b"one"]
    assert lookups == [1, 1], "twice in a row is a habit"
    assert await reader.get([key(4), key(20)]) == [b"one", b"other"]
    assert await reader.get([key(5)]) == [b"one"]
    assert lookups == [1, 1, 1, 1], "it had not all, so it is no habit any more"
    for i in range(21, 24):
        assert await reader.get([key(i)]) == [b"other"]
    assert await reader.get([key("absent")]) == [None]
    assert await reader.get([key(i) for i in range(6, 20)]) == [b"one"] * 14
    assert lookups[4:] == [1, 1, 1, 14]


async def test_an_agent_that_is_gone_is_a_habit_no_more(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = [await start_agent(transports="require:tcp") for _ in range(3)]
    one, reader, other = await connect(a), await connect(b), await connect(c)
    for client in (one, other):
        await client.put([(key(i), b"x") for i in range(6)])
    b._fetcher._habit(the_slab(b)).gave(a.ref.id, 1, 1)
    b._fetcher._habit(the_slab(b)).gave(a.ref.id, 1, 1)
    peer = b.directory.peer

    async def gone(id: str) -> Peer:
        if id == a.ref.id:
            raise PeerGone("no such agent")
        return await peer(id)

    monkeypatch.setattr(b.directory, "peer", gone)
    assert await reader.get([key(0)]) == [b"x"]
    assert b._fetcher._habit(the_slab(b)).guess == ""


@pytest.mark.parametrize("wrong", ["absent", "broken"])
async def test_who_was_asked_by_habit_in_vain_leaves_half_of_the_time_and_is_the_last_to_be_asked_again(
    start_agent: Start, connect: Connect, key: Key, monkeypatch: pytest.MonkeyPatch, wrong: str
) -> None:
    a, b, c = [await start_agent(transports="require:tcp") for _ in range(3)]
    one, reader, other = await connect(a), await connect(b), await connect(c)
    for client in (one, other):
        await client.put([(key(i), b"x") for i in range(6)])
    if wrong == "absent":
        monkeypatch.setattr(a._peers, "_lease", lambda peer, call: a._peers._nothing([key(0)]))
    habit, read, asked = b._fetcher._habit(the_slab(b)), b._fetcher._reader.read, list[tuple[str, float]]()
    for _ in range(Habit.ENOUGH):
        habit.gave(a.ref.id, 1, 1)

    async def counted(slab: Slab, source: Peer, *args: Any) -> Any:
        asked.append((source.ref.id, args[-1]))
        if source.ref == a.ref and wrong == "broken":
            raise DeadlineExceeded("it took all the time that it was given")
        return await read(slab, source, *args)

    monkeypatch.setattr(b._fetcher._reader, "read", counted)
    assert await reader.get([key(0)], timeout=3.0) == [b"x"]
    assert [agent for agent, _ in asked] == [a.ref.id, c.ref.id] and habit.guess == ""
    assert 0 < asked[0][1] <= 1.5, "half"
    habit.gave(a.ref.id, 1, 1)
    habit.gave(a.ref.id, 1, 1)
    await reader.get([key(1)], timeout=100.0)
    assert asked[2][0] == a.ref.id and asked[2][1] <= GUESS_TIMEOUT


@given(st.lists(st.tuples(st.sampled_from("ab"), st.booleans())))
def test_a_habit_is_who_had_all_twice_in_a_row(asked: list[tuple[str, bool]]) -> None:
    habit = Habit()
    for agent, all_of_it in asked:
        habit.gave(agent, 3 if all_of_it else 2, 3)
    last = asked[-Habit.ENOUGH :]
    same = len(last) == Habit.ENOUGH and len({agent for agent, _ in last}) == 1 and all(good for _, good in last)
    assert habit.guess == (last[0][0] if same else "")


@pytest.mark.parametrize(
    ("policy", "same_host", "other_host"),
    [
        ("require:tcp", True, True),
        ("require:shm", False, False),
        ("require:rdma", False, False),
        ("prefer:shm,tcp", False, True),
        ("prefer:shm,rdma,tcp", False, False),
        ("prefer:tcp,shm", True, True),
        ("prefer:shm", False, False),
    ],
)
def test_bytes_come_with_the_answer_only_where_tcp_is_the_first_choice(
    policy: str, same_host: bool, other_host: bool
) -> None:
    chosen = TransportPolicy.parse(policy)
    assert (chosen.reads_over_tcp(True), chosen.reads_over_tcp(False)) == (same_host, other_host)
