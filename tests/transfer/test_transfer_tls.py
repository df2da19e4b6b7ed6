"""ACCEPTANCE C12 over TLS: who is let in, with what words the others are kept out, and what travels."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from services.store.settings import StoreSettings
from services.store.transfer.base import Peer
from services.store.transfer.sockets import sever
from services.store.transfer.tls import Files, Tls
from services.store.transfer.tls_transport import HIGH
from shared.config import load
from shared.errors import ConfigError, MooncakeError, PeerRefused
from shared.messages import Ref
from tests.transfer.agents import World, codes, read, until, world_of, write
from tests.transfer.certificates import Authority, authority
from tests.transfer.test_transfer_handshake import garbage


@pytest.fixture(scope="module")
def mesh(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return authority(tmp_path_factory.mktemp("ours"))


@pytest.fixture(scope="module")
def ours(mesh: Authority) -> Files:
    return mesh.issue("ours")


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Files:
    """Of another authority."""
    return authority(tmp_path_factory.mktemp("theirs")).issue("theirs")


async def outcome(world: World, mine: Files | None, other: Files | None) -> MooncakeError:
    """What a READ from an agent with other files fails with; its target is unharmed."""
    a = await world.agent(tls=mine and Tls(mine))
    b = await world.agent(tls=other and Tls(other))
    [result] = await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)
    assert result.error is not None
    with pytest.raises(type(result.error)):
        await a.engine.call(b.ref, b"x", 100)
    c = await world.agent(tls=other and Tls(other))
    assert codes(await c.engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]
    return result.error


async def test_c12_a_certificate_of_another_authority_is_refused(ours: Files, theirs: Files) -> None:
    async with world_of("require:tcp") as world:
        error = await outcome(world, ours, theirs)
        assert isinstance(error, PeerRefused) and "certificate is not accepted" in error.message
        stranger = Files(theirs.cert, theirs.key, ours.ca)  # believes our targets, shows a certificate of its own
        error = await outcome(world, stranger, ours)
        assert isinstance(error, PeerRefused) and "unknown ca" in error.message


async def test_c12_an_expired_certificate_is_refused(mesh: Authority, ours: Files) -> None:
    expired = mesh.issue("expired", days=-1)
    async with world_of("require:tcp") as world:
        error = await refusal(world, ours, expired)
        assert isinstance(error, PeerRefused) and "expired" in error.message
        error = await refusal(world, expired, ours)
        assert isinstance(error, PeerRefused) and "expired" in error.message


async def refusal(world: World, mine: Files, other: Files) -> MooncakeError | None:
    a, b = await world.agent(tls=Tls(mine)), await world.agent(tls=Tls(other))
    [result] = await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)
    return result.error


async def test_c12_plain_and_tls_agents_say_what_differs(ours: Files) -> None:
    async with world_of("require:tcp") as world:
        error = await outcome(world, ours, None)
        assert "does the peer speak TLS?" in error.message
        error = await outcome(world, None, ours)
        assert isinstance(error, PeerRefused) and "this agent speaks TLS" in error.message


async def test_c12_without_a_certificate_nothing_is_heard(ours: Files) -> None:
    context = ssl.create_default_context(cafile=ours.ca)
    context.check_hostname = False
    async with world_of("require:tcp", ours) as world:
        b = await world.agent()
        peer = b.engine.peer()

        def knock() -> None:
            with (
                socket.create_connection((peer.host, peer.port), 100) as raw,
                context.wrap_socket(raw) as sock,
                pytest.raises(ssl.SSLError, match=r"(?i)certificate.required"),
            ):
                sock.sendall(garbage(b)[-1])
                sock.recv(1)

        await asyncio.to_thread(knock)
        assert b.engine.connections() == 0


async def test_c12_garbage_and_huge_lengths_inside_tls(ours: Files) -> None:
    """A member's certificate alone opens nothing."""
    tls, ended = Tls(ours), list[bool]()
    async with world_of("require:tcp", ours) as world:
        a, b = await world.agent(), await world.agent(connect_timeout=2.0)
        peer = b.engine.peer()

        def send(data: bytes) -> None:
            sock = tls.initiate(socket.create_connection((peer.host, peer.port), 100), 100.0)
            sock.sendall(data)
            ended.append(end_of(sock))

        senders = [threading.Thread(target=send, args=(data,)) for data in garbage(b)]
        for sender in senders:
            sender.start()
        await until(lambda: len(ended) == len(senders))
        assert all(ended)
        assert codes(await a.engine.transfer([read(b.ref, 0, 0, 100)], 100)) == ["ok"]
        await until(lambda: b.engine.connections() == 1)


def end_of(sock: ssl.SSLSocket) -> bool:
    """Read whatever comes until the other side closes."""
    sock.settimeout(100)
    with sock:
        try:
            while sock.recv(1 << 16):
                pass
        except (ConnectionError, ssl.SSLError):
            pass
        except TimeoutError:
            return False
    return True


