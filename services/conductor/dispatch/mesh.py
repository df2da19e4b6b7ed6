"""What all runs of one dispatcher share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.conductor.dispatch.lists import LiveLists
from services.conductor.dispatch.placing import Placer
from services.conductor.dispatch.roster import Roster
from services.conductor.dispatch.settings import DispatchSettings
from services.conductor.dispatch.telling import Teller
from services.conductor.scheduling import Ledger
from shared.bus import Bus
from shared.messages import Ref

if TYPE_CHECKING:
    from services.conductor.dispatch.run import Run


@dataclass
class Counts:
    """For ``GET /cluster``. ``served``: instance id -> requests whose first token (prefill) or last token (decode) came
    from it."""

    accepted: int = 0
    rejected: int = 0
    retried: int = 0
    migrated: int = 0
    failed: int = 0
    cancelled: int = 0
    served: Counter[str] = field(default_factory=Counter)


@dataclass
class Mesh:
    """``runs``: request id -> its run, while its iterator is open."""

    me: Ref
    bus: Bus
    settings: DispatchSettings
    roster: Roster
    lists: LiveLists
    ledger: Ledger
    placer: Placer
    teller: Teller
    counts: Counts = field(default_factory=Counts)
    runs: dict[str, Run] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def pending(self) -> list[tuple[str, int, str, int]]:
        """(request, attempt, decode instance, blocks) of attempts whose first token has not come."""
        efforts = [(id, run.effort) for id, run in self.runs.items()]
        return [
            (id, effort.attempt.number, effort.placement.decode.id, effort.placement.ask.total_blocks)
            for id, effort in efforts
            if effort and effort.first is None
        ]

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A short task that outlives the request; all of them are ended by the dispatcher."""
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task
