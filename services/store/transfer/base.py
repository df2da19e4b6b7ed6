"""The transfer engine's interface, after the paper's section on the transfer engine, and its seam to the store agent.

Memory is registered as named *segments*. A request moves bytes between a registered local buffer and a range of a
segment of a peer. What a peer may touch is decided at the target by its :class:`Guard`; ``grant`` is opaque to
the engine and to transports: the store puts slot generations (READ) and landing tokens (WRITE) there.

On the connections that carry data, agents also talk to each other: :meth:`TransferEngine.call` (leases, landing
reports, fences), so that negotiation and data share authentication and failure.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Protocol

import msgspec

from shared.errors import MooncakeError, NotPermitted
from shared.messages import Ref


class Op(StrEnum):
    READ = "read"
    WRITE = "write"


class Status(Enum):
    """WAITING: not posted. PENDING: in flight. COMPLETED: the bytes are in the target's memory and its checks passed.
    FAILED: see the error. Nothing leaves COMPLETED or FAILED."""

    WAITING = 0
    PENDING = 1
    COMPLETED = 2
    FAILED = 3


@dataclass(frozen=True)
class Peer:
    """How to reach an agent. ``host_id`` is equal for processes that can share memory (boot id + IPC scope);
    ``shm`` is the peer's address for passing memory descriptors. ``address`` host may be IPv6."""

    ref: Ref
    host: str
    port: int
    host_id: str = ""
    shm: str = ""


class Request(msgspec.Struct, frozen=True):
    """One READ (peer -> local) or WRITE (local -> peer) of ``length`` > 0 bytes.

    ``local`` names a registered local segment, offsets count from its start. ``grant`` says by which right.
    """

    op: Op
    local: str
    local_offset: int
    peer: Ref
    segment: str
    offset: int
    length: int
    grant: int = 0


@dataclass(frozen=True)
class Result:
    """Outcome of one request of a batch. ``moved`` bytes over ``transport``."""

    status: Status
    transport: str = ""
    moved: int = 0
    error: MooncakeError | None = None


@dataclass(frozen=True)
class Generations:
    """Where a peer that maps a segment reads the generation of its slots: word i (uint64, native order) from ``offset``
    of the shared-memory file ``fd`` belongs to bytes [i * slot_bytes, (i + 1) * slot_bytes). The owner changes a word
    before the first new byte (``bump_first``). A mapped READ is right when the word of each slot it touches equals
    its grant."""

    fd: int
    slot_bytes: int
    offset: int = 0


class Guard(Protocol):
    """Decides at the target. Called on transport threads: must be thread-safe and quick, and must not block."""

    def reading(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        """Pin the range, *then* check the grant (``pin_first``); raise StaleGeneration, NotPermitted ... The pin
        lasts while the copy runs."""

    def writing(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        """Before the first byte is received into the range: check the landing token (``token``). The
        context lasts while bytes may still be written (``join_receivers``)."""

    def generation(self, segment: str, offset: int) -> int:
        """The generation of the slot at ``offset`` now, for a one-sided reader that re-reads it (``gen_last``)."""

    def live_grants(self, peer: Ref) -> Sequence[int] | None:
        """WRITE grants that ``peer`` may use now: named in every handshake (``handshake``). None: grants mean nothing
        here. A grant must be live before its writer can learn of it. Grant 0 is never judged."""

    def granted(self, peer: Ref, segment: str, grant: int) -> Sequence[tuple[int, int]] | None:
        """(begin, end) of all that ``peer`` may WRITE by ``grant`` now, for one-sided writers, which nobody asks in
        between; None: all of the segment. Raises Fenced, NotPermitted."""


class OpenGuard:
    """Allows every in-bounds access of registered segments: the engine used on its own, without a store."""

    def __init__(self, remote_write: bool = True) -> None:
        self.remote_write = remote_write

    def reading(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        return _ALLOWED

    def writing(self, peer: Ref, segment: str, offset: int, length: int, grant: int) -> AbstractContextManager[None]:
        if not self.remote_write:
            raise NotPermitted(f"segment {segment} is read-only for peers")
        return _ALLOWED

    def generation(self, segment: str, offset: int) -> int:
        return 0

    def live_grants(self, peer: Ref) -> Sequence[int] | None:
        return None

    def granted(self, peer: Ref, segment: str, grant: int) -> Sequence[tuple[int, int]] | None:
        if not self.remote_write:
            raise NotPermitted(f"segment {segment} is read-only for peers")
        return None


_ALLOWED = nullcontext()


CallHandler = Callable[[Ref, bytes], Awaitable[bytes] | bytes]
"""An incoming call from an authenticated peer: payload in, answer out, at once where there is nothing to wait for. A
MooncakeError it raises reaches the caller."""

Resolver = Callable[[str], Awaitable[Peer]]
"""Finds an agent by id (metadata). Raises PeerGone."""


class TransferEngine(Protocol):
    """One per store agent. Coroutines run on the agent's loop; the data moves on threads that the GIL does not hold."""

    def register_local_memory(
        self,
        buffer: memoryview,
        location: str = "cpu:0",
        *,
        name: str,
        fd: int = -1,
        fd_offset: int = 0,
        generations: Generations | None = None,
    ) -> None:
        """Register writable host memory as segment ``name``. ``location``: where it lies (``cpu:N`` a NUMA node,
        ``cpu`` any of them), or ``cuda:N`` for the pool through which that GPU is staged; NICs are chosen by it.
        ``fd``: the shared-memory file whose bytes from ``fd_offset`` are the buffer, if peers on this host may map it.
        Without ``generations`` the guard is asked after each mapped READ. Raises Overlap (adjacent is fine) and
        InvalidInput. The caller keeps the buffer alive until unregister returned."""

    async def unregister_local_memory(self, name: str, timeout: float) -> None:
        """Waits for transfers in flight on it, refuses new ones."""

    def allocate_batch(self, size: int) -> int: ...

    def submit_transfer(self, batch: int, requests: Sequence[Request]) -> None:
        """Queue requests; may be called until ``size`` is reached. Wrong requests become FAILED in their place."""

    def get_transfer_status(self, batch: int, index: int) -> Result: ...

    def free_batch(self, batch: int) -> None:
        """Raises InvalidInput while any of its requests is in flight."""

    async def transfer(self, requests: Sequence[Request], timeout: float) -> list[Result]:
        """Submit and wait; results in input order. At the deadline what is unfinished FAILED with DeadlineExceeded
        *and* can no longer touch the local buffers (its connection is destroyed if need be: ``dest_held``)."""

    async def call(self, peer: Ref, payload: bytes, timeout: float) -> bytes:
        """Ask the agent ``peer``. Connects on first use. Raises PeerGone, DeadlineExceeded, StaleIncarnation, and what
        the other side's handler raised."""

    def refuse_grants(self, peer: Ref, grants: Iterable[int]) -> None:
        """As a writer: drop every queued, failed or retried slice with these grants to ``peer``, and refuse new ones
        (``writer_refuses``)."""

    async def drained(self, peer: Ref, grants: Iterable[int], timeout: float) -> bool:
        """As a writer: wait until no slice with these grants is in flight, all paths included (``drain_reported``)."""

    async def destroy_endpoints(self, peer: Ref) -> None:
        """As a target: destroy our ends of all endpoints from ``peer`` and wait until our own receivers and
        shared-memory executors for it have let go (``own_side``, ``all_paths``, ``join_receivers``). They may be
        rebuilt later."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...
