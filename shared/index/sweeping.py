"""Takes the entries of dead incarnations out of the index. Any conductor may run one; a lease in Redis elects it."""

from __future__ import annotations

import asyncio
import logging
from typing import Self

from shared.errors import Unavailable
from shared.index import SHARDS, Layout
from shared.index.entry import swept
from shared.metadata import Metadata
from shared.redis_client import Argument
from shared.redis_scripts import load
from shared.tasks import end

log = logging.getLogger(__name__)

LEASE = "index-sweeper"
INTERVAL = 5.0
GRACE = 60.0  # seconds that an incarnation must be unregistered: registrations expire by mistake, too
PAGE = 500  # hash fields per call
CENSUS = 600.0  # seconds between two looks at every entry, for those of whom nothing else is known any more


class Sweeper:
    """``owner``: id of the process that runs it. ``swept`` counts incarnations taken out by this one."""

    def __init__(
        self,
        metadata: Metadata,
        mesh: str,
        owner: str,
        *,
        shards: int = SHARDS,
        interval: float = INTERVAL,
        grace: float = GRACE,
    ) -> None:
        self._metadata = metadata
        self._keys = Layout(mesh, shards)
        self._owner = owner
        self._interval = interval
        self._grace = grace
        self._missing: dict[bytes, float] = {}
        self._found: set[bytes] = set()
        self._spared: frozenset[bytes] = frozenset()
        self._next_census = 0.0
        self._task: asyncio.Task[None] | None = None
        self.swept = 0

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="index-sweeper")
        return self

    async def __aexit__(self, *exc: object) -> None:
        task, self._task = self._task, None
        await end(task)

    def spare(self, codes: frozenset[bytes]) -> None:
        """Codes that are not to be swept, though they are not registered (see shared/index/sparing.py)."""
        self._spared = codes

    async def _run(self) -> None:
        while True:
            try:
                if await self._metadata.hold_lease(LEASE, self._owner, 3 * self._interval):
                    await self.sweep(asyncio.get_running_loop().time())
            except Unavailable as e:
                log.debug("sweeper: %s", e)
                self._missing.clear()  # nothing is known of the time in between
            except Exception:
                log.exception("sweeping the index failed")
            await asyncio.sleep(self._interval)

    async def sweep(self, now: float) -> None:
        """Take out those that were unregistered at every look since ``grace`` seconds. Raises Unavailable."""
        living = {record.code for record in await self._metadata.agents()}
        known = await self._known() | await self._census(now)
        self._missing = {code: self._missing.get(code, now) for code in known - living}
        over = [code for code, since in self._missing.items() if now - since >= self._grace]
        dead = [code for code in over if code not in self._spared]
        if not dead:
            return
        for shard in range(self._keys.shards):
            await self._sweep_shard(shard, dead)
        self._found -= set(dead)
        self.swept += len(dead)

    async def _known(self) -> set[bytes]:
        """All codes of which Redis holds anything."""
        names = [*self._keys.taken, *self._keys.told]
        answers = await self._metadata.link.commands([("HKEYS", name) for name in names])
        return {code for codes in answers for code in codes}

    async def _census(self, now: float) -> set[bytes]:
        """Codes of which the hashes have entries, looked up now and then."""
        if now >= self._next_census:
            self._found = {code for shard in range(self._keys.shards) for code in await self._codes(shard)}
            self._next_census = now + CENSUS
        return self._found

    async def _codes(self, shard: int) -> set[bytes]:
        cursor, found = b"0", set[bytes]()
        while True:
            args: list[Argument] = [cursor, PAGE]
            cursor, *page = await self._metadata.link.run(load("index_codes"), [self._keys.blocks[shard]], args)
            found.update(page)
            if cursor == b"0":
                return found

    async def _sweep_shard(self, shard: int, dead: list[bytes]) -> None:
        keys = self._keys
        names = [keys.blocks[shard], keys.stream[shard], keys.taken[shard], keys.told[shard]]
        entries: list[Argument] = [part for code in dead for part in (code, swept(code))]
        cursor = b"0"
        while True:
            args: list[Argument] = [cursor, PAGE, keys.kept, *entries]
            cursor = await self._metadata.link.run(load("index_sweep"), names, args)
            if cursor == b"0":
                return
