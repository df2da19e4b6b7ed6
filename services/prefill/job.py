"""The life of one attempt at a prefill instance: fetch while queued, land, compute and stream, hand over."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import msgspec

from services.prefill.blocks import PromptBlocks
from services.prefill.groups import LayerGroups, chunk_runs, whole_run
from services.prefill.plan import Await, Block, Chunk, next_step, repeats_last
from services.prefill.streamer import Streamer
from shared.engines.base import Draw, Drawn, LandingTarget, LayerHook, Run, Work
from shared.errors import InternalError, MooncakeError, ProtocolError, StoreError
from shared.instance.attempts import Phase
from shared.instance.job import Job, Prompt
from shared.instance.tracing import span
from shared.messages import LandingGrant, LandingRequest, Output, Ready, Start, Submit, Usage

if TYPE_CHECKING:
    from services.prefill.service import Prefill


class PrefillJob(Job):
    """All it holds in the pool is released when :meth:`run` ends, however it ends."""

    def __init__(self, service: Prefill, submit: Submit, prompt: Prompt, born: float) -> None:
        super().__init__(
            (submit.request, submit.attempt), submit.admission.gateway, prompt, service.store, service.role, born
        )
        self.service, self.submit = service, submit
        self.blocks = PromptBlocks(prompt, self.store, self.holds, self.owner, service.settings.pool_timeout_s)
        self.streamer = Streamer(self.store, self.owner, service.settings.stream_timeout_s)
        self.arrived = service.now()
        self.computed = 0
        self._expected = submit.prefix_blocks
        self._commits: list[asyncio.Task[None]] = []
        self._complete: set[int] = set()
        self._late: set[int] = set()

    async def run(self) -> None:
        async with self.holds:
            await self._find_prefix()
            await self.service.turns.near(self.key)
            await self.blocks.harden()
            output, usage = await self._prefill()
        if output.finish:
            self.service.courier.spawn(self._release_decode(output, usage))
        self.service.finish(self.key)

    def closed(self) -> None:
        self.service.turns.leave(self.key)

    # -- the prefix, while queued ------------------------------------------------------------------------------

    async def _find_prefix(self) -> None:
        with span("fetch", blocks=self.submit.fetch_blocks) as current:
            await self.blocks.find()
            self.progress()
            sources = [s for s in self.submit.admission.sources if s.agent != self.store.agent.id]
            ids = [s.agent for s in sorted(sources, key=lambda s: -s.blocks)]
            async with self.service.fetching:
                await self.blocks.fetch(self.submit.fetch_blocks, ids, self.service.settings.fetch_timeout_s)
            if self.submit.fetch_blocks:
                self._expected = 0
            self.progress()
            current.set_attribute("mooncake.ready_blocks", len(self.blocks.ready))

    @property
    def done(self) -> int:
        """Tokens that are not to be computed any more. Until it is known what is there, what the scheduler expects
        counts: who would report a prompt as not cached at all until it was looked for, would seem full after each."""
        blocks = max(len(self.blocks.ready), self._expected)
        return min(blocks * self.prompt.block_size, len(self.prompt) - 1) + self.computed

    def progress(self) -> None:
        self.service.queue.progress(self.key, self.done)

    # -- compute and stream ------------------------------------------------------------------------------------

    async def _prefill(self) -> tuple[Output, Usage]:
        """To the first token, and unless that is the last, to decode's readiness."""
        async with asyncio.TaskGroup() as group:
            self._stream_whole(self.blocks.ready)
            stream = group.create_task(self.streamer.run())
            landing = group.create_task(self._ask_landing())
            output, usage = await self._first_token(group)
            with span("first token"):
                if output.finish:  # who has the last token may ask the next question at once
                    await self.settle_index(self._commits)
                self.service.courier.publish(self.gateway, [(self.key, output, usage)])
            if not output.finish:
                await landing
                self.service.table.move(self.key, Phase.HOLD)
                await self._start(output, usage)
            landing.cancel()
            stream.cancel()
        return output, usage

    async def _first_token(self, group: asyncio.TaskGroup) -> tuple[Output, Usage]:
        with span("queue"):
            await self.service.turns.turn(self.key)
        began = self.service.now()
        drawn = await self._compute(group)
        self.service.turns.leave(self.key)
        ended = self.service.now()
        usage = Usage(
            cached_tokens=min(len(self.prompt) - self.computed, self.prompt.prompt_tokens - 1),
            local_blocks=self.blocks.local_blocks,
            fetched_blocks=self.blocks.fetched_blocks,
            queue_ms=1000 * (began - self.arrived),
            prefill_ms=1000 * (ended - began),
        )
        self.service.first_token(usage, len(self.prompt))
        index = self.prompt.first
        finish = self.prompt.finish(drawn.token, index, self.service.context_length)
        output = Output(index, drawn.token, finish, 0, drawn.logprob, list(drawn.top))
        self.service.outputs.add(self.key, output, usage)
        return output, usage

    async def _compute(self, group: asyncio.TaskGroup) -> Drawn:
        """Chunk by chunk; the last one draws."""
        self._stream_whole(await self.blocks.reserve())
        self._expected = 0
        done, drawn, tokens, size = 0, None, len(self.prompt), self.prompt.block_size
        while step := next_step(self.blocks.state, done, tokens, size, self.service.settings.prefill_chunk):
            if isinstance(step, Await):
                if await self.blocks.resolve(step.block):
                    self._stream_whole([step.block])
                continue
            drawn = await self._chunk(step)
            done = step.stop
            self._chunk_done(step, group)
        if drawn is None:
            raise InternalError("the prompt's last chunk drew nothing")
        return drawn

    async def _chunk(self, chunk: Chunk) -> Drawn | None:
        slots, spare = list(self.blocks.slots), -1
        if repeat := repeats_last(self.blocks.state, len(self.prompt), self.prompt.block_size):
            spare = await self.blocks.spare()
        draw = self._draw() if chunk.stop == len(self.prompt) else None
        hook = None if repeat and draw else self._hook(chunk, slots)

        def step() -> Drawn | None:
            if repeat and draw:
                self.service.pool_view.copy(slots[-1], spare)
                slots[-1] = spare
            work = Work(self.prompt.tokens[chunk.start : chunk.stop], chunk.start, slots, draw)
            return self.service.engine.step([work], hook)[0]

        with span("prefill chunk", tokens=chunk.tokens):
            return await self.service.compute.run(step)

    def _chunk_done(self, chunk: Chunk, group: asyncio.TaskGroup) -> None:
        self.computed += chunk.tokens
        self.service.chunk_done(chunk.tokens)
        self.progress()
        size = self.prompt.block_size
        filled = [i for i in chunk.filled(size) if self.blocks.state[i] is Block.OURS]
        self._commits.append(group.create_task(self._commit(filled)))
        self._complete.update(chunk.blocks(size))
        self._need_now([i for i in chunk.blocks(size) if i in self._late])

    async def _commit(self, blocks: list[int]) -> None:
        """A block that cannot be committed is still good for this attempt."""
        if not blocks:
            return
        try:
            with span("commit", blocks=len(blocks)):
                await self.blocks.commit(blocks)
        except StoreError as e:
            if self.store.closed:
                raise
            self.service.log.warning("blocks were not committed", error=e.code)

    def _draw(self) -> Draw:
        prompt = self.prompt
        at = prompt.prompt_tokens
        return Draw(prompt.sampling, prompt.first, 0, prompt.tokens[:at], prompt.tokens[at:])

    def _hook(self, chunk: Chunk, slots: list[int]) -> LayerHook:
        """On the compute thread: hand groups of finished layers over to the event loop."""
        loop = asyncio.get_running_loop()
        groups = LayerGroups(self.store.pool.geometry, chunk.tokens, time.perf_counter())

        def on_layer(layer: int) -> None:
            if group := groups.layer(layer, time.perf_counter()):
                runs = list(chunk_runs(chunk, slots, self.prompt.block_size, group))
                loop.call_soon_threadsafe(self.streamer.add, runs)

        return on_layer

    def _whole(self, block: int) -> Run:
        size = self.prompt.block_size
        tokens = min(size, len(self.prompt) - block * size)
        return whole_run(block, self.blocks.slots[block], tokens, self.store.pool.geometry)

    def _stream_whole(self, blocks: list[int]) -> None:
        """Blocks that are in the pool already go as they are."""
        self._complete.update(blocks)
        self.streamer.add([self._whole(block) for block in blocks])

    def need(self, blocks: list[int]) -> None:
        """Decode could not fetch these itself. What is not computed yet goes as soon as it is."""
        if any(not 0 <= block < self.prompt.blocks for block in blocks):
            raise ProtocolError(f"the prompt has {self.prompt.blocks} blocks", field="blocks")
        self._late.update(blocks)
        self._need_now([block for block in blocks if block in self._complete])

    def _need_now(self, blocks: list[int]) -> None:
        self._late.difference_update(blocks)
        self.streamer.need([self._whole(block) for block in blocks])

    # -- decode --------------------------------------------------------------------------------------------------

    async def _ask_landing(self) -> None:
        """Rule: resend_landing. A refusal, or decode's death, ends the attempt; the error's field says whose it was."""
        self.service.table.move(self.key, Phase.LANDING)
        age = int(1000 * (self.service.now() - self.born))
        request = LandingRequest(
            sender=self.service.ref,
            target=self.submit.decode,
            request=self.key[0],
            attempt=self.key[1],
            admission=msgspec.structs.replace(self.submit.admission, age_ms=age),
            agent=self.store.agent,
        )
        grant = await self._insist(request)
        if not isinstance(grant, LandingGrant) or len(grant.slots) != self.prompt.blocks:
            raise ProtocolError("the answer is no landing for this prompt", field="decode")
        bits = int.from_bytes(grant.have, "little")
        have = frozenset(i for i in range(self.prompt.blocks) if bits >> i & 1)
        self.streamer.grant(LandingTarget(grant.agent, grant.token, grant.slots, grant.segment), have)

    async def _start(self, output: Output, usage: Usage) -> None:
        """Rule: resend_start. Returns when decode has everything, or is over with the attempt."""
        start = Start(
            sender=self.service.ref,
            target=self.submit.decode,
            request=self.key[0],
            attempt=self.key[1],
            output=output,
            usage=usage,
        )
        while True:
            answer = await self._insist(start)
            if isinstance(answer, Ready) and answer.complete:
                return

    async def _insist(self, message: LandingRequest | Start) -> object:
        try:
            return await self.service.courier.insist(self.submit.decode, message, self.service.settings.peer_timeout_s)
        except MooncakeError as e:
            raise type(e)(e.message, field="decode", retry_after_ms=e.retry_after_ms) from e

    async def _release_decode(self, output: Output, usage: Usage) -> None:
        """The first token was the last: decode lets go of its admission at once (else the live list would tell it)."""
        try:
            await self._start(output, usage)
        except MooncakeError as e:
            self.service.log.debug("decode did not hear of the end", error=e.code)
