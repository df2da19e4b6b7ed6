"""The dispatcher with real prefill and decode services over a bad bus: equal texts, cached turns, nothing held."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pytest

from services.conductor.dispatch import DispatchSettings, MeshDispatcher
from services.conductor.generation import Generation, Token
from services.decode.service import Decode
from services.decode.settings import DecodeSettings
from services.prefill.service import Prefill
from services.prefill.settings import PrefillSettings
from shared.blocks import KEY, chain_keys
from shared.engines.local import LocalRunner
from shared.engines.memory_engine import MemoryEngine
from shared.engines.memory_store import MemoryNetwork, MemoryNode, MemoryStore
from shared.instance.compute import InlineCompute
from shared.latency import DecodeModel, PrefillModel
from shared.memory_bus import Faults, MemoryBus, MemoryConnection
from shared.messages import Ref, Sampling
from shared.records import AgentRecord, InstanceRecord
from shared.tasks import settle
from shared.virtual_loop import run
from tests.dispatch.world import ids, put_instance
from tests.held import held_now

BLOCK = 16
NO_FAULTS = Faults()
T = TypeVar("T")
PREFILL = PrefillModel(0.001, 0.0001, 0.0)


@dataclass
class NodesIndex:
    """What the pools of all nodes hold, without the delay of a real index."""

    nodes: list[MemoryNode]

    def lengths(self, keys: bytes) -> tuple[tuple[bytes, ...], npt.NDArray[Any]]:
        chain = [keys[i : i + KEY] for i in range(0, len(keys), KEY)]
        lengths = [len(list(itertools.takewhile(node.committed.__contains__, chain))) for node in self.nodes]
        return tuple(code(node.agent) for node in self.nodes), np.array(lengths)

    def dram(self, keys: bytes) -> Mapping[bytes, int]:
        return {}

    def living(self, codes: set[bytes]) -> None:
        pass

    def summary(self) -> Mapping[str, Any]:
        return {}


class TimedCompute(InlineCompute):
    """A step takes five milliseconds of virtual time, and cannot be interrupted."""

    async def run(self, step: Callable[[], T]) -> T:
        await settle(asyncio.ensure_future(asyncio.sleep(0.005)))
        return await super().run(step)


def code(ref: Ref) -> bytes:
    return ref.incarnation.to_bytes(8, "big")


class Mesh:
    """Real services on the memory bus, store and engine; each on a node of its own."""

    def __init__(self, seed: int, faults: Faults, slots: int, **settings: Any) -> None:
        self.network, self.stores = MemoryBus(seed, faults), MemoryNetwork()
        self.namespace = MemoryEngine(block_size=BLOCK).namespace
        self.slots = slots
        self.nodes: list[MemoryNode] = []
        self.services: dict[str, tuple[Prefill | Decode, MemoryConnection]] = {}
        self.tasks: list[asyncio.Future[Any]] = []
        self._numbers = itertools.count(1)
        options: dict[str, Any] = {"slo_ttft_ms": 10**7, "slo_tbt_ms": 10**6, "max_attempts": 50, **settings}
        bus = self.network.join("conductor")
        index = NodesIndex(self.nodes)
        self.dispatcher = MeshDispatcher(DispatchSettings(**options), bus, Ref("conductor", 7), index)

    async def add(self, id: str) -> None:
        node = MemoryNode(self.stores, f"node-{id}-{next(self._numbers)}", self.namespace.geometry, self.slots)
        self.nodes.append(node)
        store, engine, bus = MemoryStore(node), MemoryEngine(block_size=BLOCK), self.network.join(id)
        engine.bind(store.pool)
        ref = Ref(id, next(self._numbers))
        service: Prefill | Decode
        if id.startswith("p"):
            service = Prefill(ref, bus, store, engine, TimedCompute(), PREFILL, PrefillSettings(prefill_chunk=32))
        else:
            service = Decode(ref, bus, store, engine, TimedCompute(), DecodeSettings(headroom=0.0, expected_output=16))
        await bus.serve(ref.id, service.handle)
        self.tasks += [asyncio.ensure_future(work) for work in service.background()]
        self.services[id] = service, bus
        self.register(service, node)

    def register(self, service: Prefill | Decode, node: MemoryNode) -> None:
        agent = AgentRecord(ref=node.agent, node="n", code=code(node.agent), host="h", port=1, host_id="h")
        self.dispatcher.put_agent(agent)
        put_instance(
            self.dispatcher,
            InstanceRecord(
                ref=service.ref,
                role=service.role,
                node="n",
                model="m",
                namespace=self.namespace,
                proof=self.namespace.proof(),
                agent=node.agent,
                context_length=service.engine.context_length,
                prefill=PREFILL,
                decode=DecodeModel(0.001, 0.0001, 0.0),
            ),
        )

    def kill(self, id: str) -> None:
        """As by kill -9: nothing more is sent; its node goes too."""
        service, bus = self.services.pop(id)
        bus.abort()
        store = service.store
        assert isinstance(store, MemoryStore)
        store.node.dead = True

    def generation(self, tokens: Any, max_tokens: int) -> Generation:
        array = np.array(tokens, dtype=np.uint32)
        return Generation(
            id=f"r{next(self._numbers)}",
            tokens=array,
            root=self.namespace.root(),
            keys=chain_keys(self.namespace.root(), array, BLOCK),
            sampling=Sampling(max_tokens=max_tokens, seed=7, temperature=0.0),
            arrived=asyncio.get_running_loop().time(),
        )

    async def collect(self, generation: Generation) -> list[Token]:
        return [token async for token in self.dispatcher.generate(generation)]

    def held(self) -> dict[str, float]:
        rooms = {id: float(s.room.promised) for id, (s, _) in self.services.items() if isinstance(s, Decode)}
        holds = {node.agent.id: float(len(node.holds) + len(node.landings)) for node in self.nodes if not node.dead}
        return {kind: amount for kind, amount in (held_now() | rooms | holds).items() if amount}

    async def quiet(self, seconds: float) -> None:
        async with asyncio.timeout(seconds):
            while self.held():
                await asyncio.sleep(0.05)


Scenario = Callable[[Mesh], Awaitable[None]]


def play(
    scenario: Scenario, seed: int = 0, faults: Faults = NO_FAULTS, each: int = 2, slots: int = 128, quiet: float = 6.0
) -> None:
    async def main() -> None:
        mesh = Mesh(seed, faults, slots)
        await mesh.dispatcher.start()
        for i in range(each):
            await mesh.add(f"p{i}")
            await mesh.add(f"d{i}")
        try:
            await scenario(mesh)
            mesh.network.faults = NO_FAULTS
            await mesh.quiet(quiet)
        finally:
            await mesh.dispatcher.close()
            for service, _ in mesh.services.values():
                await service.drain()
            for task in mesh.tasks:
                task.cancel()
            await asyncio.gather(*mesh.tasks, return_exceptions=True)

    run(main())


def prompt(length: int, seed: int) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(0, 1000, length)]


def alone(tokens: list[int], max_tokens: int) -> list[int]:
    """What one process draws."""
    with LocalRunner(MemoryEngine(block_size=BLOCK), slots=256) as runner:
        sampling = Sampling(max_tokens=max_tokens, seed=7, temperature=0.0)
        return [o.token for o in runner.generate(np.array(tokens, dtype=np.uint32), sampling)]


REQUESTS = [(5, 3), (16, 1), (33, 12), (64, 20), (64, 5), (100, 30)]


async def serve_all(mesh: Mesh) -> None:
    prompts = [prompt(length, seed=length) for length, _ in REQUESTS]
    asks = [mesh.collect(mesh.generation(p, n)) for p, (_, n) in zip(prompts, REQUESTS, strict=True)]
    answers = await asyncio.gather(*asks)
    for p, (_, n), answer in zip(prompts, REQUESTS, answers, strict=True):
        assert ids(answer) == alone(p, n)


@pytest.mark.parametrize("seed", range(6))
def test_a_bad_bus_loses_repeats_and_holds_nothing(seed: int) -> None:
    play(serve_all, seed, Faults(lose=0.1, duplicate=0.2, delay=0.3, longest=1.0))


@pytest.mark.parametrize("seed", range(3))
def test_nothing_is_retried_without_a_loss(seed: int) -> None:
    async def scenario(mesh: Mesh) -> None:
        await serve_all(mesh)
        assert mesh.dispatcher.cluster()["requests"]["retried"] == 0

    play(scenario, seed, Faults(duplicate=0.3, delay=0.6, longest=0.45))


def test_a_second_turn_finds_what_prefill_and_decode_have_kept() -> None:
    async def scenario(mesh: Mesh) -> None:
        tokens, known = prompt(80, 1), 0
        for turn in range(4):
            answer = await mesh.collect(mesh.generation(tokens, 20))
            assert ids(answer) == alone(tokens, 20)
            usage = answer[0].usage
            assert usage
            assert usage.cached_tokens >= known // BLOCK * BLOCK
            known = len(tokens) + len(answer) - 1  # the last token's KV is never computed
            tokens = [*tokens, *ids(answer), *prompt(BLOCK, turn + 50)]

    play(scenario)


@pytest.mark.parametrize("victim", ["p0", "d0", "p1", "d1"])
@pytest.mark.parametrize("after", [0, 1, 6])
def test_death_of_any_of_them(victim: str, after: int) -> None:
    async def scenario(mesh: Mesh) -> None:
        prompts = [prompt(60 + i, i) for i in range(4)]
        counts = [0, 0, 0, 0]
        done: list[list[int]] = [[], [], [], []]

        async def follow(i: int) -> None:
            async for token in mesh.dispatcher.generate(mesh.generation(prompts[i], 25)):
                done[i].append(token.output.token)
                counts[i] += 1
                if sum(counts) >= after and victim in mesh.services:
                    mesh.kill(victim)

        if after == 0:
            asyncio.get_running_loop().call_later(0.02, mesh.kill, victim)
        await asyncio.gather(*(follow(i) for i in range(4)))
        assert done == [alone(p, 25) for p in prompts]

    play(scenario, quiet=14.0)


def test_more_than_the_pools_hold_waits_for_room() -> None:
    async def scenario(mesh: Mesh) -> None:
        prompts = [prompt(100, i) for i in range(12)]
        answers = await asyncio.gather(*(mesh.collect(mesh.generation(p, 20)) for p in prompts), return_exceptions=True)
        good = [i for i, answer in enumerate(answers) if not isinstance(answer, BaseException)]
        assert len(good) >= 4
        for i in good:
            answer = answers[i]
            assert not isinstance(answer, BaseException)
            assert ids(answer) == alone(prompts[i], 20)
        assert {type(a).__name__ for a in answers if isinstance(a, BaseException)} <= {"Contended"}

    play(scenario, slots=40)


@pytest.mark.parametrize("after", [0, 1, 5])
def test_cancel_gives_everything_back_at_once(after: int) -> None:
    async def scenario(mesh: Mesh) -> None:
        for i in range(10):
            stream = mesh.dispatcher.generate(mesh.generation(prompt(200, i), 1000))
            if after:
                for _ in range(after):
                    await anext(stream)
                await stream.aclose()
            else:
                task = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0.008 * i)
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                await stream.aclose()

    play(scenario, quiet=2.0)
