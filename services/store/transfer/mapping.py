"""Segments of peers on the same host, mapped read-only."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import threading
import time

import msgspec
import numpy as np

from services.store.transfer.handshake import Role, hello, initiate
from services.store.transfer.sharing import REGISTRATIONS, Shape
from services.store.transfer.sockets import connect_unix, is_over
from services.store.transfer.wire import HEADER, LIMITS, Kind, pack, parse_fault, parse_header
from shared.errors import (
    MALFORMED,
    MooncakeError,
    NoTransport,
    NotRegistered,
    OutOfRange,
    PeerGone,
    ProtocolError,
    StaleGeneration,
)
from shared.messages import Ref

WORD = 8
AGAIN = 2.0


class Mapping:
    """One segment of a peer. It stays mapped as long as this object is referred to; ``current`` says whether the peer
    still has it registered."""

    def __init__(self, shape: Shape, fds: list[int]) -> None:
        self.shape = shape
        self.size = shape.size
        if not shape.possible:
            raise ValueError(f"no segment looks like {shape}")
        self._memory = _map(fds[0], shape.offset, shape.size)
        self._beacon = memoryview(_map(fds[1], 0, REGISTRATIONS * WORD)).cast("Q")
        self.address = int(np.frombuffer(self._memory, np.uint8).ctypes.data) + shape.offset % mmap.PAGESIZE
        self._table = _words(fds[2], shape.table_offset, shape.slots) if shape.check == "table" else None

    @property
    def asks(self) -> bool:
        """The owner has to be asked after each read."""
        return self.shape.check == "ask"

    @property
    def current(self) -> bool:
        return bool(self._beacon[self.shape.beacon] == self.shape.instance)

    def check(self, offset: int, length: int) -> None:
        """Raises OutOfRange."""
        if length <= 0 or offset < 0 or offset + length > self.size:
            name = self.shape.name
            raise OutOfRange(f"[{offset}, {offset}+{length}) is not a range inside {name} of {self.size} bytes")

    def verify(self, offset: int, length: int, grant: int) -> None:
        """After (``gen_last``) a copy: was it of what ``grant`` names? Raises NotRegistered, StaleGeneration."""
        if not self.current:
            raise NotRegistered(f"segment {self.shape.name} is not registered any more", field="segment")
        if self._table is not None:
            step = self.shape.slot_bytes
            for slot in range(offset // step, (offset + length - 1) // step + 1):
                if self._table[slot] != grant:
                    raise StaleGeneration(f"slot {slot} was reused since it was leased")


def _map(fd: int, offset: int, size: int) -> mmap.mmap:
    start = offset - offset % mmap.PAGESIZE
    return mmap.mmap(fd, offset - start + size, mmap.MAP_SHARED, mmap.PROT_READ, offset=start)


def _words(fd: int, offset: int, count: int) -> memoryview:
    skip = offset % mmap.PAGESIZE
    return memoryview(_map(fd, offset, count * WORD))[skip : skip + count * WORD].cast("Q")


class Source:
    """The connection to one peer's sharing socket, and what was mapped through it. Ends with the peer."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.mappings: dict[str, Mapping] = {}
        self.lock = threading.Lock()

    def ask(self, name: str) -> Mapping:
        """Blocking. Raises what the peer says, PeerGone, ProtocolError."""
        try:
            self.sock.sendall(pack(Kind.SEGMENT, 0, name.encode()))
            limit = HEADER.size + LIMITS[Kind.SHAPE]
            data, fds, _, _ = socket.recv_fds(self.sock, limit, 3, socket.MSG_CMSG_CLOEXEC)
        except OSError as e:
            raise PeerGone(f"the peer's sharing socket failed: {e}") from e
        try:
            return self._mapping(name, data, fds)
        finally:
            for fd in fds:
                os.close(fd)

    def _mapping(self, name: str, data: bytes, fds: list[int]) -> Mapping:
        if len(data) < HEADER.size:
            raise PeerGone("the peer's sharing socket was closed")
        header, body = parse_header(data[: HEADER.size]), data[HEADER.size :]
        if header.kind is Kind.FAULT:
            raise parse_fault(body)
        if header.kind is not Kind.SHAPE or len(body) != header.length:
            raise ProtocolError(f"{header.kind.name} of {len(body)} bytes where a shape belongs")
        try:
            shape = msgspec.msgpack.decode(body, type=Shape)
            if shape.name != name:
                raise ValueError(f"{shape.name} where {name} belongs")
            return Mapping(shape, fds)
        except (*MALFORMED, ValueError, IndexError, OverflowError, OSError) as e:
            raise ProtocolError(f"a segment cannot be mapped: {e}") from e


