"""The decode loop: one step after the other over whatever is in the batch."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from opentelemetry.trace import INVALID_SPAN, Span

from services.decode.batch import Batch
from services.decode.sequence import Sequence
from shared.engines.base import Drawn, Owner, PoolClass
from shared.errors import DeadlineExceeded, DoesNotFit, InternalError, MooncakeError, NoRoom, PoolFull
from shared.instance.attempts import Key
from shared.instance.holds import Holds
from shared.instance.tracing import shared_span
from shared.messages import Output, Ref, Usage
from shared.tasks import settle
from shared.telemetry import counter, histogram

if TYPE_CHECKING:
    from services.decode.service import Decode


@dataclass(eq=False)
class Running:
    """A sequence with what its job lends to the loop. ``over`` ends with the sequence, ``filled`` tells of new full
    blocks; ``indexed`` is set while the block index has all of them. ``last``: the final output, where it has to wait
    for that (rule: the next turn finds this one's blocks)."""

    sequence: Sequence
    holds: Holds
    owner: Owner
    over: asyncio.Future[None]
    filled: asyncio.Event = field(default_factory=asyncio.Event)
    indexed: asyncio.Event = field(default_factory=asyncio.Event)
    last: Output | None = None
    span: Span = INVALID_SPAN

    def fill(self) -> None:
        """There are full blocks to commit."""
        self.indexed.clear()
        self.filled.set()

    def fail(self, error: MooncakeError) -> None:
        if not self.over.done():
            self.over.set_exception(error)

    def end(self) -> None:
        if not self.over.done():
            self.over.set_result(None)


def is_sampled(index: int) -> bool:
    """Whether output ``index`` is an event of its trace: 1, 2, 4, 8 and so on."""
    return index & (index - 1) == 0


class Decoder:
    """Owns the batch. Steps run on the instance's compute thread."""

    def __init__(self, service: Decode, limit: int) -> None:
        self.batch = Batch(limit)
        self._service = service
        self._by_key: dict[Key, Running] = {}
        self._wake = asyncio.Event()
        self._boundary: asyncio.Future[None] | None = None
        self._steps = histogram("decode_step_seconds", "Duration of a decode step.")
        self._tokens = counter("decode_tokens", "Output tokens drawn.")
        self._generated = counter("vllm:generation_tokens", "Output tokens drawn.")

    async def decode(self, running: Running) -> None:
        """Run a sequence to its end. On return, or when cancelled or failed, no step uses its slots any more."""
        sequence = running.sequence
        self._by_key[sequence.key] = running
        self.batch.add(sequence)
        self._wake.set()
        try:
            await running.over
        finally:
            self.batch.remove(sequence)
            self._by_key.pop(sequence.key, None)
            if self._boundary is not None:
                await settle(self._boundary)

    async def run(self) -> None:
        """For ever."""
        while True:
            if not len(self.batch):
                self._wake.clear()
                await self._wake.wait()
            await self._turn()

    async def _turn(self) -> None:
        """One step, between two boundaries. Whatever fails ends sequences, never the loop."""
        self._boundary = asyncio.get_running_loop().create_future()
        try:
            self.batch.join()
            await self._grow()
            await self._step()
        except MooncakeError as e:  # the store agent is gone
            self._fail_all(e)
        except Exception as e:
            self._service.log.error("decode step failed", exc_info=e)
            self._fail_all(InternalError(f"{type(e).__name__}: {e}"))
        finally:
            self._boundary.set_result(None)
            self._boundary = None

    def _fail_all(self, error: MooncakeError) -> None:
        for sequence in list(self.batch.running):
            self._fail(sequence, error)

    # -- growth ------------------------------------------------------------------------------------------------

    async def _grow(self) -> None:
        """A slot for everybody who needs one; the youngest give way when there are too few."""
        for sequence in self.batch.starving():
            while sequence in self.batch.running and not await self._slot(sequence):
                youngest = self.batch.youngest() or sequence
                self._fail(youngest, NoRoom("no room to grow; the youngest gives way"))
                await self._let_go(youngest)

    async def _slot(self, sequence: Sequence) -> bool:
        running, timeout = self._by_key[sequence.key], self._service.settings.growth_timeout_s
        try:
            call = running.holds.store.allocate(1, running.owner, PoolClass.GROWTH, timeout)
            sequence.held += await running.holds.take(call)
        except (PoolFull, DoesNotFit, DeadlineExceeded):
            return False
        self._service.room.grow(sequence.key, len(sequence.held))
        return True

    async def _let_go(self, sequence: Sequence) -> None:
        """No step is running: its slots can go at once, before its job notices."""
        if (running := self._by_key.get(sequence.key)) is not None:
            await running.holds.close()

    def _fail(self, sequence: Sequence, error: MooncakeError) -> None:
        self.batch.remove(sequence)
        if (running := self._by_key.get(sequence.key)) is not None:
            running.fail(error)

    # -- the step ------------------------------------------------------------------------------------------------

    async def _step(self) -> None:
        batch = list(self.batch.running)
        if not batch:
            return
        began = self._service.now()
        sampled = [self._by_key[one.key].span for one in batch if is_sampled(one.index)]
        with shared_span("decode step", sampled, sequences=len(batch), kv_tokens=self.batch.kv_tokens):
            drawn = await self._compute(batch)
        self._steps.observe(self._service.now() - began)
        entries: dict[Ref, list[tuple[Key, Output, Usage | None]]] = {}
        for sequence, draw in zip(batch, drawn, strict=True):
            if sequence in self.batch.running:
                self._accept(sequence, draw, entries)
        for gateway, outputs in entries.items():
            self._service.courier.publish(gateway, outputs)

    async def _compute(self, batch: Seq[Sequence]) -> list[Drawn | None]:
        """One engine step. When it fails, each sequence is tried alone, so that only the culprit ends."""
        works = [sequence.work() for sequence in batch]
        try:
            return await self._service.compute.run(lambda: self._service.engine.step(works))
        except Exception as e:
            if len(batch) == 1:
                self._service.log.error("engine failed", request=batch[0].key[0], exc_info=e)
                self._fail(batch[0], InternalError(f"the engine failed: {type(e).__name__}"))
                return [None]
        return [drawn for sequence in batch for drawn in await self._compute([sequence])]

    def _accept(
        self, sequence: Sequence, drawn: Drawn | None, entries: dict[Ref, list[tuple[Key, Output, Usage | None]]]
    ) -> None:
        running = self._by_key[sequence.key]
        if is_sampled(sequence.index) and running.span.is_recording():
            batch = len(self.batch.running)
            running.span.add_event("token", {"mooncake.index": sequence.index, "mooncake.batch": batch})
        sequence.stepped()
        if sequence.flushing or drawn is None:
            running.fill()
            self._end(running)
            return
        output = sequence.accept(drawn.token, self._service.context_length, drawn.logprob, drawn.top)
        self._tokens.inc()
        self._generated.inc()
        if sequence.done % sequence.size == 0:
            running.fill()
        if output.finish:
            self._finish(running, output)
            if running.last is not None:
                return
        self._service.outputs.add(sequence.key, output)
        entries.setdefault(sequence.gateway, []).append((sequence.key, output, None))

    def _finish(self, running: Running, output: Output) -> None:
        """The last token. It is held back while blocks are still to be computed, committed or indexed: who has it may
        ask the next question at once, and must find them."""
        sequence = running.sequence
        sequence.flushing = sequence.fills_with_last
        if sequence.flushing or not running.indexed.is_set():
            running.last = output
        else:
            self._service.finish(sequence.key)
        if not sequence.flushing:
            self._end(running)

    def _end(self, running: Running) -> None:
        self.batch.remove(running.sequence)
        running.end()
