"""ACCEPTANCE C12, C13: who is let in on the data port, on the control stream and on the sharing socket."""

from __future__ import annotations

import asyncio
import hashlib
import secrets
import socket
from typing import Any

import msgspec
import pytest

from services.store.transfer import handshake, wire
from services.store.transfer.base import Peer
from services.store.transfer.handshake import Hello, Role, hello
from services.store.transfer.sockets import receive_body, receive_header, unix_address
from services.store.transfer.tls import Tls
from services.store.transfer.wire import HEADER, MAGIC, Kind, pack
from shared.errors import NotPermitted, PeerRefused, ProtocolError, StaleIncarnation
from shared.messages import Ref
from tests.transfer.agents import SECRET, Agent, World, codes, read, until, write

ME = Ref("stranger", 5)


def hello_frame(agent: Agent, **changes: Any) -> bytes:
    return pack(
        Kind.HELLO, 0, msgspec.msgpack.encode(msgspec.structs.replace(hello(Role.DATA, ME, agent.ref), **changes))
    )


def garbage(agent: Agent) -> list[bytes]:
    good = hello_frame(agent)
    return [
        b"",
        b"\0" * 64,
        secrets.token_bytes(4096),
        b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + secrets.token_bytes(500),
        good[:3],
        good[: HEADER.size],
        good[:-1],
        HEADER.pack(MAGIC, Kind.HELLO, 0, 0, 0, 0xFFFFFFFF),
        HEADER.pack(MAGIC, Kind.CALL, 0, 0, 0, 64 << 20),
        HEADER.pack(MAGIC, 200, 0, 0, 0, 0),
        pack(Kind.HELLO, 0, b"\xc1"),
        pack(Kind.HELLO, 0, msgspec.msgpack.encode({"version": 1})),
        pack(Kind.READ, 1, wire.pack_ranges([wire.SegmentRef("pool")], [wire.Range(0, 0, 100, 0)])),
        hello_frame(agent, version=99),
        hello_frame(agent, nonce=b""),
        good,
        good + pack(Kind.PROOF, 0, b"x" * 32),
        good + pack(Kind.READ, 1, wire.pack_ranges([wire.SegmentRef("pool")], [wire.Range(0, 0, 100, 0)])),
    ]


