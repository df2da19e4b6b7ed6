"""Scripted prefill and decode instances on a bus, after the rules of the checked models."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import numpy as np

from services.conductor.generation import Generation
from shared.blocks import Namespace, unpack_tokens
from shared.errors import (
    BusDown,
    DeadlineExceeded,
    MooncakeError,
    NoResponders,
    NoRoom,
    ProtocolError,
    Tombstoned,
    UnknownAttempt,
)
from shared.latency import DecodeModel, PrefillModel
from shared.memory_bus import MemoryBus, MemoryConnection
from shared.messages import (
    Accepted,
    Admission,
    Admit,
    AnyMessage,
    AttemptMessage,
    Cancel,
    Gone,
    LandingGrant,
    LandingRequest,
    LiveList,
    LiveReply,
    Load,
    Output,
    Ready,
    Ref,
    RefusedReply,
    Since,
    SinceReply,
    Start,
    Submit,
    TokenBatch,
    TokenEntry,
    Usage,
)
from shared.records import DECODE, PREFILL, InstanceRecord

NAMESPACE = Namespace(
    model="m", weights="w", tokenizer="t", dtype="float32", layers=2, kv_heads=1, head_dim=4, block_size=4
)
Id = tuple[str, int]
MISSES = 3


class Stage(Protocol):
    """Where fakes live: their bus, and how long they take."""

    network: MemoryBus
    prefill_seconds: float
    step_seconds: float


def next_token(prompt: Any, index: int) -> int:
    """What every instance draws: depends on the original prompt and the position alone."""
    return int(1 + (int(np.asarray(prompt, dtype=np.int64).sum()) * 31 + index * 7919) % 9973)


def expected(generation: Generation) -> list[int]:
    return [next_token(generation.tokens, i) for i in range(generation.sampling.max_tokens)]


@dataclass
class Held:
    """One attempt at a fake. ``misses``: counted lists in a row that did not hold it."""

    gateway: Ref
    admission: Admission
    base: int
    misses: int = 0
    outputs: list[Output] = field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def drawn(self) -> int:
        """Outputs that the admission's tokens contain already."""
        return len(self.admission.tokens) // 4 - self.admission.prompt_tokens

    @property
    def prompt(self) -> Any:
        return unpack_tokens(self.admission.tokens)[: self.admission.prompt_tokens]


