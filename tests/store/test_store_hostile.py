"""Anything that can be said in a message, said to a real agent: it is answered by name, and nothing stays held. And
members that are no members: engines that do not read, peers that do not answer, a system that gives nothing."""

from __future__ import annotations

import asyncio
import os
import resource
import socket
import sys
import threading
import typing
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.store import local_messages as local
from services.store import peer_messages as peer
from services.store import slabs, sync_client
from services.store.agent import Agent, run_agent
from services.store.client import StoreClient
from services.store.directory import Board, LocalDirectory
from services.store.frames import frame
from services.store.memory import SlabMemory, stride_of
from services.store.peer_service import within
from services.store.removal import Removal
from services.store.session import Session
from services.store.settings import StoreSettings
from services.store.slab import segment_name
from services.store.slabs import check
from services.store.sync_client import SyncStoreClient
from shared.blocks import Namespace
from shared.engines.base import Owner, PoolClass
from shared.errors import ConfigError, Contended, DeadlineExceeded, InvalidInput, MooncakeError, ProtocolError
from shared.messages import Ref
from tests.examples import examples
from tests.store.conftest import NAMESPACE, STRIDE

Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]
OTHER = msgspec.structs.replace(NAMESPACE, model="other")

# -- any message -----------------------------------------------------------------------------------------------------

KEYS = [bytes([i]) * 16 for i in range(6)]
EDGES = [-(2**63), -(2**31), 2**31, 2**32, 2**62, 2**63 - 1, 2**64 - 1]
INTS = st.one_of(st.integers(-2, 20), st.sampled_from(EDGES))
SIMPLE: dict[Any, st.SearchStrategy[Any]] = {
    int: INTS,
    float: st.sampled_from([0.0, 0.01, 0.1, -1.0, 1e308, float("inf"), float("-inf"), float("nan")]),
    bool: st.booleans(),
    str: st.sampled_from(["", "o", "me", "segment", "../x\n", "é" * 300]),
    bytes: st.one_of(
        st.lists(st.sampled_from(KEYS), max_size=5).map(b"".join), st.sampled_from([b"", b"short", *KEYS])
    ),
    Ref: st.sampled_from([Ref("me", 0), Ref("nobody", 1), Ref("", 2**64 - 1)]),
}
NAMESPACES = st.builds(
    Namespace,
    model=st.sampled_from(["ab", "a" * 1000]),
    weights=st.just("cd"),
    tokenizer=st.just("ef"),
    dtype=st.sampled_from(["float32", "float64", ""]),
    layers=INTS,
    kv_heads=INTS,
    head_dim=INTS,
    block_size=INTS,
    tensor_parallel=INTS,
    block_bytes=st.one_of(st.just(0), st.just(4096), INTS),
)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Anything of a field's type, as often as not what a handler does not expect."""
    if kind is Namespace:
        return NAMESPACES
    if kind in SIMPLE:
        return SIMPLE[kind]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is list:
        return st.lists(values(inner[0]), max_size=4)
    if origin is tuple:
        return st.tuples(*map(values, inner))
    return st.just({}) if origin is dict else messages_of(kind)


