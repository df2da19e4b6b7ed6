"""Having blocks here: what is present is held, what somebody is bringing is waited for, the rest is brought.

One fetch of a key is in flight on a node, whoever asks. It outlives its asker: what it brings is cached.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from opentelemetry.trace import INVALID_SPAN, Span, StatusCode

from services.store.ask import Ask
from services.store.directory import Directory
from services.store.fetch_spans import awaited, describe
from services.store.fetches import FetchTable, Habit
from services.store.metrics import FETCH_FAILED
from services.store.rates import Rate
from services.store.reader import Outcome, RemoteReader, Wanted
from services.store.slab import AGENT, Slab
from services.store.sources import Elsewhere, elsewhere, is_worth_asking
from services.store.ssd.metrics import SPARED
from services.store.trace_context import current, traced
from shared.engines.base import Fetched, Owner, PoolClass
from shared.errors import DeadlineExceeded, MooncakeError
from shared.telemetry import log

logger = log("store.fetch")

IN_PROGRESS = "in_progress"
MISSING = Outcome(error="absent")

PATIENCE = 0.1
"""Share of the disk's time that the index is given to name somebody who is quicker."""

GRACE = 0.25
"""Seconds past the deadline in which a flight says why it failed."""

FEW = 8
"""For more blocks the index is asked at once: one lookup weighs little beside them."""

GUESS_TIMEOUT = 2.0
"""Seconds that an agent that was asked by habit has: more than it takes to bring blocks up from its SSD. Half of what
there is stays for others."""


@dataclass
class Flight:
    """A fetch in flight: what has become of its blocks, the agent's holds on them, and who waits for which. ``span``:
    in the trace of who started it."""

    outcomes: dict[bytes, Outcome] = field(default_factory=dict)
    holds: list[int] = field(default_factory=list)
    waiting: list[tuple[Ask, Sequence[bytes]]] = field(default_factory=list)
    landed: asyncio.Event = field(default_factory=asyncio.Event)
    span: Span = INVALID_SPAN