class Fake:
    """What prefill and decode share: attempts, tombstones, live lists, kept outputs.

    ``refuse``: how many attempts to refuse next. ``room``: blocks reported. ``mute``: answers and says nothing.
    """

    role = ""

    def __init__(self, world: Stage, id: str, incarnation: int) -> None:
        self.world = world
        self.ref = Ref(id, incarnation)
        self.bus: MemoryConnection = world.network.join(f"{id}.{incarnation}")
        self.held: dict[Id, Held] = {}
        self.dead: set[Id] = set()
        self.done: dict[Id, Held] = {}
        self.lists: dict[Ref, tuple[int, float]] = {}
        self.refuse = 0
        self.refuse_landing = 0
        self.refuse_with: MooncakeError = NoRoom("scripted refusal")
        self.room = 1000
        self.draining = False
        self.accepted = 0
        self.closed = False
        self.tasks: set[asyncio.Task[None]] = set()

    async def start(self) -> Self:
        await self.bus.serve(self.ref.id, self.handle)
        self.spawn(self.watch_gateways())
        return self

    def spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
        return task

    def kill(self) -> None:
        self.closed = True
        self.bus.abort()
        for task in self.tasks:
            task.cancel()

    @property
    def load(self) -> Load:
        queued = sum(not h.outputs for h in self.held.values())
        return Load(
            queued=queued,
            queue_ms=queued * 50.0,
            running=len(self.held),
            total_blocks=1000,
            room_blocks=self.room,
            draining=self.draining,
        )

    def record(self) -> InstanceRecord:
        return InstanceRecord(
            ref=self.ref,
            role=self.role,
            node=self.ref.id,
            model="m",
            namespace=NAMESPACE,
            proof=NAMESPACE.proof(),
            agent=Ref(f"{self.ref.id}-agent", self.ref.incarnation),
            context_length=10_000,
            prefill=PrefillModel(0.01, 1e-4, 0.0),
            decode=DecodeModel(0.01, 0.001, 0.0),
        )

    async def handle(self, message: AnyMessage) -> AnyMessage | None:
        if message.target.incarnation != self.ref.incarnation:
            if isinstance(message, AttemptMessage):
                return self.answer(message, RefusedReply, error=UnknownAttempt("another incarnation").to_wire())
            return None
        match message:
            case LiveList():
                return self.on_list(message)
            case Cancel():
                self.drop((message.request, message.attempt))
                return self.answer(message, Accepted)
            case Since():
                return self.on_since(message)
            case AttemptMessage():
                return await self.on_attempt(message)
        return None

    async def on_attempt(self, message: AttemptMessage) -> AnyMessage | None:
        raise ProtocolError(f"this instance takes no {type(message).__name__}")

    def answer(self, message: AttemptMessage, kind: Any, **more: Any) -> AnyMessage:
        made: AnyMessage = kind(
            sender=self.ref, target=message.sender, request=message.request, attempt=message.attempt, **more
        )
        return made

    def admit(self, message: Submit | Admit | LandingRequest) -> Held:
        """The first to come admits. Raises Tombstoned, NoRoom."""
        id = (message.request, message.attempt)
        if id in self.dead:
            raise Tombstoned("dropped before")
        if id in self.held:
            return self.held[id]
        if id in self.done:
            return self.done[id]
        if self.refuse > 0:
            self.refuse -= 1
            self.dead.add(id)
            raise self.refuse_with
        self.accepted += 1
        self.held[id] = Held(message.admission.gateway, message.admission, message.admission.lists)
        return self.held[id]

    def drop(self, id: Id) -> None:
        if id in self.done:
            return
        held = self.held.pop(id, None)
        self.dead.add(id)
        if held and held.task:
            held.task.cancel()

    def forget(self, id: Id) -> None:
        """As if it had never been here."""
        task = self.held.pop(id).task
        if task:
            task.cancel()

    def finish(self, id: Id) -> None:
        held = self.held.pop(id, None)
        if held:
            self.done[id] = held

    def on_list(self, message: LiveList) -> LiveReply:
        last, _ = self.lists.get(message.sender, (0, 0.0))
        listed = {(request, attempt) for request, attempt, _ in message.attempts}
        if message.number > last:
            self.lists[message.sender] = (message.number, asyncio.get_running_loop().time())
            for id, held in list(self.held.items()):
                if held.gateway == message.sender and message.number > held.base:
                    held.misses = 0 if id in listed else held.misses + 1
                    if held.misses >= MISSES:
                        self.drop(id)
        for acked in message.acked:
            if kept := self.done.get((acked[0], acked[1])):
                kept.outputs.clear()
        unknown = [
            (request, attempt)
            for request, attempt, accepted in message.attempts
            if accepted and (request, attempt) not in self.held and (request, attempt) not in self.done
        ]
        return LiveReply(sender=self.ref, target=message.sender, number=message.number, unknown=unknown, load=self.load)

    async def watch_gateways(self) -> None:
        """A gateway that is silent as long as three lists is dead."""
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(0.5)
            for id, held in list(self.held.items()):
                _, heard = self.lists.get(held.gateway, (0, 0.0))
                if self.bus.connected and heard and loop.time() - heard > 4.0:
                    self.drop(id)

    def on_since(self, message: Since) -> AnyMessage:
        id = (message.request, message.attempt)
        held = self.held.get(id) or self.done.get(id)
        if held is None:
            raise UnknownAttempt("not here")
        outputs = [output for output in held.outputs if output.index >= message.index]
        return self.answer(message, SinceReply, index=message.index, outputs=outputs, usage=Usage(cached_tokens=1))

    async def publish(self, id: Id, held: Held, output: Output, usage: Usage | None = None) -> None:
        held.outputs.append(output)
        entries = [TokenEntry(id[0], id[1], output, usage)]
        try:
            await self.bus.send(held.gateway.id, TokenBatch(sender=self.ref, target=held.gateway, entries=entries))
        except BusDown:
            return

    def draw(self, held: Held, index: int) -> Output:
        last = index + 1 >= held.admission.sampling.max_tokens
        return Output(index, next_token(held.prompt, index), "length" if last else "")

    async def insist(self, id: str, message: AnyMessage) -> AnyMessage | None:
        """Repeats until answered; None when nobody is there any more."""
        while True:
            try:
                return await self.bus.request(id, message, 0.5)
            except (DeadlineExceeded, BusDown):
                await asyncio.sleep(0.1)
            except NoResponders:
                return None


