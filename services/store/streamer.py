"""Streaming out of the local pool into a landing at another agent: the writer's side of a landing."""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from services.store import peer_messages as peer
from services.store.landing_control import LandingControl
from services.store.landings import Span
from services.store.metrics import count_bytes
from services.store.moves import Move, RunTuple, check_run, moves_of
from services.store.peers import PeerCalls
from services.store.rates import Rate
from services.store.slab import Slab
from services.store.trace_context import carrier
from services.store.transfer.base import Op, Request, Result, Status, TransferEngine
from shared.engines.base import LandingTarget
from shared.errors import DeadlineExceeded, Fenced, InvalidInput, TransferError
from shared.messages import Ref

REMEMBERED = 1 << 16
"""Fenced tokens that are remembered; the target refuses older ones by itself."""


class Streamer:
    def __init__(
        self,
        me: Ref,
        engine: TransferEngine,
        calls: PeerCalls,
        landings: LandingControl,
        threads: ThreadPoolExecutor,
        rate: Rate,
    ) -> None:
        self._me = me
        self._engine = engine
        self._calls = calls
        self._landings = landings
        self._threads = threads
        self._rate = rate
        self._refused: OrderedDict[int, None] = OrderedDict()
        self._tasks: set[asyncio.Task[int]] = set()

    def __len__(self) -> int:
        return len(self._tasks)

    async def stream(self, slab: Slab, target: LandingTarget, runs: Sequence[RunTuple], timeout: float) -> int:
        """Bytes moved, when all of them are in the target's memory and reported there. The local slots are held until
        then, also when the caller goes away (``source_held``). Raises Fenced, InvalidInput, TransferError."""
        for run in runs:
            check_run(run, slab.memory.slots, len(target.slots), slab.geometry)
        if any(not slab.is_used(run[0]) for run in runs):
            raise InvalidInput("a run starts from a free slot", field="runs")
        if not runs:
            return 0
        task = asyncio.create_task(self._hold_and_move(slab, target, runs, timeout))
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return await asyncio.shield(task)

    def _finished(self, task: asyncio.Task[int]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # seen, although its caller may have gone

    async def _hold_and_move(self, slab: Slab, target: LandingTarget, runs: Sequence[RunTuple], timeout: float) -> int:
        slots = sorted({run[0] for run in runs})
        deadline = asyncio.get_running_loop().time() + timeout
        slab.use(slots)
        try:
            moves = moves_of(runs, target.slots, slab.memory.stride, slab.geometry)
            spans: list[Span] = [run[1:] for run in runs]
            if target.agent == self._me:
                return await self._move_here(slab, target, moves, spans)
            moved = await self._move(slab, target, moves, timeout)
        finally:
            slab.unuse(slots)
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise DeadlineExceeded("the stream's report has no time left")
        report = peer.Landed(slab.name, target.token, spans, carrier())
        await self._calls.ask(target.agent, report, None, left)
        return moved

    async def _move(self, slab: Slab, target: LandingTarget, moves: Sequence[Move], timeout: float) -> int:
        if target.token in self._refused:  # rule: writer_refuses
            raise Fenced("the landing is fenced")
        requests = [
            Request(
                Op.WRITE,
                slab.name,
                m.source,
                target.agent,
                target.segment or slab.name,
                m.target,
                m.length,
                target.token,
            )
            for m in moves
        ]
        began = time.monotonic()
        results = await self._engine.transfer(requests, timeout)
        for result in results:
            count_bytes(result.transport, "out", result.moved)
        moved = sum_of(results)
        self._rate.add(moved, time.monotonic() - began)
        return moved

    async def _move_here(self, slab: Slab, target: LandingTarget, moves: Sequence[Move], spans: Sequence[Span]) -> int:
        """Prefill and decode on one node: the same checks, one copy inside the slab."""
        slots = {target.slots[span[0]] for span in spans}

        def copy() -> None:
            with slab.grants.write(target.token, self._me, slots):
                for move in moves:
                    slab.memory.copy(move.source, move.target, move.length)

        await asyncio.get_running_loop().run_in_executor(self._threads, copy)
        self._landings.report(slab, target.token, self._me, spans)
        moved = sum(move.length for move in moves)
        count_bytes("local", "out", moved)
        return moved

    async def fence(self, target: Ref, token: int, timeout: float) -> bool:
        """The target asks: write nothing for this landing any more, for good. True when nothing is in flight."""
        self._refused[token] = None
        while len(self._refused) > REMEMBERED:
            self._refused.popitem(last=False)
        self._engine.refuse_grants(target, [token])
        return await self._engine.drained(target, [token], timeout)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def sum_of(results: Sequence[Result]) -> int:
    """Bytes moved. Raises the first error, Fenced before others."""
    errors = [r.error or TransferError("a request failed") for r in results if r.status is not Status.COMPLETED]
    fenced = [error for error in errors if isinstance(error, Fenced)]
    if errors:
        raise (fenced or errors)[0]
    return sum(result.moved for result in results)
