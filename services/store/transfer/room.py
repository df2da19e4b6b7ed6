"""How many bytes may be under way to each peer; who finds no room waits for it, in order."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence

from services.store.transfer.base import Request
from services.store.transfer.metrics import UNDER_WAY, WAITING
from services.store.transfer.wire import MAX_LENGTH
from shared.errors import Contended, DeadlineExceeded
from shared.messages import Ref

Sizes = dict[Ref, int]


def sizes(requests: Sequence[Request]) -> Sizes:
    """Bytes of the requests to each peer, those of impossible length apart; in one order for everybody, so that nobody
    waits in a circle."""
    found: Sizes = {}
    peer, total = None, 0
    for request in requests:
        if request.peer is not peer:  # most are to one peer: hash it once
            if peer is not None:
                found[peer] = found.get(peer, 0) + total
            peer, total = request.peer, 0
        if 0 < request.length <= MAX_LENGTH:
            total += request.length
    if peer is not None:
        found[peer] = found.get(peer, 0) + total
    if len(found) == 1:
        return found
    return dict(sorted(found.items(), key=lambda item: (item[0].id, item[0].incarnation)))


class Room:
    """Towards one peer. Pure. What is larger than ``limit`` goes alone."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.used = 0
        self.waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    def take(self, size: int) -> bool:
        if self.waiting or not self._fits(size):
            return False
        self.used += size
        return True

    def give(self, size: int) -> None:
        """Make room, and hand it to those that wait. Whoever gave up waiting is passed over."""
        self.used -= size
        while self.waiting and (self.waiting[0][1].done() or self._fits(self.waiting[0][0])):
            wanted, granted = self.waiting.popleft()
            if not granted.done():
                self.used += wanted
                granted.set_result(None)

    def _fits(self, size: int) -> bool:
        return not self.used or self.used + size <= self._limit


class Rooms:
    """Towards all peers. Lives on the loop."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rooms: dict[Ref, Room] = {}

    def unused(self, wanted: Sizes) -> bool:
        """Nothing is under way to any of these peers, and nobody waits."""
        return not any(peer in self._rooms for peer in wanted)

    def take_now(self, wanted: Sizes) -> None:
        """Until ``give``. Raises Contended, and has taken nothing then."""
        if not self._take_all(wanted):
            raise Contended(
                f"more than {self._limit} bytes would be under way to a peer, ask again", field="data_queue_bytes"
            )

    async def take(self, wanted: Sizes, timeout: float) -> None:
        """Until ``give``. Raises DeadlineExceeded, and has taken nothing then."""
        if self._take_all(wanted):
            return
        taken: Sizes = {}
        try:
            async with asyncio.timeout(timeout):
                for peer, size in wanted.items():
                    if not self._take(peer, size):
                        await self._wait(peer, size)
                    taken[peer] = size
        except TimeoutError:
            self.give(taken)
            raise DeadlineExceeded(f"no room in the queue of a peer within {timeout:g} s") from None
        except BaseException:
            self.give(taken)
            raise

    def _take_all(self, wanted: Sizes) -> bool:
        taken: Sizes = {}
        for peer, size in wanted.items():
            if not self._take(peer, size):
                self.give(taken)
                return False
            taken[peer] = size
        return True

    def give(self, taken: Sizes) -> None:
        for peer, size in taken.items():
            UNDER_WAY.dec(size)
            self._give(peer, size)

    def _take(self, peer: Ref, size: int) -> bool:
        fits = self._rooms.setdefault(peer, Room(self._limit)).take(size)
        if fits:
            UNDER_WAY.inc(size)
        return fits

    async def _wait(self, peer: Ref, size: int) -> None:
        room = self._rooms[peer]
        granted = asyncio.get_running_loop().create_future()
        room.waiting.append((size, granted))
        WAITING.inc()
        try:
            await granted
        except asyncio.CancelledError:
            self._give(peer, 0 if granted.cancelled() else size)  # it may have been granted in the same turn
            raise
        finally:
            WAITING.dec()
        UNDER_WAY.inc(size)

    def _give(self, peer: Ref, size: int) -> None:
        room = self._rooms.get(peer)
        if room is None:
            return  # who gave up waiting in the turn in which all others had ended
        room.give(size)
        if not room.used and not room.waiting:
            del self._rooms[peer]
