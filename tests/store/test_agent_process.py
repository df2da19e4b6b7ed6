"""The agent as a process: registered, indexed, stopped by SIGTERM, killed, stopped in the middle, started again."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import uuid4

import aiohttp
import pytest

from services.store.client import StoreClient
from shared.blocks import Namespace
from shared.embedded import RedisServer
from shared.engines.base import Fetched, Kind, LandingTarget, Owner, PoolClass, Run
from shared.errors import AgentGone, Fenced, MooncakeError
from shared.index import code
from shared.index.lookup import lookup
from shared.metadata import Metadata
from shared.records import AgentRecord

OWNER = Owner("request/1")
NAMESPACE = Namespace(
    model="p", weights="p", tokenizer="p", dtype="float32", layers=4, kv_heads=2, head_dim=16, block_size=16
)


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


class AgentProcess:
    def __init__(self, redis: str, mesh: str, *flags: str) -> None:
        self.socket = "@process-" + uuid4().hex
        self._flags = [
            "--redis", redis, "--mesh", mesh, "--socket", self.socket, "--pool-bytes", "1MiB", "--growth-headroom", "0",
            "--drain-timeout", "0.3", *flags,
        ]  # fmt: skip

    async def start(self) -> None:
        env = os.environ | {"MOONCAKE_SECRET": "s"}
        self.process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "services.store", *self._flags, env=env, stderr=asyncio.subprocess.PIPE
        )

    async def stop(self, sign: int) -> tuple[int, str]:
        if self.process.returncode is None:
            self.process.send_signal(sign)
        assert self.process.stderr is not None
        _, err = await asyncio.wait_for(self.process.communicate(), 100)
        return self.process.returncode or 0, err.decode()

    async def client(self) -> StoreClient:
        return await StoreClient.connect(self.socket, NAMESPACE, secret="s", timeout=100.0)


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


@pytest.fixture
def mesh() -> str:
    return "m" + uuid4().hex[:8]


@pytest.fixture
async def metadata(redis: str, mesh: str) -> AsyncIterator[Metadata]:
    async with await Metadata.connect(redis, mesh) as metadata:
        yield metadata


@pytest.fixture
def start(redis: str, mesh: str, stack: AsyncExitStack) -> Callable[..., Awaitable[AgentProcess]]:
    async def start(*flags: str) -> AgentProcess:
        agent = AgentProcess(redis, mesh, *flags)
        await agent.start()
        stack.push_async_callback(agent.stop, signal.SIGKILL)
        return agent

    return start


async def eventually(condition: Callable[[], Awaitable[Any]], timeout: float = 100.0) -> Any:
    async with asyncio.timeout(timeout):
        while not (found := await condition()):
            await asyncio.sleep(0.05)
        return found


async def record_of(metadata: Metadata, client: StoreClient) -> AgentRecord | None:
    return next((a for a in await metadata.agents() if a.ref == client.agent), None)


async def test_two_agents_exchange_blocks_through_the_index(
    start: Any, stack: AsyncExitStack, metadata: Metadata, mesh: str
) -> None:
    a, b = await start("--transports", "require:tcp"), await start("--transports", "require:tcp")
    here, there = [await stack.enter_async_context(await agent.client()) for agent in (a, b)]
    keys = [os.urandom(16) for _ in range(3)]
    held = await here.reserve(keys, OWNER, PoolClass.PREFILL, 100.0)
    assert [h.kind for h in await here.commit(held, NAMESPACE.root(), keys, indexed=True)] == [Kind.PRESENT] * 3
    places = await lookup(metadata.link, mesh, keys)
    assert [set(place) for place in places] == [{code(here.agent.incarnation)}] * 3

    await eventually(lambda: record_of(metadata, here))
    await eventually(lambda: record_of(metadata, there))

    async def fetched() -> list[Fetched] | None:
        """The other agent knows this one from the next look at the metadata on."""
        found = await there.fetch(keys, NAMESPACE.root(), [], OWNER, PoolClass.PREFILL, 100.0)
        return None if any(f.error for f in found) else found

    assert [f.transport for f in await eventually(fetched)] == ["tcp"] * 3
    both = {code(here.agent.incarnation), code(there.agent.incarnation)}

    async def replicated() -> bool:
        return all(set(place) == both for place in await lookup(metadata.link, mesh, keys))

    await eventually(replicated)
    assert await there.remove(keys[:1]) == [True]
    assert await here.contains(keys) == [False, True, True]

    async def gone() -> bool:
        return not (await lookup(metadata.link, mesh, keys[:1]))[0]

    await eventually(gone)
    record = await record_of(metadata, here)
    assert record is not None and record.metrics
    async with aiohttp.ClientSession() as session, session.get(f"http://{record.metrics}/metrics") as answer:
        text = await answer.text()
    assert 'mooncake_held{kind="store_holds"}' in text
    assert "mooncake_store_committed_blocks_total 3.0" in text

    assert (await b.stop(signal.SIGTERM))[0] == 0
    assert await record_of(metadata, there) is None
    with pytest.raises(AgentGone):
        await there.contains([])


async def test_a_killed_agent_is_seen_and_the_next_incarnation_is_empty(start: Any, metadata: Metadata) -> None:
    agent = await start("--id", "fixed")
    client = await agent.client()
    await client.put([(bytes(16), b"x")])
    waiting = asyncio.create_task(client.wait(bytes(16), OWNER, 30.0))
    await waiting
    agent.process.kill()
    async with asyncio.timeout(100):
        while not client.closed:
            await asyncio.sleep(0.01)
    await agent.process.communicate()
    await agent.start()
    async with await agent.client() as again:
        assert again.agent.id == "fixed" and again.agent.incarnation != client.agent.incarnation
        assert await again.get([bytes(16)]) == [None]
        await eventually(lambda: record_of(metadata, again))
    await client.close()


async def test_a_stopped_writer_agent_is_cut_off_and_its_late_bytes_go_nowhere(
    start: Any, stack: AsyncExitStack, metadata: Metadata
) -> None:
    a, b = await start("--transports", "require:tcp"), await start("--transports", "require:tcp")
    prefill, decode = [await stack.enter_async_context(await agent.client()) for agent in (a, b)]
    await eventually(lambda: record_of(metadata, prefill))
    await eventually(lambda: record_of(metadata, decode))
    (source,) = await prefill.allocate(1, OWNER, PoolClass.PREFILL, 100.0)
    landing = await decode.open_landing([], 2, 32, prefill.agent, OWNER, 100.0)
    target = LandingTarget(decode.agent, landing.token, [h.slot for h in landing.held])
    await prefill.stream(target, [Run(source.slot, 0, 0, 4, 0, 16)], OWNER, 100.0)

    a.process.send_signal(signal.SIGSTOP)
    late = asyncio.create_task(prefill.stream(target, [Run(source.slot, 1, 0, 4, 0, 16)], OWNER, 100.0))
    await decode.close_landing(landing, keep=False)

    async def free() -> bool:
        stats: dict[str, float] = await decode.stats()
        return stats["store_holds"] == 0

    await eventually(free, 60.0)  # not by an expiry: those take longer
    a.process.send_signal(signal.SIGCONT)
    with pytest.raises(MooncakeError) as refused:
        await late
    assert isinstance(refused.value, Fenced)


async def test_an_agent_without_redis_says_so_and_ends(mesh: str) -> None:
    agent = AgentProcess("redis://127.0.0.1:1/0", mesh, "--registration-timeout-s", "1.5")
    await agent.start()
    assert agent.process.stderr is not None
    _, err = await asyncio.wait_for(agent.process.communicate(), 100)
    assert agent.process.returncode == 1
    assert "not registered yet: Redis does not answer" in err.decode()
    assert "Redis does not answer (Redis: ConnectionError" in err.decode() and "Traceback" not in err.decode()
