"""A decode instance: its messages, and what its attempts share."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

from services.decode.decoder import Decoder
from services.decode.job import DecodeJob
from services.decode.room import Room
from services.decode.settings import DecodeSettings
from shared.bus import Bus
from shared.engines.base import Engine, KVStore
from shared.errors import ContextLengthExceeded, ProtocolError, StaleIncarnation, UnknownAttempt
from shared.instance.attempts import Key, Phase
from shared.instance.compute import Compute
from shared.instance.instance import Instance, key_of
from shared.instance.job import Prompt
from shared.messages import (
    Admission,
    Admit,
    AnyMessage,
    LandingGrant,
    LandingRequest,
    Load,
    Ready,
    Ref,
    Start,
)
from shared.telemetry import gauge, held_gauge


class Decode(Instance[DecodeJob]):
    """Owns the batch loop (``decoder.run`` is one of its background tasks). ``engine`` is bound to ``store.pool``."""

    role = "decode"

    def __init__(
        self, ref: Ref, bus: Bus, store: KVStore, engine: Engine, compute: Compute, settings: DecodeSettings
    ) -> None:
        super().__init__(ref, bus, silence=settings.silence_s)
        self.engine, self.compute, self.settings = engine, compute, settings
        self.decoder = Decoder(self, settings.max_batch)
        self._reserved = held_gauge("decode_reserved_blocks")
        self._usage = gauge("vllm:kv_cache_usage_perc", "Part of the pool that requests and promises take, 0 to 1.")
        self.attach(store)

    def attach(self, store: KVStore) -> None:
        self.store = store
        self.listen(store)
        self.room = Room(store.pool.slots, self.engine.namespace.block_size, self.settings.headroom)

    def background(self) -> list[Coroutine[Any, Any, None]]:
        return [*super().background(), self.decoder.run()]

    async def dispatch(self, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, Admit):
            self._admit(key_of(message), message.admission, message.prefill)
            self.table.count_from(key_of(message), message.admission.lists)
            return self.accepted(message)
        if isinstance(message, LandingRequest):
            return await self._land(message)
        if isinstance(message, Start):
            return await self._start(message)
        raise ProtocolError(f"a decode instance takes no {type(message).__name__}")

    # -- admission -------------------------------------------------------------------------------------------------

    def _admit(self, key: Key, admission: Admission, prefill: Ref) -> None:
        """Take the attempt in, once. Raises NoRoom, DoesNotFit, Draining, Tombstoned."""
        if self.table.phase(key) is not None:
            self.table.accept(key, admission.gateway, Phase.ADMITTED, admission.lists, self.now())
            return
        self.check_open()
        prompt = Prompt(admission, self.engine.namespace.block_size)
        if len(prompt) >= self.engine.context_length:
            limit = self.engine.context_length
            raise ContextLengthExceeded(f"{len(prompt)} tokens, the context has {limit}", field="prompt")
        left = admission.sampling.max_tokens - prompt.first
        self.room.promise(key, len(prompt), min(left, admission.expected_output or self.settings.expected_output))
        self._reserved.set(self.room.promised)
        self._usage.set(1 - self.room.free / self.room.total if self.room.total else 0.0)
        self.table.accept(key, admission.gateway, Phase.ADMITTED, admission.lists, self.now())
        self.launch(DecodeJob(self, key, admission, prefill, prompt))

    def free_room(self, key: Key) -> None:
        """The attempt's promise is over."""
        self.room.release(key)
        self._reserved.set(self.room.promised)

    # -- prefill -----------------------------------------------------------------------------------------------------

    async def _land(self, message: LandingRequest) -> LandingGrant | None:
        key = key_of(message)
        self._admit(key, message.admission, message.sender)  # rule: landing_admits
        job = self._job(key, message.sender)
        granted = await job.land(message.agent)
        if granted is None:
            return None
        landing, have = granted
        bits = sum(1 << block for block in have)
        return LandingGrant(
            sender=self.ref,
            target=message.sender,
            request=message.request,
            attempt=message.attempt,
            agent=job.store.agent,
            token=landing.token,
            slots=[one.slot for one in landing.held],
            have=bits.to_bytes(-(-len(landing.held) // 8), "little"),
        )

    async def _start(self, message: Start) -> Ready:
        key, output = key_of(message), message.output
        if output.finish:
            self._conclude(key, message)
            return self._ready(message, True)
        if self.table.phase(key) in (Phase.DONE, Phase.DROPPED):
            return self._ready(message, True)
        complete = await self._job(key, message.sender).start(output, message.usage)
        return self._ready(message, complete)

    def _conclude(self, key: Key, message: Start) -> None:
        """The first token was the last: let go of everything; only the output is kept, for ``since``."""
        if self.table.phase(key) is Phase.DROPPED:
            return
        if self.table.conclude(key, self.now()) or key not in self.jobs:
            self.outputs.add(key, message.output, message.usage)
            self.outputs.end(key, self.now())
        if (job := self.jobs.get(key)) is not None:
            job.cancel()

    def _job(self, key: Key, prefill: Ref) -> DecodeJob:
        job = self.jobs.get(key)
        attempt = self.table.get(key)
        if job is None or attempt is None or not attempt.phase.held:
            raise UnknownAttempt(f"attempt {key[1]} of {key[0]} is not held here")
        if job.prefill != prefill:
            raise StaleIncarnation("the attempt belongs to another prefill instance", field="prefill")
        return job

    def _ready(self, message: Start, complete: bool) -> Ready:
        return Ready(
            sender=self.ref,
            target=message.sender,
            request=message.request,
            attempt=message.attempt,
            complete=complete,
        )

    def load(self) -> Load:
        self._reserved.set(self.room.promised)
        return Load(
            queued=len(self.jobs) - len(self.decoder.batch),
            running=len(self.decoder.batch),
            batch_limit=self.decoder.batch.limit,
            kv_tokens=self.decoder.batch.kv_tokens,
            total_blocks=self.room.total,
            room_blocks=self.room.free,
            progress=self.compute.progress,
            busy=self.compute.busy,
            draining=self.refuses,
        )