class Mappings:
    """All sources of an agent. ``get`` is for any thread; sources of dead peers are let go of at once, so that their
    memory is freed."""

    def __init__(self, ref: Ref, secret: bytes, timeout: float) -> None:
        self._ref = ref
        self._secret = secret
        self._timeout = timeout
        self._sources: dict[Ref, Source] = {}
        self._refused: dict[tuple[Ref, str], tuple[float, MooncakeError]] = {}
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()

    def known(self, peer: Ref, name: str) -> Mapping | MooncakeError | None:
        """A current mapping, why there is none, or None: ``get`` it, which may block."""
        source = self._sources.get(peer)
        mapping = source.mappings.get(name) if source is not None else None
        if mapping is not None and mapping.current:
            return mapping
        until, why = self._refused.get((peer, name), (0.0, None))
        return why if time.monotonic() < until else None

    def refuse(self, peer: Ref, name: str, why: MooncakeError) -> None:
        """It could not be mapped: not asked for again during the next seconds."""
        self._refused = {key: entry for key, entry in self._refused.items() if entry[0] > time.monotonic()}
        self._refused[peer, name] = (time.monotonic() + AGAIN, why)

    def get(self, peer: Ref, address: str, name: str, instance: int = 0) -> Mapping:
        """Blocking, within the timeout. Raises NoTransport, NotRegistered, PeerGone, PeerRefused ..."""
        source = self._source(peer, address)
        with source.lock:
            mapping = source.mappings.get(name)
            if mapping is None or not mapping.current or instance not in (0, mapping.shape.instance):
                source.mappings.pop(name, None)
                try:
                    mapping = source.mappings[name] = source.ask(name)
                except (PeerGone, ProtocolError):
                    self._abandon(peer, source)
                    raise
        if instance not in (0, mapping.shape.instance):
            raise NotRegistered(f"segment {name} was registered anew", field="segment")
        return mapping

    def _source(self, peer: Ref, address: str) -> Source:
        with self._lock:
            source = self._sources.get(peer)
        if source is not None:
            return source
        if not address:
            raise NoTransport("the peer shares no memory")
        sock = connect_unix(address, self._timeout)
        try:
            initiate(sock, self._secret, hello(Role.SHARE, self._ref, peer), self._timeout)
            sock.settimeout(self._timeout)
        except BaseException:
            sock.close()
            raise
        return self._adopt(peer, Source(sock))

    def _adopt(self, peer: Ref, source: Source) -> Source:
        with self._lock:
            first = self._sources.setdefault(peer, source)
        if first is not source:
            source.sock.close()
        elif self._loop is not None:
            with contextlib.suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._watch, peer, source)
        return first

    def _watch(self, peer: Ref, source: Source) -> None:
        """On the loop: the socket becomes readable between questions only when the peer is gone."""
        if self._loop is not None and self._sources.get(peer) is source:
            self._loop.add_reader(source.sock.fileno(), self._readable, peer, source)

    def _readable(self, peer: Ref, source: Source) -> None:
        if source.lock.acquire(blocking=False):  # else it is an answer, to whoever asks
            try:
                if is_over(source.sock):
                    self.forget(peer)
            finally:
                source.lock.release()

    def _abandon(self, peer: Ref, source: Source) -> None:
        """From any thread: an answer that was not waited for may still come, and must not be taken for the next."""
        with self._lock:
            if self._sources.get(peer) is source:
                del self._sources[peer]
        if self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                self._loop.call_soon_threadsafe(self._close, source)

    def forget(self, peer: Ref) -> None:
        """On the loop."""
        with self._lock:
            source = self._sources.pop(peer, None)
        if source is not None:
            self._close(source)

    def _close(self, source: Source) -> None:
        """On the loop."""
        if self._loop is not None and source.sock.fileno() >= 0:
            self._loop.remove_reader(source.sock.fileno())
        source.sock.close()

    def close(self) -> None:
        for peer in list(self._sources):
            self.forget(peer)

    def __len__(self) -> int:
        return sum(len(source.mappings) for source in self._sources.values())
