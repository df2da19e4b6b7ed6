"""The metadata store as the dispatcher uses it: who is registered."""

from __future__ import annotations

from typing import Protocol

from shared.metadata import Metadata, Snapshot
from shared.records import AgentRecord, ConductorRecord, InstanceRecord
from shared.telemetry import log

PERIOD = 0.5

logger = log("dispatch")


class Picture(Protocol):
    """Who takes the records."""

    def metadata_changed(self, up: bool) -> None: ...

    def replace_instances(self, records: list[InstanceRecord]) -> None: ...

    def replace_agents(self, records: list[AgentRecord]) -> None: ...

    def replace_conductors(self, records: list[ConductorRecord]) -> None: ...


class Watch:
    def __init__(self, picture: Picture, metadata: Metadata) -> None:
        self._picture = picture
        self._metadata = metadata

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
            self._picture.replace_conductors(snapshot.conductors)
            self._picture.replace_agents(snapshot.agents)
            self._picture.replace_instances(snapshot.instances)