def messages_of(kind: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    return st.builds(kind, **{name: values(hints[name]) for name in kind.__struct_fields__})


REQUESTS = st.one_of(*(messages_of(kind) for kind in typing.get_args(local.AnyRequest) if kind is not local.Bye))
CALLS = st.one_of(*map(messages_of, typing.get_args(peer.AnyCall)))


def told(message: Any, agent: Agent, holds: Sequence[int]) -> Any:
    """The message with names that exist here, where it has made some up."""
    names = {"segment": next(iter(agent.slabs), ""), "me": agent.ref.id}
    changes: dict[str, Any] = {}
    for field in message.__struct_fields__:
        value = getattr(message, field)
        if isinstance(value, str) and value in names:
            changes[field] = names[value]
        elif value == Ref("me", 0):
            changes[field] = agent.ref
        elif field == "holds" and holds:
            changes[field] = [holds[hold % len(holds)] if -2 <= hold <= 20 else hold for hold in value]
    return msgspec.structs.replace(message, **changes)


@settings(max_examples=examples(12), deadline=None)
@given(st.lists(st.one_of(REQUESTS, CALLS), min_size=10, max_size=40))
def test_whatever_is_said_is_answered_and_leaves_nothing_held(said: list[Any]) -> None:
    asyncio.run(say(said))


async def say(said: list[Any]) -> None:
    board, settings = Board(), {"metrics_port": -1, "secret": "s", "lease_ttl": 0.1, "namespace_idle": 0.0}
    async with AsyncExitStack() as stack:
        a, b = [
            await stack.enter_async_context(
                run_agent(
                    StoreSettings(socket="@test-" + uuid4().hex, pool_bytes=16 * STRIDE, **settings),  # type: ignore[arg-type]
                    LocalDirectory(board),
                )
            )
            for _ in range(2)
        ]
        client = await StoreClient.connect(a.settings.socket, NAMESPACE, secret="s")
        held = await client.reserve(KEYS[:3], Owner("o"), PoolClass.CACHE, 100.0)
        holds = [h.hold for h in held]

        async def one(message: Any) -> None:
            try:
                if isinstance(message, local.Request):
                    plain = told(message, a, holds)
                    await client._session.ask(lambda id: msgspec.structs.replace(plain, id=id), Any, 100.0)
                else:
                    await b.engine.call(a.ref, peer.encode(told(message, a, holds)), 100.0)
            except MooncakeError as e:
                assert e.code not in ("internal", "agent_gone", "peer_gone"), (message, e)

        await asyncio.gather(*map(one, said))
        assert not client.closed
        for slab in a.slabs.values():
            for key in KEYS:
                for owner in list(slab.pinned._pins.get(key, ())):
                    slab.unpin([key], owner)
        await client.close()
        async with asyncio.timeout(100):
            while any(value for kind, value in a.stats().items() if kind.startswith("store_")):
                await asyncio.sleep(0.01)


@given(NAMESPACES)
def test_a_namespace_describes_a_block_or_is_refused(namespace: Namespace) -> None:
    try:
        check(namespace)
    except InvalidInput as e:
        assert e.field in Namespace.__struct_fields__
        return
    geometry = namespace.geometry
    assert geometry.slot_bytes >= geometry.layers * geometry.block_size and stride_of(geometry) > 0


@given(st.floats(), st.floats(0.001, 100))
def test_a_peers_time_out_is_a_time(timeout: float, most: float) -> None:
    assert 0 <= within(timeout, most) <= most


# -- members that do not do their part -------------------------------------------------------------------------------


async def test_an_engine_that_reads_nothing_is_not_heard(start_agent: Start, connect: Connect) -> None:
    agent = await start_agent()
    client = await connect(agent)
    (connection,) = agent.local.connections
    ours, theirs = client._session._transport, connection._transport
    assert ours is not None and theirs is not None
    ours.pause_reading()
    asked = [asyncio.create_task(client.stats()) for _ in range(3000)]
    async with asyncio.timeout(100):
        while theirs.is_reading():
            await asyncio.sleep(0.01)
    assert theirs.get_write_buffer_size() < 1 << 20
    ours.resume_reading()
    assert len(await asyncio.gather(*asked)) == 3000


async def test_a_key_that_somebody_else_writes_for_ever_delays_no_others(start_agent: Start, connect: Connect) -> None:
    a, b = await start_agent(slots=64), await start_agent(slots=64)  # one batch
    here, writer, there = await connect(a), await connect(a), await connect(b)
    await there.put([(key, key) for key in KEYS[1:]], timeout=100.0)
    held = await writer.reserve(KEYS[:1], Owner("stopped"), PoolClass.CACHE, 100.0)
    getting = asyncio.create_task(here.get(KEYS, timeout=100.0))
    async with asyncio.timeout(100):
        while not all(await here.contains(KEYS[1:])):
            await asyncio.sleep(0.01)
    assert not getting.done()
    await writer.release(held)
    assert await getting == [None, *KEYS[1:]]


async def test_a_put_has_one_deadline_however_many_of_its_keys_others_write(
    start_agent: Start, connect: Connect
) -> None:
    agent = await start_agent(slots=1024)
    client, writer = await connect(agent), await connect(agent)
    keys = [i.to_bytes(16, "big") for i in range(500)]
    await writer.reserve(keys, Owner("stopped"), PoolClass.CACHE, 100.0)
    async with asyncio.timeout(100):  # each after the other they would take 250
        done = await client.put([(key, b"x") for key in keys], timeout=0.5)
    assert {put.error.code for put in done if put.error} == {"deadline_exceeded"} and len(done) == 500


async def test_an_answer_of_another_type_ends_the_session_and_nobody_waits() -> None:
    session, (ours, theirs) = Session(), socket.socketpair()
    ours.setblocking(False)
    await asyncio.get_running_loop().create_unix_connection(lambda: session, sock=ours)
    asking = asyncio.create_task(session.ask(local.Stats, dict[str, float], 100.0))
    await asyncio.sleep(0)
    theirs.sendall(frame(msgspec.msgpack.encode(local.Answer(1, msgspec.Raw(b"\xa1x")))))
    with pytest.raises(ProtocolError):
        await asking
    assert session.closed
    theirs.close()


async def test_a_blocking_call_that_is_late_is_given_up(start_agent: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    agent, given_up = await start_agent(), threading.Event()

    async def late() -> None:
        try:
            await asyncio.sleep(1000)
        finally:
            given_up.set()

    def call() -> None:
        with SyncStoreClient(agent.settings.socket, NAMESPACE, secret="s") as client:
            monkeypatch.setattr(sync_client, "SLACK", 0.05)
            with pytest.raises(DeadlineExceeded):
                client._run(late(), 0.0)
            monkeypatch.undo()
            assert given_up.wait(100)

    await asyncio.to_thread(call)


async def test_peers_are_asked_together_to_remove() -> None:
    together = asyncio.Barrier(3)

    async def ask(target: Ref, call: Any, kind: Any, timeout: float) -> list[bool]:
        async with asyncio.timeout(100):
            await together.wait()
        return [target.id == "b"]

    async def locate(keys: Sequence[bytes]) -> list[list[str]]:
        return [["a", "b", "c"] for _ in keys]

    async def find(id: str) -> Any:
        return SimpleNamespace(ref=Ref(id, 1))

    removal = Removal(SimpleNamespace(ask=ask), SimpleNamespace(locate=locate, peer=find))  # type: ignore[arg-type]
    slab: Any = SimpleNamespace(name="s", remove=lambda key: False)
    assert await removal.remove(slab, KEYS[:1], 100.0) == [True]


# -- a system that gives nothing -------------------------------------------------------------------------------------


def test_memory_that_is_not_given_leaves_no_descriptor() -> None:
    before = os.listdir("/proc/self/fd")
    for slots in (1 << 50, sys.maxsize // STRIDE + 1):
        with pytest.raises((OSError, OverflowError, ValueError)):
            SlabMemory("s", slots, NAMESPACE.geometry)
    assert os.listdir("/proc/self/fd") == before


async def test_an_engine_is_told_that_the_system_gives_no_memory(
    start_agent: Start, connect: Connect, stack: AsyncExitStack
) -> None:
    agent = await start_agent(slots=2048)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises(ConfigError) as refused:
            await connect(agent)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert refused.value.field == "pool_bytes" and "File too large" in refused.value.message
    assert await (await connect(agent)).contains([]) == []


async def test_a_namespace_that_cannot_be_shared_is_refused_again_and_again_in_the_same_words(
    start_agent: Start, connect: Connect
) -> None:
    agent = await start_agent()
    beacon = agent.engine._sharing._beacon
    free, beacon._free = beacon._free, []
    for _ in range(2):
        with pytest.raises(MooncakeError, match="shared segments"):
            await connect(agent)
    beacon._free = free
    client = await connect(agent)
    await client.put([(KEYS[0], b"x")])
    assert await client.get(KEYS[:1]) == [b"x"]


async def test_a_namespace_that_is_read_while_it_makes_way_comes_back_whole(
    start_agent: Start, stack: AsyncExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slabs, "UNREGISTER_TIMEOUT", 0.05)
    a, b = await start_agent(slots=8, namespace_idle=0.0), await start_agent(slots=8)

    async def attached(agent: Agent, namespace: Namespace) -> StoreClient:
        client = await StoreClient.connect(agent.settings.socket, namespace, secret="s", timeout=100.0)
        return await stack.enter_async_context(client)

    first = await attached(a, NAMESPACE)
    await first.close()
    (slab,) = a.slabs.values()
    async with asyncio.timeout(100):
        while a.stats()["store_connections"] or not slab.idle:
            await asyncio.sleep(0.01)
    used = a.engine._segments.use(slab.name)  # somebody's frame, however slow
    with pytest.raises(ConfigError):
        await attached(a, OTHER)
    with pytest.raises(Contended):
        await attached(a, NAMESPACE)
    a.engine._segments.let_go(used)
    again, reader = await attached(a, NAMESPACE), await attached(b, NAMESPACE)
    await again.put([(KEYS[0], b"x")])
    assert await reader.get(KEYS[:1], timeout=100.0) == [b"x"]


async def test_namespaces_that_made_way_leave_nothing_in_the_tier_below(
    start_ssd: Start, stack: AsyncExitStack
) -> None:
    agent = await start_ssd(slots=8, namespace_idle=0.0)
    for turn in range(4):
        namespace = msgspec.structs.replace(NAMESPACE, model=f"m{turn}")
        async with await StoreClient.connect(agent.settings.socket, namespace, timeout=100.0) as client:
            await client.put([(KEYS[0], b"x")])
        async with asyncio.timeout(100):
            while agent._in_use(slab := agent.slabs[segment_name(namespace)]) or not slab.idle:
                await asyncio.sleep(0.01)
    assert len(agent.ssd.spaces) == len(agent.slabs) == 1
