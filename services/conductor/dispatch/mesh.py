"""What all runs of one dispatcher share."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from services.conductor.dispatch.gatekeeper import Gatekeeper
from services.conductor.dispatch.lists import LiveLists
from services.conductor.dispatch.placing import Placer
from services.conductor.dispatch.roster import Roster
from services.conductor.dispatch.settings import DispatchSettings
from services.conductor.dispatch.sharing import Sharing
from services.conductor.dispatch.telling import Teller
from services.conductor.scheduling import Ledger
from shared.bus import Bus
from shared.messages import Load, Ref

if TYPE_CHECKING:
    from services.conductor.dispatch.run import Run


@dataclass
class Counts:
    """For ``GET /cluster``. ``served``: instance id -> requests whose first token (prefill) or last token (decode) came
    from it. ``overcommitted``: attempts that an instance had no room for, though it was thought to have."""

    accepted: int = 0
    retried: int = 0
    migrated: int = 0
    failed: int = 0
    cancelled: int = 0
    overcommitted: int = 0
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
    sharing: Sharing
    gatekeeper: Gatekeeper
    counts: Counts = field(default_factory=Counts)
    runs: dict[str, Run] = field(default_factory=dict)
    tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    def reported(self, id: str, load: Load, now: float) -> None:
        """An instance says how loaded it is: others' attempts that it had accepted before are in that."""
        self.ledger.report(id, load, now)
        self.sharing.others.reported(id)

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A short task that outlives the request; all of them are ended by the dispatcher."""
        return spawn_in(self.tasks, work)


def spawn_in(tasks: set[asyncio.Task[Any]], work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """A task that is in ``tasks`` until it ends."""
    task = asyncio.get_running_loop().create_task(work)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task
