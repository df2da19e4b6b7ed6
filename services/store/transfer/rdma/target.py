"""The target's side: queue pairs that peers reach our memory by, and what they may know of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from services.store.transfer.base import Guard
from services.store.transfer.rdma.messages import Admit, Ask, Connect, Connected, Facts, Keep, Keys, Reap
from services.store.transfer.rdma.metrics import PAIRS
from services.store.transfer.rdma.nic import Nic
from services.store.transfer.rdma.queue_pair import QueuePair
from services.store.transfer.rdma.reach import Reach
from services.store.transfer.rdma.regions import Regions
from services.store.transfer.rdma.verbs import LOCAL_WRITE, REMOTE_READ, REMOTE_WRITE
from services.store.transfer.topology.matrix import Matrix
from shared.errors import Fenced, InvalidInput, NotPermitted, NoTransport
from shared.messages import Ref
from shared.telemetry import log

MOST = 4096
"""Queue pairs of peers at one time."""
SILENCE = 30.0
"""Seconds after which a peer that has not said what it keeps has lost its queue pairs here."""
PATIENCE = 60.0

logger = log("transfer.rdma")


@dataclass
class Incoming:
    pair: QueuePair
    heard: float


class Target:
    """Lives on the loop."""

    def __init__(self, nics: Mapping[str, Nic], matrix: Matrix, regions: Regions, guard: Guard) -> None:
        self._nics = nics
        self._matrix = matrix
        self._regions = regions
        self._guard = guard
        self._pairs: dict[tuple[Ref, int], Incoming] = {}

    def __len__(self) -> int:
        return len(self._pairs)

    async def answer(self, peer: Ref, call: Ask | Keys | Connect | Admit | Reap | Keep) -> Any:
        """To a call of an authenticated peer. Raises what the peer shall hear."""
        match call:
            case Ask():
                return Facts(self._matrix.format())
            case Keys():
                return await self._show(peer, call)
            case Connect():
                return self._connect(peer, call)
            case Admit():
                return self._granted(peer, call)
            case Reap():
                return self._close(lambda who, number: who == peer and number in call.numbers)
            case Keep():
                return self._keep(peer, call.numbers)

    async def _show(self, peer: Ref, call: Keys) -> Reach:
        if call.write:
            self._check_write(peer, call.segment)
        return await self._regions.shown(call.segment, call.write, min(call.timeout, PATIENCE))

    def _check_write(self, peer: Ref, segment: str) -> None:
        """Keys to write with are given to writers only."""
        if self._live(peer) == []:
            raise NotPermitted(f"no landing of {peer.id} is open in segment {segment}")

    def _live(self, peer: Ref) -> list[int] | None:
        live = self._guard.live_grants(peer)
        return None if live is None else list(live)

    def _granted(self, peer: Ref, call: Admit) -> list[tuple[int, int]] | None:
        live = self._live(peer)
        if live is not None and call.grant not in live:
            raise Fenced("the landing is not open")
        ranges = self._guard.granted(peer, call.segment, call.grant)
        return None if ranges is None else merged(ranges)

    def _connect(self, peer: Ref, call: Connect) -> Connected:
        """Between the making of the pair and the reading of the grants nothing else runs: a fence that is not in this
        list destroys it."""
        nic = self._nics.get(call.nic)
        if nic is None:
            raise InvalidInput(f"no RDMA device {call.nic} here", field="nic")
        if not nic.active():
            raise NoTransport(f"the port of {call.nic} is down")
        self._close(lambda who, _: who.id == peer.id and who != peer)  # of an earlier incarnation
        if (peer, call.number) in self._pairs:
            raise InvalidInput(f"connection {call.number} is there already", field="number")
        if len(self._pairs) >= MOST:
            raise NoTransport(f"{MOST} queue pairs are in use")
        pair = QueuePair(nic, call.side, LOCAL_WRITE | REMOTE_READ | REMOTE_WRITE)
        try:
            pair.join(call.side)
        except BaseException:
            pair.end()
            raise
        self._pairs[peer, call.number] = Incoming(pair, _now())
        PAIRS.inc()
        return Connected(pair.side, self._live(peer), nic.opened)

    def _keep(self, peer: Ref, numbers: Sequence[int]) -> None:
        kept = set(numbers)
        self._close(lambda who, number: who == peer and number not in kept)
        for number in kept:
            if (incoming := self._pairs.get((peer, number))) is not None:
                incoming.heard = _now()

    def peers(self) -> set[Ref]:
        """Those that reach us."""
        return {peer for peer, _ in self._pairs}

    def drop(self, nic: str) -> None:
        """All that is on a device that is no more."""
        for key in [key for key, incoming in self._pairs.items() if incoming.pair.nic.name == nic]:
            self._pairs.pop(key).pair.end()
            PAIRS.dec()

    def held(self) -> Iterator[str]:
        """The NIC of each queue pair."""
        return (incoming.pair.nic.name for incoming in self._pairs.values())

    def destroy(self, peer: Ref) -> None:
        """All our ends from ``peer``; nothing of them can land any more when this returns (``own_side``)."""
        self._close(lambda who, _: who == peer)

    def look(self) -> None:
        """Peers that died without a word."""
        over = _now() - SILENCE
        silent = {key for key, incoming in self._pairs.items() if incoming.heard < over}
        self._try_to_close(lambda who, number: (who, number) in silent)

    def _close(self, which: Callable[[Ref, int], bool]) -> None:
        """Raises NoTransport where one of them could not be destroyed: it stays, and is tried again."""
        failed: NoTransport | None = None
        for key in [key for key in self._pairs if which(*key)]:
            try:
                self._pairs[key].pair.close()
            except NoTransport as e:
                failed = e
                continue
            del self._pairs[key]
            PAIRS.dec()
        if failed is not None:
            raise failed

    def _try_to_close(self, which: Callable[[Ref, int], bool]) -> None:
        try:
            self._close(which)
        except NoTransport as e:
            logger.error("the device failed", error=e.message)

    def close(self) -> None:
        self._try_to_close(lambda who, number: True)


def merged(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """In order, those that follow each other as one."""
    found: list[tuple[int, int]] = []
    for begin, end in ranges:
        if found and found[-1][1] == begin:
            found[-1] = (found[-1][0], end)
        else:
            found.append((begin, end))
    return found


def _now() -> float:
    return asyncio.get_running_loop().time()
