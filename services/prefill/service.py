"""A prefill instance: its messages, and what its attempts share."""

from __future__ import annotations

import asyncio

from services.prefill.job import PrefillJob
from services.prefill.queue import PrefillQueue, due_at
from services.prefill.replicas import ReplicaKeeper
from services.prefill.settings import PrefillSettings
from services.prefill.turns import Turns
from shared.bus import Bus
from shared.engines.base import Engine, KVStore
from shared.errors import ContextLengthExceeded, DoesNotFit, ProtocolError, UnknownAttempt
from shared.instance.attempts import Phase
from shared.instance.compute import Compute
from shared.instance.instance import Instance, key_of
from shared.instance.job import Prompt
from shared.instance.pool import PoolView
from shared.latency import PrefillModel
from shared.messages import Accepted, AnyMessage, Load, Need, Ref, Replicas, Submit, Usage
from shared.telemetry import counter, exemplar, histogram


class Prefill(Instance[PrefillJob]):
    """Owns the queue and the compute thread. ``engine`` is bound to ``store.pool``."""

    role = "prefill"

    def __init__(
        self,
        ref: Ref,
        bus: Bus,
        store: KVStore,
        engine: Engine,
        compute: Compute,
        model: PrefillModel,
        settings: PrefillSettings,
    ) -> None:
        super().__init__(ref, bus, silence=settings.silence_s)
        self.engine, self.compute, self.settings = engine, compute, settings
        self.queue = PrefillQueue(model)
        self.turns = Turns(self.queue)
        self.replicas = ReplicaKeeper(ref, lambda: self.store, settings.fetch_timeout_s)
        self.fetching = asyncio.Semaphore(settings.fetches)
        self._waited = histogram("prefill_queue_seconds", "From submit to the first chunk.")
        self._took = histogram("prefill_seconds", "From the first chunk to the first token.")
        self._cached = counter("prefill_cached_tokens", "Prompt tokens that were not computed.")
        self._tokens = counter("prefill_tokens", "Prompt tokens computed.")
        self._prompts = counter("vllm:prompt_tokens", "Tokens of prompts that are done, cached ones included.")
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens looked for in the cache.")
        self._hits = counter("vllm:prefix_cache_hits", "Of these, tokens found.")
        self.attach(store)

    def attach(self, store: KVStore) -> None:
        self.store = store
        self.listen(store)
        self.pool_view = PoolView(store.pool)

    async def dispatch(self, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, Submit):
            return self._submit(message)
        if isinstance(message, Need):
            return self._need(message)
        if isinstance(message, Replicas):
            return await self.replicas.carry_out(message)
        raise ProtocolError(f"a prefill instance takes no {type(message).__name__}")

    def _submit(self, message: Submit) -> Accepted:
        key, admission = key_of(message), message.admission
        if self.table.phase(key) is None:
            self.check_open()
            prompt = self._checked(message)
            now = self.now()
            self.table.accept(key, admission.gateway, Phase.QUEUED, admission.lists, now)
            job = PrefillJob(self, message, prompt, now - admission.age_ms / 1000)
            due = due_at(now, admission.deadline_ms, admission.priority)
            self.queue.join(key, due, job.born, len(prompt), job.done)
            self.launch(job)
        else:
            self.table.accept(key, admission.gateway, Phase.QUEUED, admission.lists, self.now())
        return self.accepted(message)

    def _checked(self, message: Submit) -> Prompt:
        prompt = Prompt(message.admission, self.engine.namespace.block_size)
        if len(prompt) >= self.engine.context_length:
            limit = self.engine.context_length
            raise ContextLengthExceeded(f"{len(prompt)} tokens, the context has {limit}", field="prompt")
        if prompt.blocks + 1 > self.store.pool.slots:
            raise DoesNotFit(f"{prompt.blocks + 1} blocks, the pool has {self.store.pool.slots}")
        return prompt

    def _need(self, message: Need) -> Accepted:
        job = self.jobs.get(key_of(message))
        if job is None:
            raise UnknownAttempt(f"attempt {message.attempt} of {message.request} is not held here")
        job.need(message.blocks)
        return self.accepted(message)

    def first_token(self, usage: Usage, prompt_tokens: int) -> None:
        self._waited.observe(usage.queue_ms / 1000, exemplar())
        self._took.observe(usage.prefill_ms / 1000, exemplar())
        self._cached.inc(usage.cached_tokens)
        self._hits.inc(usage.cached_tokens)
        self._prompts.inc(prompt_tokens)
        self._queries.inc(prompt_tokens)

    def chunk_done(self, tokens: int) -> None:
        self._tokens.inc(tokens)

    def load(self) -> Load:
        return Load(
            queued=len(self.queue),
            queued_tokens=self.queue.queued_tokens,
            queue_ms=self.queue.queue_ms(),
            running=len(self.jobs),
            total_blocks=self.store.pool.slots,
            progress=self.compute.progress,
            busy=self.compute.busy,
            draining=self.refuses,
        )
