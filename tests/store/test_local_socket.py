"""The local socket: who may attach, what garbage does, what engines see when the agent goes."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.store import local_messages as wire
from services.store.agent import Agent, run_agent
from services.store.attach import attach
from services.store.client import StoreClient
from services.store.directory import Board, LocalDirectory
from services.store.frames import MAX_FRAME, FrameReader, frame
from services.store.settings import StoreSettings
from services.store.sync_client import SyncStoreClient
from shared.blocks import Geometry, Namespace
from shared.engines.base import Owner, PoolClass
from shared.errors import AgentGone, ConfigError, DoesNotFit, InvalidInput, ProtocolError, Unauthorized
from tests.examples import examples

OWNER = Owner("request/1")

Start = Callable[..., Awaitable[Agent]]
Connect = Callable[..., Awaitable[StoreClient]]
Key = Callable[[object], bytes]

GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff\xff\xff\xff",
    (1 << 20).to_bytes(4, "little") + b"x",
    frame(b"\xc1"),
    frame(msgspec.msgpack.encode(["hello"])),
    frame(msgspec.msgpack.encode({"type": "hello", "version": 1})),
    b"\x05\x00",
    b"",
    os.urandom(3000),
]


def send_raw(address: str, data: bytes) -> bytes:
    """What comes back until the agent hangs up, the challenge left out."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(100)
        sock.connect("\0" + address[1:])
        sock.recv(4096)
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        got = b""
        try:
            while piece := sock.recv(4096):
                got += piece
        except ConnectionResetError:
            pass
        return got


@pytest.mark.parametrize("data", GARBAGE, ids=range(len(GARBAGE)))
async def test_garbage_before_the_greeting_closes_and_harms_nobody(
    start_agent: Start, connect: Connect, data: bytes
) -> None:
    a = await start_agent()
    client = await connect(a)
    await asyncio.to_thread(send_raw, a.settings.socket, data)
    assert await client.contains([]) == []
    assert a.stats()["store_connections"] == 1


@pytest.mark.parametrize("data", [b"\xff\xff\xff\xff", frame(b"\xc1"), frame(msgspec.msgpack.encode({"t": "no such"}))])
async def test_garbage_after_the_greeting_ends_that_connection_alone(
    start_agent: Start, connect: Connect, data: bytes
) -> None:
    a = await start_agent()
    good, bad = await connect(a), await connect(a)
    transport = bad._session._transport
    assert transport is not None
    transport.write(data)
    async with asyncio.timeout(100):
        while not bad.closed:
            await asyncio.sleep(0.01)
    with pytest.raises(AgentGone):
        await bad.contains([])
    assert await good.contains([]) == []