@contextmanager
def between(
    peer: Peer, meet: Callable[[socket.socket, socket.socket], tuple[socket.socket, socket.socket]]
) -> Iterator[tuple[int, list[bytes]]]:
    """A relay: its port, and what it saw. ``meet`` may terminate TLS on both of its sides."""
    seen: list[bytes] = []
    socks: list[socket.socket] = []

    def pump(source: socket.socket, target: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                seen.append(data)
                target.sendall(data)
        except OSError:
            pass
        sever(source)
        sever(target)

    def serve(inner: socket.socket) -> None:
        try:
            inner, outer = meet(inner, socket.create_connection((peer.host, peer.port)))
        except (OSError, MooncakeError):
            return inner.close()
        socks.extend([inner, outer])
        up = threading.Thread(target=pump, args=(inner, outer), daemon=True)
        up.start()
        pump(outer, inner)
        up.join()
        inner.close()
        outer.close()

    def accept() -> None:
        while True:
            try:
                inner, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(inner,), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        try:
            yield listener.getsockname()[1], seen
        finally:
            sever(listener)
            for sock in socks:
                sever(sock)


async def test_c12_a_member_in_between_is_found_out(mesh: Authority, ours: Files) -> None:
    """It holds a certificate of our authority, not the secret: it hears both proofs and can use neither."""
    insider = Tls(mesh.issue("insider"))
    async with world_of("require:tcp", ours) as world:
        a, b = await world.agent(), await world.agent()
        with between(b.engine.peer(), lambda i, o: (insider.respond(i, 100.0), insider.initiate(o, 100.0))) as (
            port,
            _,
        ):
            world.peers[b.ref.id] = Peer(b.ref, "127.0.0.1", port)
            assert codes(await a.engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["peer_refused"]


async def test_nothing_travels_in_the_clear(ours: Files) -> None:
    async def repeat(_: Ref, payload: bytes) -> bytes:
        return payload

    async with world_of("require:tcp", ours) as world:
        a, b = await world.agent(), await world.agent(on_call=repeat)
        secret = b"nobody may read this" * 100
        a.pool[: len(secret)] = secret
        with between(b.engine.peer(), lambda i, o: (i, o)) as (port, seen):
            world.peers[b.ref.id] = Peer(b.ref, "127.0.0.1", port)
            results = await a.engine.transfer([write(b.ref, 0, 0, len(secret))], 100)
            results += await a.engine.transfer([read(b.ref, 1 << 20, 0, len(secret))], 100)
            assert codes(results) == ["ok"] * 2
            assert await a.engine.call(b.ref, secret, 100) == secret
            assert sum(map(len, seen)) > 3 * len(secret)
            assert b"nobody may" not in b"".join(seen) and b"pool" not in b"".join(seen)


async def test_large_calls_both_ways_over_tls(ours: Files) -> None:
    """More than is written or read at once."""

    async def repeat(_: Ref, payload: bytes) -> bytes:
        return payload[::-1]

    async with world_of("require:tcp", ours) as world:
        a, b = await world.agent(), await world.agent(on_call=repeat)
        payloads = [bytes([i]) * (3 * HIGH + i) + b"end" for i in range(4)]
        answers = await asyncio.gather(*(a.engine.call(b.ref, payload, 100) for payload in payloads))
        assert answers == [payload[::-1] for payload in payloads]


async def test_replaced_files_count_from_the_next_connection(tmp_path: Path, ours: Files, theirs: Files) -> None:
    current = Files(*(str(tmp_path / name) for name in ("cert.pem", "key.pem", "ca.pem")))

    def install(files: Files) -> None:
        for source, target in ((files.cert, current.cert), (files.key, current.key), (files.ca, current.ca)):
            shutil.copy(source, target + ".new")
            Path(target + ".new").rename(target)

    install(ours)
    async with world_of("require:tcp") as world:
        b = await world.agent(tls=Tls(current))
        assert codes(await (await world.agent(tls=Tls(ours))).engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]
        install(theirs)
        assert codes(await (await world.agent(tls=Tls(theirs))).engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]
        Path(current.key).write_text("no key")  # the old ones stay
        assert codes(await (await world.agent(tls=Tls(theirs))).engine.transfer([read(b.ref, 0, 0, 8)], 100)) == ["ok"]


def test_wrong_files_are_named(tmp_path: Path, ours: Files, theirs: Files) -> None:
    missing, empty = str(tmp_path / "missing"), tmp_path / "empty"
    empty.write_text("")
    for files, field in (
        (Files(missing, ours.key, ours.ca), "data_tls_cert"),
        (Files(str(empty), ours.key, ours.ca), "data_tls_cert"),
        (Files(ours.cert, missing, ours.ca), "data_tls_key"),
        (Files(ours.cert, str(empty), ours.ca), "data_tls_key"),
        (Files(ours.cert, theirs.key, ours.ca), "data_tls_key"),
        (Files(ours.cert, ours.key, missing), "data_tls_ca"),
        (Files(ours.cert, ours.key, str(empty)), "data_tls_ca"),
    ):
        with pytest.raises(ConfigError) as error:
            Tls(files)
        assert error.value.field == field


def test_settings_come_together() -> None:
    for flags in (["--data-tls-cert", "x"], ["--data-tls-cert", "x", "--data-tls-key", "y"], ["--data-tls-ca", "x"]):
        with pytest.raises(ConfigError, match="data_tls_cert, data_tls_key and data_tls_ca must be set together"):
            load(StoreSettings, prog="store", argv=flags, env={})
