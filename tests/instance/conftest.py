"""A small mesh in one process: memory bus, memory store, memory engine, real prefill and decode, a model gateway."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import pytest

from services.decode.service import Decode
from services.decode.settings import DecodeSettings
from services.prefill.service import Prefill
from services.prefill.settings import PrefillSettings
from shared import virtual_loop
from shared.engines.local import LocalRunner
from shared.engines.memory_engine import MemoryEngine
from shared.engines.memory_store import MemoryNetwork, MemoryNode, MemoryStore
from shared.instance.compute import InlineCompute
from shared.latency import PrefillModel
from shared.memory_bus import Faults, MemoryBus, MemoryConnection
from shared.messages import (
    Admit,
    AnyMessage,
    Cancel,
    LandingRequest,
    Output,
    Ref,
    Sampling,
    Start,
)
from shared.tasks import settle
from tests.held import held_now
from tests.instance.model_gateway import Gateway, Stream

BLOCK = 16
NO_FAULTS = Faults()
PREFILL = PrefillSettings(prefill_chunk=32, pool_timeout_s=2.0)
DECODE = DecodeSettings(headroom=0.0, expected_output=16, pool_timeout_s=2.0)
T = TypeVar("T")


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
