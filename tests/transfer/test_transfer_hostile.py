"""Requests, frames and messages that nobody meant to send: refused alone, by name, and everything else goes on."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from services.store import peer_messages
from services.store.transfer import handshake, wire
from services.store.transfer.base import Op
from services.store.transfer.handshake import Role, hello
from services.store.transfer.mapping import Mapping, Mappings
from services.store.transfer.rdma import messages as rdma_messages
from services.store.transfer.room import Rooms
from services.store.transfer.segments import Segment, Segments
from services.store.transfer.sharing import Shape, Sharing
from services.store.transfer.wire import MAX_PIECES, Kind, pack
from shared import messages
from shared.errors import DeadlineExceeded, MooncakeError, PeerGone, ProtocolError
from shared.messages import Ref
from tests.examples import examples
from tests.transfer.agents import SECRET, World, codes, read, request, until, world_of

TOO_DEEP = b"\x91" * 4000


# -- requests ------------------------------------------------------------------------------------------------------

WRONG: list[dict[str, Any]] = [
    {"grant": -1},
    {"grant": 1 << 64},
    {"offset": -(1 << 63)},
    {"offset": (1 << 63) - 1},
    {"local_offset": -1},
    {"local_offset": 1 << 63},
    {"length": 0},
    {"length": -4096},
    {"length": 1 << 63},
    {"segment": ""},
    {"segment": "x" * 256},
    {"segment": "x" * (64 << 10)},
    {"segment": "\ud800"},
    {"local": "\ud800"},
    {"local": ""},
]


@pytest.mark.parametrize("op", list(Op))
async def test_what_no_frame_could_say_fails_alone(world: World, op: Op) -> None:
    a, b = await world.agent("a"), await world.agent("b")
    good = [request(op, b.ref, i * 8192, i * 8192, 4096) for i in range(len(WRONG) + 1)]
    mixed = [good[0]]
    for right, change in zip(good[1:], WRONG, strict=True):
        mixed += [msgspec.structs.replace(right, **change), right]
    results = await a.engine.transfer(mixed, 100)
    found = codes(results)
    assert found[::2] == ["ok"] * len(good)
    assert set(found[1::2]) <= {"out_of_range", "invalid_input", "not_registered"}


@pytest.mark.parametrize("op", list(Op))
async def test_more_tiny_neighbours_than_a_frame_can_answer_for(op: Op) -> None:
    async with world_of("require:tcp") as world:
        a, b = await world.agent("a"), await world.agent("b")
        count = MAX_PIECES + 1000
        a.pool[0:count], b.pool[0:count] = os.urandom(count), os.urandom(count)
        results = await a.engine.transfer([request(op, b.ref, i, i, 1) for i in range(count)], 100)
        assert set(codes(results)) == {"ok"} and a.pool[0:count] == b.pool[0:count]


async def test_without_descriptors_requests_fail_and_with_them_they_go_on(world: World) -> None:
    a, b = await world.agent("a"), await world.agent("b")
    with no_descriptors():
        (failed,) = codes(await a.engine.transfer([read(b.ref, 0, 0, 64)], 100))
    assert failed in ("peer_gone", "deadline_exceeded")
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 64)], 100)) == ["ok"]


@contextlib.contextmanager
def no_descriptors() -> Iterator[None]:
    """Not one more can be opened."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        yield


# -- the queue of a peer: whatever ends in one turn of the loop ------------------------------------------------------

MOVES = st.lists(st.sampled_from(["take", "cancel", "give", "turn"]), max_size=40)


@settings(deadline=None)
@given(MOVES, st.lists(st.integers(1, 12), min_size=1, max_size=8))
@example(["take", "take", "turn", "cancel", "give", "turn"], [10])
def test_whoever_gives_up_in_whatever_turn_leaves_the_queue_empty(moves: list[str], sizes: list[int]) -> None:
    async def play() -> None:
        rooms, peer = Rooms(10), Ref("p", 1)
        tasks: list[tuple[int, asyncio.Task[None]]] = []

        def granted() -> list[tuple[int, asyncio.Task[None]]]:
            return [(n, t) for n, t in tasks if t.done() and not t.cancelled()]

        def give() -> None:
            for entry in granted()[:1]:
                tasks.remove(entry)
                assert entry[1].exception() is None
                rooms.give({peer: entry[0]})

        for at, move in enumerate(moves):
            if move == "take":
                size = sizes[at % len(sizes)]
                tasks.append((size, asyncio.create_task(rooms.take({peer: size}, 100))))
            elif move == "cancel":
                for _, task in tasks:
                    task.cancel()
            elif move == "give":
                give()
            else:
                await asyncio.sleep(0)
        for _, task in tasks:
            task.cancel()
        await asyncio.gather(*(task for _, task in tasks), return_exceptions=True)
        while granted():
            give()
        assert all(task.cancelled() for _, task in tasks)
        rooms.take_now({peer: 11})  # what is larger than the limit goes alone: nothing is left of the others

    asyncio.run(play())


# -- messages --------------------------------------------------------------------------------------------------------

