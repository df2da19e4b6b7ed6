"""The queue pairs towards one incarnation of a peer: made on first use, destroyed, and named to the peer."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from services.store.transfer.rdma.messages import Call, Connect, Connected, Keep
from services.store.transfer.rdma.metrics import PAIRS
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.queue_pair import QueuePair
from services.store.transfer.rdma.reaper import BACK_OFF, TRIES, Reaper
from services.store.transfer.rdma.traffic import Lane
from services.store.transfer.topology.health import Fault
from shared.errors import (
    InternalError,
    InvalidInput,
    MooncakeError,
    NoTransport,
    PeerRefused,
    ProtocolError,
    StaleIncarnation,
)
from shared.telemetry import log

logger = log("transfer.rdma")


class Owner(Protocol):
    """Whose lanes are connected. ``wants``: the lane is still of use; ``grants``: those with something under way;
    ``lost``: see there; ``give_up``: everything for the peer fails."""

    async def call(self, call: Call, kind: Any) -> Any: ...

    def grants(self) -> set[int]: ...

    def wants(self, lane: Lane) -> bool: ...

    def joined(self, lane: Lane, pair: QueuePair) -> None: ...

    def lost(self, lane: Lane, error: MooncakeError, fault: Fault | None) -> None: ...

    def give_up(self, error: MooncakeError) -> None: ...

    def refuse(self, grants: set[int]) -> None: ...

    async def reopened(self, nic: str, opened: int) -> None: ...


class Registry(Protocol):
    """Is told which lanes have a queue pair no more."""

    def gone(self, lane: Lane) -> None: ...


class Connections:
    """Lives on the loop. ``reaper`` has the peer destroy its ends."""

    def __init__(self, owner: Owner, nics: Mapping[str, Nic], reaper: Reaper, registry: Registry) -> None:
        self.pairs: dict[Lane, QueuePair] = {}
        self._owner = owner
        self._nics = nics
        self._reaper = reaper
        self._registry = registry
        self._loop = asyncio.get_running_loop()
        self._connecting: dict[Lane, asyncio.Task[None]] = {}
        self._failures = 0

    def want(self, lane: Lane) -> None:
        """Connect it, unless that is under way."""
        if lane not in self._connecting:
            task = self._connecting[lane] = self._loop.create_task(self._connect(lane))
            task.add_done_callback(lambda _: self._connecting.pop(lane, None))

    async def _connect(self, lane: Lane) -> None:
        owner = self._owner
        try:
            await self._join(lane)
            self._failures = 0
        except NoTransport as e:
            ours = not self._nics[lane.path.local.name].active()
            owner.lost(lane, e, Fault.LOCAL if ours else Fault.LINK)
        except MooncakeError as e:
            await self._unreachable(lane, e)
        except Exception as e:  # a bug here must not leave requests waiting for their deadline
            logger.exception("connecting failed", path=repr(lane.path))
            owner.lost(lane, InternalError(f"connecting failed: {e!r}"), Fault.LOCAL)
            owner.give_up(InternalError(f"connecting failed: {e!r}"))

    async def _join(self, lane: Lane) -> None:
        nic, owner = self._nics[lane.path.local.name], self._owner
        if not nic.active():
            raise NoTransport(f"the port of {nic.name} is down")
        pair = QueuePair(nic)
        try:
            known = owner.grants()  # ours before the peer is asked
            connect = Connect(lane.number, lane.path.remote.name, pair.side)
            answer: Connected = await owner.call(connect, Connected)
            pair.join(answer.side)
        except BaseException:
            self._unused(lane, pair)
            raise
        try:
            await owner.reopened(lane.path.remote.name, answer.opened)
        except BaseException:
            self._unused(lane, pair)
            raise
        if answer.live is not None:  # rule: handshake
            owner.refuse(known - set(answer.live))
        if not owner.wants(lane):
            return self._unused(lane, pair)
        self.pairs[lane] = pair
        PAIRS.inc()
        owner.joined(lane, pair)

    def _unused(self, lane: Lane, pair: QueuePair) -> None:
        """A pair that carried nothing; the peer may have its end."""
        pair.end()
        self._reaper.add(lane.number)

    async def _unreachable(self, lane: Lane, error: MooncakeError) -> None:
        """The peer does not answer. A few tries, then everything for it fails."""
        self._failures += 1
        final = isinstance(error, StaleIncarnation | PeerRefused | ProtocolError | InvalidInput)
        if self._failures >= TRIES or final:
            self._failures = 0
            self._owner.lost(lane, error, None)
            self._owner.give_up(error)
            return
        await asyncio.sleep(BACK_OFF * 2**self._failures)
        self._owner.lost(lane, error, None)

    def destroy(self, lane: Lane) -> bool:
        """The lane's queue pair, if it has one: nothing of it touches memory here when this returns."""
        pair = self.pairs.pop(lane, None)
        if pair is None:
            return False
        self._registry.gone(lane)
        PAIRS.dec()
        pair.leave()
        return True

    async def keep(self) -> None:
        """Tell the peer which there are."""
        numbers = [lane.number for lane in (*self.pairs, *self._connecting)]
        if not numbers:
            return
        try:
            await self._owner.call(Keep(numbers), None)
        except MooncakeError:
            pass  # found out by whoever needs it

    def close(self) -> None:
        for task in self._connecting.values():
            task.cancel()
        for lane in list(self.pairs):
            self.destroy(lane)
