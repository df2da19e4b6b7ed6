"""Keeps conductors from purging agents whose registrations alone are lost: the shell around shared/index/breaker.py."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Self

from shared.answering import answers
from shared.errors import Unavailable
from shared.index.breaker import SILENCE, Breaker
from shared.metadata import Metadata
from shared.records import AgentRecord
from shared.registration import TTL
from shared.tasks import end
from shared.telemetry import counter, gauge, log

logger = log("index.sparing")

INTERVAL = 1.0
ANSWER_TIMEOUT = 2.0
AT_ONCE = 64

SPARED = gauge("index_spared_agents", "Agents that vanished in a mass expiry and are not purged from the index.")
EXPIRIES = counter("index_mass_expiries", "Times that most agents vanished at once.")
ASKED = counter("index_spared_asked", "Vanished agents asked on their data port, by answer.", ["answer"])
ALIVE, SILENT = ASKED.labels("alive"), ASKED.labels("silent")

Spare = Callable[[frozenset[bytes]], None]


class Sparing:
    """``spare`` of each keeper is called with the codes that must be kept, whenever they change, on the loop."""

    def __init__(
        self,
        metadata: Metadata,
        *keepers: Spare,
        interval: float = INTERVAL,
        ttl: float = TTL,
        silence: float = SILENCE,
    ) -> None:
        self.breaker = Breaker(ttl, silence)
        self._metadata = metadata
        self._keepers = keepers
        self._interval = interval
        self._told: frozenset[bytes] = frozenset()
        self._asking = asyncio.Semaphore(AT_ONCE)
        self._questions: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._run(), name="index-sparing")
        return self

    async def __aexit__(self, *exc: object) -> None:
        task, self._task = self._task, None
        await end(task, *self._questions)
        SPARED.set(0)

    async def _run(self) -> None:
        while True:
            try:
                self.look(await self._metadata.agents())
            except Unavailable as e:
                logger.debug("registrations not read", error=str(e))  # who is registered is not known: nobody vanished
            except Exception:
                logger.exception("looking for a mass expiry failed")
            await asyncio.sleep(self._interval)

    def look(self, agents: list[AgentRecord]) -> None:
        """``agents`` are registered now."""
        now, before = asyncio.get_running_loop().time(), self.breaker.tripped
        self.breaker.look(agents, now)
        if self.breaker.tripped > before:
            EXPIRIES.inc()
            lost, left = len(self.breaker.spared), len(agents)
            logger.warning("mass expiry: nobody is purged from the index unasked", vanished=lost, registered=left)
        for record in self.breaker.due(now):
            question = asyncio.create_task(self._ask(record), name="index-asking")
            self._questions.add(question)
            question.add_done_callback(self._questions.discard)
        self._tell({agent.code for agent in agents})

    def _tell(self, registered: set[bytes]) -> None:
        spared = self.breaker.spared
        if spared == self._told:
            return
        for code in self._told - spared:
            back = code in registered
            logger.info("agent is back" if back else "agent was silent or replaced: it may be purged", agent=code.hex())
        self._told = spared
        SPARED.set(len(spared))
        for spare in self._keepers:
            spare(spared)

    async def _ask(self, record: AgentRecord) -> None:
        async with self._asking:
            alive = await answers(record.host, record.port, ANSWER_TIMEOUT)
        (ALIVE if alive else SILENT).inc()
        if alive:
            self.breaker.answered(record.code, asyncio.get_running_loop().time())
        else:
            self.breaker.silent(record.code)
