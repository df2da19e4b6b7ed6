"""Streams a prompt's KV into decode's landing while it is being computed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from services.prefill.groups import run_bytes
from shared.engines.base import KVStore, LandingTarget, Owner, Run
from shared.errors import DeadlineExceeded, TransferError
from shared.instance.tracing import span
from shared.telemetry import counter

TRIES = 3
INFLIGHT = 4
BATCH_BYTES = 32 << 20


class Streamer:
    """Runs queue up from the first moment; they flow once the landing is granted. Blocks that decode has itself are
    left out, until it asks for them.

    ``run()`` is to be a task of the attempt's group: it raises Fenced, or TransferError after several tries.
    The caller holds the slots named in the runs until the attempt is over.
    """

    def __init__(self, store: KVStore, owner: Owner, timeout: float) -> None:
        self._store, self._owner, self._timeout = store, owner, timeout
        self._geometry = store.pool.geometry
        self._pending: list[Run] = []
        self._target: LandingTarget | None = None
        self._have: frozenset[int] = frozenset()
        self._wake = asyncio.Event()
        self._bytes = counter("prefill_streamed_bytes", "KV streamed into landings.")

    def add(self, runs: Iterable[Run]) -> None:
        """Queue runs; call on the event loop."""
        self._pending += [run for run in runs if run.block not in self._have]
        self._wake.set()

    def grant(self, target: LandingTarget, have: frozenset[int]) -> None:
        self._target, self._have = target, have
        self._pending = [run for run in self._pending if run.block not in have]
        self._wake.set()

    def need(self, runs: Iterable[Run]) -> None:
        """Decode could not get these whole blocks itself. They stay left out of what else is added."""
        self._pending += runs
        self._wake.set()

    async def run(self) -> None:
        """For ever, until cancelled."""
        slots = asyncio.Semaphore(INFLIGHT)
        async with asyncio.TaskGroup() as group:
            while True:
                await self._wake.wait()
                self._wake.clear()
                if self._target is None:
                    continue
                while batch := self._batch():
                    await slots.acquire()
                    group.create_task(self._stream(self._target, batch, slots))

    def _batch(self) -> list[Run]:
        """As many queued runs as make a good call."""
        size = taken = 0
        for run in self._pending:
            size += run_bytes(run, self._geometry)
            taken += 1
            if size >= BATCH_BYTES:
                break
        batch, self._pending = self._pending[:taken], self._pending[taken:]
        return batch

    async def _stream(self, target: LandingTarget, runs: list[Run], slots: asyncio.Semaphore) -> None:
        try:
            with span("stream", runs=len(runs), to=target.agent.id):
                self._bytes.inc(await self._try(target, runs))
        finally:
            slots.release()

    async def _try(self, target: LandingTarget, runs: list[Run]) -> int:
        for attempt in range(1, TRIES + 1):
            try:
                return await self._store.stream(target, runs, self._owner, self._timeout)
            except (TransferError, DeadlineExceeded):
                if attempt == TRIES:
                    raise
        return 0