class FakePrefill(Fake):
    """One prompt after the other, 50 ms each."""

    role = PREFILL

    def __init__(self, world: Stage, id: str, incarnation: int) -> None:
        super().__init__(world, id, incarnation)
        self.gpu = asyncio.Lock()
        self.prompts: list[int] = []

    async def on_attempt(self, message: AttemptMessage) -> AnyMessage | None:
        assert isinstance(message, Submit)
        held = self.admit(message)
        if held.task is None:
            held.task = self.spawn(self.work((message.request, message.attempt), held, message))
        return self.answer(message, Accepted, load=self.load)

    async def work(self, id: Id, held: Held, submit: Submit) -> None:
        async with self.gpu:
            landing = LandingRequest(
                sender=self.ref,
                target=submit.decode,
                request=id[0],
                attempt=id[1],
                admission=held.admission,
                agent=Ref("agent", 1),
            )
            granted = await self.insist(submit.decode.id, landing)
            if not isinstance(granted, LandingGrant):
                await self.give_up(id, held, granted)
                return
            await asyncio.sleep(self.world.prefill_seconds)
            self.prompts.append(len(held.admission.tokens) // 4)
        output = self.draw(held, held.drawn)
        await self.publish(id, held, output, Usage(cached_tokens=1))
        if not output.finish:
            start = Start(sender=self.ref, target=submit.decode, request=id[0], attempt=id[1], output=output)
            await self.insist(submit.decode.id, start)
            held.outputs.clear()
        self.finish(id)

    async def give_up(self, id: Id, held: Held, refused: AnyMessage | None) -> None:
        self.drop(id)
        error = NoRoom("decode refused the landing", field="decode").to_wire()
        gone = Gone(sender=self.ref, target=held.gateway, request=id[0], attempt=id[1], error=error)
        await self.bus.send(held.gateway.id, gone)


class FakeDecode(Fake):
    """A token every ``world.step_seconds`` for each attempt."""

    role = DECODE

    async def on_attempt(self, message: AttemptMessage) -> AnyMessage | None:
        id = (message.request, message.attempt)
        if isinstance(message, Admit):
            self.admit(message)
            return self.answer(message, Accepted, load=self.load)
        if isinstance(message, LandingRequest):
            if self.refuse_landing > 0:
                self.refuse_landing -= 1
                self.drop(id)
                raise NoRoom("scripted refusal of a landing")
            self.admit(message)
            return self.answer(message, LandingGrant, agent=Ref("agent", 1), token=1, slots=[], have=b"")
        assert isinstance(message, Start)
        held = self.held.get(id)
        if held and held.task is None:
            held.task = self.spawn(self.work(id, held, message.output))
        if held or id in self.done or id in self.dead:
            return self.answer(message, Ready)
        raise UnknownAttempt("never admitted")

    def seconds(self, index: int) -> float:
        """Until the token at ``index``, from the one before."""
        return self.world.step_seconds

    async def work(self, id: Id, held: Held, first: Output) -> None:
        held.outputs.append(first)
        for index in itertools.count(first.index + 1):
            await asyncio.sleep(self.seconds(index))
            output = self.draw(held, index)
            await self.publish(id, held, output)
            if output.finish:
                break
        self.finish(id)
