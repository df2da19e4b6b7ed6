"""A1 over RDMA, required: prefill, decode and agents give token for token what a single process gives, wherever the
prefix was: nowhere, in the local pool, on another node. Simulated engines: their KV bytes depend on every token before
them, and are checked by whoever uses them."""

from __future__ import annotations

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
from services.store.metrics import TRANSFER_BYTES
from services.store.settings import StoreSettings
from shared.engines.local import LocalRunner
from shared.engines.simulated import SimulatedEngine
from shared.instance.compute import ComputeThread
from shared.latency import PrefillModel
from shared.messages import Ref, Sampling, Source
from tests.instance.conftest import kit
from tests.rdma.rig import NICS, in_guest, make_words_model, packets

__all__ = ["kit"]
pytestmark = [pytest.mark.rig, in_guest, pytest.mark.timeout(300)]
BLOCK = 16


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_words_model(tmp_path_factory.mktemp("models") / "tiny")


def engine_of(model: Path) -> SimulatedEngine:
    return SimulatedEngine(model, block_size=BLOCK)


def alone(model: Path, tokens: list[int], sampling: Sampling) -> list[int]:
    with LocalRunner(engine_of(model), slots=64) as runner:
        return [o.token for o in runner.generate(tokens, sampling)]


@contextlib.asynccontextmanager
async def mesh_of(kit: Any, model: Path, nodes: int) -> AsyncIterator[tuple[Any, list[Any]]]:
    """A prefill and a decode instance on each node, the kit's gateway before them; and the nodes' agents."""
    settings = PrefillSettings(prefill_chunk=32, peer_timeout_s=30.0), DecodeSettings(peer_timeout_s=30.0)
    mesh = kit.mesh(prefills=0, decodes=0, prefill=settings[0], decode=settings[1])
    mesh.namespace = engine_of(model).namespace
    board, agents = Board(), []
    async with contextlib.AsyncExitStack() as stack:
        for node in range(nodes):
            chosen = StoreSettings(
                socket=f"@t-{uuid4().hex}", pool_bytes=8 << 20, metrics_port=-1, transports="require:rdma"
            )
            agents.append(await stack.enter_async_context(run_agent(chosen, LocalDirectory(board))))
            for role in "pd":
                engine = engine_of(model)
                client = await StoreClient.connect(chosen.socket, engine.namespace)
                store = await stack.enter_async_context(client)
                compute = ComputeThread(role)
                stack.callback(compute.close)
                pool = store.pool
                await compute.run(lambda engine=engine, pool=pool: engine.bind(pool))  # type: ignore[misc]
                ref, bus = Ref(f"{role}{node}", 7), mesh.net.join(f"{role}{node}")
                service: Any
                if role == "p":
                    service = Prefill(ref, bus, store, engine, compute, PrefillModel(0, 0, 0), settings[0])
                    mesh.prefills.append(service)
                else:
                    service = Decode(ref, bus, store, engine, compute, settings[1])
                    mesh.decodes.append(service)
                await mesh.start(service, bus)
        await stack.enter_async_context(mesh)
        yield mesh, agents


def moved(transport: str) -> float:
    directions = ("in", "out")
    return float(sum(TRANSFER_BYTES.labels(transport, direction)._value.get() for direction in directions))


async def test_a1_equal_to_one_process(kit: Any, model: Path) -> None:
    before, counted = sum(packets(nic) for nic in NICS), moved("rdma")
    others = moved("tcp") + moved("shm")
    async with mesh_of(kit, model, 2) as (mesh, agents):
        gateway, source = mesh.gateway, Source(agents[0].ref.id, 9)
        for length in (17, 100):
            tokens, sampling = kit.tokens(length, seed=length), kit.greedy(6)
            expected = alone(model, tokens, sampling)
            cold = await gateway.run(tokens, sampling, pairs=[(0, 1)])
            assert (cold.tokens, cold.usage.cached_tokens) == (expected, 0)
            warm = await gateway.run(tokens, sampling, pairs=[(0, 1)])
            assert (warm.tokens, warm.usage.cached_tokens) == (expected, length // BLOCK * BLOCK)
        tokens = kit.tokens(100, seed=7)
        for pair, fetched in (((0, 0), 0), ((1, 1), 6)):
            answer = await gateway.run(tokens, kit.greedy(6), pairs=[pair], fetch=6, sources=[source])
            assert (answer.tokens, answer.usage.fetched_blocks) == (alone(model, tokens, kit.greedy(6)), fetched)
            assert answer.usage.cached_tokens == BLOCK * fetched
    assert moved("rdma") > counted and moved("tcp") + moved("shm") == others
    assert sum(packets(nic) for nic in NICS) > before
