"""The life of one attempt at a decode instance: admitted, landed, started, run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from services.decode.decoder import Running
from services.decode.sequence import Sequence
from shared.engines.base import Held, Landing, PoolClass
from shared.errors import DeadlineExceeded, DoesNotFit, MooncakeError, NoRoom, PoolFull, StoreError, UnknownAttempt
from shared.instance.attempts import Key, Phase
from shared.instance.job import INDEX_WAIT_S, Job, Prompt
from shared.instance.tracing import span
from shared.messages import Admission, Need, Output, Ref, Source, Usage
from shared.tasks import settle
from shared.telemetry import held

if TYPE_CHECKING:
    from services.decode.service import Decode

READY_WAIT_S = 0.5
"""How long a start is kept waiting for the landing to be complete before it is told to ask again."""
GRANT_WAIT_S = 1.0
"""How long a landing request is kept waiting: as long as prefill listens before it asks again."""
LANDED_WAIT_S = 1.0
COMMIT_WAIT_S = 15.0
"""How long the last blocks of an answer may take to be committed: longer than the store may leave a call unanswered."""


class DecodeJob(Job):
    """``granted`` is the answer to landing requests, ``complete`` to starts. All holds end with :meth:`run`."""

    def __init__(self, service: Decode, key: Key, admission: Admission, prefill: Ref, prompt: Prompt) -> None:
        born = service.now() - admission.age_ms / 1000
        super().__init__(key, admission.gateway, prompt, service.store, service.role, born)
        self.service, self.admission, self.prefill = service, admission, prefill
        loop = asyncio.get_running_loop()
        self.asked: asyncio.Future[Ref] = loop.create_future()
        self.granted: asyncio.Future[tuple[Landing, frozenset[int]]] = loop.create_future()
        self.started: asyncio.Future[Output] = loop.create_future()
        self.complete = asyncio.Event()
        self._fetched: dict[int, Held] = {}

    # -- what messages do ----------------------------------------------------------------------------------------

    async def land(self, writer: Ref) -> tuple[Landing, frozenset[int]] | None:
        """Answer a landing request: the landing, and the blocks that p need not write. None: not yet, p will ask again.
        Raises why there is none."""
        if not self.asked.done():
            self.asked.set_result(writer)
        await asyncio.wait([self.granted], timeout=GRANT_WAIT_S)
        return self.granted.result() if self.granted.done() else None

    async def start(self, output: Output, usage: Usage | None) -> bool:
        """The first token came; True once everything has landed."""
        self.service.outputs.add(self.key, output, usage)
        if not self.started.done():
            self.started.set_result(output)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(READY_WAIT_S):
                await self.complete.wait()
        return self.complete.is_set()

    # -- its life --------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        try:
            async with self.holds:
                running = await self._land()
                self.complete.set()
                running.sequence.push((await self._started()).token)
                self.service.table.move(self.key, Phase.RUN)
                with span("decode", prompt_tokens=len(self.prompt)) as current:
                    running.span = current
                    await self._decode(running)
                    current.set_attribute("gen_ai.usage.output_tokens", running.sequence.index)
        except (PoolFull, DoesNotFit) as e:
            refusal = NoRoom(e.message)
            self._refuse(refusal)
            raise refusal from e

    def closed(self) -> None:
        self.complete.set()
        self.service.free_room(self.key)
        self._refuse(UnknownAttempt("the attempt has ended"))

    def _refuse(self, error: MooncakeError) -> None:
        """What landing requests hear from now on."""
        if not self.granted.done():
            self.granted.set_exception(error)
            self.granted.exception()  # nobody need have asked

    async def _land(self) -> Running:
        """Open the landing when p asks, fetch what we get ourselves, and wait until all of the prompt is here."""
        writer = await self.asked
        apart = await self._apart(writer)
        async with self._landing(writer, apart) as landing:
            have = landing.have | apart
            self.service.table.move(self.key, Phase.LANDED)
            self.granted.set_result((landing, have))
            with span("landing", blocks=len(landing.held), have=len(have)):
                await self._fetch(landing, sorted(apart - landing.have))
                await self._landed(landing)
            kept = await self.holds.take(self.store.close_landing(landing, keep=True))
        await self.holds.release([kept[block] for block in self._fetched])
        slots = [self._fetched.get(block, one) for block, one in enumerate(kept)]
        shared = landing.have | frozenset(self._fetched)
        sequence = Sequence(self.key, self.gateway, self.prompt, self.born, slots, shared)
        return Running(sequence, self.holds, self.owner, asyncio.get_running_loop().create_future())

    async def _landed(self, landing: Landing) -> None:
        """Everything is here. Raises DeadlineExceeded, which names prefill, where nothing more comes."""
        limit, before, since = self.service.settings.landing_timeout_s, 0, self.service.now()
        while missing := await self.store.missing(landing, LANDED_WAIT_S):
            if missing != before:
                before, since = missing, self.service.now()
            elif self.service.now() - since >= limit:
                raise DeadlineExceeded(f"nothing of the prompt has landed for {limit:g} s", field="prefill")

    async def _started(self) -> Output:
        """The first token. Raises as ``_landed``."""
        limit = self.service.settings.landing_timeout_s
        try:
            async with asyncio.timeout(limit):
                return await self.started
        except TimeoutError:
            raise DeadlineExceeded(f"no first token for {limit:g} s after all has landed", field="prefill") from None

    @contextlib.asynccontextmanager
    async def _landing(self, writer: Ref, apart: frozenset[int]) -> AsyncIterator[Landing]:
        """An open landing, fenced at the end unless it was kept."""
        with held("landings"):
            opening = asyncio.ensure_future(
                self.store.open_landing(
                    self.prompt.keys,
                    self.prompt.blocks,
                    len(self.prompt),
                    writer,
                    self.owner,
                    self.service.settings.pool_timeout_s,
                    **({"apart": apart} if apart else {}),
                )
            )
            try:
                yield await asyncio.shield(opening)
            finally:
                closing = self.service.courier.spawn(self._close(opening))
                if opening.done():
                    await settle(closing)

    async def _close(self, opening: asyncio.Future[Landing]) -> None:
        with contextlib.suppress(MooncakeError):  # never opened, or the agent is gone
            await self.store.close_landing(await opening, keep=False)

    # -- what we fetch ourselves -----------------------------------------------------------------------------------

    async def _apart(self, writer: Ref) -> frozenset[int]:
        """Blocks that some third node has: those come from there, p's link is spared."""
        blocks = max((s.blocks for s in self._sources(writer)), default=0)
        keys = self.prompt.keys[: min(blocks, self.prompt.full)]
        if not keys:
            return frozenset()
        return frozenset(i for i, here in enumerate(await self.store.contains(keys)) if not here)

    def _sources(self, writer: Ref) -> list[Source]:
        return [s for s in self.admission.sources if s.agent not in (writer.id, self.store.agent.id)]

    async def _fetch(self, landing: Landing, blocks: list[int]) -> None:
        """Fetch ``blocks``; what fails is asked of p."""
        if not blocks:
            return
        first, last = blocks[0], blocks[-1] + 1
        sources = [s.agent for s in sorted(self._sources(self.asked.result()), key=lambda s: -s.blocks)]
        call = self.store.fetch(
            self.prompt.keys[first:last],
            self.prompt.parent(first),
            sources,
            self.owner,
            PoolClass.LANDING,
            self.service.settings.fetch_timeout_s,
        )
        found = {first + i: f.held for i, f in enumerate(await self.holds.take(call)) if f.held is not None}
        self._fetched = {block: one for block, one in found.items() if block in blocks}
        await self.holds.release([one for block, one in found.items() if block not in blocks])
        if failed := [block for block in blocks if block not in self._fetched]:
            await self.store.owe(landing, failed)
            await self._need(failed)

    async def _need(self, blocks: list[int]) -> None:
        need = Need(
            sender=self.service.ref, target=self.prefill, request=self.key[0], attempt=self.key[1], blocks=blocks
        )
        await self.service.courier.insist(self.prefill, need, self.service.settings.peer_timeout_s)

    # -- running -----------------------------------------------------------------------------------------------------

    async def _decode(self, running: Running) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                commits = group.create_task(self._commits(running))
                await self.service.decoder.decode(running)
                if running.last is not None:
                    await self._indexed(running, INDEX_WAIT_S)
                self._publish_last(running)
                if not await self._indexed(running, COMMIT_WAIT_S):
                    self.service.log.warning("the last blocks were not committed in time")
                commits.cancel()
        except ExceptionGroup:  # the agent is gone, or there was no room to fill the last block: the answer is complete
            self._publish_last(running)
            raise

    @staticmethod
    async def _indexed(running: Running, timeout: float) -> bool:
        """All full blocks are committed, and in the index as far as that could be waited for. False at the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                await running.indexed.wait()
        return running.indexed.is_set()

    def _publish_last(self, running: Running) -> None:
        """The final output that was held back for the index."""
        output, running.last = running.last, None
        if output is not None:
            self.service.outputs.add(self.key, output)
            self.service.courier.publish(self.gateway, [(self.key, output, None)])
            self.service.finish(self.key)

    async def _commits(self, running: Running) -> None:
        """Commit blocks as they fill, beside the steps."""
        while True:
            running.filled.clear()
            await self._commit(running)
            if not running.filled.is_set():
                await self.settle_index()
            if not running.filled.is_set():
                running.indexed.set()
                await running.filled.wait()

    async def _commit(self, running: Running) -> None:
        for run in running.sequence.filled():
            try:
                with span("commit", blocks=len(run.keys)):
                    await self.store.commit(run.holds, run.parent, run.keys)
            except StoreError as e:
                if self.store.closed:
                    raise
                self.service.log.warning("blocks were not committed", error=e.code)