async def is_closed(sock: socket.socket, timeout: float) -> bool:
    """Read whatever comes until the other side closes."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(timeout):
            while await loop.sock_recv(sock, 1 << 16):
                pass
    except ConnectionError:
        pass
    except TimeoutError:
        return False
    return True


def dial(agent: Agent, where: str) -> socket.socket:
    peer = agent.engine.peer()
    if where == "port":
        sock = socket.create_connection((peer.host, peer.port))
    else:
        sock = socket.socket(socket.AF_UNIX)
        sock.connect(unix_address(peer.shm))
    sock.setblocking(False)
    return sock


@pytest.mark.parametrize("where", ["port", "shm"])
async def test_c12_garbage_is_cut_off_and_the_agent_unharmed(world: World, where: str) -> None:
    a, b = await world.agent(), await world.agent(connect_timeout=0.3)
    b.pool[:100] = bytes(range(100))
    socks = []
    for data in garbage(b):
        socks.append(sock := dial(b, where))
        await asyncio.get_running_loop().sock_sendall(sock, data)
    slow = dial(b, where)

    async def drip() -> None:
        """A byte now and then does not keep a connection open."""
        for byte in hello_frame(b):
            try:
                await asyncio.get_running_loop().sock_sendall(slow, bytes([byte]))
            except OSError:
                return
            await asyncio.sleep(0.02)

    dripping = asyncio.create_task(drip())
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 100)], 100)) == ["ok"]  # meanwhile
    assert all(await asyncio.gather(*(is_closed(sock, 100) for sock in [*socks, slow])))
    await dripping
    for sock in [*socks, slow]:
        sock.close()
    assert codes(await a.engine.transfer([write(b.ref, 0, 200, 100)], 100)) == ["ok"]
    assert b.pool[200:300] == bytes(range(100))


async def test_c12_a_flood_of_half_handshakes_does_not_keep_members_out_for_long(tcp_world: World) -> None:
    a, b = await tcp_world.agent(), await tcp_world.agent(connect_timeout=0.3)
    flood = [dial(b, "port") for _ in range(200)]
    async with asyncio.timeout(100):
        while codes(await a.engine.transfer([read(b.ref, 0, 0, 100)], 100)) != ["ok"]:
            await asyncio.sleep(0.02)  # its own handshake may take too long, too, where others keep the machine busy
    for sock in flood:
        sock.close()


async def test_c12_wrong_secret_refused(world: World) -> None:
    a, b = await world.agent(secret=b"another"), await world.agent()
    before = b.pool[:100]
    a.pool[:100] = b"x" * 100
    expected = "peer_refused"
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 100)], 100)) == [expected]
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 100)], 100)) == [expected]
    with pytest.raises(PeerRefused):
        await a.engine.call(b.ref, b"hello", 100)
    assert b.pool[:100] == before


async def test_c12_an_impostor_target_is_refused(tcp_world: World) -> None:
    """A server that does not know the secret learns nothing but a challenge's answer, and gets no request."""
    a = await tcp_world.agent()
    heard: list[Kind] = []

    def impostor(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        if tcp_world.tls:
            sock = Tls(tcp_world.tls).respond(sock, 100.0)
        for say in (
            pack(Kind.CHALLENGE, 0, msgspec.msgpack.encode(handshake.Challenge(b"n" * 32))),
            pack(
                Kind.WELCOME,
                0,
                msgspec.msgpack.encode(
                    handshake.Proven(b"p" * 32, msgspec.Raw(msgspec.msgpack.encode(handshake.Welcome())))
                ),
            ),
        ):
            header = receive_header(sock)
            receive_body(sock, header)
            heard.append(header.kind)
            sock.sendall(say)
        assert sock.recv(1) == b""
        sock.close()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        ref = Ref("impostor", 1)
        tcp_world.peers["impostor"] = Peer(ref, "127.0.0.1", listener.getsockname()[1])
        serving = asyncio.create_task(asyncio.to_thread(impostor, listener))
        assert codes(await a.engine.transfer([read(ref, 0, 0, 8)], 100)) == ["peer_refused"]
        await serving
    assert heard == [Kind.HELLO, Kind.PROOF]


async def test_another_incarnation_is_refused(world: World) -> None:
    a, b = await world.agent(), await world.agent()
    old = Ref(b.ref.id, b.ref.incarnation ^ 1)
    assert codes(await a.engine.transfer([read(old, 0, 0, 8)], 100)) == ["stale_incarnation"]  # metadata says so
    peer = b.engine.peer()
    world.peers[old.id] = Peer(old, peer.host, peer.port, peer.host_id, peer.shm)
    late = Ref(old.id, old.incarnation)
    results = await a.engine.transfer([read(late, 0, 0, 8), write(late, 0, 0, 8)], 100)  # the target says so
    assert codes(results) == ["stale_incarnation"] * 2
    with pytest.raises(StaleIncarnation):
        await a.engine.call(late, b"hello", 100)


async def shake(secret: bytes, greeting: Hello, admit: Any = lambda _: [7, 8]) -> tuple[Any, Any]:
    left, right = socket.socketpair()
    with left, right:
        sides = (
            asyncio.to_thread(handshake.initiate, left, secret, greeting, 30.0),
            asyncio.to_thread(handshake.respond, right, SECRET, Ref("t", 1), 30.0, admit),
        )
        return tuple(await asyncio.gather(*sides, return_exceptions=True))  # type: ignore[return-value]


async def test_the_handshake_names_the_live_grants() -> None:
    welcome, greeting = await shake(SECRET, hello(Role.DATA, ME, Ref("t", 1), 42))
    assert welcome.grants == [7, 8] and (greeting.me, greeting.stream) == (ME, 42)
    welcome, _ = await shake(SECRET, hello(Role.DATA, ME, Ref("t", 1)), lambda _: None)
    assert welcome.grants is None


async def test_refusals_arrive_as_the_same_error() -> None:
    def refuse(_: Hello) -> list[int]:
        raise NotPermitted("no", field="x")

    for got in await shake(SECRET, hello(Role.DATA, ME, Ref("t", 1)), refuse):
        assert type(got) is NotPermitted and got.field == "x"
    for got in await shake(b"wrong", hello(Role.DATA, ME, Ref("t", 1))):
        assert isinstance(got, PeerRefused)
    for got in await shake(SECRET, hello(Role.DATA, ME, Ref("t", 2))):
        assert isinstance(got, StaleIncarnation)
    wrong = msgspec.structs.replace(hello(Role.DATA, ME, Ref("t", 1)), version=2)
    for got in await shake(SECRET, wrong):
        assert isinstance(got, ProtocolError) and got.field == "version"


def test_proofs_depend_on_every_part() -> None:
    proofs = [
        handshake.prove(*parts)
        for parts in (
            (b"s", b"a", b"bc", b"d"),
            (b"s", b"a", b"b", b"cd"),
            (b"s", b"x", b"bc", b"d"),
            (b"t", b"a", b"bc", b"d"),
        )
    ]
    assert len(set(proofs)) == 4 and all(len(proof) == hashlib.sha256().digest_size for proof in proofs)


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "localhost"])
async def test_c13_every_kind_of_loopback_address(world: World, host: str) -> None:
    a, b = await world.agent(host=host), await world.agent(host=host, on_call=echo)
    a.pool[:5] = b"hello"
    assert codes(await a.engine.transfer([write(b.ref, 0, 0, 5), read(b.ref, 9, 0, 5)], 100)) == ["ok", "ok"]
    assert await a.engine.call(b.ref, b"x", 100) == b"x"


async def echo(_: Ref, payload: bytes) -> bytes:
    return payload


async def test_nothing_is_left_of_refused_connections(tcp_world: World) -> None:
    b = await tcp_world.agent()
    for data in garbage(b)[:4]:
        sock = dial(b, "port")
        await asyncio.get_running_loop().sock_sendall(sock, data)
        sock.close()
    await until(lambda: b.engine.connections() == 0)
