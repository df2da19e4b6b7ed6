"""A small mesh in one process: memory bus, memory store, memory engine, real prefill and decode, a model gateway."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import pytest

from services.decode.service import Decode
from services.decode.settings import DecodeSettings
from services.prefill.service import Prefill
from services.prefill.settings import PrefillSettings
from shared import virtual_loop
from shared.blocks import Tokens, chain_keys, pack_tokens
from shared.engines.local import LocalRunner
from shared.engines.memory_engine import MemoryEngine
from shared.engines.memory_store import MemoryNetwork, MemoryNode, MemoryStore
from shared.errors import MooncakeError, Unavailable
from shared.instance.compute import InlineCompute, settle
from shared.latency import PrefillModel
from shared.memory_bus import Faults, MemoryBus, MemoryConnection
from shared.messages import (
    Accepted,
    Admission,
    Admit,
    AnyMessage,
    Cancel,
    Gone,
    LandingRequest,
    LiveList,
    LiveReply,
    Output,
    Ref,
    RefusedReply,
    Sampling,
    Since,
    SinceReply,
    Source,
    Start,
    Submit,
    TokenBatch,
    Usage,
)
from shared.telemetry import held_now

BLOCK = 16
NO_FAULTS = Faults()
PREFILL = PrefillSettings(prefill_chunk=32, pool_timeout_s=2.0)
DECODE = DecodeSettings(headroom=0.0, expected_output=16, pool_timeout_s=2.0)
T = TypeVar("T")


class Left(Exception):
    """The attempt is over without an end: try another."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass
class Stream:
    """One attempt as the gateway sees it."""

    request: str
    attempt: int
    prefill: Ref
    decode: Ref
    delivered: list[Output]
    buffered: dict[int, Output] = field(default_factory=dict)
    usage: Usage | None = None
    accepted: set[str] = field(default_factory=set)
    decoding: bool = False
    error: str = ""
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def take(self, output: Output, usage: Usage | None) -> None:
        if output.index >= len(self.delivered):
            self.buffered.setdefault(output.index, output)
        self.usage = self.usage or usage
        while (following := self.buffered.pop(len(self.delivered), None)) is not None:
            self.delivered.append(following)
        self.changed.set()

    def leave(self, why: str) -> None:
        self.error = self.error or why
        self.changed.set()

    @property
    def ended(self) -> bool:
        return bool(self.delivered) and bool(self.delivered[-1].finish)


@dataclass
class Answer:
    tokens: list[int]
    finish: str
    usage: Usage | None
    attempts: int
    errors: list[str]


