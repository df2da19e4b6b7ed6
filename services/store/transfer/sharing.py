"""Memory descriptors for peers on the same host: a Unix socket, authenticated like the data port.

Who may map a segment maps it read-only: the descriptor passed is one opened for reading. Beside it goes the
*beacon*, one word for each registration that holds its instance while it lasts, so that a reader of a mapping sees
that a segment is gone without asking.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading

import msgspec

from services.store.transfer.acceptor import Acceptor
from services.store.transfer.base import Generations
from services.store.transfer.handshake import Hello, Role, respond
from services.store.transfer.segments import Segment, Segments
from services.store.transfer.sockets import receive_body, receive_header, unix_address
from services.store.transfer.wire import Kind, pack, pack_fault
from shared.errors import ConfigError, MooncakeError, NotPermitted, NoTransport, ProtocolError
from shared.messages import Ref

REGISTRATIONS = 4096
CONNECTIONS = 256


class Shape(msgspec.Struct, frozen=True):
    """A segment to be mapped: ``size`` bytes from ``offset`` of the first descriptor; word ``beacon`` of the second is
    ``instance`` while it is registered. How a one-sided read is checked afterwards: ``open`` no further, ``table``:
    word ``slot`` of the third descriptor is the generation of that slot of ``slot_bytes``, ``ask``: the owner says."""

    name: str
    instance: int
    size: int
    offset: int
    beacon: int
    check: str
    slot_bytes: int = 0
    table_offset: int = 0
    slots: int = 0

    @property
    def possible(self) -> bool:
        """It could be a segment's, whatever the descriptors hold."""
        place = self.size > 0 and self.offset >= 0 and 0 <= self.beacon < REGISTRATIONS
        if self.check != "table":
            return place and self.check in ("open", "ask")
        return place and self.slot_bytes > 0 and self.table_offset >= 0 and self.slots * self.slot_bytes >= self.size


class Beacon:
    """A word per registration, in a file that peers map."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("mooncake-beacon", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, REGISTRATIONS * 8)
        self._map = mmap.mmap(self.fd, REGISTRATIONS * 8)
        self._words = memoryview(self._map).cast("Q")
        self._free = list(range(REGISTRATIONS - 1, -1, -1))

    def light(self, instance: int) -> int:
        """The word that says so. Raises NoTransport when there are too many registrations."""
        if not self._free:
            raise NoTransport(f"more than {REGISTRATIONS} shared segments")
        index = self._free.pop()
        self._words[index] = instance
        return index

    def quench(self, index: int) -> None:
        self._words[index] = 0
        self._free.append(index)

    def close(self) -> None:
        self._words[:] = memoryview(bytes(REGISTRATIONS * 8)).cast("Q")
        self._words.release()
        self._map.close()
        os.close(self.fd)


class Sharing:
    """Listens on ``address`` (``@name`` is abstract, else a path) from ``start`` to ``close``."""

    def __init__(self, ref: Ref, secret: bytes, segments: Segments, open_guard: bool, timeout: float) -> None:
        self._ref = ref
        self._secret = secret
        self._segments = segments
        self._open_guard = open_guard
        self._timeout = timeout
        self._beacon = Beacon()
        self._lit: dict[int, int] = {}
        self._lock = threading.Lock()
        self._acceptor: Acceptor | None = None
        self._path = ""

    def start(self, address: str) -> None:
        """Raises ConfigError."""
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.bind(unix_address(address))
            listener.listen(64)
        except OSError as e:
            listener.close()
            raise ConfigError(f"cannot listen on {address}: {e}", field="shm") from e
        self._path = "" if address.startswith("@") else address
        self._acceptor = Acceptor(listener, self._serve, CONNECTIONS, "transfer-share")

    def shares(self, segment: Segment) -> None:
        """A registration that may be mapped begins."""
        with self._lock:
            self._lit[segment.instance] = self._beacon.light(segment.instance)

    def withdraws(self, segment: Segment) -> None:
        """It ends: readers of a mapping see it by themselves."""
        with self._lock:
            index = self._lit.pop(segment.instance, None)
            if index is not None:
                self._beacon.quench(index)

    def _serve(self, sock: socket.socket) -> None:
        try:
            respond(sock, self._secret, self._ref, self._timeout, _only_share)
            sock.settimeout(None)
            while True:
                self._answer(sock)
        except (OSError, MooncakeError):
            pass  # the connection ends; its peer notices
        finally:
            sock.close()

    def _answer(self, sock: socket.socket) -> None:
        header = receive_header(sock)
        if header.kind is not Kind.SEGMENT:
            raise ProtocolError(f"{header.kind.name} where memory is shared")
        name = receive_body(sock, header).decode(errors="replace")
        try:
            segment = self._segments.use(name)
        except MooncakeError as e:
            sock.sendall(pack(Kind.FAULT, header.tag, pack_fault(e)))
            return
        try:
            self._share(sock, header.tag, segment)
        except MooncakeError as e:
            sock.sendall(pack(Kind.FAULT, header.tag, pack_fault(e)))
        finally:
            self._segments.let_go(segment)

    def _share(self, sock: socket.socket, tag: int, segment: Segment) -> None:
        with self._lock:
            beacon = self._lit.get(segment.instance)
        if beacon is None:
            raise NoTransport(f"segment {segment.name} is not in shared memory")
        table = segment.generations
        shape = self._shape(segment, beacon, table)
        with contextlib.ExitStack() as stack:
            fds = [_for_reading(stack, fd) for fd in (segment.fd, self._beacon.fd, *([table.fd] if table else ()))]
            socket.send_fds(sock, [pack(Kind.SHAPE, tag, msgspec.msgpack.encode(shape))], fds)

    def _shape(self, segment: Segment, beacon: int, table: Generations | None) -> Shape:
        shape = Shape(segment.name, segment.instance, segment.size, segment.fd_offset, beacon, "ask")
        if self._open_guard:
            return msgspec.structs.replace(shape, check="open")
        if table is None:
            return shape
        slots = -(-segment.size // table.slot_bytes)
        return msgspec.structs.replace(
            shape, check="table", slot_bytes=table.slot_bytes, table_offset=table.offset, slots=slots
        )

    def close(self) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        if self._path:
            with contextlib.suppress(OSError):
                os.unlink(self._path)
        self._beacon.close()


def _only_share(greeting: Hello) -> None:
    if greeting.role is not Role.SHARE:
        raise NotPermitted("only memory is shared on this socket")


def _for_reading(stack: contextlib.ExitStack, fd: int) -> int:
    """The same file, opened so that nobody can write through the descriptor."""
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    stack.callback(os.close, again)
    return again
