"""``mooncake store verify`` on a store with a flipped bit, and with an index that names what is not there."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from click.testing import CliRunner, Result

from cli.main import main
from services.store import inspection
from services.store.agent import Agent, run_agent
from services.store.client import StoreClient, plain_namespace
from services.store.settings import StoreSettings
from shared.embedded import RedisServer
from shared.metadata import Metadata
from tests.transfer.certificates import authority

pytestmark = pytest.mark.timeout(240)

SPACE = plain_namespace("verify", 1000)
KEYS = [bytes([n]) * 16 for n in range(8)]
ABSENT = b"\xff" * 16
SECRET = "a secret"


@pytest.fixture(scope="module")
def redis() -> Iterator[str]:
    with RedisServer() as server:
        yield server.url


@pytest.fixture
async def agent(redis: str) -> AsyncIterator[Agent]:
    settings = StoreSettings(
        redis=redis,
        mesh="m" + uuid4().hex[:8],
        socket="@test-" + uuid4().hex,
        pool_bytes=1 << 20,
        slab_bytes=1 << 19,
        secret=SECRET,
    )
    async with run_agent(settings) as agent:
        yield agent


@pytest.fixture
async def client(agent: Agent) -> AsyncIterator[StoreClient]:
    """With :data:`KEYS` in store and index."""
    async with await StoreClient.connect(agent.settings.socket, SPACE, secret=SECRET, timeout=100.0) as client:
        await filled(agent, client)
        yield client


async def filled(agent: Agent, client: StoreClient) -> None:
    assert all(put.stored for put in await client.put([(key, key * 60) for key in KEYS], 100.0))
    await agent.directory.flushed(100.0)
    while not await beaten(agent):
        await asyncio.sleep(0.05)


async def beaten(agent: Agent) -> bool:
    """The mesh knows of the namespace."""
    async with Metadata(agent.settings.redis, agent.settings.mesh) as metadata:
        return any(record.slabs for record in await metadata.agents())


async def verify(agent: Agent, *argv: str) -> Result:
    mesh = ["--redis", agent.settings.redis, "--mesh", agent.settings.mesh, "--secret", SECRET, "--json"]
    return await asyncio.to_thread(CliRunner().invoke, main, ["store", "verify", *mesh, *argv])


def counts(result: Result) -> dict[str, Any]:
    document = json.loads(result.stdout)
    return {what: document[what] for what in ("good", "lost", "corrupt", "unread")}


def flip(agent: Agent, key: bytes) -> None:
    (slab,) = agent.slabs.values()
    slot = slab.pool.find(key)
    assert slot is not None
    with slab.memory.range(slot, 60) as data:
        data[7] ^= 1


async def test_a_flipped_bit_and_a_lost_block_are_found(agent: Agent, client: StoreClient) -> None:
    clean = await verify(agent)
    assert clean.exit_code == 0 and counts(clean) == {"good": 8, "lost": 0, "corrupt": 0, "unread": 0}
    flip(agent, KEYS[3])
    agent.directory.committed(b"", [ABSENT])
    await agent.directory.flushed(100.0)
    result = await verify(agent, "--agent", agent.ref.id[:6])
    assert result.exit_code == 1 and counts(result) == {"good": 7, "lost": 1, "corrupt": 1, "unread": 0}
    bad = json.loads(result.stdout)["agents"][0]["bad"]
    assert {(one["key"], one["what"]) for one in bad} == {(KEYS[3].hex(), "corrupt"), (ABSENT.hex(), "lost")}
    assert await client.contains(KEYS) == [True] * 8  # looking changes nothing


@pytest.mark.parametrize("known", [0, 1])
async def test_blocks_of_a_namespace_that_the_last_heartbeat_did_not_know_are_found(
    agent: Agent, client: StoreClient, monkeypatch: pytest.MonkeyPatch, known: int
) -> None:
    """The index is newer than the agent's record: blocks are not lost for that."""
    monkeypatch.setattr(inspection, "SETTLE", 0.0)
    settings, other = agent.settings, plain_namespace("newer", 500)
    async with await StoreClient.connect(settings.socket, other, secret=SECRET, timeout=100.0) as newer:
        await newer.put([(b"n" * 16, b"new")], 100.0)
        await agent.directory.flushed(100.0)
        async with Metadata(settings.redis, settings.mesh) as metadata:
            while len((record := (await metadata.agents())[0]).slabs) < 2:
                await asyncio.sleep(0.05)
            async with inspection.inspector(metadata, settings.mesh, SECRET) as eye:
                keys = [key async for page in eye.indexed(record) for key, _ in page]
                found = [finding async for finding in eye.verify(record, keys, record.slabs[:known])]
    assert {finding.key for finding in found} == {*KEYS, b"n" * 16}
    assert {finding.verdict for finding in found} == {inspection.Verdict.GOOD}


async def test_repair_drops_what_is_corrupt_and_nothing_else(agent: Agent, client: StoreClient) -> None:
    flip(agent, KEYS[5])
    assert counts(await verify(agent, "--repair"))["corrupt"] == 1
    assert await client.contains(KEYS) == [key != KEYS[5] for key in KEYS]
    await agent.directory.flushed(100.0)
    assert counts(await verify(agent)) == {"good": 7, "lost": 0, "corrupt": 0, "unread": 0}


async def test_agents_that_talk_over_tls_are_verified_with_a_certificate(redis: str, tmp_path: Path) -> None:
    files = authority(tmp_path).issue("agent")
    paths: dict[str, Any] = {"data_tls_cert": files.cert, "data_tls_key": files.key, "data_tls_ca": files.ca}
    mesh, socket = "m" + uuid4().hex[:8], "@test-" + uuid4().hex
    settings = StoreSettings(redis=redis, mesh=mesh, socket=socket, pool_bytes=1 << 20, secret=SECRET, **paths)
    flags = [word for name, path in paths.items() for word in ("--" + name.replace("_", "-"), path)]
    async with run_agent(settings) as agent, await StoreClient.connect(socket, SPACE, secret=SECRET) as client:
        await filled(agent, client)
        assert counts(await verify(agent, "--transports", "require:tcp", *flags))["good"] == 8
        without = await verify(agent, "--transports", "require:tcp")
        assert without.exit_code == 1 and json.loads(without.stdout)["agents"][0]["error"]


async def test_a_wrong_secret_is_an_error_not_a_clean_bill(agent: Agent, client: StoreClient) -> None:
    mesh = ["--redis", agent.settings.redis, "--mesh", agent.settings.mesh, "--secret", "another"]
    result = await asyncio.to_thread(CliRunner().invoke, main, ["store", "verify", *mesh])
    assert result.exit_code == 1 and "stopped" in result.output
