"""The conductor as a process: how it starts, says whether it can serve, and ends."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.conductor.service import Stopping, run
from services.conductor.settings import ConductorSettings
from shared.embedded import NatsServer, RedisServer
from shared.errors import ConfigError
from shared.metadata import Metadata
from tests.gateway.fakes import until

NOWHERE = ["--nats", "nats://127.0.0.1:9", "--redis", "redis://127.0.0.1:9/0"]


@dataclass
class Conductor:
    process: asyncio.subprocess.Process
    url: str
    http: aiohttp.ClientSession
    lines: list[str]

    async def get(self, path: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path) as response:
            return response.status, await response.json()

    async def ready(self) -> set[str]:
        """Why not; empty when ready."""
        return set((await self.get("/ready"))[1]["reasons"])

    async def stop(self, sign: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(sign)
        async with asyncio.timeout(200):
            return await self.process.wait()


async def collect(stream: asyncio.StreamReader, lines: list[str]) -> None:
    async for line in stream:
        lines.append(line.decode())


@asynccontextmanager
async def conductor(folder: Path, *flags: str) -> AsyncIterator[Conductor]:
    """``python -m services.conductor``, listening."""
    command = [sys.executable, "-m", "services.conductor", "--port", "0", "--model", str(folder), *flags]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE, env=dict(os.environ))
    assert process.stderr is not None
    lines: list[str] = []
    reading = asyncio.create_task(collect(process.stderr, lines))
    try:
        await until(lambda: "conductor listening" in "".join(lines) or reading.done(), 60)
        match = re.search(r"http://[^\s\"]+", "".join(lines))
        assert match, lines
        async with aiohttp.ClientSession() as http:
            yield Conductor(process, match[0], http, lines)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
        await reading


@pytest.fixture(scope="module")
def nats() -> Iterator[NatsServer]:
    with NatsServer() as server:
        yield server


@pytest.fixture(scope="module")
def redis() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


async def test_it_serves_what_it_can_before_any_instance_is_there(
    model_folder: Path, nats: NatsServer, redis: RedisServer
) -> None:
    async with conductor(model_folder, "--nats", nats.url, "--redis", redis.url, "--log-format", "json") as one:
        assert await one.get("/health") == (200, {"status": "ok"})
        while await one.ready() != {"no_prefill", "no_decode"}:
            await asyncio.sleep(0.1)
        status, models = await one.get("/v1/models")
        assert (status, [model["id"] for model in models["data"]]) == (200, [model_folder.name])
        body = {"model": model_folder.name, "prompt": "x"}
        async with one.http.post(one.url + "/v1/completions", json=body) as response:
            assert response.status == 503
            assert response.headers["Retry-After"]
        picture = (await one.get("/cluster"))[1]
        assert picture["instances"] == []
        assert picture["gateway"]["model"] == model_folder.name
        assert await one.stop() == 0
        assert all(json.loads(line) for line in one.lines if line.startswith("{"))
        assert not [line for line in one.lines if "Traceback" in line], one.lines


async def test_it_starts_without_nats_and_redis_and_says_so(model_folder: Path) -> None:
    async with conductor(model_folder, *NOWHERE) as one:
        assert (await one.get("/health"))[0] == 200
        status, answer = await one.get("/ready")
        assert status == 503
        assert "bus_down" in answer["reasons"]
        assert await one.stop(signal.SIGINT) == 0


async def test_it_registers_itself_and_leaves(model_folder: Path, nats: NatsServer, redis: RedisServer) -> None:
    async with await Metadata.connect(redis.url, "mine") as metadata:
        async with conductor(model_folder, "--nats", nats.url, "--redis", redis.url, "--mesh", "mine") as one:
            while not (records := await metadata.conductors()):
                await asyncio.sleep(0.05)
            assert [record.url for record in records] == [one.url]
            assert await one.stop() == 0
        assert await metadata.conductors() == []


@pytest.mark.parametrize(
    ("field", "value"), [("model", "/nowhere"), ("api_keys", "/nowhere/keys.yaml"), ("host", "203.0.113.1")]
)
async def test_what_cannot_be_had_is_named(model_folder: Path, field: str, value: str) -> None:
    wanted = {"model": str(model_folder), "port": 0, "metrics_port": -1} | {field: value}
    settings = ConductorSettings(nats=NOWHERE[1], redis=NOWHERE[3], **wanted)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=re.escape(value)):
        await run(settings, Stopping())


async def test_a_wrong_setting_is_one_line_and_exit_2() -> None:
    command = [sys.executable, "-m", "services.conductor", "--port", "eighty"]
    process = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    _, errors = await asyncio.wait_for(process.communicate(), 100)
    assert process.returncode == 2
    assert len(errors.decode().splitlines()) == 1
    assert b"port" in errors
