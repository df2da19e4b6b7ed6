"""The same pair over real parts: store agents over their sockets and data plane, a tiny Llama, compute threads."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from services.decode.service import Decode
from services.decode.settings import DecodeSettings
from services.prefill.service import Prefill
from services.prefill.settings import PrefillSettings
from services.store.agent import run_agent
from services.store.client import StoreClient
from services.store.directory import Board, LocalDirectory
from services.store.settings import StoreSettings
from shared.engines.local import LocalRunner
from shared.engines.tiny import make_tiny_model
from shared.engines.transformers import TransformersEngine
from shared.instance.compute import ComputeThread
from shared.latency import PrefillModel
from shared.messages import Ref, Sampling, Source

BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def engine_of(model: Path) -> TransformersEngine:
    return TransformersEngine(model, block_size=BLOCK)


class RealMesh:
    """One prefill and one decode instance for each agent; the kit's gateway over the memory bus."""

    def __init__(self, kit: Any, model: Path, transports: str) -> None:
        prefill = PrefillSettings(prefill_chunk=32, pool_timeout_s=30.0, peer_timeout_s=30.0)
        decode = DecodeSettings(pool_timeout_s=30.0, peer_timeout_s=30.0)
        self.base = kit.mesh(prefills=0, decodes=0, prefill=prefill, decode=decode)
        self.base.namespace = engine_of(model).namespace
        self.model, self.transports, self.agents = model, transports, list[Any]()

    @contextlib.asynccontextmanager
    async def run(self, nodes: int) -> AsyncIterator[RealMesh]:
        board = Board()
        async with contextlib.AsyncExitStack() as stack:
            for i in range(nodes):
                settings = StoreSettings(
                    socket=f"@t-{uuid4().hex}", pool_bytes=8 << 20, metrics_port=-1, transports=self.transports
                )
                self.agents.append(await stack.enter_async_context(run_agent(settings, LocalDirectory(board))))
                self.base.prefills.append(await self.instance("p", i, stack))
                self.base.decodes.append(await self.instance("d", i, stack))
            await stack.enter_async_context(self.base)
            yield self

    async def instance(self, role: str, node: int, stack: contextlib.AsyncExitStack) -> Any:
        engine = engine_of(self.model)
        address = self.agents[node].settings.socket
        store = await stack.enter_async_context(await StoreClient.connect(address, engine.namespace))
        compute = ComputeThread(role)
        stack.callback(compute.close)
        await compute.run(lambda: engine.bind(store.pool))
        ref, bus = Ref(f"{role}{node}", 7), self.base.net.join(f"{role}{node}")
        service: Any
        if role == "p":
            service = Prefill(ref, bus, store, engine, compute, PrefillModel(0, 0, 0), self.base.settings[0])
        else:
            service = Decode(ref, bus, store, engine, compute, self.base.settings[1])
        await self.base.start(service, bus)
        return service

    async def quiet(self) -> None:
        """No engine holds anything at any agent."""
        await self.base.quiet()
        stats: list[dict[str, float]] = []
        for _ in range(40):
            stats = [agent.stats() for agent in self.agents]
            kinds = ("store_holds", "store_landings", "store_quarantined", "store_streams", "store_leases")
            if not any(one.get(kind) for one in stats for kind in kinds):
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"still held: {stats}")


def alone(model: Path, tokens: list[int], sampling: Sampling) -> list[int]:
    with LocalRunner(engine_of(model), slots=64) as runner:
        return [o.token for o in runner.generate(tokens, sampling)]


@pytest.mark.parametrize("transports", ["require:tcp", "require:shm"])
async def test_equal_to_one_process(kit: Any, model: Path, transports: str) -> None:
    async with RealMesh(kit, model, transports).run(2) as mesh:
        gateway, source = mesh.base.gateway, Source(mesh.agents[0].ref.id, 9)
        for length in (5, 16, 17, 100):
            tokens, sampling = kit.tokens(length, seed=length), kit.greedy(6)
            expected = alone(model, tokens, sampling)
            cold = await gateway.run(tokens, sampling, pairs=[(0, 0)])
            assert (cold.tokens, cold.attempts, cold.usage.cached_tokens) == (expected, 1, 0)
            warm = await gateway.run(tokens, sampling, pairs=[(0, 1)])
            cached = min(length // BLOCK * BLOCK, length - 1)
            assert (warm.tokens, warm.usage.cached_tokens) == (expected, cached)
        tokens = kit.tokens(100, seed=7)
        for pair, fetched in (((0, 0), 0), ((1, 1), 6)):
            answer = await gateway.run(tokens, kit.greedy(6), pairs=[pair], fetch=6, sources=[source])
            assert (answer.tokens, answer.usage.fetched_blocks) == (alone(model, tokens, kit.greedy(6)), fetched)
            assert answer.usage.cached_tokens == 16 * fetched
        await mesh.quiet()


async def test_many_at_once_with_drawn_tokens(kit: Any, model: Path) -> None:
    async with RealMesh(kit, model, "prefer:shm,tcp").run(2) as mesh:
        pairs = [(0, 1), (1, 0), (0, 0), (1, 1)]
        work = [(kit.tokens(10 + 9 * i, seed=i % 3), Sampling(max_tokens=2 + i, seed=i)) for i in range(8)]
        answers = await asyncio.gather(
            *(mesh.base.gateway.run(t, s, pairs=pairs[i % 4 :] + pairs[: i % 4]) for i, (t, s) in enumerate(work))
        )
        for (tokens, sampling), answer in zip(work, answers, strict=True):
            assert (answer.tokens, answer.attempts) == (alone(model, tokens, sampling), 1)
        await mesh.quiet()


@pytest.mark.parametrize("after", [0, 1, 6])
async def test_cancel_leaves_nothing(kit: Any, model: Path, after: int) -> None:
    """Cancelled once ``after`` tokens have come."""
    async with RealMesh(kit, model, "prefer:shm,tcp").run(2) as mesh:
        gateway = mesh.base.gateway
        ask = asyncio.ensure_future(gateway.run(kit.tokens(200), kit.greedy(400), pairs=[(0, 1)], name="r"))
        await asyncio.sleep(0.01)
        stream = gateway.streams["r", 1]
        async with asyncio.timeout(100):
            while len(stream.delivered) < after:
                await asyncio.sleep(0.001)
        ask.cancel()
        await gateway.cancel(stream)
        await mesh.quiet()


async def test_agent_dies_and_comes_back(kit: Any, model: Path) -> None:
    """Attempts on it are given up, and those elsewhere go on with what was delivered."""
    async with RealMesh(kit, model, "prefer:shm,tcp").run(2) as mesh:
        gateway, sampling = mesh.base.gateway, kit.greedy(40)
        ask = asyncio.ensure_future(gateway.run(kit.tokens(60), sampling, pairs=[(0, 1), (0, 0)], name="r"))
        async with asyncio.timeout(100):
            while not (stream := gateway.streams.get(("r", 1))) or len(stream.delivered) < 5:
                await asyncio.sleep(0.001)
        service = mesh.base.decodes[1]
        await service.store.close()
        answer = await ask
        assert answer.tokens == alone(model, kit.tokens(60), sampling)
        assert answer.attempts == 2
