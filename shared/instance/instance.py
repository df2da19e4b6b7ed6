"""The control side of an instance: who may do what to which attempt, whatever the bus loses, repeats or reorders.

Prefill and decode derive from :class:`Instance` and add the messages of their own. Every handler is idempotent.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from opentelemetry import trace

from shared.bus import Bus
from shared.engines.base import Aborting, Engine, KVStore
from shared.errors import Draining, MooncakeError, NoRoom, StaleIncarnation, UnknownAttempt
from shared.instance.attempts import AttemptTable, Key, Phase
from shared.instance.courier import Courier
from shared.instance.job import Job, cause
from shared.instance.outputs import OutputLog
from shared.messages import (
    Accepted,
    AnyMessage,
    AttemptMessage,
    Cancel,
    Gone,
    LiveList,
    LiveReply,
    Load,
    Ref,
    Since,
    SinceReply,
)
from shared.telemetry import bound, counter, gauge, held, log

TICK_S = 0.1
SETTLE_S = 5.0
SPARE = 20
"""One slot of so many, and one more, is no single request's: the store keeps some for growth."""

J = TypeVar("J", bound=Job)


def key_of(message: AttemptMessage) -> Key:
    return message.request, message.attempt


class Instance(ABC, Generic[J]):
    """``jobs`` holds the attempts at work; ``table`` what is known of all; ``outputs`` what ``since`` answers from."""

    role = ""
    store: KVStore
    engine: Engine

    def __init__(self, ref: Ref, bus: Bus, *, silence: float = 3.0) -> None:
        self.ref = ref
        self.bus = bus
        self.table = AttemptTable(silence)
        self.courier = Courier(ref, bus, self.table.clock)
        self.outputs = OutputLog()
        self.jobs: dict[Key, J] = {}
        self.draining = False
        self.closed: MooncakeError | None = None
        self.snapshot = Load()
        self.log = log(self.role)
        self._running = gauge("vllm:num_requests_running", "Requests in the engine now.")
        self._waiting = gauge("vllm:num_requests_waiting", "Requests that wait for the engine.")
        self._ended = counter(f"{self.role}_attempts", "Attempts that ended, by outcome.", ("outcome",))
        bus.on_change(lambda up: self.table.clock.link(up, self.now()))

    @abstractmethod
    def load(self) -> Load:
        """What the scheduler should know now."""

    @property
    def refuses(self) -> bool:
        """True while no new work is taken."""
        return self.draining or self.closed is not None

    @property
    def context_length(self) -> int:
        """Tokens of prompt and output together: the model's limit, or what the node's pool can hold of one request."""
        pool = self.store.pool
        return min(self.engine.context_length, max(pool.slots - pool.slots // SPARE - 1, 1) * pool.geometry.block_size)

    @abstractmethod
    def attach(self, store: KVStore) -> None:
        """Work over this connection from now on. No attempt is held; the engine is bound to its pool by the caller."""

    def listen(self, store: KVStore) -> None:
        """The pool may need room for an older request, or for growth: then one of ours is given up."""
        if isinstance(store, Aborting):
            store.watch_aborts(self._give_way)

    def _give_way(self, owner: str) -> None:
        for job in tuple(self.jobs.values()):
            if job.owner.id == owner:
                self.give_up(job.key, NoRoom("the pool needs the room for an older request"))

    def background(self) -> list[Coroutine[Any, Any, None]]:
        """What runs for ever beside the messages."""
        return [self.tick_forever()]

    @abstractmethod
    async def dispatch(self, message: AnyMessage) -> AnyMessage | None:
        """Handle a message that is this role's own; its target is this incarnation."""

    def now(self) -> float:
        """Seconds on the clock of the event loop, which only this process knows."""
        return asyncio.get_running_loop().time()

    # -- messages --------------------------------------------------------------------------------------------

    async def handle(self, message: AnyMessage) -> AnyMessage | None:
        """The bus handler. Raises what becomes a refusal."""
        if isinstance(message, LiveList):
            return self._live_list(message)
        if message.target != self.ref:  # rule: incarnation
            raise StaleIncarnation(f"this is incarnation {self.ref.incarnation:x} of {self.ref.id}", field="target")
        if isinstance(message, Cancel):
            self.drop(key_of(message), message.sender)
            return self.accepted(message)
        if isinstance(message, Since):
            return self._since(message)
        return await self.dispatch(message)

    def _live_list(self, message: LiveList) -> LiveReply:
        if message.target != self.ref:  # the list means an incarnation that is gone: nothing on it is here
            unknown = [(r, n) for r, n, accepted in message.attempts if accepted]
        else:
            outcome = self.table.listed(message.sender, message.number, message.attempts, self.now())
            for key in outcome.dropped:
                self._dropped(key, "unlisted")
            self.outputs.listed(((r, n) for r, n, _ in message.attempts), self.now())
            self.outputs.acknowledge(message.acked)
            unknown = outcome.unknown
        return LiveReply(
            sender=self.ref, target=message.sender, number=message.number, unknown=unknown, load=self.load()
        )

    def _since(self, message: Since) -> SinceReply:
        key = key_of(message)
        try:
            index, outputs, usage = self.outputs.since(key, message.index, message.most)
        except UnknownAttempt:
            attempt = self.table.get(key)
            if attempt is None or not attempt.phase.held:
                raise
            index, outputs, usage = message.index, [], None  # held, nothing drawn yet
        return SinceReply(
            sender=self.ref,
            target=message.sender,
            request=message.request,
            attempt=message.attempt,
            index=index,
            outputs=outputs,
            usage=usage,
        )

    def accepted(self, message: AttemptMessage) -> Accepted:
        return Accepted(
            sender=self.ref,
            target=message.sender,
            request=message.request,
            attempt=message.attempt,
            load=self.load(),
        )

    # -- the life of an attempt ------------------------------------------------------------------------------

    def check_open(self) -> None:
        """Raises why no new work is taken, if so."""
        if self.draining:
            raise Draining("the instance is shutting down")
        if self.closed is not None:
            raise self.closed

    def launch(self, job: J) -> None:
        """Start the job of an attempt that the table has just accepted."""
        self.jobs[job.key] = job
        job.task = self.courier.spawn(self._work(job))
        job.task.add_done_callback(lambda _: self._over(job))  # runs even when the task never began

    async def _work(self, job: J) -> None:
        outcome = "done"
        try:
            with held(f"{self.role}_attempts"), bound(request=job.key[0], attempt=job.key[1]):
                await job.run()
        except asyncio.CancelledError:
            outcome = "dropped"
        except Exception as e:
            error = cause(e)
            outcome = error.code
            if type(error) is MooncakeError or error.code == "internal":
                self.log.error("attempt failed", request=job.key[0], attempt=job.key[1], exc_info=e)
            self.give_up(job.key, error)
        finally:
            self._ended.labels(outcome).inc()
            self.log.debug("attempt over", request=job.key[0], attempt=job.key[1], outcome=outcome)

    def _over(self, job: J) -> None:
        job.closed()
        if self.jobs.get(job.key) is job:
            del self.jobs[job.key]

    def finish(self, key: Key) -> None:
        """The attempt ended in good order; its outputs stay for ``since``."""
        now = self.now()
        self.table.finish(key, now)
        self.outputs.end(key, now)

    def drop(self, key: Key, gateway: Ref) -> None:
        """Cancelled: leave a tombstone, stop the work; of a finished one, forget the outputs."""
        if self.table.drop(key, gateway, self.now()):
            self._dropped(key, "cancelled")
        elif self.table.phase(key) is Phase.DONE and key not in self.jobs:
            self.outputs.forget([key])

    def give_up(self, key: Key, error: MooncakeError) -> None:
        """End an attempt for a reason of ours, and say so to its gateway at once."""
        attempt = self.table.get(key)
        if attempt is None or not self.table.drop(key, attempt.gateway, self.now()):
            return
        self._dropped(key, error.code)
        self.courier.post(
            attempt.gateway,
            Gone(sender=self.ref, target=attempt.gateway, request=key[0], attempt=key[1], error=error.to_wire()),
        )

    def _dropped(self, key: Key, why: str) -> None:
        self.outputs.forget([key])
        job = self.jobs.get(key)
        with trace.use_span(job.span if job else trace.get_current_span(), end_on_exit=False):
            self.log.debug("attempt dropped", request=key[0], attempt=key[1], why=why)
        if job is not None and job.task is not asyncio.current_task():
            job.cancel()

    # -- running -----------------------------------------------------------------------------------------------

    async def tick_forever(self) -> None:
        """Silence of conductors, expiry of what is remembered, and the load as the heartbeat's thread may read it."""
        while True:
            now = self.now()
            for key in self.table.tick(now):
                self._dropped(key, "silence")
            self.outputs.expire(now)
            self._show(self.load())
            await asyncio.sleep(TICK_S)

    def _show(self, load: Load) -> None:
        """Let the heartbeat's thread and ``/metrics`` see it. The names are those that dashboards of vLLM know."""
        self.snapshot = load
        self._running.set(load.running)
        self._waiting.set(load.queued)

    async def abandon(self, error: MooncakeError) -> None:
        """Give up all attempts, and wait until their work has let go of everything."""
        for key in [a.key for a in self.table.held()]:
            self.give_up(key, error)
        jobs = [job.task for job in self.jobs.values() if job.task is not None]
        if jobs:
            await asyncio.wait(jobs, timeout=SETTLE_S)

    async def drain(self) -> None:
        """Shut down: refuse new work and hand the running over (their gateways resume them elsewhere)."""
        self.draining = True
        await self.abandon(Draining("the instance is shutting down"))
        await self.courier.settled(SETTLE_S)