async def test_wrong_arguments_are_refused_and_the_connection_lives(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    client = await connect(await start_agent())
    ask = client._session.ask
    by = wire.By("o", 0.0, 2)
    for make in (
        lambda id: wire.Contains(id, b"short"),
        lambda id: wire.Reserve(id, key(0), by, -1.0),
        lambda id: wire.Reserve(id, key(0), by, float("nan")),
        lambda id: wire.Reserve(id, key(0), wire.By("o", 0.0, 77), 1.0),
        lambda id: wire.Allocate(id, 1, wire.By("o", float("nan"), 0), 1.0),
        lambda id: wire.Allocate(id, -1, by, 100.0),
        lambda id: wire.Wait(id, b"", by, 100.0),
        lambda id: wire.Commit(id, [1, 2], b"", key(0)),
        lambda id: wire.Commit(id, [1], b"parent", key(0)),
        lambda id: wire.Commit(id, [1], b"", key(0), [0]),
        lambda id: wire.OpenLanding(id, b"", 2, 100, client.agent, by, 100.0),
        lambda id: wire.Stream(id, client.agent, 1, [0], [(99, 0, 0, 1, 0, 1)], 1.0),
        lambda id: wire.Stream(id, client.agent, 1, [0], [(0, 0, 0, 1, 0, 1)], 1.0),  # a free slot
    ):
        with pytest.raises(InvalidInput):
            await ask(make, Any)
    with pytest.raises(DoesNotFit):
        await ask(lambda id: wire.OpenLanding(id, b"", 1 << 60, 100, client.agent, by, 100.0), Any)
    assert await client.contains([key(0)]) == [False]


async def test_the_secret_is_needed(start_agent: Start, connect: Connect) -> None:
    a = await start_agent()
    namespace = (await connect(a)).pool.geometry
    with pytest.raises(Unauthorized):
        await StoreClient.connect(a.settings.socket, like(namespace), secret="wrong", timeout=100.0)


def like(geometry: Any, **other: Any) -> Namespace:
    fields = {"layers": geometry.layers, "kv_heads": geometry.kv_heads, "head_dim": geometry.head_dim,
              "block_size": geometry.block_size, "dtype": geometry.dtype}  # fmt: skip
    return Namespace(**({"model": "ab", "weights": "cd", "tokenizer": "ef"} | fields | other))


async def test_a_second_namespace_is_refused_naming_the_limit_or_gets_its_own_slab(
    start_agent: Start, connect: Connect, key: Key
) -> None:
    a = await start_agent(slots=4)
    first = await connect(a)
    other = like(first.pool.geometry, model="other")
    with pytest.raises(ConfigError, match="slab_bytes") as refused:
        await StoreClient.connect(a.settings.socket, other, secret="s", timeout=100.0)
    assert refused.value.field == "slab_bytes"

    b = await start_agent(slots=4, slab_bytes=2 * first.pool.stride)
    one = await connect(b)
    async with await StoreClient.connect(b.settings.socket, other, secret="s", timeout=100.0) as two:
        assert (one.pool.slots, two.pool.slots) == (2, 2)
        await one.put([(key(0), b"x")])
        assert await two.contains([key(0)]) == [False]  # no namespace sees another's blocks
        salted = like(first.pool.geometry, salt="tenant")
        async with await StoreClient.connect(b.settings.socket, salted, secret="s", timeout=100.0) as three:
            assert three.pool.slots == 2 and await three.contains([key(0)]) == [True]


@pytest.mark.parametrize("field", [{"layers": 0}, {"head_dim": -1}, {"dtype": "float7"}, {"block_size": 1 << 30}])
async def test_a_namespace_that_describes_no_block_is_refused(start_agent: Start, field: dict[str, Any]) -> None:
    a = await start_agent()
    good: dict[str, Any] = {"layers": 1, "kv_heads": 1, "head_dim": 1, "block_size": 16, "dtype": "float32"}
    with pytest.raises(InvalidInput) as refused:
        await StoreClient.connect(
            a.settings.socket,
            Namespace(model="", weights="", tokenizer="", **(good | field)),
            secret="s",
            timeout=1.0,
        )
    assert refused.value.field == next(iter(field))


async def test_engines_see_the_agent_go_and_attach_to_the_next_incarnation(key: Key, tmp_path: Path) -> None:
    address, namespace = str(tmp_path / "agent.sock"), like(Geometry(2, 16, 1, 16, "float32"))
    chosen = StoreSettings(socket=address, pool_bytes=1 << 20, metrics_port=-1, id="agent")
    async with run_agent(chosen, LocalDirectory(Board())):
        assert os.stat(address).st_mode & 0o777 == 0o600
        with pytest.raises(ConfigError, match="listen"):
            async with run_agent(chosen, LocalDirectory(Board())):
                pass
        client = await StoreClient.connect(address, namespace)
        waiting = asyncio.create_task(client.wait(key(0), OWNER, 30.0))
        await client.put([(key(0), b"x")])
        held = await client.allocate(1, OWNER, PoolClass.GROWTH, 100.0)
        before = client.agent
        with open(client.pool.path, "r+b") as pool:
            old = pool.read(1)
    await waiting
    async with asyncio.timeout(100):
        while not client.closed:
            await asyncio.sleep(0.01)
    with pytest.raises(AgentGone):
        await client.contains([key(0)])
    await client.release(held)
    with open(client.pool.path, "r+b") as pool:  # the old mapping lives as long as the client
        assert pool.read(1) == old
    with pytest.raises(AgentGone):
        await StoreClient.connect(address, namespace, timeout=0.2)
    connecting = asyncio.create_task(StoreClient.connect(address, namespace, timeout=100.0))
    await asyncio.sleep(0.1)
    async with run_agent(chosen, LocalDirectory(Board())):
        again = await connecting
        assert again.agent.id == before.id and again.agent.incarnation != before.incarnation
        assert await again.contains([key(0)]) == [False]
        await again.close()
    await client.close()
    await client.close()
    assert not os.path.exists(address)


async def test_a_dead_agents_socket_file_is_replaced_and_another_file_is_not(tmp_path: Path) -> None:
    address = str(tmp_path / "agent.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(address)
    chosen = StoreSettings(socket=address, pool_bytes=1 << 20, metrics_port=-1)
    async with run_agent(chosen, LocalDirectory(Board())):
        pass
    Path(address).write_text("precious")
    with pytest.raises(ConfigError):
        async with run_agent(chosen, LocalDirectory(Board())):
            pass
    assert Path(address).read_text() == "precious"


async def test_the_sync_client(start_agent: Start, connect: Connect, key: Key) -> None:
    a = await start_agent()
    namespace = like((await connect(a)).pool.geometry)

    def work() -> None:
        with SyncStoreClient(a.settings.socket, namespace, secret="s") as store:
            assert [p.stored for p in store.put([(key(0), b"abc")])] == [True]
            assert store.get([key(0), key(1)]) == [b"abc", None]
            assert store.contains([key(0), key(1)]) == [True, False]
            assert store.remove([key(0)]) == [True]
        with pytest.raises(Unauthorized):
            SyncStoreClient(a.settings.socket, namespace, secret="wrong")

    await asyncio.to_thread(work)


async def test_close_gives_everything_back(start_agent: Start, connect: Connect, key: Key) -> None:
    a = await start_agent(slots=4)
    client = await connect(a)
    await client.reserve([key(0)], OWNER, PoolClass.PREFILL, 100.0)
    await client.allocate(1, OWNER, PoolClass.PREFILL, 100.0)
    await client.open_landing([], 2, 20, client.agent, OWNER, 100.0)
    await client.close()
    async with asyncio.timeout(100):
        while a.stats()["free"] < 4:
            await asyncio.sleep(0.01)
    assert a.stats()["store_holds"] == a.stats()["store_landings"] == 0


def test_attach_says_where_nobody_is() -> None:
    namespace = like(Geometry(1, 16, 1, 1, "float32"))
    with pytest.raises(AgentGone, match="nowhere"):
        attach("@nowhere", namespace, "x", "", 0.05)


# -- frames ------------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=40), max_size=6), st.data())
@settings(max_examples=examples(50), deadline=None)
def test_frames_come_out_whole_however_they_are_cut(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(frame, bodies))
    reader, out, at = FrameReader(), [], 0
    while at < len(stream):
        n = data.draw(st.integers(1, len(stream) - at))
        out += list(reader.feed(stream[at : at + n]))
        at += n
    assert out == bodies and reader.pending == 0


def test_a_frame_over_the_limit_is_refused_before_it_is_buffered() -> None:
    reader = FrameReader()
    with pytest.raises(ProtocolError):
        list(reader.feed((MAX_FRAME + 1).to_bytes(4, "little")))
    with pytest.raises(ProtocolError):
        frame(bytes(MAX_FRAME + 1))