class Gateway:
    """Follows the models' rules for a gateway; short, and for tests only."""

    def __init__(self, mesh: Mesh, name: str = "g") -> None:
        self.mesh, self.ref = mesh, Ref(name, 99)
        self.bus = mesh.net.join(name)
        self.streams: dict[tuple[str, int], Stream] = {}
        self.number = 0
        self.acked: list[tuple[str, int]] = []
        self.names = itertools.count(1)
        self.events: list[str] = []

    async def start(self) -> None:
        await self.bus.serve(self.ref.id, self.handle)
        self.mesh.tasks.append(asyncio.ensure_future(self.list_forever()))

    async def handle(self, message: AnyMessage) -> None:
        if isinstance(message, TokenBatch):
            for entry in message.entries:
                if (stream := self.streams.get((entry.request, entry.attempt))) is not None:
                    stream.decoding |= message.sender == stream.decode
                    stream.take(entry.output, entry.usage)
        elif isinstance(message, Gone) and (stream := self.streams.get((message.request, message.attempt))):
            stream.leave(message.error.code)

    async def list_forever(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            self.number += 1
            for ref in {r for s in [*self.streams.values(), *self.mesh.known()] for r in (s.prefill, s.decode)}:
                self.mesh.tasks.append(asyncio.ensure_future(self.send_list(ref)))

    async def send_list(self, ref: Ref) -> None:
        attempts = [
            (s.request, s.attempt, ref.id in s.accepted)
            for s in self.streams.values()
            if s.decode == ref or (s.prefill == ref and not s.decoding)
        ]
        message = LiveList(sender=self.ref, target=ref, number=self.number, attempts=attempts, acked=self.acked[-100:])
        with contextlib.suppress(MooncakeError):
            reply = await self.bus.request(ref.id, message, 1.0)
            if isinstance(reply, LiveReply):
                for key in reply.unknown:
                    if (stream := self.streams.get(key)) is not None and reply.sender == ref:
                        stream.leave("unknown")

    def admission(self, tokens: Tokens, prompt: int, sampling: Sampling, sources: Sequence[Source]) -> Admission:
        root = self.mesh.namespace.root()
        return Admission(
            gateway=self.ref,
            tokens=pack_tokens(tokens),
            prompt_tokens=prompt,
            root=root,
            keys=chain_keys(root, tokens, self.mesh.namespace.block_size),
            sampling=sampling,
            lists=self.number,
            sources=list(sources),
        )

    async def run(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        *,
        pairs: Sequence[tuple[int, int]] = ((0, 0),),
        fetch: int = 0,
        sources: Sequence[Source] = (),
        attempts: int = 30,
        name: str = "",
    ) -> Answer:
        """A whole request, migrating as often as it must; ``pairs`` are (prefill, decode) to use in turn."""
        request, delivered, errors = name or f"r{next(self.names)}", list[Output](), list[str]()
        usage: Usage | None = None
        for attempt in range(1, attempts + 1):
            p, d = pairs[(attempt - 1) % len(pairs)]
            prefill, decode = self.mesh.prefills[p].ref, self.mesh.decodes[d].ref
            stream = self.streams[request, attempt] = Stream(request, attempt, prefill, decode, delivered)
            sent = np.array([*tokens, *(o.token for o in delivered)], dtype=np.uint32)
            admission = self.admission(sent, len(tokens), sampling, sources)
            try:
                await self.attempt(stream, admission, fetch)
                return Answer(
                    [o.token for o in delivered], delivered[-1].finish, stream.usage or usage, attempt, errors
                )
            except Left as e:
                errors.append(e.why)
                usage = usage or stream.usage
                await self.cancel(stream)
                await asyncio.sleep(0.05)
            finally:
                self.streams.pop((request, attempt), None)
                self.acked.append((request, attempt))
        raise AssertionError(f"{request} did not end: {errors}")

    def header(self, stream: Stream, target: Ref) -> dict[str, Any]:
        return {"sender": self.ref, "target": target, "request": stream.request, "attempt": stream.attempt}

    async def attempt(self, stream: Stream, admission: Admission, fetch: int) -> None:
        admit = Admit(**self.header(stream, stream.decode), admission=admission, prefill=stream.prefill)
        submit = Submit(
            **self.header(stream, stream.prefill), admission=admission, decode=stream.decode, fetch_blocks=fetch
        )
        asks = [asyncio.ensure_future(self.ask(stream, m)) for m in (admit, submit)]
        try:
            await self.follow(stream)
        finally:
            for ask in asks:
                ask.cancel()

    async def ask(self, stream: Stream, message: Admit | Submit) -> None:
        while not stream.ended:
            try:
                answer = await self.bus.request(message.target.id, message, 1.0)
            except Unavailable:
                await asyncio.sleep(0.3)
                continue
            except MooncakeError:
                continue
            if isinstance(answer, Accepted):
                stream.accepted.add(message.target.id)
            elif isinstance(answer, RefusedReply):
                stream.leave(answer.error.code)
            return

    async def follow(self, stream: Stream) -> None:
        """Until the end; asks ``since`` on silence, and leaves after ten seconds of it."""
        silent = 0
        while not stream.ended:
            have = len(stream.delivered)
            stream.changed.clear()
            if stream.error:
                raise Left(stream.error)
            try:
                async with asyncio.timeout(2.0):
                    await stream.changed.wait()
            except TimeoutError:
                await self.since(stream, stream.decode, stream.prefill)
            if stream.buffered:
                await self.since(stream, stream.decode)
            silent = 0 if len(stream.delivered) > have else silent + 1
            if silent > 20:
                raise Left("silence")

    async def since(self, stream: Stream, *whom: Ref) -> None:
        for ref in whom:
            with contextlib.suppress(MooncakeError):
                question = Since(**self.header(stream, ref), index=len(stream.delivered))
                answer = await self.bus.request(ref.id, question, 1.0)
                if isinstance(answer, SinceReply):
                    for output in answer.outputs:
                        stream.take(output, answer.usage)
                elif isinstance(answer, RefusedReply) and ref.id in stream.accepted and ref == stream.decode:
                    stream.leave(answer.error.code)

    async def cancel(self, stream: Stream) -> None:
        for ref in (stream.prefill, stream.decode):
            with contextlib.suppress(MooncakeError):
                await self.bus.send(ref.id, Cancel(**self.header(stream, ref)))


class SlowCompute(InlineCompute):
    """Steps take ``seconds`` of virtual time; a cancelled caller is kept until its step is over."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def run(self, step: Callable[[], T]) -> T:
        await settle(asyncio.ensure_future(asyncio.sleep(self.seconds)))
        return await super().run(step)


class Mesh:
    """``prefills`` and ``decodes``, each on a node of its own unless ``shared_node``."""

    def __init__(
        self,
        *,
        prefills: int = 1,
        decodes: int = 1,
        slots: int = 64,
        seed: int = 0,
        faults: Faults = NO_FAULTS,
        prefill: PrefillSettings = PREFILL,
        decode: DecodeSettings = DECODE,
        step_s: float = 0.0,
    ) -> None:
        self.net, self.network = MemoryBus(seed, faults), MemoryNetwork()
        self.namespace = MemoryEngine(block_size=BLOCK).namespace
        self.slots, self.sizes = slots, (prefills, decodes)
        self.settings, self.step_s = (prefill, decode), step_s
        self.nodes: list[MemoryNode] = []
        self.prefills: list[Prefill] = []
        self.decodes: list[Decode] = []
        self.engines: list[MemoryEngine] = []
        self.tasks: list[asyncio.Future[Any]] = []
        self.gateway = Gateway(self)
        self.incarnations = itertools.count(1)

    def known(self) -> list[Stream]:
        """All pairs, so that everybody gets lists."""
        return [Stream("", 0, p.ref, d.ref, []) for p in self.prefills for d in self.decodes]

    async def __aenter__(self) -> Mesh:
        for i in range(self.sizes[0]):
            self.prefills.append(await self.prefill(f"p{i}"))
        for i in range(self.sizes[1]):
            self.decodes.append(await self.decode(f"d{i}"))
        await self.gateway.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        for prefill in self.prefills:
            await prefill.drain()
        for decode in self.decodes:
            await decode.drain()
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    def node(self, name: str) -> MemoryStore:
        self.nodes.append(MemoryNode(self.network, f"node-{name}", self.namespace.geometry, self.slots))
        return MemoryStore(self.nodes[-1])

    def engine(self, store: MemoryStore) -> MemoryEngine:
        engine = MemoryEngine(block_size=BLOCK)
        engine.bind(store.pool)
        self.engines.append(engine)
        return engine

    async def prefill(self, name: str, store: MemoryStore | None = None) -> Prefill:
        store, bus = store or self.node(name), self.net.join(name)
        ref, model = Ref(name, next(self.incarnations)), PrefillModel(0.001, 0.0001, 0.0)
        service = Prefill(ref, bus, store, self.engine(store), SlowCompute(self.step_s), model, self.settings[0])
        await self.start(service, bus)
        return service

    async def decode(self, name: str, store: MemoryStore | None = None) -> Decode:
        store, bus = store or self.node(name), self.net.join(name)
        ref = Ref(name, next(self.incarnations))
        service = Decode(ref, bus, store, self.engine(store), SlowCompute(self.step_s), self.settings[1])
        await self.start(service, bus)
        return service

    async def start(self, service: Prefill | Decode, bus: MemoryConnection) -> None:
        await bus.serve(service.ref.id, service.handle)
        self.tasks += [asyncio.ensure_future(work) for work in service.background()]

    def held(self) -> dict[str, float]:
        """Everything held that must be given back."""
        holds = {node.agent.id: float(len(node.holds)) for node in self.nodes}
        landings = {f"{node.agent.id} landings": float(len(node.landings)) for node in self.nodes}
        rooms = {d.ref.id: float(d.room.promised) for d in self.decodes}
        ours = {kind: amount for kind, amount in held_now().items() if not kind.startswith("store_")}
        return {k: v for k, v in (ours | holds | landings | rooms).items() if v}

    async def quiet(self, seconds: float = 2.0) -> None:
        """Nothing is held any more within ``seconds``."""
        for _ in range(int(seconds / 0.05)):
            if not self.held():
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"still held: {self.held()}")

    def expect(self, tokens: Sequence[int], sampling: Sampling) -> list[int]:
        """What one process alone draws."""
        return [o.token for o in self.expected(tokens, sampling)]

    def expected(self, tokens: Sequence[int], sampling: Sampling) -> list[Output]:
        with LocalRunner(MemoryEngine(block_size=BLOCK), slots=256) as runner:
            return runner.generate(np.array(tokens, dtype=np.uint32), sampling)


class Peer:
    """Plays gateway and prefill by hand, one message at a time, against a decode instance."""

    def __init__(self, name: str, mesh: Mesh) -> None:
        self.ref, self.mesh = Ref(name, 5), mesh
        self.bus = mesh.net.join(name)

    def stream(self, decode: Ref) -> Stream:
        return Stream("r", 1, self.ref, decode, [])

    async def say(self, what: str, stream: Stream, tokens: Sequence[int]) -> AnyMessage:
        """Send ``admit``, ``landing``, ``start``, ``end`` (a start that finishes) or ``cancel``; the answer."""
        gateway = self.mesh.gateway
        header: dict[str, Any] = gateway.header(stream, stream.decode) | {"sender": self.ref}
        array = np.array(tokens, dtype=np.uint32)
        admission = gateway.admission(array, len(tokens), greedy(4), [])
        messages: dict[str, AnyMessage] = {
            "admit": Admit(**header | {"sender": gateway.ref}, admission=admission, prefill=self.ref),
            "landing": LandingRequest(**header, admission=admission, agent=Ref("node-p", 3)),
            "start": Start(**header, output=Output(0, 5)),
            "end": Start(**header, output=Output(0, 5, "stop")),
            "cancel": Cancel(**header | {"sender": gateway.ref}),
        }
        return await self.bus.request(stream.decode.id, messages[what], 5.0)


def make_tokens(count: int, seed: int = 0) -> list[int]:
    """Prompt tokens; never the same first block for two seeds."""
    return [int(t) for t in np.random.default_rng(seed).integers(0, 1000, count)]


def greedy(max_tokens: int = 8, **more: Any) -> Sampling:
    return Sampling(max_tokens=max_tokens, seed=7, temperature=0.0, **more)


@dataclass(frozen=True)
class Kit:
    """What tests build meshes from."""

    mesh: type[Mesh] = Mesh
    faults: type[Faults] = Faults
    block: int = BLOCK

    def peer(self, name: str, mesh: Mesh) -> Peer:
        return Peer(name, mesh)

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return make_tokens(count, seed)

    def greedy(self, max_tokens: int = 8, **more: Any) -> Sampling:
        return greedy(max_tokens, **more)

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """In virtual time."""
        return virtual_loop.run(main)


@pytest.fixture
def kit() -> Kit:
    return Kit()
