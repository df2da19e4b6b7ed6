"""The in-memory twin of the bus: a network in one event loop that loses, repeats, delays and partitions on purpose.

Faults come from a seeded generator, so a run can be repeated. Time is the event loop's: with a loop of virtual
time (``shared/virtual_loop.py``) delays and deadlines cost nothing. Messages are encoded and decoded as on the wire.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass

from shared.bus import Handler
from shared.bus_answer import answer, forget
from shared.errors import BusDown, DeadlineExceeded, NoResponders
from shared.messages import AnyMessage, decode, encode


@dataclass(frozen=True)
class Faults:
    """Probabilities per message, answers included. A delayed message takes up to ``longest`` seconds and may so be
    overtaken (reordering); others arrive at once and in order."""

    lose: float = 0.0
    duplicate: float = 0.0
    delay: float = 0.0
    longest: float = 0.5


class MemoryBus:
    """The network. ``join()`` gives a Bus. ``faults`` may be changed at any time.

    ``filter(id, message)``: where set, a message for which it returns False is lost ("" is the id of answers).
    """

    def __init__(self, seed: int = 0, faults: Faults = Faults()) -> None:
        self.faults = faults
        self.filter: Callable[[str, AnyMessage], bool] | None = None
        self.lost = self.delivered = 0
        self._random = random.Random(seed)
        self._connections: list[MemoryConnection] = []
        self._served: dict[str, MemoryConnection] = {}
        self._cut: set[str] = set()
        self._up = True

    def join(self, name: str = "") -> MemoryConnection:
        """A connection of its own. ``name`` may be used in :meth:`partition` beside the ids it serves."""
        connection = MemoryConnection(self, name)
        self._connections.append(connection)
        return connection

    def partition(self, *ids: str) -> None:
        """Cut off the connections with these names or served ids: what they send or should get is lost, unseen."""
        self._cut.update(ids)

    def heal(self, *ids: str) -> None:
        """Undo partition() for these ids, for all when none is given."""
        self._cut = self._cut - set(ids) if ids else set()

    def stop(self) -> None:
        """The server is gone: every connection sees it, and what is in flight fails."""
        self._switch(False)

    def start(self) -> None:
        self._switch(True)

    @property
    def up(self) -> bool:
        return self._up

    def _switch(self, up: bool) -> None:
        if self._up != up:
            self._up = up
            for connection in list(self._connections):
                connection._changed(up)

    def _is_cut(self, connection: MemoryConnection) -> bool:
        return not self._cut.isdisjoint({connection.name, *connection._handlers})

    def _post(self, sender: MemoryConnection, id: str, payload: bytes, arrive: Callable[[], None]) -> None:
        """Have ``arrive`` called never, once or twice, now or later."""
        if self._is_cut(sender) or self._random.random() < self.faults.lose:
            self.lost += 1
            return
        if self.filter is not None and not self.filter(id, decode(payload)):
            self.lost += 1
            return
        copies = 2 if self._random.random() < self.faults.duplicate else 1
        loop = asyncio.get_running_loop()
        for _ in range(copies):
            self.delivered += 1
            if self._random.random() < self.faults.delay:
                loop.call_later(self._random.uniform(0, self.faults.longest), arrive)
            else:
                loop.call_soon(arrive)

    def _leave(self, connection: MemoryConnection) -> None:
        self._connections = [other for other in self._connections if other is not connection]
        self._served = {id: owner for id, owner in self._served.items() if owner is not connection}


class MemoryConnection:
    """A Bus (see shared/bus.py) on a MemoryBus."""

    def __init__(self, network: MemoryBus, name: str) -> None:
        self.name = name
        self._network = network
        self._handlers: dict[str, Handler] = {}
        self._callbacks: list[Callable[[bool], None]] = []
        self._waiting: set[asyncio.Future[bytes]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @property
    def connected(self) -> bool:
        return self._network.up and not self._closed

    def on_change(self, callback: Callable[[bool], None]) -> None:
        self._callbacks.append(callback)

    async def serve(self, id: str, handler: Handler) -> None:
        self._handlers[id] = handler
        self._network._served[id] = self

    async def send(self, id: str, message: AnyMessage) -> None:
        self._post(id, encode(message), None)

    async def request(self, id: str, message: AnyMessage, timeout: float) -> AnyMessage:
        reply: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._waiting.add(reply)
        try:
            self._post(id, encode(message), reply)
            async with asyncio.timeout(timeout):
                return decode(await reply)
        except TimeoutError as e:
            raise DeadlineExceeded(f"{type(message).__name__} to {id}: no answer within {timeout:g} s") from e
        finally:
            self._waiting.discard(reply)
            forget(reply)

    async def close(self) -> None:
        if not self._closed:
            self._network._leave(self)
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=5.0)
            self.abort()

    def abort(self) -> None:
        """Die as a killed process does: handlers are cancelled, nothing more is sent, its ids have no responder."""
        self._closed = True
        self._network._leave(self)
        for task in self._tasks:
            task.cancel()
        self._fail_waiting()

    def _post(self, id: str, payload: bytes, reply: asyncio.Future[bytes] | None) -> None:
        if not self.connected:
            raise BusDown("the bus is down", retry_after_ms=1000)
        self._network._post(self, id, payload, lambda: self._arrive(id, payload, reply))

    def _arrive(self, id: str, payload: bytes, reply: asyncio.Future[bytes] | None) -> None:
        """``payload`` reaches whoever serves ``id`` now."""
        if not self._network.up:
            return
        receiver = self._network._served.get(id)
        if receiver is None:
            if reply is not None and not reply.done():
                reply.set_exception(NoResponders("nobody serves that id"))
        elif not self._network._is_cut(receiver):
            receiver._start(id, payload, reply)

    def _start(self, id: str, payload: bytes, reply: asyncio.Future[bytes] | None) -> None:
        task = asyncio.get_running_loop().create_task(self._handle(self._handlers[id], payload, reply))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _handle(self, handler: Handler, payload: bytes, reply: asyncio.Future[bytes] | None) -> None:
        result = await answer(handler, decode(payload))
        if result is None or reply is None or not self.connected:
            return
        answered = encode(result)

        def arrive() -> None:
            if not reply.done():
                reply.set_result(answered)

        self._network._post(self, "", answered, arrive)

    def _changed(self, up: bool) -> None:
        if not up:
            self._fail_waiting()
        for callback in self._callbacks:
            callback(up)

    def _fail_waiting(self) -> None:
        for reply in self._waiting:
            if not reply.done():
                reply.set_exception(BusDown("the bus is down", retry_after_ms=1000))