DECODERS: dict[str, Callable[[bytes], Any]] = {
    "errors of an answer": wire.parse_errors,
    "fault": wire.parse_fault,
    "ids": wire.parse_ids,
    "ranges": wire.parse_ranges,
    "hello": lambda body: handshake._decode(body, handshake.Hello),
    "welcome": lambda body: handshake._decode(body, handshake.Proven),
    "call of an agent": lambda body: peer_messages.decode_call(bytes((peer_messages.VERSION,)) + body),
    "answer of an agent": lambda body: peer_messages.decode_answer(
        bytes((peer_messages.VERSION,)) + body, peer_messages.Leased
    ),
    "call about RDMA": lambda body: rdma_messages.unpack(rdma_messages.MARK + body),
    "message of the bus": lambda body: messages.decode(bytes((messages.PROTOCOL,)) + body),
}


@pytest.mark.parametrize("name", DECODERS)
@settings(max_examples=examples(20))
@given(st.binary(max_size=400))
@example(TOO_DEEP)
@example(b"\x81\xa1x" + TOO_DEEP)
@example(b"\x82\xa4type\xa5lease\xa1x" + TOO_DEEP)
@example(b"\x81\xa1\xff\x01")
@example(b"\xdd\xff\xff\xff\xff")
def test_any_bytes_are_a_message_or_a_protocol_error(name: str, body: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        DECODERS[name](body)


@pytest.mark.parametrize("role", [Role.DATA, Role.CONTROL])
async def test_a_greeting_nested_too_deeply_is_refused(role: Role) -> None:
    async with world_of("require:tcp") as world:
        await greet_too_deeply(world, role)


async def greet_too_deeply(world: World, role: Role) -> None:
    a, b = await world.agent("a"), await world.agent("b")
    body = msgspec.msgpack.encode(msgspec.structs.asdict(hello(role, a.ref, b.ref)) | {"x": 0})[:-1] + TOO_DEEP[:3000]

    def knock() -> bytes:
        peer = b.engine.peer()
        with socket.create_connection((peer.host, peer.port), 100) as sock:
            sock.sendall(pack(Kind.HELLO, 0, body))
            answer = bytearray()
            while data := sock.recv(4096):
                answer += data
            return bytes(answer)

    (header, refusal), *_ = wire.Parser().feed(await asyncio.to_thread(knock))
    assert header.kind is Kind.REFUSED and isinstance(wire.parse_fault(refusal), ProtocolError)
    assert codes(await a.engine.transfer([read(b.ref, 0, 0, 64)], 100)) == ["ok"]


# -- memory descriptors ----------------------------------------------------------------------------------------------


class Sleepy(Sharing):
    """An owner that is stopped before it answers, and goes on later."""

    awake = threading.Event()

    def _share(self, sock: socket.socket, tag: int, segment: Segment) -> None:
        self.awake.wait()
        super()._share(sock, tag, segment)


async def test_a_late_answer_is_not_taken_for_the_next_one() -> None:
    me, owner, address = Ref("me", 1), Ref("owner", 2), "@test-" + secrets.token_hex(8)
    segments = Segments()
    sharing = Sleepy(owner, SECRET, segments, True, 100.0)
    files = {name: os.memfd_create(name) for name in ("one", "two")}
    for name, fd in files.items():
        os.pwrite(fd, name.encode() * 1365, 0)
        segment = Segment(name, memoryview(bytearray(4095)), "cpu:0", fd)
        segments.register(segment)
        sharing.shares(segment)
    sharing.start(address)
    mappings = Mappings(me, SECRET, 0.5)
    mappings.start()
    try:
        with pytest.raises(PeerGone):
            await asyncio.to_thread(mappings.get, owner, address, "one")
        sharing.awake.set()
        for name in ("two", "one"):
            mapping = await asyncio.to_thread(get_in_time, mappings, owner, address, name)
            assert bytes(mapping._memory[:3]) == name.encode()
        await until(lambda: len(mappings) == 2)
    finally:
        sharing.awake.set()
        mappings.close()
        sharing.close()
        for fd in files.values():
            os.close(fd)


def get_in_time(mappings: Mappings, owner: Ref, address: str, name: str) -> Mapping:
    """Half a second may be too little on a busy machine: ask again."""
    for _ in range(200):
        try:
            return mappings.get(owner, address, name)
        except (PeerGone, DeadlineExceeded):
            continue
    raise AssertionError("it never answered")


NUMBERS = st.one_of(st.integers(-(2**63), 2**64 - 1), st.integers(-2, 5000))


@given(
    st.builds(
        Shape,
        st.just("s"),
        NUMBERS,
        NUMBERS,
        NUMBERS,
        NUMBERS,
        st.sampled_from(["open", "ask", "table", ""]),
        NUMBERS,
        NUMBERS,
        NUMBERS,
    )
)
@example(Shape("s", 1, 4096, 0, 0, "table", 0, 0, 1))
@example(Shape("s", 1, 4096, 0, 0, "table", 4096, 0, 0))
@example(Shape("s", 1, 2**63, 2**63, 0, "open"))
def test_a_segment_of_any_shape_is_mapped_or_refused(shape: Shape) -> None:
    fds = [os.memfd_create("s") for _ in range(3)]
    try:
        for fd in fds:
            os.ftruncate(fd, 1 << 16)
        mapping = Mapping(shape, fds)
        mapping.check(0, shape.size)
        with contextlib.suppress(MooncakeError):
            mapping.verify(0, shape.size, 1)
    except (ValueError, OverflowError, OSError):
        pass
    finally:
        for fd in fds:
            os.close(fd)