class Fetcher:
    """``rate``: of the link to others, as it is measured."""

    def __init__(self, me: str, reader: RemoteReader, directory: Directory, rate: Rate) -> None:
        self._me = me
        self._reader = reader
        self._rate = rate
        self._directory = directory
        self._flights: dict[str, FetchTable[Flight]] = {}
        self._habits: dict[str, Habit] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        """Blocks in flight."""
        return sum(map(len, self._flights.values()))

    @staticmethod
    def here(ask: Ask, wanted: Sequence[Wanted]) -> list[Fetched] | None:
        """As ``fetch``, at once, where all is in DRAM already; None where something must be brought or waited for."""
        keys = [w.key for w in wanted]
        return None if None in map(ask.slab.pool.find, keys) else ask.hold_all(keys)

    async def fetch(self, ask: Ask, wanted: Sequence[Wanted], sources: Sequence[str], timeout: float) -> list[Fetched]:
        """One result for each block, in order, each with a hold of its own; raises for none of them."""
        deadline = asyncio.get_running_loop().time() + timeout
        try:
            async with asyncio.timeout_at(deadline + GRACE):
                await self._have(ask, wanted, sources, deadline)
        except TimeoutError:
            pass
        except asyncio.CancelledError:
            ask.give_back()
            raise
        finally:
            ask.open = False
        return self._in_order(ask, wanted)

    @asynccontextmanager
    async def brought_up(
        self,
        slab: Slab,
        keys: Sequence[bytes],
        owner: Owner,
        pool_class: PoolClass,
        timeout: float,
        disk_only: bool = True,
    ) -> AsyncIterator[None]:
        """What this node's SSD has of ``keys`` is in DRAM while the block runs, as far as there are time and room.
        Not ``disk_only``: from another agent's DRAM, where that is quicker."""
        ask = Ask(slab, AGENT, owner, pool_class, current(), disk_only=disk_only)
        wanted = [Wanted(key, b"") for key in dict.fromkeys(keys) if slab.is_below(key)]
        if wanted:
            await self.fetch(ask, wanted, [self._me], timeout)
        try:
            yield
        finally:
            ask.give_back()

    @staticmethod
    def _in_order(ask: Ask, wanted: Sequence[Wanted]) -> list[Fetched]:
        """A key that was asked for twice is held twice."""
        out: list[Fetched] = []
        seen: set[bytes] = set()
        for w in wanted:
            result = ask.results.get(w.key, Fetched(None, error=DeadlineExceeded.code))
            out.append(ask.hold(w.key, Outcome(error=result.error)) if w.key in seen else result)
            seen.add(w.key)
        return out

    async def _have(self, ask: Ask, wanted: Sequence[Wanted], sources: Sequence[str], deadline: float) -> None:
        """What an engine of this node is writing may take for ever: the others do not wait for it."""
        written = {w.key for w in wanted if self._written_here(ask.slab, w.key)}
        await self._bring(ask, [w for w in wanted if w.key not in written], sources, deadline)
        for key in written:
            await ask.slab.settled(key, deadline - asyncio.get_running_loop().time())
        if written:
            await self._bring(ask, [w for w in wanted if w.key in written], sources, deadline)

    def _written_here(self, slab: Slab, key: bytes) -> bool:
        return slab.pool.in_progress(key) and key not in self._table(slab)

    async def _bring(self, ask: Ask, wanted: Sequence[Wanted], sources: Sequence[str], deadline: float) -> None:
        for w in wanted:
            if ask.slab.pool.find(w.key) is not None:
                ask.take(w.key, Outcome())
            elif self._written_here(ask.slab, w.key):
                ask.take(w.key, Outcome(error=IN_PROGRESS))
        missing = [w for w in wanted if w.key not in ask.results]
        joined = await self._round(ask, missing, sources, deadline)
        failed = [w for w in missing if w.key in joined and ask.results[w.key].error]
        if failed:  # in another's flight, perhaps for lack of time: ours may be longer
            await self._round(ask, failed, sources, deadline)

    async def _round(
        self, ask: Ask, wanted: Sequence[Wanted], sources: Sequence[str], deadline: float
    ) -> dict[bytes, Flight]:
        """Wait for the flights that bring these blocks; start one for what nobody brings. Returns those joined."""
        split = self._table(ask.slab).split([w.key for w in wanted])
        waits = {id(flight): flight for flight in split.others.values()}
        for flight in waits.values():
            flight.waiting.append((ask, [key for key, other in split.others.items() if other is flight]))
        if split.mine:
            by_key = {w.key: w for w in wanted}
            flight = self._start(ask, [by_key[key] for key in split.mine], sources, deadline)
            flight.waiting.append((ask, split.mine))
            waits[id(flight)] = flight
        with awaited(ask.trace, [flight.span for flight in {id(f): f for f in split.others.values()}.values()]):
            for flight in waits.values():
                await flight.landed.wait()
        return split.others

    def _table(self, slab: Slab) -> FetchTable[Flight]:
        return self._flights.setdefault(slab.name, FetchTable())

    # -- flights ---------------------------------------------------------------------------------------

    def _start(self, ask: Ask, wanted: Sequence[Wanted], sources: Sequence[str], deadline: float) -> Flight:
        flight, keys = Flight(), [w.key for w in wanted]
        self._table(ask.slab).begin(keys, flight)
        task = asyncio.create_task(self._fly(flight, ask, wanted, sources, deadline), name="fetch")
        self._tasks.add(task)
        task.add_done_callback(lambda done: self._land(done, flight, ask.slab, keys))
        return flight

    def _land(self, done: asyncio.Task[None], flight: Flight, slab: Slab, keys: Sequence[bytes]) -> None:
        """Who waits takes hold before the flight's own holds end: nothing is evicted in between."""
        self._tasks.discard(done)
        if not done.cancelled() and done.exception() is not None:
            logger.error("fetch broke", exc_info=done.exception())
        self._table(slab).end(keys)
        for ask, wanted in flight.waiting:
            for key in wanted:
                ask.take(key, flight.outcomes.get(key, MISSING))
        slab.release(AGENT, flight.holds)
        flight.landed.set()

    async def _fly(
        self, flight: Flight, ask: Ask, wanted: Sequence[Wanted], sources: Sequence[str], deadline: float
    ) -> None:
        """Ask one agent after the other for what is still missing."""
        with traced("store.fetch", ask.trace) as span:
            flight.span = span
            missing = await self._from_quicker(flight, ask, wanted, deadline)
            missing = await self._from_below(flight, ask, missing, deadline)
            guess = "" if sources or len(missing) > FEW else self._habit(ask.slab).guess
            if missing and guess:
                missing = await self._by_habit(flight, ask, guess, missing, deadline)
            for agent in await self._candidates([w.key for w in missing], sources, guess):
                left = deadline - asyncio.get_running_loop().time()
                if left <= 0:
                    late = Outcome(error=DeadlineExceeded.code)
                    flight.outcomes.update({w.key: late for w in missing})
                    break
                before = len(missing)
                missing = await self._all_from(flight, ask, agent, missing, deadline)
                if not sources:
                    self._habit(ask.slab).gave(agent, before - len(missing), before)
                if not missing:
                    break
            span.set_attribute("mooncake.blocks", len(wanted))
            span.set_attribute("mooncake.missing", len(missing))
        for w in missing:
            FETCH_FAILED.labels(flight.outcomes.get(w.key, MISSING).error).inc()

    def _habit(self, slab: Slab) -> Habit:
        return self._habits.setdefault(slab.name, Habit())

    async def _by_habit(
        self, flight: Flight, ask: Ask, guess: str, wanted: Sequence[Wanted], deadline: float
    ) -> list[Wanted]:
        """Ask who had everything of late, before the index is asked who has this: the owner knows. Returns what is
        still missing."""
        now = asyncio.get_running_loop().time()
        soon = now + min(GUESS_TIMEOUT, (deadline - now) / 2)
        missing = await self._all_from(flight, ask, guess, wanted, soon)
        self._habit(ask.slab).gave(guess, len(wanted) - len(missing), len(wanted))
        for w in missing:  # why that one did not have them says nothing
            flight.outcomes.pop(w.key, None)
        return missing

    async def _candidates(self, keys: Sequence[bytes], sources: Sequence[str], asked: str = "") -> list[str]:
        """The agents named, else those of the index: most blocks first, then the least loaded; at last who was
        ``asked`` already."""
        if sources or not keys:
            return [agent for agent in dict.fromkeys(sources) if agent != self._me] if keys else []
        located = await self._directory.locate(keys)
        found = [agent for agent, _ in Counter(agent for agents in located for agent in agents).most_common()]
        return sorted(found, key=lambda agent: agent == asked)

    async def _from_quicker(
        self, flight: Flight, ask: Ask, wanted: Sequence[Wanted], deadline: float
    ) -> Sequence[Wanted]:
        """What is on this node's SSD, from another agent's DRAM where that is quicker. Half of the time is left for the
        disk all the same. Returns what is still missing."""
        there = None if ask.disk_only else await self._elsewhere(ask.slab, [w.key for w in wanted])
        if there is None:
            return wanted
        asked, now = set(there.keys), asyncio.get_running_loop().time()
        there_first = [w for w in wanted if w.key in asked]
        await self._all_from(flight, ask, there.agent, there_first, now + (deadline - now) / 2)
        missing = [w for w in wanted if flight.outcomes.get(w.key, MISSING).error]
        SPARED.inc(len(wanted) - len(missing))
        return missing

    async def _elsewhere(self, slab: Slab, keys: Sequence[bytes]) -> Elsewhere | None:
        """The index is not waited for longer than the disk would take."""
        sizes, disk, link = slab.lower.sizes(keys), slab.lower.disk(), self._rate.value
        if not is_worth_asking(sizes, disk, link):
            return None
        try:
            async with asyncio.timeout(PATIENCE * disk.seconds(sum(sizes.values()))):
                copies = await self._directory.copies(list(sizes))
        except TimeoutError:
            return None
        return elsewhere(sizes, dict(zip(sizes, copies, strict=True)), disk, link)

    async def _from_below(self, flight: Flight, ask: Ask, wanted: Sequence[Wanted], deadline: float) -> list[Wanted]:
        """From this node's SSD. Returns what is still missing."""
        if not any(ask.slab.lower.holds(one.key) for one in wanted):
            return list(wanted)
        left = deadline - asyncio.get_running_loop().time()
        with traced("store.ssd", current(), blocks=len(wanted)) as span:
            read = await ask.slab.lower.read(wanted, ask.owner, ask.pool_class, left)
            if read is None:
                return list(wanted)
            span.set_attribute("mooncake.found", sum(not outcome.error for outcome in read.outcomes.values()))
        flight.outcomes.update(read.outcomes)
        flight.holds.extend(read.holds)
        return [w for w in wanted if read.outcomes.get(w.key, MISSING).error]

    async def _all_from(
        self, flight: Flight, ask: Ask, agent: str, missing: Sequence[Wanted], deadline: float
    ) -> list[Wanted]:
        """An agent answers with what it has brought up from its SSD in time: as long as more comes, ask for the rest.
        Returns what is still missing."""
        while True:
            left = deadline - asyncio.get_running_loop().time()
            await self._from(flight, ask, agent, missing, left)
            rest = [w for w in missing if flight.outcomes.get(w.key, MISSING).error]
            more = len(rest) < len(missing) and any(w.key not in flight.outcomes for w in rest)
            if not more or deadline <= asyncio.get_running_loop().time():
                return rest
            missing = rest

    async def _from(self, flight: Flight, ask: Ask, agent: str, missing: Sequence[Wanted], timeout: float) -> None:
        with traced("store.source", current(), agent=agent, blocks=len(missing)) as span:
            try:
                owner = await self._directory.peer(agent)
                read = await self._reader.read(ask.slab, owner, missing, ask.owner, ask.pool_class, timeout)
            except MooncakeError as e:
                logger.info("fetch failed", agent=agent, error=e.message)
                span.set_status(StatusCode.ERROR, e.code)
                flight.outcomes.update({w.key: Outcome(error=e.code) for w in missing})
                return
            describe(span, read.outcomes.values())
        flight.outcomes.update(read.outcomes)
        flight.holds.extend(read.holds)

    async def close(self) -> None:
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
