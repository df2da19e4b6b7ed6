"""The metadata store as the dispatcher uses it: who is registered, and what other conductors have reserved."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from services.conductor.dispatch.mesh import Mesh
from shared.errors import Unavailable
from shared.metadata import Metadata, Reservation, Reserved, Snapshot
from shared.records import AgentRecord, InstanceRecord
from shared.telemetry import log

PERIOD = 0.5
RENEW_EVERY = 1.0

logger = log("dispatch")


class Picture(Protocol):
    """Who takes the records."""

    mesh: Mesh

    def metadata_changed(self, up: bool) -> None: ...

    def replace_instances(self, records: list[InstanceRecord]) -> None: ...

    def replace_agents(self, records: list[AgentRecord]) -> None: ...


class Watch:
    def __init__(self, picture: Picture, metadata: Metadata) -> None:
        self._picture = picture
        self._metadata = metadata
        self._conductors = 1
        self._reserved: set[tuple[str, str]] = set()

    async def run(self) -> None:
        """For ever; while the store is away the last records stand."""
        async for snapshot in self._metadata.watch(PERIOD):
            try:
                self._take(snapshot)
            except Exception:
                logger.exception("a snapshot of the metadata store was not understood")

    def _take(self, snapshot: Snapshot) -> None:
        self._picture.metadata_changed(snapshot.fresh)
        if snapshot.fresh:
            self._conductors = len(snapshot.conductors)
            self._picture.replace_agents(snapshot.agents)
            self._picture.replace_instances(snapshot.instances)

    async def share(self) -> None:
        """With several conductors: tell the others what is about to decode where, and hear the same of them. Hints."""
        while True:
            await asyncio.sleep(RENEW_EVERY)
            if self._conductors > 1 or self._reserved:
                try:
                    await self._exchange()
                except Unavailable:
                    continue
                except Exception:
                    logger.exception("reservations were not shared")

    async def _exchange(self) -> None:
        entries = [
            Reservation(f"{request}.{attempt}", instance, blocks)
            for request, attempt, instance, blocks in self._picture.mesh.pending()
        ]
        mine = {(entry.attempt, entry.instance) for entry in entries}
        await self._metadata.release_all(Reservation(*key, 0) for key in self._reserved - mine)
        self._reserved = mine
        await self._metadata.reserve_all(entries)
        self._others(await self._metadata.sums(), entries)

    def _others(self, sums: Mapping[str, Reserved], entries: list[Reservation]) -> None:
        """What is reserved beyond our own."""
        decodes = self._picture.mesh.ledger.decodes
        for id in decodes.seats:
            ours = [entry.blocks for entry in entries if entry.instance == id]
            total = sums.get(id, Reserved(0, 0))
            decodes.others(id, max(total.attempts - len(ours), 0), max(total.blocks - sum(ours), 0))
