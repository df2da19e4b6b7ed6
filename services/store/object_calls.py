"""What any program does with blocks: put, get, remove, pin, copy. The part of the client that knows no engine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from services.store import local_messages as wire
from services.store.objects import Buffer, Data, Objects, Put
from services.store.session import Session
from shared.errors import MooncakeError, WireError

PIN_TTL = 3600.0


@dataclass(frozen=True)
class Pinned:
    """Result for one key. ``pinned`` False without ``error``: the block is not at this node."""

    pinned: bool
    error: MooncakeError | None = None


@dataclass(frozen=True)
class Replicas:
    """Result for one key: ``agents`` have it, ``wanted`` of them were asked for. No agents and no error: a miss."""

    agents: tuple[str, ...]
    wanted: int
    error: MooncakeError | None = None

    @property
    def short(self) -> bool:
        return len(self.agents) < self.wanted


class ObjectCalls(ABC):
    """Batched; one result for each item, in input order. ``name`` owns the pins."""

    def __init__(self, session: Session, name: str) -> None:
        self._session = session
        self._name = name

    @abstractmethod
    def _objects(self) -> Objects: ...

    async def put(self, items: Sequence[tuple[bytes, Data]], timeout: float = 10.0) -> list[Put]:
        """Store bytes (1 to a slot's) under keys of 16 bytes. A key that is there keeps its bytes. Raises for no item:
        see :class:`Put`. Raises AgentGone."""
        return await self._objects().put(items, timeout)

    async def get(self, keys: Sequence[bytes], timeout: float = 10.0) -> list[bytes | None]:
        """The bytes, from here or from another agent (the copy stays here); None for a miss."""
        return await self._objects().get(keys, timeout)

    async def get_into(self, items: Sequence[tuple[bytes, Buffer]], timeout: float = 10.0) -> list[int | None]:
        """As ``get``, into writable buffers of the caller, which may not be touched until this returns, cancelled or
        not. The object's length, None for a miss; where it is more than the buffer has, nothing was written to that."""
        return await self._objects().get_into(items, timeout)

    async def remove(self, keys: Sequence[bytes], timeout: float = 10.0) -> list[bool]:
        """Remove at all agents, pinned or not; True where it was. Who holds or leases a block keeps it to the end."""
        packed = b"".join(keys)
        answer: list[bool] = await self._session.ask(lambda id: wire.Remove(id, packed, timeout), list[bool], timeout)
        return answer

    async def pin(self, keys: Sequence[bytes], *, hard: bool = True, ttl: float = PIN_TTL) -> list[Pinned]:
        """Keep blocks of this node in its memory for ``ttl`` seconds (infinite: until they are unpinned).

        Hard: never evicted, nor are the blocks before it in its chain; all hard pins together keep at most the agent's
        ``pin_share`` of the slots (else PinLimit, for the item). Soft: evicted after all that is not pinned. What is on
        the SSD alone is brought up first. A pin belongs to this client's ``owner_name``, whatever becomes of the
        connection: who has the same name renews it by pinning again, and ends it. It also ends with the block: by
        ``remove``, by the end of the agent, or, softly pinned, by eviction.
        """
        packed = b"".join(keys)
        answer: list[wire.Outcome] = await self._session.ask(
            lambda id: wire.Pin(id, packed, self._name, hard, ttl), list[wire.Outcome]
        )
        return [Pinned(o.done, None if o.error is None else _error(o.error)) for o in answer]

    async def unpin(self, keys: Sequence[bytes]) -> list[bool]:
        """False where this client's ``owner_name`` has no pin."""
        packed = b"".join(keys)
        answer: list[bool] = await self._session.ask(lambda id: wire.Unpin(id, packed, self._name), list[bool])
        return answer

    async def change_replica(self, keys: Sequence[bytes], copies: int, timeout: float = 10.0) -> list[Replicas]:
        """Have each block at ``copies`` agents, this one counted: on nodes that have none first. Copies are cache like
        any other: they may be evicted. Too many are dropped, hard pins and the last ``copies`` excepted. Where there
        are too few agents, or no room, the result says how many it became, and why."""
        packed = b"".join(keys)
        answer: list[wire.Copies] = await self._session.ask(
            lambda id: wire.ChangeReplica(id, packed, copies, timeout), list[wire.Copies], timeout
        )
        return [Replicas(tuple(c.agents), copies, None if c.error is None else _error(c.error)) for c in answer]

    async def let_go(self, keys: Sequence[bytes], keep: int) -> list[bool]:
        """Drop this node's copies, where ``keep`` (1 or more) of other agents that live are left and no hard pin keeps
        ours; True where it was dropped. Raises Unavailable where nobody can say how many there are."""
        packed = b"".join(keys)
        answer: list[bool] = await self._session.ask(lambda id: wire.LetGo(id, packed, keep), list[bool])
        return answer


def _error(wire_error: WireError) -> MooncakeError:
    return MooncakeError.from_wire(wire_error)
