"""Several conductors, one picture: promises told over the bus at once, kept in Redis for who does not hear them.

No decision waits for any of it. A conductor that is heard over the bus counts by what it says; of others, the sums of
their reservations in Redis count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from services.conductor.dispatch import metrics
from services.conductor.scheduling import Ledger
from services.conductor.scheduling.others import Others
from services.conductor.scheduling.outbox import Outbox
from shared.bus import Bus
from shared.errors import MooncakeError, Unavailable
from shared.messages import Promise, Promises, Ref, Step
from shared.metadata import Metadata, Reservation, Reserved
from shared.telemetry import log

GATHER = 0.002
"""Seconds for which promises are gathered into one message."""

STEPS_WAIT = 0.05
"""Seconds that further steps wait for one to go with: who hears of them late is only more careful."""

UNDERWAY = 0.01
"""Seconds after which the others have surely heard what was sent, on a good day."""

PERIOD = 1.0
"""Seconds between two rounds in which all promises are told, and renewed in Redis."""

NOBODY = Reserved(0, 0)

logger = log("dispatch")


class Sharing:
    """``placed`` hears of each promise of any conductor. ``spawn`` runs what outlives a call."""

    def __init__(
        self,
        me: Ref,
        bus: Bus,
        ledger: Ledger,
        spawn: Callable[[Coroutine[Any, Any, None]], object],
        placed: Callable[[Promise], None] = lambda promise: None,
    ) -> None:
        self.others = Others(ledger, placed)
        self.peers: tuple[Ref, ...] = ()
        self._me = me
        self._bus = bus
        self._ledger = ledger
        self._spawn = spawn
        self._placed = placed
        self._outbox = Outbox()
        self._timer: asyncio.TimerHandle | None = None
        self._reserved: set[Reservation] = set()
        ledger.told = self._told

    def living(self, conductors: Iterable[Ref]) -> None:
        """The registered conductors, this one among them."""
        self.peers = tuple(ref for ref in conductors if ref != self._me)
        self.others.left(self.peers)
        self._ledger.others = len(self.peers)

    def promises(self, ref: Ref) -> int:
        """How many of a conductor stand, as far as is known here."""
        return len(self._outbox.standing) if ref == self._me else self.others.promises.get(ref, 0)

    def _told(self, promise: Promise, step: Step) -> None:
        loop = asyncio.get_running_loop()
        self._outbox.told(promise, step, loop.time())
        if not step:
            self._placed(promise)
        if self.peers:
            self._flush_by(loop, loop.time() + (STEPS_WAIT if step else GATHER))

    def _flush_by(self, loop: asyncio.AbstractEventLoop, when: float) -> None:
        if self._timer is not None and self._timer.when() <= when:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = loop.call_at(when, self._flush)

    def _flush(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if news := self._outbox.news():
            self._tell(placed=news.placed, steps=news.steps)
            if self.peers and news.placed:
                asyncio.get_running_loop().call_later(UNDERWAY, self._heard, news.placed)

    def _heard(self, placed: list[Promise]) -> None:
        for promise in placed:
            self._ledger.heard(promise)

    def _tell(self, **news: Any) -> None:
        for peer in self.peers:
            self._spawn(self._send(Promises(sender=self._me, target=peer, **news)))

    async def _send(self, message: Promises) -> None:
        """What is lost is told again within a second."""
        try:
            await self._bus.send(message.target.id, message)
        except MooncakeError:
            return

    def receive(self, message: Promises) -> None:
        self.others.told(message, asyncio.get_running_loop().time())

    # -- once a second -------------------------------------------------------------------------------------

    async def run(self, metadata: Metadata | None) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(PERIOD)
            try:
                self._round(loop.time())
                if metadata:
                    await self._exchange(metadata, loop.time())
            except Unavailable:
                continue
            except Exception:
                logger.exception("promises were not shared")

    def _round(self, now: float) -> None:
        self.others.tick(now)
        self._flush()
        if self.peers:
            self._tell(all=self._outbox.all(now))
        metrics.CONDUCTORS.set(1 + len(self.peers))
        metrics.OTHERS.set(len(self.others))

    async def _exchange(self, metadata: Metadata, now: float) -> None:
        mine = set(self._reservations()) if self.peers else set()
        if mine or self._reserved:
            keys = {(entry.attempt, entry.instance) for entry in mine}
            gone = [entry for entry in self._reserved if (entry.attempt, entry.instance) not in keys]
            self._reserved |= mine
            await metadata.exchange(mine, gone)
            self._reserved = mine
        heard = self.others.heard(now) | {self._me.id}
        unheard = any(peer.id not in heard for peer in self.peers)
        self._unheard(await metadata.sums(besides=heard) if unheard else {})

    def _reservations(self) -> Iterable[Reservation]:
        """Of attempts whose first token has not come."""
        for one in self._outbox.standing.values():
            if Step.PREFILLED not in one.steps:
                promise = one.promise
                attempt, owner = str(promise.number), self._me.id
                yield Reservation(attempt, promise.prefill, 0, int(promise.work_ms), owner)
                yield Reservation(attempt, promise.decode, promise.blocks, 0, owner)

    def _unheard(self, sums: dict[str, Reserved]) -> None:
        """What those have reserved who are not heard."""
        ledger = self._ledger
        for id in ledger.decodes.seats:
            total = sums.get(id, NOBODY)
            ledger.decodes.others(id, total.attempts, total.blocks)
        for id in ledger.prefills.seats:
            ledger.prefills.others(id, sums.get(id, NOBODY).work_ms / 1000)
